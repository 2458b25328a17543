"""A profile that contradicts itself: measured again at a start, tried while answering, and never
kept in a good one's place."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from resolved import config_of

from specoffload.commands.bench import prompts
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session

pytestmark = pytest.mark.usefixtures("measures_briefly")
TOO_LONG, FACTOR = (2, 3, 4), 40.0  # sizes, and how many times too long their times are
N_MAX = 12


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    return tmp_path


def opened(device: str) -> Session:
    streams = {"n_cpu_moe": 99} if device == "sim" else {}
    return Session(config_of(device=device, threads=1, ctx_size=512, **streams))


def file_of(folder: Path) -> Path:
    """The kept profile: others in the folder are of min-batch and split layers."""
    (found,) = [f for f in folder.glob("*.json") if "step_s" in json.loads(f.read_text())]
    return found


def rewritten(file: Path, sizes: Sequence[int], *, n_retried: int = 0) -> list[float]:
    """The stored profile as an even curve, whose `sizes` are far too long; its times."""
    data: dict[str, Any] = json.loads(file.read_text())
    one_s = data["step_s"][0]
    steps = [one_s * (0.5 + 0.5 * n) * (FACTOR if n in sizes else 1.0) for n in range(1, N_MAX + 1)]
    timed = [[n, 4, 0.01, "2025-01-02", n_retried] for n in range(1, N_MAX + 1)]
    even = {"step_s": steps, "timed": timed, "uncertain": [], "depths": []}
    file.write_text(json.dumps(data | even | {"draft_step_s": 0.01 * one_s}))
    return steps


def assert_shorter(found: Sequence[float], stated: Sequence[float], sizes: Sequence[int]) -> None:
    """Whatever the machine's speed is now, these sizes have come down to the others."""
    usual = median(a / b for a, b in zip(found, stated, strict=True))
    assert all(found[n - 1] / stated[n - 1] < usual / 2 for n in sizes)


def answer(session: Session) -> None:
    options = GenerateOptions(n_predict=60, ignore_eos=True)
    list(session.generate(prompts("code")[0], options))


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_later_start_measures_contradicting_sizes_again(
    folder: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(device):
        pass
    stated = rewritten(file_of(folder), TOO_LONG)
    monkeypatch.setattr("specoffload.speculation.profiling.BUDGET_S", 8.0)
    with opened(device) as session:
        (note,) = [line for line in session.notes if "contradicted others" in line]
        assert "3 of them were measured again" in note
        assert session.speculation is not None
        found = session.speculation.costs
    assert_shorter(found.step_s, stated, TOO_LONG)
    kept = json.loads(file_of(folder).read_text())
    assert kept["step_s"][:4] == pytest.approx(found.step_s[:4])
    assert all(date > "2025-01-02" for n, _, _, date, _ in kept["timed"] if n in TOO_LONG)


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_sizes_in_doubt_are_tried_while_answering_and_what_was_found_is_kept(
    folder: Path, device: str
) -> None:
    with opened(device):
        pass
    stated = rewritten(file_of(folder), TOO_LONG, n_retried=3)  # no start measures them again
    with opened(device) as session:
        assert not any("contradicted others" in line for line in session.notes)
        answer(session)
        assert session.counters()["size_retries"] >= 1
    kept = json.loads(file_of(folder).read_text())
    tried = [n for n, _, _, date, _ in kept["timed"] if n in TOO_LONG and date > "2025-01-02"]
    assert tried
    assert_shorter(kept["step_s"], stated, tried)


def test_what_a_busy_machine_taught_does_not_replace_a_good_profile(folder: Path) -> None:
    with opened("cpu"):
        pass
    stated = rewritten(file_of(folder), ())
    with opened("cpu") as session:
        answer(session)
        assert session.speculation is not None
        costs = session.speculation.policy.costs  # type: ignore[attr-defined]
        for _ in range(400):  # another program runs whenever a batch of 3 is decoded
            costs.observe(3, 40 * stated[2], 0, 0.0)
            costs.observe(1, stated[0], 0, 0.0)
            costs.observe(8, stated[7], 0, 0.0)
        assert 3 in costs.profile().to_retry
    kept = json.loads(file_of(folder).read_text())
    assert kept["step_s"] == stated
    assert kept["calibration"], "what was learnt of the drafter is kept"
