"""Starts servers as processes, and reads the processor time of them and their children."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from lab import ROOT
from specoffload.bench.llama_server import running_server

LOAD_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Server:
    """A running server. `process` is the started process, without its children."""

    name: str
    port: int
    process: psutil.Process

    def cpu_s(self) -> float:
        """User and system seconds of the started process, without its children."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def engine_cpu_s(self) -> float:
        """User and system seconds of the child that computes; 0 without such a child."""
        times = [child.cpu_times() for child in self.process.children(recursive=True)]
        return max((float(t.user + t.system) for t in times), default=0.0)


def ours(
    model: Path, n_threads: int, n_parallel: int, n_ctx: int, flags: Sequence[str]
) -> list[str]:
    return [
        *(sys.executable, "-m", "specoffload", "serve", str(model), "--device", "cpu"),
        *("-t", str(n_threads), "-np", str(n_parallel), "-c", str(n_ctx), *flags),
    ]


def theirs(
    program: Path,
    model: Path,
    n_threads: int,
    n_parallel: int,
    n_ctx: int,
    flags: Sequence[str] = ("-kvu",),
) -> list[str]:
    return [
        *(str(program), "-m", str(model), "-t", str(n_threads), "-tb", str(n_threads)),
        *("-np", str(n_parallel), "-c", str(n_ctx), *flags),
    ]


@contextmanager
def running(name: str, command: list[str], log: Path) -> Iterator[Server]:
    """Start a server, yield it, and stop it. Raises DeviceFailed if it does not come up."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with running_server(command, log, environment, LOAD_PATIENCE_S) as (process, port):
        yield Server(name, port, psutil.Process(process.pid))
