"""Checks of what must hold when a case is over find what they are for."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from combinations import elsewhere
from combinations.afterwards import Held, LogFaults, file_faults, is_expected
from combinations.cases import Case

ON_CPU = Case.of("session", device="cpu", experts="split")
ON_SIM = ON_CPU.replaced("device", "sim")
CHANGED = (
    "batches of 1 token are computed by the CPU from now on: {} ms instead of {} ms on the GPU"
)
SLOW = "decodes take 3.6 times as long as expected, other programs use the processors: computing"


@pytest.mark.parametrize(
    ("warning", "case", "is_true"),
    [
        ("--vram ignored: the CPU computes alone (asked for)", ON_CPU, True),
        ("--vram ignored: the CPU computes alone (asked for)", ON_SIM, False),
        ("--ram ignored: the CPU computes alone (asked for)", ON_CPU, False),  # was not given
        (CHANGED.format(2.5, 3), ON_SIM, True),
        (CHANGED.format(3, 2.5), ON_SIM, False),
        (SLOW, ON_SIM.replaced("machine", "busy"), True),
        ("a prompt of 300 tokens is not kept: no room", ON_SIM, False),
    ],
)
def test_a_warning_is_true_if_what_it_says_has_happened(
    warning: str, case: Case, is_true: bool
) -> None:
    assert is_expected(warning, case, case.words) is is_true


def test_untrue_warnings_errors_and_tracebacks_are_faults() -> None:
    said = LogFaults(ON_SIM)
    log = logging.Logger("test")
    log.addHandler(said)
    log.info("loading")
    log.warning("--vram: 3 GiB are used")
    assert said.faults == []
    log.warning("--ram: 3 GiB are used")
    log.error("lost")
    try:
        raise ValueError("inside")
    except ValueError:
        log.warning("--vram: failed", exc_info=True)
    assert [fault.split()[1] for fault in said.faults] == ["WARNING", "ERROR", "WARNING"]


def test_what_a_case_leaves_behind_is_counted(tmp_path: Path) -> None:
    before, ended = Held.now(), threading.Event()
    assert before.grown(before) == []
    thread = threading.Thread(target=ended.wait)
    thread.start()
    with (tmp_path / "file").open("w"):
        left = Held.now().grown(before)
    ended.set()
    thread.join()
    assert [words.partition(" ")[2].split(" become ")[0] for words in left] == [
        "open files", "threads",
    ]  # fmt: skip
    bigger = replace(before, anonymous_bytes=before.anonymous_bytes + (1 << 30))
    assert "bytes of memory" in bigger.grown(before)[0]


def test_unfinished_and_damaged_files_are_faults(tmp_path: Path) -> None:
    assert file_faults(tmp_path) == []
    (tmp_path / "machine.json").write_text("{")
    (tmp_path / "machine.json.1a2b.new").touch()
    unfinished, damaged = file_faults(tmp_path)
    assert unfinished == "machine.json.1a2b.new was not finished"
    assert "is damaged" in damaged


def test_a_device_that_this_machine_lacks_is_skipped_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elsewhere, "ROOT", tmp_path)
    assert elsewhere.why_not("sim") == ""
    for device, (venv, script, _) in elsewhere.DEVICES.items():
        assert elsewhere.why_not(device) == f"no {venv}, which {script} makes"
        assert os.access(Path(__file__).parents[2] / script, os.X_OK)
