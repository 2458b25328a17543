"""docs/flow.md: its files exist, and a token really passes the ones named, and no other."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from offload.plan.min_batch import MinBatch
from offload.streaming.copy import ThreadCopier
from specdec.options import DrafterName, PolicyName, SpecOptions
from specoffload.commands.run import run_prompt
from specoffload.config.host import read_host
from specoffload.config.options import ChatOptions, Options, RunOptions
from specoffload.config.resolution import resolve
from specoffload.session.generation import GenerateOptions

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
GUARD = "offload/ggml/library/callback.py"  # every callback's door, named beside the list
MOST_OF_A_TOKEN = 9
WAYS = ("a token", "a GGUF path", "a flag", "a chat request")


def way_of(thing: str) -> list[str]:
    """The files that begin the numbered lines of a section."""
    section = PAGE.split(f"## The way of {thing}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)


@pytest.mark.parametrize("thing", WAYS)
def test_the_files_of_a_way_exist_and_are_numbered_in_order(thing: str) -> None:
    files = way_of(thing)
    assert len(files) >= 5
    assert [path for path in files if not (ROOT / path).is_file()] == []
    section = PAGE.split(f"## The way of {thing}\n", 1)[1].split("\n## ", 1)[0]
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    assert numbers == list(range(1, len(files) + 1))


def test_every_file_that_the_page_names_exists() -> None:
    named = re.findall(r"`((?:specoffload|offload|specdec|numa)/[\w/]+\.py)`", PAGE)
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def passed() -> list[str]:
    """Our files on the stack, from the command down, each once."""
    files: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:  # type: ignore[redundant-expr]
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.suffix == ".py" and path != Path(__file__):
            files.append(str(path.relative_to(ROOT)))
        frame = frame.f_back  # type: ignore[assignment]
    return [path for path in dict.fromkeys(reversed(files)) if not path.startswith(".venv")]


@pytest.mark.parametrize("drafter", [DrafterName.NONE, DrafterName.SUFFIX])
def test_a_token_passes_the_files_that_are_listed(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, drafter: DrafterName
) -> None:
    listed = way_of("a token")
    assert len(listed) <= MOST_OF_A_TOKEN
    ways: set[tuple[str, ...]] = set()
    copy = ThreadCopier.copy

    def seen(self: ThreadCopier, *arguments: object) -> None:
        ways.add(tuple(passed()))
        copy(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ThreadCopier, "copy", seen)
    options = Options(
        model=tiny_moe,
        device="sim",
        ctx_size=256,
        threads=1,
        min_batch=MinBatch(1, 1),
        spec=SpecOptions(drafters=(drafter,), policy=PolicyName.FIXED),
    )
    asked = GenerateOptions(n_predict=8, ignore_eos=True)
    config = resolve(options, read_host(None))
    own = RunOptions(conversation=False)
    run_prompt(config, lambda: "a b a b a b", asked, own, ChatOptions(), has_limit=True)
    assert ways
    of_rounds = {way for way in ways if any(path.startswith("specdec/") for path in way)}
    *before, copier = listed
    assert {tuple(path for path in way if path != GUARD) for way in of_rounds} == {tuple(before)}
    assert copier == str(
        Path(sys.modules[ThreadCopier.__module__].__file__ or "").relative_to(ROOT)
    )
