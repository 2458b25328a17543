"""Times of a split layer's two sides, taken on the layer itself: what the split decides by.

The device computes a layer's products again, with experts of as many rows each, in whatever slots;
the CPU a few experts of its own; the link copies an expert over itself. Every number is a median.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Protocol

from offload.hybrid.costs import MeasuredCosts, side_times

_REPEATED = 3
_ROWS = (1, 2, 4, 8, 16)  # of one expert
_EXPERTS = (2, 6)

Measured = dict[int, list[tuple[int, float]]]  # rows -> (experts, seconds)


class Sides(Protocol):
    """A split layer as it was computed last: what its sides take now. Nothing is under way."""

    @property
    def n_pairs(self) -> int:
        """Pairs of a token and an expert that a computation of it has."""

    @property
    def n_slots(self) -> int: ...

    @property
    def n_experts(self) -> int: ...

    def device_s(self, n_experts: int) -> float:
        """The device's seconds for all pairs, spread over so many experts in slots."""

    def host_s(self, n_experts: int, n_rows: int) -> float:
        """The CPU's seconds for so many experts of so many rows each."""

    def copy_s(self) -> float | None:
        """The link's seconds for one expert; None where none of the layer's is in a slot."""


def on_device(sides: Sides, measured: Measured) -> None:
    """Add the device's times at the numbers of rows that the layer's pairs can be spread to."""
    n_rows = 1
    while n_rows <= sides.n_pairs:
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


def costs_of(device: Measured, host: Measured, copies_s: list[float]) -> MeasuredCosts:
    """Raises ValueError where a side has no times."""
    if not copies_s:
        raise ValueError("no copy was timed")
    return MeasuredCosts(side_times(host), side_times(device), median(copies_s))


def _median(timed: Callable[[], float]) -> float:
    timed()  # touches memory that nobody used for long
    return median(timed() for _ in range(_REPEATED))
