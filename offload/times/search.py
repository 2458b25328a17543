"""Chooses which decode to time next, to use the few seconds of a start best. Pure.

Each (way, batch size) is valued by the cost of its uncertainty. For the fastest way, that cost is
the error of T(n). For a way that may be the fastest, it is the time that a wrong choice would lose.
The machine model's times count as uncertain. So a first start times the sizes that the model knows
least about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from offload.decode import SMALL_BATCH
from offload.times.steadiness import spread_words
from offload.times.table import (
    TOLERANCE,
    CostTable,
    Way,
    contradicting,
    entry_of,
    relative_error,
)

_GRID = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 33, 40, 48, 56, 64)
_SPANNING = (64, 8)  # batch sizes that are timed in every way after one token
_STEP = math.sqrt(2.0)  # ratio between prefill sizes
_MODELLED = 0.6  # relative uncertainty of a time that comes from the machine model
_BETWEEN = 0.2  # relative uncertainty of a time interpolated at twice or half a measured size
_ONCE = 0.06  # relative uncertainty of a size that was timed once
_PREFILL_WEIGHT = 0.3  # weight of a prefill size; decodes of one token have 1
_ENOUGH = 0.004  # effect (`_effect`) below which a size is not worth timing
_LEAST_RETRIES = 4  # timings of a size that contradicts others
_MOST_ERROR = 0.1  # relative standard error of a median above which the median may be noise
# Standard error of a median of one timing, over `DecodeTime.spread`, if times are normal.
# 1.4826: standard deviation over spread. 1.2533: standard error of a median over that of a mean.
_SPREAD_TO_ERROR = 1.4826 * 1.2533

_TIMING_SHARE = 0.25  # share of the seconds left that one timing's repeated decodes may take
_LEAST_TIMING_S = 0.4  # seconds that these decodes may always take

Samples = dict[tuple[Way, int], list[float]]  # seconds of each timing


@dataclass(frozen=True)
class TimingRequest:
    """The ways and batch sizes to measure.

    `ways` are compared for verification of up to `n_verify` tokens and for prefill of up to
    `n_most` tokens. `edges` are batch sizes to time besides the grid. `part(way, n)` returns the
    share of a decode that is computed to time it, because long decodes are stopped early.
    """

    ways: tuple[Way, ...]
    n_verify: int = SMALL_BATCH
    n_most: int = SMALL_BATCH
    n_split: int = SMALL_BATCH  # the largest batch that may be split
    n_repeats: int = 12  # most timings of a size
    n_least: int = 1  # least timings of each size; if above 1, every size is timed in turn
    since: str = ""  # date from which stored entries count for `n_least`, to continue a run
    edges: tuple[int, ...] = ()
    again: frozenset[tuple[Way, int]] = frozenset()  # if not empty, the only sizes to time
    part: Callable[[Way, int], float] = field(default=lambda way, n: 1.0)

    def sizes(self, way: Way) -> list[int]:
        """Return the batch sizes that are worth timing, ascending."""
        if self.again:
            return sorted(n for w, n in self.again if w is way)
        most = min(self.n_verify, self.n_split) if way is Way.SPLIT else self.n_verify
        numbers = {n for n in (*_GRID, *self.edges, most) if 1 <= n <= most}
        if self.n_most > SMALL_BATCH and way is not Way.SPLIT and len(self.ways) > 1:
            n = 2.0 * SMALL_BATCH
            while n < self.n_most:
                numbers.add(round(n))
                n *= _STEP
            numbers.add(self.n_most)
        return sorted(numbers)


def budget_s(one_s: float, n_ways: int) -> float:
    """Return the seconds of a first start's measurement if T(1) is `one_s` seconds."""
    least_s, n_tokens, most_s = (2.6, 44.0, 8.0) if n_ways == 1 else (5.0, 70.0, 13.0)
    return min(max(least_s, n_tokens * one_s), most_s)


def one_timing(
    decode_s: Callable[[], float],
    lead_s: Callable[[int], float],
    n: int,
    *,
    n_leads: int,
    left_s: float,
    leads_with_one: bool = False,
) -> float:
    """Return the mean seconds of decodes of `n` tokens, after `n_leads` decodes that fill slots.

    `decode_s()` runs a decode that counts. `lead_s(m)` runs one of `m` tokens that does not count.
    Both return seconds. With `leads_with_one`, a decode of one token precedes each one that counts.
    Decodes stop after a share of `left_s`, the seconds that the measurement has left. At least one
    decode counts.
    """
    most_s = max(_TIMING_SHARE * left_s, _LEAST_TIMING_S)
    spent_s = 0.0
    for _ in range(n_leads):
        if spent_s >= most_s:
            break
        spent_s += lead_s(n)
    run: list[float] = []
    while len(run) < max(1, n_leads // 2) and (not run or spent_s < most_s):
        if leads_with_one:
            spent_s += lead_s(1)
        run.append(decode_s())
        spent_s += run[-1]
    return fmean(run)


def next_size(
    table: CostTable, samples: Samples, request: TimingRequest, left_s: float
) -> tuple[Way, int] | None:
    """Return the way and size to time next, or None if none is worth timing or fits `left_s`.

    One token in every way comes first, even if it does not fit `left_s`. The sizes in `_SPANNING`
    follow in every way, if they are expected to take at most a quarter of `left_s`.
    """
    if request.again:
        return _next_again(table, samples, request, left_s)
    for way in request.ways:
        if not samples.get((way, 1)):
            return way, 1
    for place in _SPANNING:
        for way in request.ways:
            n = min(place, request.sizes(way)[-1], request.n_verify)
            if samples.get((way, n)) or expected_s(table, request, way, n) > left_s / 4:
                continue
            return way, n
    if request.n_least > 1:  # thorough: every size in turn
        counts = {
            (way, n): len(samples.get((way, n), ()))
            for way in request.ways
            for n in request.sizes(way)
            if not _is_done(table, samples, request, way, n)
        }
        if counts:
            at = min(counts, key=lambda at: counts[at])
            return at if expected_s(table, request, *at) <= left_s else None
    doubted = _doubted(samples)
    n_retries = request.n_repeats if request.n_least > 1 else _LEAST_RETRIES
    best: tuple[float, Way, int] | None = None
    for way in request.ways:
        for n in request.sizes(way):
            times = samples.get((way, n), ())
            is_doubted = (way, n) in doubted and len(times) < n_retries
            if len(times) >= max(request.n_repeats, n_retries if is_doubted else 0):
                continue
            cost_s = expected_s(table, request, way, n)
            if cost_s > left_s:
                continue
            effect = 1.0 if is_doubted else _effect(table, samples, request, way, n)
            if effect < _ENOUGH:
                continue
            worth = effect / math.sqrt(cost_s) / (1 + len(times))
            if best is None or worth > best[0]:
                best = worth, way, n
    return None if best is None else best[1:]


def _is_done(table: CostTable, samples: Samples, request: TimingRequest, way: Way, n: int) -> bool:
    """True if this size was timed often enough, by this measurement or since `request.since`."""
    entry = table.measured(way).get(n)
    if (way, n) not in samples and request.since and entry and entry.date >= request.since:
        return entry.n_timed >= request.n_least
    return len(samples.get((way, n), ())) >= request.n_least


def _next_again(
    table: CostTable, samples: Samples, request: TimingRequest, left_s: float
) -> tuple[Way, int] | None:
    """Return the least timed entry of `request.again`, or None if none is left or fits `left_s`."""
    counts = {at: len(samples.get(at, ())) for at in request.again}
    open_ = [
        at for at, n in counts.items()
        if n < _LEAST_RETRIES and (not n or expected_s(table, request, *at) <= left_s)
    ]  # fmt: skip
    return min(open_, key=lambda at: (counts[at], at[1]), default=None)


def expected_s(table: CostTable, request: TimingRequest, way: Way, n: int) -> float:
    """Return the seconds that timing this size is expected to take; 0 for an unknown way."""
    if not table.has(way):
        return 0.0
    return table.seconds(way, n) * request.part(way, n)


def uncertainty(table: CostTable, way: Way, n: int, times: Sequence[float] = ()) -> float:
    """Return the relative uncertainty of `table.seconds(way, n)`; `times`: this start's timings."""
    measured = table.measured(way)
    if n in measured:
        entry = measured[n]
        if len(times) > 1:
            return max(relative_error(times), TOLERANCE / len(times))
        return _ONCE / math.sqrt(entry.n_timed) if entry.n_timed > 1 else _ONCE
    if not measured:
        return _MODELLED
    gaps = [abs(math.log2(n / m)) for m in measured]
    is_between = min(measured) < n < max(measured)
    return min(_MODELLED, (_BETWEEN if is_between else 2 * _BETWEEN) * min(gaps))


def left_out(table: CostTable, ways: Sequence[Way]) -> list[tuple[Way, int]]:
    """Return the sizes that were timed only once, so that nothing shows whether that time is noise.

    A thorough measurement does not keep them.
    """
    return [(way, n) for way in ways for n, e in table.measured(way).items() if e.n_timed < 2]


def noise(table: CostTable, request: TimingRequest) -> str:
    """Return a clause on the first time of a thorough measurement that may be noise; "" if none.

    Sizes that were timed only once do not count, except one token, which every other time is
    compared with. A time that contradicts others is believed once it was timed
    `request.n_repeats` times, because kernels can be uneven.
    """
    for way in request.ways:
        entries = {n: e for n, e in table.measured(way).items() if e.n_timed > 1}
        if 1 not in entries:
            return f"a decode of 1 token {way} was not timed twice in the time given"
        for n, entry in sorted(entries.items()):
            error = _SPREAD_TO_ERROR * entry.spread / math.sqrt(entry.n_timed)
            if error > _MOST_ERROR:
                return (
                    f"{entry.n_timed} decodes of {_tokens(n)} {way} differ "
                    f"{spread_words(entry.spread)} (median {entry.seconds * 1e3:.1f} ms)"
                )
        for n in contradicting({n: entry.seconds for n, entry in entries.items()}):
            if entries[n].n_timed < request.n_repeats:
                took = f"{entries[n].seconds * 1e3:.1f} ms"
                return (
                    f"a decode of {_tokens(n)} {way} took {took}, which is longer than a larger "
                    "batch takes, or than the smaller batches into which it can be cut"
                )
    return ""


def _tokens(n: int) -> str:
    return "1 token" if n == 1 else f"{n} tokens"


def _effect(table: CostTable, samples: Samples, request: TimingRequest, way: Way, n: int) -> float:
    """Return the cost of this time's uncertainty, as a weighted share of the decode's time."""
    error = uncertainty(table, way, n, samples.get((way, n), ()))
    weight = 1.0 / math.sqrt(n) if n <= SMALL_BATCH else _PREFILL_WEIGHT
    known = [w for w in request.ways if table.has(w) and n in range(1, 1 + _most(request, w))]
    if not table.has(way):
        return weight
    own_s = table.seconds(way, n)
    others = [w for w in known if w is not way and _compete(w, way)]
    rival_s = min((table.seconds(w, n) for w in others), default=math.inf)
    if own_s <= rival_s:
        # This way is the fastest, so T(n) is uncertain. The choice is too, if the rival is close.
        risk = max(0.0, own_s * (1 + error) - rival_s) / own_s if rival_s < math.inf else 0.0
        return weight * (error if n <= SMALL_BATCH else risk)
    return weight * max(0.0, rival_s - own_s * (1 - error)) / rival_s


def _compete(a: Way, b: Way) -> bool:
    """True if a batch may be computed in either way. `DENSE` competes with `IN_PLACE` alone."""
    return Way.IN_PLACE in (a, b) or Way.DENSE not in (a, b)


def _most(request: TimingRequest, way: Way) -> int:
    return request.n_split if way is Way.SPLIT else max(request.n_verify, request.n_most)


def _doubted(samples: Mapping[tuple[Way, int], Sequence[float]]) -> set[tuple[Way, int]]:
    """Return timed (way, size)s whose times contradict those of other sizes of the same way."""
    by_way: dict[Way, dict[int, float]] = {}
    for (way, n), times in samples.items():
        if times:
            by_way.setdefault(way, {})[n] = entry_of(times).seconds
    return {(way, n) for way, seconds in by_way.items() for n in contradicting(seconds)}


def fill(
    table: CostTable,
    request: TimingRequest,
    time_size: Callable[[Way, int], Sequence[float]],
    left_s: Callable[[], float],
    date: str,
    on_entry: Callable[[], None] = lambda: None,
) -> None:
    """Time sizes until `next_size` returns None, and add their entries to the table.

    `time_size` returns the seconds of each of its decodes. `on_entry` is called after each entry.
    """
    samples: Samples = {}
    while (chosen := next_size(table, samples, request, left_s())) is not None:
        times = samples.setdefault(chosen, [])
        times += time_size(*chosen)
        table.add(*chosen, entry_of(times, date))
        on_entry()
