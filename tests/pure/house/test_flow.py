"""docs/flow.md names files and what they define. tests/model/test_flow_page.py watches a run."""

from __future__ import annotations

import ast
import re

import pytest
from flow_page import PAGE, ROOT, WAYS, section_of, way_of

CHANGES = ("A cache rule", "A drafter", "An endpoint", "A flag")
FILE = re.compile(r"`((?:specoffload|offload|specdec|numa|tests|docs)/[\w/]+\.(?:py|md|c))`")


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
    assert 3 <= len(set(FILE.findall(section))) <= 6
    for item in re.split(r"^\d+\. ", section, flags=re.MULTILINE)[1:]:
        files = FILE.findall(item)
        assert files, item
        source = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in files)
        for name in re.findall(r"`(/?\w+)`", FILE.sub("", item)):
            assert re.search(rf"{re.escape(name)}\b", source), f"{files} have no {name}"
