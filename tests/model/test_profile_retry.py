"""Times that contradict others are measured again at a start or while answering. They never
replace good ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from resolved import config_of

from specoffload.config.resolution import demo_prompts
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

# Batch sizes whose stored times are too long, and the factor. A busy machine slows no decode that
# much.
TOO_LONG, FACTOR = (2, 3, 4), 400.0
N_MAX = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    return tmp_path


def opened(device: str) -> Session:
    streams = {"n_cpu_moe": 99, "min_batch": "1000"} if device == "sim" else {}
    return Session(config_of(device=device, threads=1, ctx_size=512, **streams))


def kept_run(folder: Path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The stored profile's file, its data, and the entries of the last run's first way."""
    (file,) = folder.glob("target-*.json")
    data = json.loads(file.read_text())
    ways = data["runs"][-1]["table"]["ways"]
    return file, data, next(iter(ways.values()))


def rewrite(folder: Path, sizes: Sequence[int], *, n_retried: int = 0) -> dict[int, float]:
    """Replace the stored times by an even curve on which those of `sizes` are far too long."""
    file, data, entries = kept_run(folder)
    one_s = entries["1"]["seconds"]
    steps = {n: one_s * (0.5 + 0.5 * n) * (FACTOR if n in sizes else 1.0) for n in range(1, N_MAX)}
    entries.clear()
    for n, seconds in steps.items():
        entries[str(n)] = {
            "seconds": seconds, "spread": 0.01, "n_timed": 4, "date": "2025-01-02",
            "n_retried": n_retried,
        }  # fmt: skip
    for draft in data["runs"][-1]["drafts"].values():
        draft["step_s"] = 0.01 * one_s
    file.write_text(json.dumps(data))
    return steps


def assert_shorter(entries: dict[str, Any], stated: dict[int, float], sizes: Sequence[int]) -> None:
    """Check that the times of `sizes` came down, relative to the other sizes' times."""
    found = {n: entries[str(n)]["seconds"] / seconds for n, seconds in stated.items()}
    usual = median(ratio for n, ratio in found.items() if n not in TOO_LONG)
    assert all(found[n] < usual / 2 for n in sizes)


def answer(session: Session) -> None:
    options = GenerateOptions(n_predict=60, ignore_eos=True)
    list(session.generate(demo_prompts("code")[0], options))


def test_a_later_start_measures_contradicting_sizes_again(folder: Path) -> None:
    device = "sim"
    with opened(device):
        pass
    stated = rewrite(folder, TOO_LONG)
    with opened(device) as session:
        assert any("3 that contradicted others timed again" in line for line in session.notes)
    entries = kept_run(folder)[2]
    assert_shorter(entries, stated, TOO_LONG)
    assert all(entries[str(n)]["date"] > "2025-01-02" for n in TOO_LONG)


def test_sizes_in_doubt_are_tried_while_answering_and_what_was_found_is_kept(
    folder: Path,
) -> None:
    device = "cpu"
    with opened(device):
        pass
    stated = rewrite(folder, TOO_LONG, n_retried=3)  # no start measures them again
    with opened(device) as session:
        assert not any("contradicted others" in line for line in session.notes)
        answer(session)
        assert session.counters()["size_retries"] >= 1
    entries = kept_run(folder)[2]
    tried = [n for n in TOO_LONG if entries[str(n)]["date"] > "2025-01-02"]
    assert tried
    assert_shorter(entries, stated, tried)
