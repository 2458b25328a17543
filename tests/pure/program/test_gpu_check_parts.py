"""The parts of scripts/gpu-check end at their time, and a bad one loses nothing."""

from __future__ import annotations

import importlib
import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "scripts" / "gpu_check"


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("timed_parts")


class Run:
    """Runs parts, and has what they left."""

    def __init__(self, parts: ModuleType, folder: Path) -> None:
        self._parts, self.log = parts, io.BytesIO()
        self.report = parts.Report(folder / "report.json", {"seconds": {}, "error": ""})

    def __call__(self, limit_s: float = 60.0, **measures: Callable[[float], bool]) -> bool:
        chosen = [self._parts.Part(name, 1.0, measure) for name, measure in measures.items()]
        start_s = time.monotonic()
        ok: bool = self._parts.run_parts(
            chosen, self.report, self.log, start_s=start_s, limit_s=limit_s
        )
        return ok

    def status(self, name: str) -> str:
        return str(self.saved()["parts"][name]["status"])

    def saved(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.report.path.read_text("utf-8"))
        return found


@pytest.fixture
def run(parts: ModuleType, tmp_path: Path) -> Run:
    return Run(parts, tmp_path)


def test_time_that_a_part_leaves_goes_to_later_parts(parts: ModuleType) -> None:
    assert parts.end_times([1, 3, 4], 100.0, 80.0) == [110.0, 140.0, 180.0]


def test_each_part_finds_the_results_of_those_before_it_in_the_file(run: Run) -> None:
    def first(end_s: float) -> bool:
        run.report.values["found"] = 1
        print("hello from the first")
        return True

    def second(end_s: float) -> bool:
        saved = run.saved()
        assert saved["parts"]["first"]["status"] == "passed"
        return bool(saved["found"] == 1)

    assert run(first=first, second=second)
    assert run.status("second") == "passed"
    assert b"hello from the first\n" in run.log.getvalue()


def test_a_part_is_ended_at_its_time_with_its_children_and_keeps_what_it_saved(
    run: Run, tmp_path: Path
) -> None:
    child = tmp_path / "child"

    def endless(end_s: float) -> bool:
        run.report.values["half"] = "measured"
        run.report.save()
        started = subprocess.Popen(["sleep", "600"])
        child.write_text(str(started.pid))
        time.sleep(600)
        return True

    assert not run(limit_s=2.0, endless=endless, after=lambda end_s: True)
    assert run.status("endless").startswith("ended: its share of --limit-s was over")
    assert run.status("after") == "passed"
    assert run.saved()["half"] == "measured"
    assert b"endless: ended" in run.log.getvalue()
    until_s = time.monotonic() + 10
    while is_running(int(child.read_text())):
        assert time.monotonic() < until_s
        time.sleep(0.01)


def is_running(process: int) -> bool:
    """False if the process has ended, whether its parent has waited for it or not."""
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_an_interrupted_check_ends_the_part_that_runs(run: Run, tmp_path: Path) -> None:
    def sleeps(end_s: float) -> bool:
        (tmp_path / "part").write_text(str(os.getpid()))
        # Python ignores exceptions in what it runs in the parent right after a fork.
        time.sleep(0.5)
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
        return True

    with pytest.raises(KeyboardInterrupt):
        run(sleeps=sleeps)
    assert not is_running(int((tmp_path / "part").read_text()))


def test_output_without_end_does_not_hold_a_part_beyond_its_time(run: Run) -> None:
    def chatters(end_s: float) -> bool:
        while True:
            print("word " * 100)

    assert not run(limit_s=1.0, chatters=chatters)
    assert run.status("chatters").startswith("ended: its share of --limit-s was over")


def test_a_part_that_crashes_or_raises_is_named_and_the_next_one_runs(run: Run) -> None:
    def crashes(end_s: float) -> bool:
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def raises(end_s: float) -> bool:
        raise ValueError("no good")

    assert not run(crashes=crashes, raises=raises, after=lambda end_s: True)
    assert run.status("crashes") == "ended by signal 9 (SIGKILL)"
    assert run.status("raises") == "failed: ValueError: no good"
    assert run.saved()["error"] == "raises: ValueError: no good"
    assert run.status("after") == "passed"


def test_a_part_with_nothing_to_measure_is_left_out_with_its_reason(
    run: Run, parts: ModuleType
) -> None:
    def absent(end_s: float) -> bool:
        raise parts.LeftOut("no such tool")

    assert run(absent=absent)
    assert run.status("absent") == "left out: no such tool"


def test_wrong_results_fail(run: Run) -> None:
    assert not run(wrong=lambda end_s: False, after=lambda end_s: True)
    assert run.status("wrong") == "failed"


def test_without_a_gpu_nothing_else_runs(run: Run, parts: ModuleType) -> None:
    def absent(end_s: float) -> bool:
        raise parts.NoGpu

    with pytest.raises(parts.NoGpu):
        run(absent=absent, after=lambda end_s: True)
    assert "after" not in run.saved()["parts"]
