"""docs/flow.md names files and what they define. tests/model/test_flow_page.py watches a run.

Files that other pages name exist, too.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from flow_page import PAGE, ROOT, WAYS, defined, section_of, way_of

CHANGES = (
    *("A cache rule", "A drafter", "A draft policy", "A number on the plan's screen"),
    *("A backend of ggml", "An endpoint", "A flag"),
)
# Makes the rule, computes its ranks, counts its hits, or hands over its numbers.
RULE = r"\bLrfu[(.]|class Lrfu|def recorded_hits|\brule_scan\b(?!.*_N\))"
FILE = re.compile(r"`((?:specoffload|offload|specdec|numa|tests|docs)/[\w/]+\.(?:py|md|c))`")

# In any page: a path in the repository with an ending, or a script, or the bare name of a source.
NAMED = re.compile(
    r"`((?:specoffload|offload|specdec|numa|tests|docs|scripts)/[\w/.-]+\.\w+|scripts/[\w-]+|\w+\.(?:py|c))`"
)
HISTORY = {"log.md", "results.md"}  # they name what was there when it was tried or measured
ELSEWHERE = {  # names of files of other repositories and commits
    "speculative.md", "K3.md", "pictures", "convert_hf_to_gguf.py", "coverage.py",
}  # fmt: skip


@pytest.mark.parametrize("thing", WAYS)
def test_each_item_of_a_way_names_a_file_and_what_it_defines(thing: str) -> None:
    items = way_of(thing)
    numbers = [int(n) for n in re.findall(r"^(\d+)\. ", section_of(thing), re.MULTILINE)]
    assert numbers == list(range(1, len(items) + 1)), "an item without `file` (`name`)"
    assert len(items) >= 5
    assert [item[:2] for item in items if item.symbol not in defined(item.file)] == []


def test_every_file_that_the_page_names_exists() -> None:
    named = FILE.findall(PAGE)
    assert len(named) > 60
    assert [path for path in named if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_at_most_six_files_that_have_what_is_said_of_them(change: str) -> None:
    section = PAGE.split(f"### {change}\n", 1)[1].split("\n##", 1)[0]
    assert 3 <= len({path for path in FILE.findall(section) if not path.endswith(".md")}) <= 6
    for item in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]:
        files = FILE.findall(item)
        assert files, item
        for beside in re.findall(r"Beside it,\s+`?(\w+\.\w+)", item):
            assert (ROOT / files[-1]).with_name(beside).is_file(), f"{beside} is not beside it"
        source = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in files)
        for name in re.findall(r"`(/?\w+)`", FILE.sub("", item)):
            assert re.search(rf"{re.escape(name)}\b", source), f"{files} have no {name}"


def test_files_that_pages_name_exist() -> None:
    files = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.split()
    known = {*files, *(Path(file).name for file in files)}
    missing, n_named = [], 0
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        if page.name in HISTORY:
            continue
        named = NAMED.findall(page.read_text(encoding="utf-8"))
        n_named += len(named)
        missing += [
            f"{page.name}: {name}"
            for name in named
            if name not in known and Path(name).name not in ELSEWHERE
        ]
    assert missing == []
    assert n_named > 200


def test_the_page_names_every_place_of_the_cache_rule() -> None:
    section = PAGE.split("### A cache rule\n", 1)[1].split("\n##", 1)[0]
    sources = [*(ROOT / "offload").rglob("*.py"), *(ROOT / "offload").rglob("*.c")]
    places = {
        str(path.relative_to(ROOT))
        for path in sources
        if re.search(RULE, path.read_text(encoding="utf-8"))
    }
    assert len(places) >= 5
    assert {place for place in places if Path(place).name not in section} == set()
