"""Corrects the kept costs of a split layer by timings that are repeated while serving. Pure.

A first start measures a split layer's sides within half a second. If another program ran then, the
division of every batch and prompt stays wrong, and an expert that seems slow on one side is never
computed there, so nothing would show the mistake. Therefore sessions time the sides again between
decodes, one small timing after the other (specoffload/speculation/split_retiming.py). Each time is
the lower median of the kept one and of those that were seen (offload/times/recent.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from statistics import median_low

from offload.schedule.division import MeasuredCosts, SideTimes, side_times
from offload.times.recent import RecentMedian

HOST_EXPERTS = (2, 6)  # experts that the CPU computes in one timing
_TWICE = 2
_LEAST_COPIES = 3  # timings of the link below which they show no rate
_ALIKE = 1.05  # largest ratio up to which costs divide layers alike
_MOST_PER_ROW = 2.0  # cap on a time by rows, as a multiple of computing the rows by turns
_NOTHING_S = 1e-9


class TimedSide(Enum):
    """The side of a split layer that a timing measures."""

    HOST = "CPU"
    DEVICE = "device"
    LINK = "link"  # copies alone and beside the CPU's computation


@dataclass(frozen=True)
class SplitTiming:
    """One timing: a side's seconds for `n_experts` experts of `n_rows` rows each.

    A timing of the link has neither.
    """

    side: TimedSide
    n_rows: int = 0
    n_experts: int = 0


LINK = SplitTiming(TimedSide.LINK)


def device_timings(n_tokens: int, n_pairs: int, most_experts: int) -> Iterator[SplitTiming]:
    """Yield the timings of the device that a split layer of `n_tokens` and `n_pairs` allows.

    No token uses an expert twice, so an expert has at most `n_tokens` rows. The layer and the slots
    have room for `most_experts` experts.
    """
    n_rows = 1
    while n_rows <= n_tokens:
        n_experts = n_pairs // n_rows
        if n_experts * n_rows == n_pairs and n_experts <= most_experts:
            yield SplitTiming(TimedSide.DEVICE, n_rows, n_experts)
        n_rows *= 2


class SplitCorrections:
    """The costs of one device's split layers. `see` and `see_link` correct them."""

    def __init__(self, kept: MeasuredCosts) -> None:
        self._kept = self._used = kept
        # Seconds by timing. Values of the kept costs count as one timing.
        self._seconds: dict[SplitTiming, RecentMedian] = {}
        self._copy = RecentMedian(kept.copy_s / kept.link_slowdown)
        self._seen_copy, self._n_copies = RecentMedian(), 0  # timings alone, without the kept one
        self._slowdowns = RecentMedian(kept.host_slowdown), RecentMedian(kept.link_slowdown)
        self._n_seen: dict[SplitTiming, int] = {LINK: 0}
        for n_rows, n_experts in product(kept.host.by_rows_s, HOST_EXPERTS):
            self._know(SplitTiming(TimedSide.HOST, n_rows, n_experts))

    def _know(self, timing: SplitTiming) -> RecentMedian:
        known = self._seconds.get(timing)
        if known is None:
            known = self._seconds[timing] = RecentMedian(self._kept_s(timing))
            self._n_seen[timing] = 0
        return known

    def _change(self, side: TimedSide) -> float:
        """Return by which factor a side's timings differ from the kept costs, in the median."""
        return median_low(
            known.value / self._kept_s(timing)
            for timing, known in self._seconds.items()
            if timing.side is side and self._n_seen[timing]
        )

    def _kept_s(self, timing: SplitTiming) -> float:
        side = self._side(self._kept, timing.side)
        array = side.array()
        expert_s = side.by_rows_s.get(
            timing.n_rows, float(array[min(timing.n_rows, len(array) - 1)])
        )
        return max(side.fixed_s + timing.n_experts * expert_s, _NOTHING_S)

    @staticmethod
    def _side(costs: MeasuredCosts, side: TimedSide) -> SideTimes:
        return costs.host if side is TimedSide.HOST else costs.device

    @property
    def is_first(self) -> bool:
        """True until each known timing was repeated twice."""
        return min(self._n_seen.values()) < _TWICE

    @property
    def n_seen(self) -> int:
        return sum(self._n_seen.values())

    def next(self, n_tokens: int, n_pairs: int, most_experts: int) -> SplitTiming:
        """Return the timing that was repeated least often. Arguments: as in `device_timings`."""
        possible = self._possible(n_tokens, n_pairs, most_experts)
        return min(possible, key=lambda timing: self._n_seen.get(timing, 0))

    def may_wait(self, n_tokens: int, n_pairs: int, most_experts: int) -> bool:
        """True if a timing that needs a batch of another size was repeated least often."""
        timing = self.next(n_tokens, n_pairs, most_experts)
        return self._n_seen.get(timing, 0) > min(self._n_seen.values())

    def _possible(self, n_tokens: int, n_pairs: int, most_experts: int) -> list[SplitTiming]:
        return [
            *device_timings(n_tokens, n_pairs, most_experts),
            *(timing for timing in self._seconds if timing.side is TimedSide.HOST),
            LINK,  # last, because it takes longest
        ]

    def see(self, timing: SplitTiming, seconds: float) -> None:
        """Learn from a repeated timing of the CPU or of the device."""
        self._know(timing).see(max(seconds, _NOTHING_S))
        self._n_seen[timing] += 1

    def see_link(self, copy_s: float, host_slowdown: float, link_slowdown: float) -> None:
        """Learn from a repeated timing of the link: seconds of a copy alone, and the slowdowns."""
        self._copy.see(copy_s)
        self._seen_copy.see(copy_s)
        self._n_copies += 1
        for known, seen in zip(self._slowdowns, (host_slowdown, link_slowdown), strict=True):
            known.see(seen)
        self._n_seen[LINK] += 1

    @property
    def seen_copy_s(self) -> float | None:
        """The seconds of an expert's copy while the CPU rests. None: it was timed too seldom."""
        return self._seen_copy.value if self._n_copies >= _LEAST_COPIES else None

    def skip(self, timing: SplitTiming) -> None:
        """Count a timing that was not possible, so that the next one is another one."""
        self._n_seen[timing] = self._n_seen.get(timing, 0) + 1

    def costs(self) -> MeasuredCosts:
        """Return the corrected costs."""
        host_slow, link_slow = (known.value for known in self._slowdowns)
        return replace(
            self._kept,
            host=self._corrected(TimedSide.HOST),
            device=self._corrected(TimedSide.DEVICE),
            copy_s=self._copy.value * link_slow,
            host_slowdown=host_slow,
            link_slowdown=link_slow,
        )

    def costs_to_keep(self) -> MeasuredCosts:
        """Return the corrected costs with the spreads of the timings that were repeated."""
        return replace(
            self.costs(),
            host_spread=self._spread(TimedSide.HOST) or self._kept.host_spread,
            device_spread=self._spread(TimedSide.DEVICE) or self._kept.device_spread,
            copy_spread=self._copy.spread or self._kept.copy_spread,
        )

    def _spread(self, side: TimedSide) -> float:
        """Return the median spread of a side's timings that were repeated, 0.0 if none was."""
        spreads = [
            known.spread
            for timing, known in self._seconds.items()
            if timing.side is side and self._n_seen[timing]
        ]
        return median_low(spreads) if spreads else 0.0

    def changed(self) -> MeasuredCosts | None:
        """Return the corrected costs if they differ from those that it returned last."""
        now = self.costs()
        if largest_ratio(now, self._used) <= _ALIKE:
            return None
        self._used = now
        return now

    def _corrected(self, side: TimedSide) -> SideTimes:
        """Return a side's times. Rows that no timing was about lie between those of others."""
        kept = self._side(self._kept, side)
        points: dict[int, list[tuple[int, float]]] = {}
        for timing, known in self._seconds.items():
            if timing.side is side and (side is TimedSide.HOST or self._n_seen[timing]):
                points.setdefault(timing.n_rows, []).append((timing.n_experts, known.value))
        if not points:
            return kept
        times = side_times(points)
        if side is TimedSide.DEVICE and not _has_lines(points):
            # One number of experts gives no line. So the fixed time changes as the whole times did.
            fixed_s = min(
                kept.fixed_s * self._change(side),
                *(s for of_rows in points.values() for _, s in of_rows),
            )
            times = SideTimes(
                {n: min((s - fixed_s) / k for k, s in of_rows) for n, of_rows in points.items()},
                fixed_s,
            )
        by_rows_s = dict(times.by_rows_s)
        for n in sorted(kept.by_rows_s.keys() - by_rows_s.keys()):
            below = {m: s for m, s in times.by_rows_s.items() if m < n}
            above = [s for m, s in times.by_rows_s.items() if m > n]
            most_s = min((*above, *(_MOST_PER_ROW * n / m * s for m, s in below.items())))
            by_rows_s[n] = max((min(kept.by_rows_s[n], most_s), *below.values()))
        return SideTimes(dict(sorted(by_rows_s.items())), times.fixed_s)


def _has_lines(points: dict[int, list[tuple[int, float]]]) -> bool:
    return any(len({n for n, _ in of_rows}) > 1 for of_rows in points.values())


def largest_ratio(one: MeasuredCosts, other: MeasuredCosts) -> float:
    """Return the largest ratio, 1 or more, of a time or slowdown to the same one in the other."""
    pairs = [
        (one.copy_s, other.copy_s),
        (one.host_slowdown, other.host_slowdown),
        (one.link_slowdown, other.link_slowdown),
    ]
    for one_side, other_side in ((one.host, other.host), (one.device, other.device)):
        a, b = one_side.array(), other_side.array()
        n = min(len(a), len(b))
        one_s, other_s = one_side.fixed_s + a[1:n], other_side.fixed_s + b[1:n]
        pairs += [*zip(one_s.tolist(), other_s.tolist(), strict=True)]
    return max((max(pair) + _NOTHING_S) / (min(pair) + _NOTHING_S) for pair in pairs)
