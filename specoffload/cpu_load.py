"""Measures the processor time of other programs, which makes measured times too long."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import psutil

_BUSY = 0.2  # least share of processor time by other programs that disturbs timing
_IDLE = ("idle", "iowait")
_COUNTED_TWICE = ("guest", "guest_nice")  # kinds of time that user and nice include


@dataclass(frozen=True)
class Load:
    """The share `others` of processor time that other programs took, on this process's `n_cpus`."""

    others: float
    n_cpus: int

    @property
    def is_busy(self) -> bool:
        return self.others >= _BUSY

    @property
    def words(self) -> str:
        processors = "the processor" if self.n_cpus == 1 else f"the {self.n_cpus} processors"
        return f"other programs took {self.others:.0%} of {processors}"


class Watch:
    """Measures the processor time of other programs from its creation on.

    This is all busy time, minus the time of this process and its children.
    """

    def __init__(self) -> None:
        n_all = psutil.cpu_count() or 1
        affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(n_all)
        self._cpus = [cpu for cpu in affinity if cpu < n_all] or list(range(n_all))
        self._began = (_own_s(), *self._processors_s())

    def others(self) -> Load:
        """The load since the watch began."""
        own_s, busy_s, total_s = self.spent_s()
        share = (busy_s - own_s) / total_s if total_s else 0.0
        return Load(min(1.0, max(0.0, share)), len(self._cpus))

    def spent_s(self) -> tuple[float, float, float]:
        """Returns processor seconds since the watch began: of this process, busy, and in total.

        The time of this process includes its children.
        """
        now = (_own_s(), *self._processors_s())
        own_s, busy_s, total_s = (b - a for a, b in zip(self._began, now, strict=True))
        return own_s, busy_s, total_s

    def _processors_s(self) -> tuple[float, float]:
        """Returns the busy and the total seconds of the processors; stolen time counts as busy."""
        busy_s = total_s = 0.0
        times = psutil.cpu_times(percpu=True)
        for cpu in self._cpus:
            spent = times[cpu]._asdict()
            all_s = sum(spent.values()) - sum(spent.get(name, 0.0) for name in _COUNTED_TWICE)
            total_s += all_s
            busy_s += all_s - sum(spent.get(name, 0.0) for name in _IDLE)
        return busy_s, total_s


def _own_s() -> float:
    """Processor seconds of this process and its children, including ended children."""
    me = psutil.Process()
    spent_s = sum(me.cpu_times()[:4])  # user and system time, own and of ended children
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            spent_s += sum(child.cpu_times()[:4])
    return float(spent_s)
