"""The processors' time that other programs take: a busy machine gives times that are too long."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass

import psutil

from specoffload import report

_LOOK_S = 0.3
_BUSY = 0.2  # share of the processors' time from which other programs disturb timing
_IDLE = ("idle", "iowait")
_COUNTED_TWICE = ("guest", "guest_nice")  # they are part of user and nice


@dataclass(frozen=True)
class Load:
    """Share of the time of this process's `n_cpus` processors that other programs took."""

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
    """Measures the processor time of other programs from now on.

    It is all used time, less that of this process and its children.
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
        """Processor seconds since the watch began: of this process, of all, and idle ones too."""
        now = (_own_s(), *self._processors_s())
        own_s, busy_s, total_s = (b - a for a, b in zip(self._began, now, strict=True))
        return own_s, busy_s, total_s

    def _processors_s(self) -> tuple[float, float]:
        """Seconds in which the processors worked, and all seconds; a hypervisor's theft is work."""
        busy_s = total_s = 0.0
        times = psutil.cpu_times(percpu=True)
        for cpu in self._cpus:
            spent = times[cpu]._asdict()
            all_s = sum(spent.values()) - sum(spent.get(name, 0.0) for name in _COUNTED_TWICE)
            total_s += all_s
            busy_s += all_s - sum(spent.get(name, 0.0) for name in _IDLE)
        return busy_s, total_s


def _own_s() -> float:
    """Processor time of this process and its children, those that have ended included."""
    me = psutil.Process()
    spent_s = sum(me.cpu_times()[:4])  # user, system, and both of children that have ended
    for child in me.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            spent_s += sum(child.cpu_times()[:4])
    return float(spent_s)


def load_sentence(load: Load) -> str:
    """A warning if other programs disturb the timing, else ""."""
    if not load.is_busy:
        return ""
    return (
        f"this machine is busy: {load.words} in the last {_LOOK_S:g} s, so measurements will be "
        "too slow"
    )


def warn_of_load() -> None:
    """Measure the load for a third of a second, and warn if other programs will disturb timing."""
    watch = Watch()
    time.sleep(_LOOK_S)
    if sentence := load_sentence(watch.others()):
        report.note(sentence)
