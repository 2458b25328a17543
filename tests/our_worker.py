"""`specoffload worker` as a process, for tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from offload.remote.address import Address, parse_address

SIM = "sim:vram=1MiB"
_ENVIRONMENT = {**os.environ, "SPECOFFLOAD_WITHOUT": "profile"}
_START_S = 60.0


class RunningWorker:
    """`specoffload worker` as a process, with the lines that it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.address = process, Address("", 0)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + _START_S
        while not self.address.port and process.poll() is None:
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if found := re.match(r"worker listening on (\S+)", line):
                self.address = parse_address(found[1])

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def says(self, expected: str, timeout_s: float = 15.0) -> bool:
        """Whether a line says it in time: the worker may write it after its client has ended."""
        deadline = time.monotonic() + timeout_s
        while expected not in self.text and time.monotonic() < deadline:
            time.sleep(0.03)
        return expected in self.text

    def status(self) -> dict[str, object]:
        found: dict[str, object] = httpx.get(f"http://{self.address}/").json()
        return found

    def counters(self) -> dict[str, float]:
        found = self.status()["counters"]
        assert isinstance(found, dict)
        return found

    def ended(self) -> int:
        code = self.process.wait(30)
        self._reader.join(10)
        return code


@contextmanager
def working(model: Path, *flags: str, profiles: Path | None = None) -> Iterator[RunningWorker]:
    """Run a worker. It keeps what it measures in `profiles`, or nowhere."""
    environment = _ENVIRONMENT
    if profiles is not None:
        environment = _ENVIRONMENT | {
            "SPECOFFLOAD_WITHOUT": "", "SPECOFFLOAD_PROFILE_DIR": str(profiles),
        }  # fmt: skip
    command = [sys.executable, "-m", "specoffload", "worker", str(model), "--threads", "1",
               "--listen", "127.0.0.1:0", *flags]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            running = RunningWorker(process)
            yield running
        except BaseException:
            process.kill()  # else closing its pipe waits for the reader, and so for the process
            raise
        process.terminate()
        try:
            running.ended()
        except subprocess.TimeoutExpired:
            process.kill()
            raise
