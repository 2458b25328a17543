"""`specoffload` as a process group of its own that always ends, its memory and its log."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from lab import ROOT

PATIENCE_S = 60.0
# Lines that no log may have: a traceback, an interpreter or a libc that gives up.
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
    """For `preexec_fn`: resource limits of the process to be, and no core files."""

    def set_them() -> None:
        for which, value in {resource.RLIMIT_CORE: (0, 0), **limits}.items():
            resource.setrlimit(which, value)

    return set_them


def bad_lines(log: str) -> list[str]:
    """The lines of a log that must not be."""
    return [line for line in log.splitlines() if any(word in line for word in _LAST_WORDS)]


class Program:
    """A server that was started; `port` is known when it listens."""

    def __init__(self, log: Path, flags: Sequence[str] = (), limits: Limits | None = None) -> None:
        self.log = log
        command = [sys.executable, "-m", "specoffload", "serve", "--port", "0", *flags]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment(),
                start_new_session=True,
                preexec_fn=with_limits(limits or {}),
            )
        self.port = 0

    def wait_until_listening(self, patience_s: float = PATIENCE_S) -> None:
        """Raises TimeoutError."""
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s and self.process.poll() is None:
            for line in self.said().splitlines():
                _, found, url = line.partition("listening on http://")
                if found:
                    self.port = int(url.rpartition(":")[2])
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{self.log}: no address\n{self.said()[-2000:]}")

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=10):
                return True
        except (OSError, urllib.error.URLError):
            return False

    def wait_until_healthy(self, patience_s: float = PATIENCE_S) -> None:
        """Raises TimeoutError."""
        end_s = time.monotonic() + patience_s
        while not self.is_healthy():
            if time.monotonic() > end_s or self.process.poll() is not None:
                raise TimeoutError(f"{self.log}: not healthy\n{self.said()[-2000:]}")
            time.sleep(0.05)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def parts(self) -> list[psutil.Process]:
        """The process and its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        return []

    def engine(self) -> psutil.Process | None:
        """The child that holds the model: the largest."""
        children = self.parts()[1:]
        return max(children, key=_rss_bytes, default=None)

    def rss_bytes(self) -> int:
        """Resident memory of all of its processes."""
        return sum(map(_rss_bytes, self.parts()))

    def end(self, patience_s: float = 30.0) -> int:
        """SIGTERM, and its exit code. What is left of its group is killed."""
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


def _rss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


@contextmanager
def serving(log: Path, flags: Sequence[str], limits: Limits | None = None) -> Iterator[Program]:
    """A healthy server, whose processes are gone afterwards. Raises TimeoutError."""
    program = Program(log, flags, limits)
    try:
        program.wait_until_listening()
        program.wait_until_healthy()
        yield program
    finally:
        program.kill()
