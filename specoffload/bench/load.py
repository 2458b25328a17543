"""The machine's load before something is timed: a busy machine gives times that are too long."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from specoffload import report

_LOOK_S = 0.3
_BUSY = 0.2  # share of the processors' time from which on others disturb


@dataclass(frozen=True)
class Load:
    """The work of others: `busy` is a share of the time of this process's `n_cpus` processors, now;
    `average` the processes that ran or waited in the last minute, on all `n_all`."""

    busy: float
    average: float
    n_cpus: int
    n_all: int


def look_at_load() -> Load:
    """Looks for a third of a second, in which this process does nothing."""
    shares = psutil.cpu_percent(_LOOK_S, percpu=True)
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(shares))
    mine = [shares[cpu] for cpu in affinity if cpu < len(shares)] or shares
    return Load(sum(mine) / len(mine) / 100, os.getloadavg()[0], len(mine), len(shares))


def load_sentence(load: Load) -> str:
    """A warning where others disturb what is timed, else nothing. Pure."""
    if load.busy < _BUSY and load.average <= load.n_all:
        return ""
    processors = "the processor" if load.n_cpus == 1 else f"the {load.n_cpus} processors"
    return (
        f"this machine is busy with other work ({load.busy:.0%} of {processors} now, load average "
        f"{load.average:.1f}): what is measured now is slower than it could be"
    )


def warn_of_load() -> None:
    """Say it, before something is timed."""
    sentence = load_sentence(look_at_load())
    if sentence:
        report.note(sentence)
