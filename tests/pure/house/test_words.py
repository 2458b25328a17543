"""Texts cite only sources that a reader can open, and link only to existing pages and sections."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = sorted((ROOT / "docs").glob("*.md"))
# Names of notes that are in no file of this repository. A10 is left out: it is also a GPU.
TITLES = re.compile(r"\b(?:MECHANISMS|PEERS|DESIGN|STYLE)\b")
ENTRIES = re.compile(
    r"\b(?:A(?:0[1-9]|1[1-9]|2[0-2])|B(?:0[1-9]|1\d|2[0-8])|[C-I](?:0[1-9]|1[0-5]))\b"
)
PAGES = re.compile(r"docs/(\w+\.md)(?:, ([\w ,:-]+?))?(?=[)\].;\"`]|$)", re.MULTILINE)


def tracked() -> list[Path]:
    """The repository's tracked text files."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    kinds = {".py", ".md", ".toml", ".json", ""}
    return [
        path
        for path in map(ROOT.joinpath, names)
        if path.suffix in kinds and path.is_file() and path != Path(__file__)
    ]


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = page.read_text(encoding="utf-8")
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_sources_are_ones_that_a_reader_can_open() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{n}: {words}"
        for path in tracked()
        for n, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (words := TITLES.findall(line) + ENTRIES.findall(line))
    ]
    assert found == []


def test_the_pages_and_sections_that_are_cited_exist() -> None:
    missing, n_sections = [], 0
    for path in tracked():
        if path.suffix != ".py":
            continue
        text = re.sub(r"\s*\n\s*#?\s*", " ", path.read_text(encoding="utf-8"))
        for name, section in PAGES.findall(text):
            page = ROOT / "docs" / name
            # The comma after another page's name is only punctuation.
            named = bool(section) and name == "background.md"
            n_sections += named
            if not page.is_file() or named and anchor(section) not in anchors(page):
                missing.append(f"{path.relative_to(ROOT)}: docs/{name}, {section}")
    assert missing == []
    assert n_sections >= 3  # otherwise the pattern is wrong


def test_every_anchor_of_a_page_leads_to_a_heading() -> None:
    missing = []
    for page in [ROOT / "README.md", *DOCS]:
        for target, at in re.findall(r"\]\(([\w./]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            other = page.parent / target if target else page
            if at not in anchors(other):
                missing.append(f"{page.name}: {target}#{at}")
    assert missing == []


# Words of ours that names in the code and pages use as if everybody knew them.
OURS = (
    *("ahead", "band", "cache rule", "crossover", "cut", "deferred", "division", "doorbell"),
    *("fence", "launch", "layout", "lent slot", "min-batch", "pair", "pass", "piece", "player"),
    *("promotion", "rank", "repair", "residency", "resident", "ring", "rung", "schedule", "slot"),
    *("split layer", "start", "streamed", "ticket", "way"),
)


def test_the_glossary_has_the_words_of_ours() -> None:
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [
        row.split(" | ", 1)[0]
        for row in page.splitlines()
        if row.startswith("| ") and not row.startswith("| term ")
    ]
    terms = {term for row in rows for term in row.removeprefix("| ").strip("`").split(", ")}
    also = set(re.findall(r"\*(\w+)\*", page))  # said in another word's row
    assert [word for word in OURS if word not in terms | also] == []
    assert len(terms) == len([term for row in rows for term in row.split(", ")])
