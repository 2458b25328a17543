"""The name of a class or of a type stands for one thing. A search for it finds one definition.

A leading underscore makes no other name: `_Part` and `Part` are read as the same word.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGES = ("numa", "offload", "specdec", "specoffload")


def types_of(tree: ast.Module) -> Iterator[str]:
    """Names of a module's classes, nested ones included, and of its aliases of types.

    Names without a small letter are constants, or type variables, of which each module has its own.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lstrip("_")
            if name[:1].isupper() and any(letter.islower() for letter in name):
                yield node.targets[0].id


def definitions() -> dict[str, list[str]]:
    found = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in types_of(ast.parse(path.read_text(encoding="utf-8"))):
                found[name.lstrip("_")].append(str(path.relative_to(ROOT)))
    return found


def test_each_type_has_a_name_of_its_own() -> None:
    found = definitions()
    assert len(found) > 1000
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_classes_and_aliases_are_found() -> None:
    code = (
        "class A:\n    class _B: ...\n_Rows = list[int]\nMOST_ROWS = 3\n_T = TypeVar('_T')\nx = 1\n"
    )
    assert list(types_of(ast.parse(code))) == ["A", "_B", "_Rows"]
