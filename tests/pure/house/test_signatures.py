"""The tables of C signatures list exactly the functions that are called."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIBRARY = ROOT / "offload" / "ggml" / "library"
ENTRY = re.compile(r'^    "((?:ggml|gguf|llama)_\w+)": ', re.MULTILINE)


def sources() -> str:
    folders = ("offload", "scripts", "tests")
    paths = (p for folder in folders for p in (ROOT / folder).rglob("*.py"))
    return "\n".join(p.read_text(encoding="utf-8") for p in paths)


def test_every_entry_is_called_somewhere() -> None:
    names = ENTRY.findall((LIBRARY / "lib.py").read_text(encoding="utf-8"))
    assert len(names) > 30
    called = set(re.findall(r"\.((?:ggml|gguf|llama)_\w+)", sources()))
    assert sorted(set(names) - called) == []
