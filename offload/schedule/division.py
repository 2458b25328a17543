"""Divides a layer's experts between device and CPU, so that the slower side ends soonest. Pure.

Decodes are divided by the player (`by_costs` in offload/ggml/player.c), which has the same rule.
This file is what tests compare it with, and it divides what the player leaves to Python.

The CPU computes its experts in place. Meanwhile the device computes those in slots, and the link
copies more. Hits stay on the device: the device's product cannot skip a pair, so leaving a hit to
the CPU would save nothing. A copy saves most for the expert with the most rows, so misses are
streamed in descending order of rows.

In this file, a *cut* is a number of streamed misses. The times of all cuts, from no miss to all
misses, are computed, and the shortest is chosen. With one token the best cut is the optimum. With
more tokens it takes at most the time of one miss longer than the optimum
(tests/pure/stream/test_split.py).

The model of a layer:

    device   The link copies one kind of weight after the other (gate, up, down), each for all
             experts. Each product waits for its own kind. So there is one possible end for each
             kind: all copies up to that kind, then the products from that kind on. The device ends
             at the latest of them.
    CPU, link   Both read RAM, so each is slower only while the other is busy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.schedule.believed import believed, contradict

HIT, STREAMED, HOST = 0, 1, 2
LATE = 3  # computed by the CPU after it has been read from the disk (offload/schedule/from_disk.py)
MOST_SLOWDOWN = 20.0  # largest measured slowdown of the CPU or the link
MOST_ROWS = SMALL_BATCH  # most rows of an expert in a measurement
_LEAST = 64  # rows and misses of the smallest tables
_NOTHING = 1e-9  # largest rounding error of a share
_BEFORE = np.zeros(1, np.intp)  # a zero in front of the experts' rows

_PairCounts = tuple[int, int]


@dataclass(frozen=True, eq=False)
class SplitCosts:
    """Measured costs of one kind of layer, in seconds.

    The arrays are indexed by an expert's rows, the number of tokens that use it: `host_s[r]` for
    r = 0..R, with R at least 1. Beyond R, each row adds as much as the last measured one.
    """

    host_s: NDArray[np.float64]  # the CPU's time for one expert
    device_s: NDArray[np.float64]  # the device's time for one expert
    host_fixed_s: float  # paid once if the CPU computes any expert
    device_fixed_s: float  # paid once if the device computes any expert
    copy_s: float  # the link's time for one expert, while the CPU reads memory too
    host_slowdown: float = 1.0  # factor on the CPU's times while the link copies
    link_slowdown: float = 1.0  # factor on the link's times while the CPU computes
    kinds: tuple[float, ...] = (1.0,)  # each kind's share of an expert, in the order of copying
    _of_token: dict[_PairCounts, _Cut] = field(default_factory=dict, init=False, repr=False)
    _tables: list[_Tables] = field(default_factory=list, init=False, repr=False)

    def tables(self, most_rows: int, n_misses: int) -> _Tables:
        """Return tables for at least `most_rows` rows of an expert and `n_misses` misses.

        The tables are kept for the next calls.
        """
        tables = self._tables[0] if self._tables else None
        if tables is None or tables.most_rows < most_rows or tables.most_misses < n_misses:
            most = (0, 0) if tables is None else (tables.most_rows, tables.most_misses)
            most_rows, n_misses = max(most_rows, most[0]), max(n_misses, most[1])
            most_rows = 1 << (most_rows - 1).bit_length()  # so that few batches make them anew
            tables = _Tables.of(self, max(most_rows, _LEAST), max(n_misses, _LEAST))
            self._tables[:] = [tables]
        return tables


@dataclass(frozen=True, eq=False)
class _Tables:
    """Tables that give the end times of all cuts of a layer by cumulative sums.

    A *line* gives the end of one side as a linear function of the experts on each side: a fixed
    time, and a time for each expert. The CPU and each stage of the device have one line. The device
    ends with its latest stage.

    If the sides slow each other down, the CPU and each stage have two lines. The first line assumes
    that the other side is busy to the end. The second line assumes that the other side rests
    earlier. The earlier of both ends counts.

    `by_rows_s` holds the change of each line when an expert moves from the device to the CPU. It is
    the time that the CPU adds, minus the time that the device saves.
    """

    most_rows: int
    most_misses: int
    by_rows_s: NDArray[np.float64]  # [lines + 2, rows]: line changes, CPU seconds, device seconds
    work: NDArray[np.float64]  # [lines, 1]: factor on the CPU's seconds
    copies_s: NDArray[np.float64]  # [lines, n + 1]: fixed time and n copies
    n_ends: int  # number of ends: the CPU's and one for each stage
    idle: tuple[tuple[float, float], ...]  # (copy, products) of each stage while the CPU rests
    idle_fixed_s: float

    @classmethod
    def of(cls, costs: SplitCosts, most_rows: int, most_misses: int) -> _Tables:
        slow, link_slow, copy_s = costs.host_slowdown, costs.link_slowdown, costs.copy_s
        fixed_s, stages = costs.device_fixed_s, _stages(costs.kinds, all_of_them=link_slow > 1.0)
        # Each line is (fixed seconds, factor on the CPU's time, factor on the device's time, factor
        # on the slowed link's time).
        lines = [(0.0, slow, 0.0, 0.0)]
        lines += [(fixed_s, 0.0, products, link) for link, products in stages]
        if slow > 1.0 or link_slow > 1.0:  # lines for the case that the other side rests earlier
            lines.append((0.0, 1.0, 0.0, 1.0 - 1.0 / slow))
            beside = slow * (1.0 - 1.0 / link_slow)
            lines += [(fixed_s, beside, products, link / link_slow) for link, products in stages]
        once, work, products, link = np.array(lines).T[:, :, None]
        rows = np.arange(most_rows + 1)
        host_s, device_s = seconds_at(costs.host_s, rows), seconds_at(costs.device_s, rows)
        by_rows_s = np.vstack([work * host_s - products * device_s, host_s, device_s])
        by_rows_s[:, 0] = 0.0  # the zero in front of the experts' rows
        copies_s = once + work * costs.host_fixed_s + link * copy_s * np.arange(most_misses + 1)
        idle = tuple((link * copy_s / link_slow, products) for link, products in stages)
        return cls(
            most_rows, most_misses, by_rows_s, work, copies_s, 1 + len(stages), idle, fixed_s
        )

    def ends_s(
        self, rows: NDArray[np.integer], n_hits: int, n_left: int = 0
    ) -> NDArray[np.float64]:
        """Return seconds until the CPU and each stage end: [1 + stages, streamed misses].

        `rows` holds a zero, the rows of each hit, and the rows of each miss in the order of
        streaming. The CPU computes the first `n_left` hits.
        """
        sums = self.by_rows_s.take(rows, axis=1).cumsum(axis=1)
        n_misses = sums.shape[1] - 1 - n_hits
        host_s, device_s = sums[-2:, -1].tolist()
        ends: NDArray[np.float64] = self.copies_s[:, : n_misses + 1] - sums[:-2, n_hits:]
        ends += self.work * host_s
        if n_left:
            ends += sums[:-2, n_left, None]
        n = self.n_ends
        if len(ends) > n:
            ends = np.minimum(ends[:n], ends[n:])
            if not n_left:
                # The CPU computes nothing in the last cut.
                ends[1:, -1] = [
                    self.idle_fixed_s + n_misses * copy + products * device_s
                    for copy, products in self.idle
                ]
        if not n_left:
            ends[0, -1] = 0.0  # the CPU has no expert
        if n_left == n_hits:
            ends[1:, 0] = 0.0
        return ends


def _slowdown_words(times: float) -> str:
    told = f"{times:.2f}"
    return "is as fast as alone" if told == "1.00" else f"takes {told} times as long"


def _stages(kinds: Sequence[float], *, all_of_them: bool) -> tuple[tuple[float, float], ...]:
    """Return (share of the copies up to a kind, share of the products from that kind on) by kind.

    Leaves out stages that are never the latest, unless `all_of_them` is set.
    """
    ends = list(itertools.accumulate(kinds))
    shares = [(end, 1.0 - end + kind) for end, kind in zip(ends, kinds, strict=True)]
    (first_link, first_products), (last_link, last_products) = shares[0], shares[-1]
    if all_of_them:
        return tuple(shares)
    kept = [
        (link, products)
        for link, products in shares[1:-1]
        # A stage can be the latest only if it lies above the line from the first stage to the last.
        if (link - first_link) * (first_products - last_products)
        + (products - first_products) * (last_link - first_link)
        > _NOTHING
    ]
    return tuple(dict.fromkeys([shares[0], *kept, shares[-1]]))


@dataclass(frozen=True)
class Split:
    """The side of each expert of a layer, and the expected seconds of both sides."""

    kind: NDArray[np.uint8]  # HIT, STREAMED or HOST; meaningless for unused experts
    cpu_s: float
    device_s: float
    link_s: float = 0.0  # part of `device_s` in which the link copies

    @property
    def idle_s(self) -> float:
        """Seconds in which the link is expected to copy nothing."""
        return max(0.0, max(self.cpu_s, self.device_s) - self.link_s)


@dataclass(frozen=True)
class _Cut:
    n_streamed: int  # misses that are streamed, those with the most rows
    cpu_s: float
    device_s: float


def split_pairs(
    ids: NDArray[np.int32],
    resident: NDArray[np.bool_],
    costs: SplitCosts,
    rows: NDArray[np.intp] | None = None,
) -> Split:
    """Return the division of a batch's experts whose slower side ends soonest.

    `ids` [n_tokens, n_used]: each token's experts. `resident` [n_experts]: True for experts that
    are in a slot. `rows` [n_experts]: the number of tokens that use each expert, if known.
    """
    if len(ids) == 1:
        return _split_of_token(ids[0], resident, costs)
    if rows is None:
        rows = np.bincount(ids.ravel(), minlength=len(resident))
    used = rows.nonzero()[0]
    used = used[(-rows[used]).argsort(kind="stable")]
    there = resident[used]
    hits, misses = used[there], used[~there]
    in_order = rows.take(np.concatenate((hits, misses)))
    cut = _best_cut(np.concatenate((_BEFORE, in_order)), len(hits), costs)
    return _split(misses, len(resident), cut, costs)


def _split_of_token(
    ids: NDArray[np.int32], resident: NDArray[np.bool_], costs: SplitCosts
) -> Split:
    """Return the best division for one token. Only the numbers of hits and misses matter."""
    there = resident[ids]
    misses = ids[~there]
    counts = len(ids) - len(misses), len(misses)
    cut = costs._of_token.get(counts)
    if cut is None:
        cut = _best_cut(np.array([0] + [1] * len(ids)), counts[0], costs)
        costs._of_token[counts] = cut
    return _split(misses, len(resident), cut, costs)


def _split(misses: NDArray[np.integer], n_experts: int, cut: _Cut, costs: SplitCosts) -> Split:
    kind = np.zeros(n_experts, np.uint8)
    kind[misses] = HOST
    kind[misses[: cut.n_streamed]] = STREAMED
    return Split(kind, cut.cpu_s, cut.device_s, cut.n_streamed * costs.copy_s)


def _best_cut(rows: NDArray[np.integer], n_hits: int, costs: SplitCosts) -> _Cut:
    """Return the best cut. If several are equal, return the one that copies least.

    `rows` holds a zero, then the rows of each hit, descending, then the rows of each miss,
    descending.
    """
    ends = costs.tables(int(rows[1:].max(initial=0)), len(rows) - 1 - n_hits).ends_s(rows, n_hits)
    n_streamed = int(np.maximum.reduce(ends).argmin())
    cpu_s, *stages_s = ends[:, n_streamed].tolist()
    return _Cut(n_streamed, cpu_s, max(stages_s))


def expected(ids: NDArray[np.int32], kind: NDArray[np.uint8], costs: SplitCosts) -> Split:
    """Return the division `kind` [n_experts] with its expected times.

    `ids`: as in `split_pairs`.
    """
    rows = np.bincount(ids.ravel(), minlength=len(kind))
    hosts, hits, streamed = (rows[(rows > 0) & (kind == side)] for side in (HOST, HIT, STREAMED))
    n_hits, n_copies = len(hosts) + len(hits), len(streamed)
    # The times are those of a cut in which the CPU's experts are the first hits, and all misses are
    # streamed.
    ends = costs.tables(int(rows.max(initial=0)), n_copies).ends_s(
        np.concatenate((_BEFORE, hosts, hits, streamed)), n_hits, len(hosts)
    )
    cpu_s, *stages_s = ends[:, n_copies].tolist()
    return Split(kind, cpu_s, max(stages_s), n_copies * costs.copy_s)


def seconds_at(by_rows_s: NDArray[np.float64], rows: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return the seconds of experts with `rows` rows each, beyond the measured rows linearly."""
    last = len(by_rows_s) - 1
    seconds: NDArray[np.float64] = by_rows_s[np.minimum(rows, last)]
    beyond = rows - last
    if beyond.max(initial=0) > 0:
        step_s = max(0.0, by_rows_s[-1] - by_rows_s[-2])  # noise must not make time negative
        seconds = seconds + np.maximum(beyond, 0) * step_s
    return seconds


# -- measured costs
#
# Each measurement is one side's time for some experts of equally many rows. A line through the
# times by number of experts gives the fixed time, which is paid once. The remaining time, divided
# by the number of experts, is one expert's time. Between measured numbers of rows, times are
# interpolated. They never fall as rows increase (offload/schedule/believed.py).


@dataclass(frozen=True)
class SideTimes:
    """The seconds that one side takes for its experts."""

    by_rows_s: Mapping[int, float]  # seconds of one expert by its rows
    fixed_s: float = 0.0  # seconds paid once, whatever the number of experts

    def __post_init__(self) -> None:
        """Raise ValueError for rows out of range, or for times that are negative or infinite."""
        rows, seconds = [*self.by_rows_s], [*self.by_rows_s.values(), self.fixed_s]
        if not rows or not all(1 <= n <= MOST_ROWS for n in rows):
            raise ValueError(f"there must be times of 1 to {MOST_ROWS} rows, not of {sorted(rows)}")
        if not all(0.0 <= s < math.inf for s in seconds):
            raise ValueError(f"times must be finite and at least 0 s, not {seconds}")

    def array(self) -> NDArray[np.float64]:
        """Return the seconds of one expert by its rows: 0, 1, ... up to the most rows measured."""
        known = believed(self.by_rows_s)
        rows, seconds = [*known], [*known.values()]
        if rows[0] > 1:
            rows, seconds = [0, *rows], [0.0, *seconds]
        by_rows_s = np.interp(np.arange(max(rows[-1], 1) + 1), rows, seconds)
        by_rows_s[0] = 0.0
        return by_rows_s


@dataclass(frozen=True)
class MeasuredCosts:
    """The measured costs of one kind of layer, in seconds."""

    host: SideTimes
    device: SideTimes
    copy_s: float  # seconds of one expert's copy, while the CPU computes
    host_slowdown: float = 1.0  # factor on the CPU's times while the link copies
    link_slowdown: float = 1.0  # factor on the link's times while the CPU computes
    kinds: tuple[float, ...] = (1.0,)  # each kind's share of an expert, in the order of copying
    # Half the interquartile range of repeated timings over their median; 0.0: not repeated yet.
    host_spread: float = 0.0
    device_spread: float = 0.0
    copy_spread: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError unless these are times, slowdowns and shares."""
        if not 0.0 <= self.copy_s < math.inf:
            raise ValueError(f"a copy's time must be finite and at least 0 s, not {self.copy_s}")
        if not all(1.0 <= slow < math.inf for slow in (self.host_slowdown, self.link_slowdown)):
            raise ValueError(
                f"slowdowns must be 1 or more, not {self.host_slowdown} and {self.link_slowdown}"
            )
        if not self.kinds or min(self.kinds) <= 0 or not math.isclose(sum(self.kinds), 1.0):
            raise ValueError(f"shares of an expert must sum to 1, not {self.kinds!r:.80}")

    @property
    def words(self) -> str:
        """A clause for messages: times of an expert of one row on each side, and of its copy."""
        host_s, device_s = self.host.array()[1], self.device.array()[1]
        link_s = self.copy_s / self.link_slowdown
        return (
            f"an expert takes the CPU {host_s * 1e6:.0f} us, the device {device_s * 1e6:.0f} us "
            f"and the link {link_s * 1e6:.0f} us; while both work, the CPU "
            f"{_slowdown_words(self.host_slowdown)} and the link "
            f"{_slowdown_words(self.link_slowdown)}"
        )

    @property
    def is_doubtful(self) -> bool:
        """True if the measurement was disturbed: times contradict each other, or slow too much."""
        is_huge = max(self.host_slowdown, self.link_slowdown) >= MOST_SLOWDOWN
        return is_huge or contradict(self.host.by_rows_s) or contradict(self.device.by_rows_s)

    def costs(self) -> SplitCosts:
        """Return these costs as arrays, for the split."""
        return SplitCosts(
            self.host.array(),
            self.device.array(),
            self.host.fixed_s,
            self.device.fixed_s,
            self.copy_s,
            self.host_slowdown,
            self.link_slowdown,
            self.kinds,
        )


@dataclass(frozen=True)
class DeviceCosts:
    """A device's measured costs of split layers, and what they depend on."""

    device: str  # the device in words, as `DeviceChoice.words`
    n_threads: int  # the CPU's threads
    build: str  # the library's build
    costs: MeasuredCosts
    date: str = ""

    def is_like(self, other: DeviceCosts) -> bool:
        """True if both were measured on the same device, threads and build."""
        mine, theirs = ((of.device, of.n_threads, of.build) for of in (self, other))
        return mine == theirs


def side_times(measured: Mapping[int, Sequence[tuple[int, float]]]) -> SideTimes:
    """Return one side's times from `measured`: (number of experts, seconds) by rows of an expert.

    Each number of rows that was measured with several numbers of experts gives a line. The fixed
    time is the median of these lines' values at 0 experts, or 0 if there is no line. Raises
    ValueError if nothing was measured.
    """
    if not measured or not all(measured.values()):
        raise ValueError("a side's times need a measurement at each number of rows")
    lines = [points for points in measured.values() if len({n for n, _ in points}) > 1]
    fixed_s = float(np.median([_at_none(points) for points in lines])) if lines else 0.0
    by_rows_s = {
        rows: float(np.median([max(0.0, s - fixed_s) / n for n, s in measured[rows]]))
        for rows in sorted(measured)
    }
    return SideTimes(by_rows_s, fixed_s)


def _at_none(points: Sequence[tuple[int, float]]) -> float:
    """Return the seconds at 0 experts on the line fitted to `points` (experts, seconds).

    Neither the result nor the line's slope is below 0.
    """
    numbers = np.array([n for n, _ in points], np.float64)
    seconds = np.array([s for _, s in points])
    spread = numbers - numbers.mean()
    slope = max(0.0, float(spread @ seconds) / float(spread @ spread))
    return max(0.0, float(seconds.mean() - slope * numbers.mean()))


def slowdown(alone_s: Sequence[float], beside_copies_s: Sequence[float]) -> float:
    """Return a side's median time beside copies divided by its median time alone.

    It is at least 1 and at most `MOST_SLOWDOWN`, which only other programs exceed.
    """
    return min(MOST_SLOWDOWN, max(1.0, float(np.median(beside_copies_s) / np.median(alone_s))))
