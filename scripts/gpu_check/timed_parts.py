"""Runs the parts of scripts/gpu-check, each in a process of its own that is ended at its time.

A part that hangs or crashes loses neither the others nor what it had saved. All output goes to the
terminal and to the log line by line. The report is a JSON file that is replaced as a whole.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

PASSED, FAILED, LEFT_OUT = "passed", "failed", "left out"
_PATIENCE_S = 3.0  # most time for a process to vanish
_NO_GPU = "no GPU"
_MOST = 1 << 16  # bytes of output that are read at once


class LeftOut(Exception):
    """A part has nothing to measure here. The text says why."""


class NoGpu(Exception):
    """There is no GPU, so there is nothing to check."""


@dataclass
class Report:
    """The results so far, in a file that other processes read."""

    path: Path
    values: dict[str, Any] = field(default_factory=dict)

    def save(self) -> None:
        """Replace the file as a whole, so that no reader finds half of it."""
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(self.values) + "\n", "utf-8")
        new.replace(self.path)

    def load(self) -> None:
        self.values.clear()
        self.values.update(json.loads(self.path.read_text("utf-8")))


@dataclass(frozen=True)
class Part:
    """A part of the check. `measure` returns True if all results are right."""

    name: str
    share: float  # of the time limit, relative to the other parts' shares
    measure: Callable[[float], bool]  # gets the time (of time.monotonic) at which it is ended


def end_times(shares: Sequence[float], start_s: float, limit_s: float) -> list[float]:
    """The time at which each part ends at the latest. Time that a part leaves goes to later parts.

    The parts run one after the other from `start_s` on, for `limit_s` seconds in all.
    """
    ends, used, whole = [], 0.0, sum(shares)
    for share in shares:
        used += share
        ends.append(start_s + limit_s * used / whole)
    return ends


def run_parts(
    parts: Sequence[Part], report: Report, log: BinaryIO, *, start_s: float, limit_s: float
) -> bool:
    """Run the parts in their order. Returns True if all passed. Raises NoGpu.

    `parts` of the report gets each part's `status` and the seconds that it took.
    """
    ends = end_times([part.share for part in parts], start_s, limit_s)
    statuses: dict[str, Any] = {}
    for part, end_s in zip(parts, ends, strict=True):
        began_s = time.monotonic()
        status = _run(part, end_s, report, log)
        report.load()
        took_s = round(time.monotonic() - began_s, 1)
        if status.startswith("ended"):
            emit(log, f"{part.name}: {status}\n".encode())
        statuses = report.values.setdefault("parts", {})
        statuses[part.name] = {"status": status, "s": took_s}
        report.values["seconds"][part.name] = round(time.monotonic() - start_s, 1)
        report.save()
        if status == _NO_GPU:
            raise NoGpu
    return all(part["status"].startswith((PASSED, LEFT_OUT)) for part in statuses.values())


def _run(part: Part, end_s: float, report: Report, log: BinaryIO) -> str:
    """Run one part in a new process. Returns its status."""
    report.save()
    sys.stdout.flush()
    sys.stderr.flush()
    said = tempfile.NamedTemporaryFile("r", suffix=".status")  # noqa: SIM115
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        _in_child(part, end_s, report, writing, Path(said.name))
    os.close(writing)
    with said, open(reading, "rb", buffering=0) as output:
        try:
            exit_status = _follow(child, output, end_s, log)
        except BaseException:  # Ctrl-C or SIGTERM, which reaches this process alone
            _end(child)
            raise
        words = said.read()
    if exit_status is None:
        return "ended: its share of --limit-s was over"
    if exit_status < 0:
        number = -exit_status
        return f"ended by signal {number} ({signal.Signals(number).name})"
    return words or f"ended with status {exit_status}"


def _in_child(part: Part, end_s: float, report: Report, output: int, said: Path) -> None:
    """Measure the part, with the pipe `output` as standard output and error, and exit."""
    status = 1
    try:
        os.setsid()  # its own children end with it
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        try:
            words = PASSED if part.measure(end_s) else FAILED
        except LeftOut as e:
            words = f"{LEFT_OUT}: {e}"
            print(f"{part.name} is left out: {e}")
        except NoGpu:
            words = _NO_GPU
        except Exception as e:  # the report keeps what was measured before
            words = f"{FAILED}: {type(e).__name__}: {e}"
            errors = (report.values["error"], f"{part.name}: {type(e).__name__}: {e}")
            report.values["error"] = "; ".join(filter(None, errors))
            traceback.print_exc()
        report.save()
        said.write_text(words, "utf-8")
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # libraries of a GPU may hang at exit


def _follow(child: int, output: BinaryIO, end_s: float, log: BinaryIO) -> int | None:
    """Copy the output to the terminal and the log until the process has ended.

    Returns its exit status, negative for a signal, or None if it was ended because its time was
    over. Its own children are ended with it.
    """
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            _end_group(child)
            while select.select([output], [], [], 0)[0] and (
                data := os.read(output.fileno(), _MOST)
            ):
                emit(log, data)
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end_s:
            _end(child)
            return None
        if select.select([output], [], [], 0.05)[0]:
            if data := os.read(output.fileno(), _MOST):
                emit(log, data)
            else:
                time.sleep(0.01)  # it closed its output and is about to end


def _end(child: int) -> None:
    """End a process and its children. Waits a while, because a driver may hold the process."""
    _end_group(child)
    os.kill(child, signal.SIGKILL)  # if it had no time to make its group
    until_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until_s and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.02)


def _end_group(child: int) -> None:
    try:
        os.killpg(child, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return  # it ended, or has no group of its own


def emit(log: BinaryIO, data: bytes) -> None:
    """Write to the terminal and to the log at once."""
    for out in (sys.stdout.buffer, log):
        out.write(data)
        out.flush()
