"""Every shell block of README and docs is run with a check, or says why it is not."""

from __future__ import annotations

import re

import pytest
from documented_blocks import NOT_RUN, RECORDED, ROOT, SHOWS, TEST, Command, commands, commands_of

COMMANDS = [*commands()]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: f"{c.page}: {c.words[:50]}")
def test_a_command_of_a_shell_block_has_a_check_or_a_reason(command: Command) -> None:
    assert command.words, f"{command.page}: a mark without a command: {command.promise}"
    assert command.mark in (SHOWS, TEST, NOT_RUN), f"{command.page}: {command.words} has no mark"
    assert command.promise
    if command.mark == SHOWS:
        pattern = re.compile(command.promise)
        assert not pattern.search(""), "the pattern asks for something"
    elif command.mark == TEST:
        file, _, name = command.promise.partition("::")
        assert (ROOT / file).is_file(), f"{command.page}: there is no {file}"
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8")
    else:
        assert len(command.promise.split()) >= 4, "a reason says what is missing"


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 50
    assert len([c for c in COMMANDS if c.mark == SHOWS]) >= 10
    assert {page for page in RECORDED if (ROOT / "docs" / page).is_file()} == set(RECORDED)


def test_a_block_is_read_with_its_marks() -> None:
    page = """Text.

<!--
shows: a|b
not run: it needs a GPU
-->

```sh
one --flag \\
    two   # remark
three
```

```sh
four
```

```toml
key = 1
```

```
$ five
```
"""
    assert [(c.words, c.mark, c.promise) for c in commands_of("p.md", page)] == [
        ("one --flag      two", "shows", "a|b"),
        ("three", "not run", "it needs a GPU"),
        ("four", "", ""),
        ("$ five", "", ""),
    ]
    assert [*commands_of("plans.md", page)][-1].words == "four", "screens there are recorded"
