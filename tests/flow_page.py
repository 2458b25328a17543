"""The files and functions that docs/flow.md lists for each way through the program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
WAYS = ("a token", "a GGUF path", "a flag", "a decode's time", "a chat request")


class Item(NamedTuple):
    """A numbered item: the file with which it begins, and where to begin reading in the file."""

    file: str
    symbol: str
    text: str


def section_of(thing: str) -> str:
    return PAGE.split(f"## The way of {thing}\n", 1)[1].split("\n## ", 1)[0]


def way_of(thing: str) -> list[Item]:
    """The numbered items of the section "The way of `thing`"."""
    texts = re.split(r"^\d+\. ", section_of(thing), flags=re.MULTILINE)[1:]
    found = [re.match(r"`([^`]+)` \(`([\w.]+)`\)", text) for text in texts]
    return [Item(m[1], m[2], text) for m, text in zip(found, texts, strict=True) if m]
