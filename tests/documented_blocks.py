"""Shell blocks of the documentation, and what each of their commands promises to show.

A comment of HTML before a block, which no reader of the page sees, has a line for each command:

    shows: REGEX          the command is run, and its output has a match
    test: FILE[::TEST]    this test runs it
    not run: REASON       it needs what a test does not have

A comment of one line that shows nothing stands for all commands of its block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# Pages whose screens a script types, records and writes.
RECORDED = {
    "first-minutes.md": "scripts/lab/run first-minutes",
    "plans.md": "scripts/lab/run plans",
}
_BLOCK = re.compile(
    r"(?:<!--(?P<marks>(?:(?!-->).)*)-->\n\n)?"  # what the block promises
    r"^```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
SHOWS, TEST, NOT_RUN = "shows", "test", "not run"


@dataclass(frozen=True)
class Command:
    """A command of a block, with its mark: one of SHOWS, TEST and NOT_RUN, and the words after it.

    `mark` is "" if the block has no mark for it.
    """

    page: str
    words: str
    mark: str
    promise: str


def commands() -> Iterator[Command]:
    """Yield each command of all shell blocks, in the order of the pages."""
    for page in PAGES:
        yield from commands_of(page.name, page.read_text(encoding="utf-8"))


def commands_of(name: str, page: str) -> Iterator[Command]:
    """Yield the commands of a page's blocks of kind `sh`, and of its screens with a prompt `$ `."""
    for block in _BLOCK.finditer(page):
        is_screen = block["text"].startswith("$ ")
        if block["kind"] != "sh" and not is_screen:
            continue
        if is_screen and name in RECORDED:
            continue
        marks = [line.strip() for line in (block["marks"] or "").strip().splitlines()]
        lines = _lines_of(block["text"])
        if len(marks) == 1 and not marks[0].startswith(SHOWS):
            marks *= len(lines)
        for i in range(max(len(lines), len(marks))):
            mark, _, promise = (marks[i] if i < len(marks) else "").partition(": ")
            yield Command(name, lines[i] if i < len(lines) else "", mark, promise)


def _lines_of(text: str) -> list[str]:
    """The commands of a block, without their comments."""
    lines = text.replace("\\\n", " ").splitlines()
    return [re.split(r"\s+#\s", line)[0].strip() for line in lines if line.strip()]
