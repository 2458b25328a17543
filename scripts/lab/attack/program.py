"""Runs servers, and ends their process groups in any case. Reads their memory, time and log."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from lab import ROOT

LOOPBACK = "127.0.0.1"
PATIENCE_S = 60.0
# Texts that no log may have: they show a traceback, or a crash in the interpreter or libc.
_LAST_WORDS = ("Traceback (most recent", "Exception ignored", "Fatal Python", "terminate called")

Limits = Mapping[int, tuple[int, int]]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "SPECOFFLOAD_WITHOUT": "profile",
    }


def with_limits(limits: Limits) -> Callable[[], None]:
    """A `preexec_fn` that sets these resource limits and turns core files off."""

    def set_them() -> None:
        for which, value in {resource.RLIMIT_CORE: (0, 0), **limits}.items():
            resource.setrlimit(which, value)

    return set_them


def bad_lines(log: str) -> list[str]:
    """The lines of a log that show a crash."""
    return [line for line in log.splitlines() if any(word in line for word in _LAST_WORDS)]


class Program:
    """A server process with its children. It listens on `port` once it is healthy."""

    def __init__(self, log: Path, command: Sequence[str], limits: Limits | None = None) -> None:
        """`command` is a command line, or flags of `specoffload serve` if it begins with a flag."""
        self.log = log
        if not command or command[0].startswith("-"):
            command = [sys.executable, "-m", "specoffload", "serve", *command]
        with socket.socket() as free:
            free.bind((LOOPBACK, 0))
            self.port = int(free.getsockname()[1])
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*command, "--host", LOOPBACK, "--port", str(self.port)],
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,
                preexec_fn=with_limits(limits or {}),
            )

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{LOOPBACK}:{self.port}/health", timeout=10):
                return True
        except OSError:
            return False

    def wait_until_healthy(self, patience_s: float = PATIENCE_S) -> None:
        """Raises TimeoutError."""
        end_s = time.monotonic() + patience_s
        while not self.is_healthy():
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise TimeoutError(f"{self.log}: not healthy\n{self.said()[-2000:]}")
            time.sleep(0.05)

    def cpu_s(self) -> tuple[float, float]:
        """User plus system seconds of the process itself, and of its busiest child."""
        times = [_cpu_s(part) for part in self.parts()]
        return times[0], max(times[1:], default=0.0)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def parts(self) -> list[psutil.Process]:
        """The process and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def engine(self) -> psutil.Process | None:
        """The largest child, which holds the model; None without children."""
        children = self.parts()[1:]
        return max(children, key=_rss_bytes, default=None)

    def rss_bytes(self) -> int:
        """Resident memory of all of its processes."""
        return sum(map(_rss_bytes, self.parts()))

    def end(self, patience_s: float = 30.0) -> int:
        """Send SIGTERM and return the exit code. Kills what is left of the process group."""
        children = self.parts()[1:]
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        self.kill()
        psutil.wait_procs(children, timeout=5)
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


@contextmanager
def serving(
    log: Path,
    command: Sequence[str],
    limits: Limits | None = None,
    patience_s: float = PATIENCE_S,
) -> Iterator[Program]:
    """Start a server, yield it when it is healthy, and end it. Raises TimeoutError."""
    program = Program(log, command, limits)
    try:
        program.wait_until_healthy(patience_s)
        yield program
    finally:
        program.kill()
