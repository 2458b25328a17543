"""lab disk-kills: an interrupted measurement continues, and warm runs follow their cold ones."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from lab.disk_kills import Outcome, Run, kept, runs_of

MODEL_BYTES = 1_000_000_000
RUNS = runs_of([0.3, 0.4, 0.6], [512, 4096], [1, 8], 30)


def outcome(run: Run) -> Outcome:
    limit_bytes = int(run.share * MODEL_BYTES) // 4096 * 4096
    return Outcome(run, "served", 1.0, limit_bytes, limit_bytes // 2, 0, 0)


def written(path: Path, n: int) -> Path:
    path.write_text(json.dumps([asdict(outcome(run)) for run in RUNS[:n]]))
    return path


def test_every_second_run_is_the_warm_one_of_the_run_before() -> None:
    assert len(RUNS) == 30
    for cold, warm in zip(RUNS[::2], RUNS[1::2], strict=True):
        assert (cold.is_warm, warm.is_warm) == (False, True)
        assert (cold.share, cold.n_prompt, cold.n_streams) == (
            warm.share, warm.n_prompt, warm.n_streams,
        )  # fmt: skip
    cells = {(run.share, run.n_prompt, run.n_streams) for run in RUNS}
    assert len(cells) == 3 * 2 * 2


@pytest.mark.parametrize(("n", "n_kept"), [(0, 0), (1, 0), (2, 2), (19, 18), (29, 28), (30, 30)])
def test_a_measurement_continues_after_its_last_pair_of_runs(
    tmp_path: Path, n: int, n_kept: int
) -> None:
    found = kept(written(tmp_path / "runs.json", n), RUNS, MODEL_BYTES)
    assert found == [outcome(run) for run in RUNS[:n_kept]]


def test_nothing_is_kept_without_a_file(tmp_path: Path) -> None:
    assert kept(None, RUNS, MODEL_BYTES) == kept(tmp_path / "none", RUNS, MODEL_BYTES) == []


def test_fewer_runs_than_the_file_has_are_its_first_ones(tmp_path: Path) -> None:
    assert len(kept(written(tmp_path / "runs.json", 30), RUNS[:4], MODEL_BYTES)) == 4


def test_runs_of_another_model_or_other_shares_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "runs.json", 4)
    with pytest.raises(ValueError, match="300000000|299999232"):
        kept(path, RUNS, 2 * MODEL_BYTES)
    with pytest.raises(ValueError, match="these arguments ask for"):
        kept(path, runs_of([0.5], [512], [1], 30), MODEL_BYTES)
