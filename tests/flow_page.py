"""The files and functions that docs/flow.md and docs/core.md list, and what a file defines."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "flow.md").read_text(encoding="utf-8")
CORE = (ROOT / "docs" / "core.md").read_text(encoding="utf-8")
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
    return items_of(PAGE, f"The way of {thing}")


def items_of(page: str, title: str) -> list[Item]:
    """The numbered items of a page's section."""
    section = page.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    texts = re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]
    found = [re.match(r"`([^`]+)` \(`([\w.]+)`\)", text) for text in texts]
    return [Item(m[1], m[2], text) for m, text in zip(found, texts, strict=True) if m]


def defined(path: str) -> set[str]:
    """Names that a file defines: `function`, `Class`, `Class.method`, `CONSTANT`."""
    text = (ROOT / path).read_text(encoding="utf-8")
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{child.name}" for child in node.body
                      if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)}  # fmt: skip
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names
