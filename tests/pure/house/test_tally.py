"""The last lines of scripts/test have the counts of all its runs."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import tally
from tally import Tally

NO_GPU = "ggml finds no GPU: the installed build has no GPU backend, or there is no driver"


def skip(reason: str) -> SimpleNamespace:
    return SimpleNamespace(longrepr=("tests/test_x.py", 7, f"Skipped: {reason}"))


def test_a_runs_counts_are_those_of_its_reports() -> None:
    stats = {"passed": [1, 2, 3], "failed": [1], "error": [1], "skipped": [skip("x"), skip("x")]}
    assert tally.tally_of(stats, 4) == Tally(3, 2, 4, Counter(x=2))
    assert tally.tally_of({}, 0) == Tally()


def test_one_line_has_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tally"
    monkeypatch.setenv("SPECOFFLOAD_TESTS_TALLY", str(path))
    torch = "torch is not installed: scripts/test-extras runs this"
    tally.keep(Tally(5000, 0, 81, Counter({NO_GPU: 90, torch: 3})))
    tally.keep(Tally(193, 0, 0, Counter({NO_GPU: 7})))
    done = subprocess.run(
        [sys.executable, tally.__file__, path, "341.7"], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [
        "   81 skipped: wide, scripts/test-wide runs them (tests/wide.py)",
        f"   97 skipped: {NO_GPU}",
        f"    3 skipped: {torch}",
        "5,193 passed, 0 failed, 181 skipped in 5:41 (no GPU 97, wide 81, no torch 3)",
    ]
    tally.keep(Tally(failed=1))
    failed = subprocess.run([sys.executable, tally.__file__, path, "1"], capture_output=True)
    assert failed.returncode == 1


def test_without_the_variable_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECOFFLOAD_TESTS_TALLY", raising=False)
    monkeypatch.chdir(tmp_path)
    tally.keep(Tally(1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("reason", "name"),
    [
        (NO_GPU, "no GPU"),
        ("transformers is not installed: scripts/test-extras runs this", "no transformers"),
        ("could not import 'anthropic': see scripts/test-extras", "no anthropic"),
        ("no chromium is installed", "no browser"),
        ("no C compiler", "no C compiler"),
        ("a reason that is told at length and fits no line", "other"),
    ],
)
def test_reasons_have_short_names(reason: str, name: str) -> None:
    assert tally.short(reason) == name
