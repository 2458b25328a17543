"""A thread that computes the CPU's pairs of a prompt's layer.

Meanwhile the caller's thread submits the many launches of the device's pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from offload.ggml.threads import CpuTeam
from offload.schedule.slots import StreamCounters
from offload.stream.cpu_side import HostGraph


class HostThread:
    """Computes the chosen pairs of a host graph, and counts the seconds."""

    def __init__(self, team: CpuTeam, counters: StreamCounters) -> None:
        self._team, self._counters = team, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pairs")  # starts at first use
        self._running: Future[int] | None = None

    def start(self, host: HostGraph, layer: int, wait: Callable[[], None]) -> None:
        """Compute the pairs that `host` was told, which are of `layer`, after `wait`."""
        self._running = self._thread.submit(self._compute, host, layer, wait)

    def _compute(self, host: HostGraph, layer: int, wait: Callable[[], None]) -> int:
        wait()
        start_s = time.perf_counter()
        status = host.compute(self._team.stream, layer)
        self._counters.host_s += time.perf_counter() - start_s
        return status

    def join(self) -> int:
        """Wait until the pairs are computed. Returns a ggml_status. Raises DeviceFailed."""
        running, self._running = self._running, None
        return running.result() if running is not None else 0

    def abandon(self) -> None:
        """After a failure, wait for the computation and ignore its result."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()

    def close(self) -> None:
        self.abandon()
        self._thread.shutdown()
