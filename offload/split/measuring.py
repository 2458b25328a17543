"""Times of a split layer's two sides, taken on the layer itself: what the split decides by.

The device computes a layer's products again, with experts of as many rows each, in whatever slots;
the CPU a few experts of its own; the link copies experts over themselves. Every number is a median.

CPU and link read the same RAM. So both are also timed beside each other, in turn with each alone:
the CPU's experts while the link copies, and the link while the CPU computes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

from offload.split.costs import MeasuredCosts, side_times, slowdown

_REPEATED = 3
_ROWS = (1, 2, 4, 8, 16)  # rows of one expert
_EXPERTS = (2, 6)
_OUTLASTS = 4  # what the copies beside the CPU take alone, over what its experts do
_LEAST_S = 0.01  # and at least so long: where a thread copies, it takes a while to get a processor
_COPIES, _MOST_COPIES = 2, 64
_TURNS = 5  # turns of either side alone, and of both
_LEAST_DONE = 1 / 16  # least share of the copies done while the CPU computed

Measured = dict[int, list[tuple[int, float]]]  # rows -> (experts, seconds)


class Sides(Protocol):
    """A split layer as it was computed last: what its sides take now. Nothing is under way."""

    @property
    def n_pairs(self) -> int:
        """Pairs of a token and an expert that a computation of it has."""

    @property
    def n_tokens(self) -> int:
        """Tokens of that computation: an expert has no more rows."""

    @property
    def n_slots(self) -> int: ...

    @property
    def n_experts(self) -> int: ...

    def device_s(self, n_experts: int) -> float:
        """The device's seconds for all pairs, spread over so many experts in slots."""

    def host_s(self, n_experts: int, n_rows: int) -> float:
        """The CPU's seconds for so many experts of so many rows each."""

    @property
    def kinds(self) -> tuple[float, ...]:
        """The share of each kind of weight in an expert's bytes, in the order of copying."""

    @property
    def can_copy(self) -> bool:
        """True if one of the layer's experts is in a slot, to be copied there again."""

    def copies_s(self, n: int) -> float:
        """The link's seconds for so many experts."""

    def beside_copies(self, n: int, until_s: float, n_experts: int, n_rows: int) -> Beside:
        """Have so many experts copied, and the CPU compute meanwhile: once, and again as long as it
        would end before `until_s`."""


@dataclass(frozen=True)
class Beside:
    """Computations of the CPU while the link copied."""

    host_s: Sequence[float]  # seconds of each computation
    busy_s: float  # from the first copy to the end of the last computation
    left_s: float  # seconds of the copies after that


@dataclass(frozen=True)
class LinkTimes:
    """An expert's copy alone, and how much longer either side takes while the other is busy."""

    copy_s: float
    host_slowdown: float = 1.0
    link_slowdown: float = 1.0


def on_device(sides: Sides, measured: Measured) -> None:
    """Add the device's times at the numbers of rows that the layer's pairs can be spread to, no
    token using an expert twice."""
    n_rows = 1
    while n_rows <= sides.n_tokens:
        n_experts = sides.n_pairs // n_rows
        if n_experts * n_rows == sides.n_pairs and n_experts <= min(sides.n_slots, sides.n_experts):
            seconds = _median(partial(sides.device_s, n_experts))
            measured.setdefault(n_rows, []).append((n_experts, seconds))
        n_rows *= 2


def on_host(sides: Sides) -> Measured:
    """The CPU's times."""
    found: Measured = {}
    for n_rows, n_experts in _sizes(sides.n_experts):
        seconds = _median(partial(sides.host_s, n_experts, n_rows))
        found.setdefault(n_rows, []).append((n_experts, seconds))
    return found


def _sizes(n_experts: int) -> Iterator[tuple[int, int]]:
    for n_rows in _ROWS:
        for n in dict.fromkeys(min(n_experts, wanted) for wanted in _EXPERTS):
            yield n_rows, n


def on_link(sides: Sides) -> LinkTimes | None:
    """The link's times; None where no expert can be copied."""
    if not sides.can_copy:
        return None
    n_experts, n_rows = min(sides.n_experts, min(_EXPERTS)), 1
    once_s = _median(partial(sides.host_s, n_experts, n_rows))
    copy_s = _median(partial(sides.copies_s, _COPIES)) / _COPIES
    long_s = max(_OUTLASTS * once_s, _LEAST_S)
    n = max(_COPIES, math.ceil(min(_MOST_COPIES, long_s / max(copy_s, 1e-9))))
    if n * copy_s < once_s:  # copies that end so soon slow nothing for long
        return LinkTimes(copy_s)
    host_s: list[float] = []
    host_beside_s: list[float] = []
    copies_s: list[float] = []
    copies_beside_s: list[float] = []
    for _ in range(_TURNS):
        host_s.append(sides.host_s(n_experts, n_rows))
        copies_s.append(sides.copies_s(n))
        beside = sides.beside_copies(n, copies_s[-1], n_experts, n_rows)
        host_beside_s += beside.host_s
        # What was left took its own time, and all before it as long as the CPU was busy.
        done = max(_LEAST_DONE, 1.0 - beside.left_s / copies_s[-1])
        copies_beside_s.append(beside.busy_s / done)
    return LinkTimes(
        median(copies_s) / n,
        slowdown(host_s, host_beside_s),
        slowdown(copies_s, copies_beside_s),
    )


def costs_of(
    device: Measured, host: Measured, link: LinkTimes, kinds: Sequence[float]
) -> MeasuredCosts:
    """`kinds`: as of `Sides`. Raises ValueError where a side has no times."""
    return MeasuredCosts(
        side_times(host),
        side_times(device),
        link.copy_s * link.link_slowdown,
        link.host_slowdown,
        link.link_slowdown,
        tuple(kinds),
    )


def _median(timed: Callable[[], float]) -> float:
    timed()  # touches memory that nobody used for long
    return median(timed() for _ in range(_REPEATED))
