"""`tune` keeps times whose repetitions agree, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from resolved import config_of

from offload.costs.search import Wanted
from offload.costs.table import CostTable, Way, entry_of
from specoffload import report
from specoffload.commands.tune import tune_all
from specoffload.config.resolution import Config, demo_file

AGREEING_MS = {1: (45.0, 45.5, 45.2, 45.1), 2: (60.0, 60.5, 60.1, 60.2)}
SPOILT_MS = {1: (97.0,), 2: (45.0,)}
Times = dict[int, tuple[float, ...]]


@pytest.fixture
def kept_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def tune(
    kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Times], tuple[dict[str, Any], str]]:
    """Runs `tune` as if decodes took the given milliseconds. Returns its data, and its words."""
    said: list[str] = []
    found: list[dict[str, Any]] = []
    config: Config = config_of(
        model=demo_file("target.gguf"), device="cpu", threads=1, ctx_size=256
    )
    monkeypatch.setattr(report, "paragraph", said.append)
    monkeypatch.setattr(report, "data", found.append)
    monkeypatch.setattr("specoffload.bench.load.Load.is_busy", False)

    def run(times_ms: Times) -> tuple[dict[str, Any], str]:
        def measured(
            target: object, text: object, table: CostTable, wanted: Wanted, date: str, *,
            on_entry: Callable[[], object], **rest: object,
        ) -> None:  # fmt: skip
            for n, times in times_ms.items():
                for i in range(1, 1 + len(times)):
                    table.add(Way.IN_PLACE, n, entry_of([t / 1e3 for t in times[:i]], date))
                    on_entry()

        monkeypatch.setattr("specoffload.session.costs.measure", measured)
        said.clear()
        tune_all(config, minutes=1.0)
        return found[-1], " ".join(said)

    return run


def kept_times(folder: Path) -> list[dict[str, Any]]:
    """The runs in the kept file; [] if there is none."""
    return [run for path in folder.glob("*.json") for run in json.loads(path.read_text())["runs"]]


def test_agreeing_times_are_kept(tune: Callable[..., Any], kept_in: Path) -> None:
    data, words = tune(AGREEING_MS)
    assert Path(data["stored"]).is_file()
    assert (data["why_not_stored"], words) == ("", "")
    (run,) = kept_times(kept_in)
    assert run["table"]["ways"]["in place"].keys() == {"1", "2"}


def test_spoilt_times_are_refused_and_nothing_is_kept(
    tune: Callable[..., Any], kept_in: Path
) -> None:
    data, words = tune(SPOILT_MS)
    assert data["stored"] is None
    assert "1 token in place was not timed twice" in data["why_not_stored"]
    assert words.startswith("not kept: a decode of 1 token")
    assert kept_times(kept_in) == []


def test_spoilt_times_leave_what_was_kept_before(tune: Callable[..., Any], kept_in: Path) -> None:
    tune(AGREEING_MS)
    (before,) = kept_times(kept_in)
    data, _ = tune({1: (97.0, 140.0, 60.0, 200.0), 2: (45.0, 45.5)})
    assert "differ by" in data["why_not_stored"]
    assert kept_times(kept_in) == [before]


def test_a_busy_machine_is_a_reason_to_keep_nothing(
    tune: Callable[..., Any], kept_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specoffload.bench.load.Load.is_busy", True)
    data, words = tune(AGREEING_MS)
    assert data["stored"] is None
    assert "other programs took" in words
    assert kept_times(kept_in) == []
