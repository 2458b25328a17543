"""A thread that computes the CPU's pairs of one layer while the device computes others.

`sim` with a pace computes on the caller's thread, and prompts submit many launches. In both cases
the CPU's pairs need a thread of their own.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor

from offload.ggml.threads import CpuTeam
from offload.schedule.slots import StreamCounters
from offload.stream.cpu_side import HostGraph


class HostThread:
    """Computes the chosen pairs of a host graph, and counts the seconds."""

    def __init__(self, team: CpuTeam, expert_s: float, counters: StreamCounters) -> None:
        """`expert_s`: the least seconds of an expert, to simulate a slow CPU."""
        self._team, self._expert_s, self._counters = team, expert_s, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pairs")  # starts at first use
        self._running: Future[int] | None = None

    def start(self, host: HostGraph, layer: int, n_experts: int) -> None:
        """Compute the pairs that `host` was told, which have `n_experts` experts of `layer`."""
        self._running = self._thread.submit(self._compute, host, layer, n_experts)

    def _compute(self, host: HostGraph, layer: int, n_experts: int) -> int:
        start_s = time.perf_counter()
        status = host.compute(self._team.stream, layer)
        wait_until(start_s + n_experts * self._expert_s)
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


def wait_until(moment_s: float) -> None:
    """Sleep until the clock of time.perf_counter shows `moment_s`."""
    left_s = moment_s - time.perf_counter()
    if left_s > 0:
        time.sleep(left_s)
