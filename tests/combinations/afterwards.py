"""Checks after a case: its warnings are true, memory has come back, kept files are whole."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from combinations.cases import Case
from specoffload.kept import read_file

_MOST_GROWN_BYTES = 32 << 20  # the models have 1 to 16 MB
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")

# Warnings about no flag of the command line, and the cases in which they are true.
_CHANGED = r"^batches of .* from now on: ([\d.]+) ms instead of ([\d.]+) ms"
_TRUE_OF: Sequence[tuple[str, Callable[[Case], bool]]] = (
    (
        "^decodes take .* other programs use the processors|^computing with .* threads again$",
        lambda case: case["machine"] == "busy" or os.getloadavg()[0] > 1,
    ),
    (
        "a measurement is not used, and is made again when needed: the (split costs|draft step)",
        lambda case: case["machine"] == "busy" or os.getloadavg()[0] > 1,
    ),
    (_CHANGED, lambda case: case["device"] != "cpu"),
    (
        r"^--spec-type (eagle3|dflash|dspark): .* needs rows of the target's layers",
        lambda case: case["drafter"] in ("eagle3", "dflash2", "dspark"),
    ),
)


def is_expected(warning: str, case: Case, words: Sequence[str]) -> bool:
    """True if what the warning says has happened in this case, which was opened with `words`."""
    if (times := re.search(_CHANGED, warning)) and float(times[1]) >= float(times[2]):
        return False
    if any(re.search(pattern, warning) and holds(case) for pattern, holds in _TRUE_OF):
        return True
    flag = _FLAG.match(warning)
    if flag is None or flag[0] not in words:
        return False
    return "the CPU computes alone" not in warning or case["device"] == "cpu"


class LogFaults(logging.Handler):
    """Collects log records that a user must not see: errors, tracebacks and untrue warnings."""

    def __init__(self, case: Case) -> None:
        super().__init__(logging.WARNING)
        self.faults: list[str] = []
        self.words: Sequence[str] = ()  # the command line of the case
        self._case = case

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "offload.llama":  # not shown to users
            return
        words = record.getMessage()
        is_fault = record.exc_info or record.levelno >= logging.ERROR or "\n" in words
        if is_fault or not is_expected(words, self._case, self.words or self._case.words):
            self.faults.append(f"log: {record.levelname} {words}")


@dataclass(frozen=True)
class Held:
    """The memory, files, threads and children of this process. A case changes none of them."""

    n_files: int
    n_threads: int
    n_children: int
    anonymous_bytes: int

    @staticmethod
    def now() -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps pages of what was freed
        process = psutil.Process()
        rollup = Path("/proc/self/smaps_rollup").read_text()
        (kib,) = re.findall(r"^Anonymous: +(\d+) kB$", rollup, re.M)
        return Held(
            process.num_fds(), process.num_threads(), len(process.children(recursive=True)),
            int(kib) << 10,
        )  # fmt: skip

    def grown(self, since: Held) -> list[str]:
        """Name each count that has grown since then. Small growth of memory is noise."""
        counts = (
            ("open files", since.n_files, self.n_files, 0),
            ("threads", since.n_threads, self.n_threads, 0),
            ("processes", since.n_children, self.n_children, 0),
            ("bytes of memory", since.anonymous_bytes, self.anonymous_bytes, _MOST_GROWN_BYTES),
        )
        return [f"{a} {what} become {b}" for what, a, b, most in counts if b - a > most]


def file_faults(folder: Path) -> list[str]:
    """A sentence for each file of `folder` that was not finished, or that no start can read."""
    faults = [f"{path.name} was not finished" for path in folder.rglob("*.new")]
    for path in folder.rglob("*.json"):
        _, why = read_file(path)
        if why:
            faults.append(f"a kept file cannot be read: {why}")
    return faults


def profiles() -> Path:
    """The folder of what starts have measured."""
    return Path(os.environ["SPECOFFLOAD_PROFILE_DIR"])
