"""Texts cite only sources that a reader can open, and link only to existing pages and sections."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

from flow_page import CORE, items_of

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
    *("ahead", "band", "batch", "cache rule", "checkpoint", "chooser", "copier", "crossover"),
    *("cut", "deferred", "division", "doorbell", "executor", "fence", "follower", "group", "guess"),
    *("home", "launch", "layout", "lent slot", "member", "message", "min-batch", "need", "note"),
    *("pair", "pass", "piece", "player", "pool", "prepared graph", "promotion", "rank", "reason"),
    *("redirect", "region", "repair", "residency", "resident", "ring", "rung", "schedule"),
    *("segment", "slot", "snapshot", "span", "split layer", "start", "stop", "streamed", "team"),
    *("tenant", "ticket", "transfer", "verdict", "victim", "walk", "way", "words"),
)


def glossary() -> list[str]:
    """The terms of the glossary, in its order, with the words that stand in another term's row."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = [
        row.split(" | ", 1)[0]
        for row in page.splitlines()
        if row.startswith("| ") and not row.startswith("| term ")
    ]
    terms = [term for row in rows for term in row.removeprefix("| ").strip("`").split(", ")]
    return [*terms, *re.findall(r"\*(\w+)\*", page)]


def test_the_glossary_has_the_words_of_ours() -> None:
    terms = glossary()
    assert [word for word in OURS if word not in terms] == []
    assert [term for term, n in Counter(terms).items() if n > 1] == []


# Words in names of the core's classes that engineers know, or that llama.cpp uses in the same way.
KNOWN = {
    *("array", "context", "copy", "counters", "decoder", "decoding", "embedder", "events", "id"),
    *("image", "library", "llama", "loop", "model", "native", "no", "order", "part", "planner"),
    *("queue", "read", "reader", "reusable", "runner", "sampler", "sequences", "speed", "stream"),
    *("streaming", "text", "thread", "threaded", "timer", "token", "traits", "ubatches"),
}


def test_the_glossary_has_the_nouns_of_the_core() -> None:
    """Each word of a class's name is in it, singular or plural."""
    names = [
        name
        for way in ("A decode of one token", "A prompt of 1,000 tokens")
        for item in items_of(CORE, way)
        for name in re.findall(
            r"^class _?(\w+)", (ROOT / item.file).read_text("utf-8"), re.MULTILINE
        )
    ]
    words = {word.lower() for name in names for word in re.findall(r"[A-Z][a-z]+", name)}
    terms = {word for term in glossary() for word in re.split(r"[ -]", term)}
    assert {word for word in words if not {word, word.removesuffix("s")} & terms} == KNOWN
