"""docs/flow.md names files that exist, in numbered lists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
WAYS = ("a token", "a GGUF path", "a flag", "a decode's time", "a chat request")
CHANGES = ("A cache rule", "A drafter", "An endpoint", "A flag")


def way_of(thing: str) -> list[str]:
    """The file names that begin the numbered lines of the section "The way of `thing`"."""
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


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_at_most_six_files_that_exist(change: str) -> None:
    section = PAGE.split(f"### {change}\n", 1)[1].split("\n##", 1)[0]
    files = set(re.findall(r"`([\w/]+\.(?:py|md))`", section))
    assert 3 <= len(files) <= 6
    assert [path for path in files if not (ROOT / path).is_file()] == []
