"""Two modules that a test imports by a bare name never have the same name.

pytest puts each test's folder on the path, so the first of two that a process imports is
taken for both; which one is first differs with the tests that a worker gets.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_names_of_modules_imported_by_a_bare_name_are_unique() -> None:
    beside_tests = [
        path.stem
        for path in (ROOT / "tests").rglob("*.py")
        if path.stem not in {"conftest", "__init__"} and not path.stem.startswith("test_")
    ]
    of_gpu_check = [path.stem for path in (ROOT / "scripts" / "gpu_check").glob("[!_]*.py")]
    assert len(beside_tests) > 10
    assert len(of_gpu_check) > 5
    assert [name for name, n in Counter(beside_tests + of_gpu_check).items() if n > 1] == []
