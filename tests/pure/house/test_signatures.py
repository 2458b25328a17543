"""The tables of C signatures list exactly the functions that the product calls."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
LIBRARY = ROOT / "offload" / "ggml" / "library"
ENTRY = re.compile(r'^    "((?:ggml|gguf|llama)_\w+)": ', re.MULTILINE)
CALL = re.compile(r"\.((?:ggml|gguf|llama)_\w+)")


def test_the_product_calls_every_entry() -> None:
    """Calls of tests and scripts do not count."""
    names = ENTRY.findall((LIBRARY / "lib.py").read_text(encoding="utf-8"))
    assert len(names) > 30
    called = {
        name
        for path in (ROOT / "offload").rglob("*.py")
        for name in CALL.findall(path.read_text(encoding="utf-8"))
    }
    assert sorted(set(names) - called) == []
