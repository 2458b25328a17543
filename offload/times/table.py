"""The cost table: seconds of a decode by way and batch size, and the choices they imply. Pure.

A *way* is how the weights in host memory are computed. The table answers every question about
speed. Min-batch is the size from which streaming beats the CPU. A batch is split if splitting is
its fastest way. T(n), by which drafts are priced, is the least time of all ways at n.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from operator import add
from statistics import fmean, median

from numa.topology import format_list
from offload.routing.routing import union_of_neighbours
from offload.times.cpu_kernels import ROW_SHARE
from offload.times.min_batch import NEVER, MinBatch, Regime, by_rule, regimes
from offload.times.repeated import half_spread
from offload.times.work import product_s

CONTRADICTS = 1.2  # ratio of a time to the most that other sizes allow; above it is not noise
TOLERANCE = 0.03  # relative error of a median up to which repetitions agree
PAYS = 0.97  # ratio of times below which another way is chosen; changing ways costs time
SETTLED = 3  # starts that timed a contradicting size again, after which its time is believed
_DISTURBED = 1.3  # ratio to the median above which a time counts as disturbed
_MAD_TO_SIGMA, _MEDIAN_TO_MEAN = 1.4826, 1.2533  # ratios for a normal distribution
_COMPUTING = 1e-4  # share of the streamed weights' time that one more token takes on the device
_SECONDS = 1e6  # seconds from which a time counts as an error
_LEAST_S, _MOST_S = 1e-6, 3600.0  # limits of a decode's plausible time
_ABSURD = 1000.0  # ratio to what other sizes allow, beyond any disturbance
# Streaming dense weights shortens the time in place to a measured share of it. Times of other ways
# are shortened to a quarter of this share at most, and never to less than 5 %.
_LEAST_OF_SHARE, _LEAST_LEFT = 0.25, 0.05


class Way(StrEnum):
    """How a decode computes the weights in host memory."""

    IN_PLACE = "in place"  # the CPU computes; the only way of a model that does not stream
    STREAMED = "streamed"  # experts are copied to the device; dense weights as in place
    SPLIT = "split"  # the CPU and the device share each layer's experts
    DENSE = "dense streamed"  # dense weights are copied; experts as in place
    FIXED = "as --min-batch says"  # in place below the user's threshold, else streamed


@dataclass(frozen=True)
class DecodeTime:
    """One decode time."""

    seconds: float
    spread: float = 0.0  # half the interquartile range over the median
    n_timed: int = 0  # number of timings; 0: the time comes from the machine model
    date: str = ""  # ISO date of the last measurement
    n_retried: int = 0  # starts that timed a doubted size again and found it as long
    measured_s: float = 0.0  # seconds that a measurement gave, before serving; 0: `seconds`

    def __post_init__(self) -> None:
        """Raise ValueError for times that are not positive or too long, and for negative counts."""
        counts = self.n_timed >= 0 and self.n_retried >= 0
        others = 0.0 <= self.spread < _SECONDS and 0.0 <= self.measured_s < _SECONDS
        if not (0.0 < self.seconds < _SECONDS and others and counts):
            raise ValueError(f"{self.seconds} s, timed {self.n_timed} times, is not a valid time")

    @property
    def first_s(self) -> float:
        """The seconds that a measurement gave, before serving corrected them."""
        return self.measured_s or self.seconds

    @property
    def is_modelled(self) -> bool:
        return self.n_timed == 0


def typical(times: Sequence[float]) -> float:
    """Return the mean of the undisturbed times. Short times count: some tokens are just cheap."""
    most = _DISTURBED * median(times)
    return fmean([t for t in times if t <= most])


def relative_error(times: Sequence[float]) -> float:
    """Return the standard error of the median over the median, infinite for a single time."""
    if len(times) < 2 or (middle := median(times)) <= 0.0:
        return math.inf
    deviation = median([abs(t - middle) for t in times])
    return _MEDIAN_TO_MEAN * _MAD_TO_SIGMA * deviation / math.sqrt(len(times)) / middle


def entry_of(times: Sequence[float], date: str = "") -> DecodeTime:
    """Return the entry for a size whose decodes took `times` seconds."""
    spread = half_spread(times) or 0.0
    return DecodeTime(max(typical(times), 1e-9), spread, len(times), date)


def agreeing(seconds: Mapping[int, float]) -> dict[int, float]:
    """Return `seconds` by batch size, lowered as little as needed to end all contradictions.

    A batch takes no longer than a larger one, and no longer than smaller ones that it can be cut
    into. Disturbances only lengthen decodes, so the shorter of two contradicting times is believed.
    """
    sizes = sorted(seconds)
    low = list(accumulate([seconds[n] for n in reversed(sizes)], min))[::-1]
    if low and sizes[-1] == len(sizes):  # all sizes are known, so each cut is a sum of two
        for i in range(1, len(low)):
            low[i] = min(low[i], min(map(add, low[: (i + 1) // 2], low[i - 1 :: -1])))
        return dict(zip(sizes, low, strict=True))
    for i, n in enumerate(sizes):
        for j in range(i):
            low[i] = min(low[i], math.ceil(n / sizes[j]) * low[j])
            # Index of the least size that holds the other n - sizes[j] tokens.
            rest = bisect_left(sizes, n - sizes[j])
            if rest < i:
                low[i] = min(low[i], low[j] + low[rest])
    return dict(zip(sizes, low, strict=True))


def contradicting(seconds: Mapping[int, float]) -> list[int]:
    """Return the batch sizes whose times are, by more than noise, longer than other sizes allow."""
    most = agreeing(seconds)
    return [n for n in sorted(seconds) if seconds[n] > CONTRADICTS * most[n]]


def n_conflicts(n: int, seconds: float, others: Mapping[int, float]) -> int:
    """Return how many other sizes' times contradict `seconds` for `n` tokens by more than noise.

    The smaller of two sizes takes no longer than the larger one, and the larger one no longer than
    the smaller ones that it can be cut into.
    """
    count = 0
    for m, its_s in others.items():
        (small, small_s), (large, large_s) = sorted(((n, seconds), (m, its_s)))
        is_short = large_s * CONTRADICTS < small_s
        count += is_short or large_s > CONTRADICTS * -(-large // small) * small_s
    return count


def is_believed(retried_s: float, stated_s: float, most_s: float) -> bool:
    """True if a repeated time replaces a doubted one.

    The repeated time does so if it agrees with `most_s`, the most that the other sizes allow. It
    also does so if it is shorter than the doubted time `stated_s` by more than noise.
    """
    return retried_s <= CONTRADICTS * most_s or CONTRADICTS * retried_s < stated_s


@dataclass
class CostTable:
    """Entries by way and batch size. A token uses `n_used` of a layer's `n_experts` experts."""

    n_experts: int = 0
    n_used: int = 0
    ways: dict[Way, dict[int, DecodeTime]] = field(default_factory=dict)
    # By n: number of a layer's experts that n tokens of the measured text used.
    unions: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raise ValueError for sizes below 1, or if a token uses more experts than there are."""
        bad = [n for entries in self.ways.values() for n in entries if n < 1]
        bad += [n for n, used in self.unions.items() if not (n >= 1 and used <= self.n_experts)]
        if bad or self.n_used > self.n_experts:
            raise ValueError(
                f"not valid: batches of {bad} tokens, or {self.n_used} of {self.n_experts} experts"
            )

    def entries(self, way: Way) -> dict[int, DecodeTime]:
        """Return the measured entries of a way, or the modelled ones if none is measured."""
        known = self.ways.get(way, {})
        measured = {n: e for n, e in known.items() if not e.is_modelled}
        return measured or known

    def measured(self, way: Way) -> dict[int, DecodeTime]:
        return {n: e for n, e in self.ways.get(way, {}).items() if not e.is_modelled}

    def has(self, way: Way) -> bool:
        return bool(self.ways.get(way))

    @property
    def is_measured(self) -> bool:
        return any(self.measured(way) for way in self.ways)

    @property
    def n_most(self) -> int:
        """The largest batch in the table; 0 for an empty one."""
        return max((n for entries in self.ways.values() for n in entries), default=0)

    def add(self, way: Way, n: int, entry: DecodeTime) -> None:
        self.ways.setdefault(way, {})[n] = entry

    @property
    def absurd(self) -> str:
        """Return a clause on a measured time that no decode takes; "" if there is none."""
        for way in self.ways:
            seconds = {n: e.seconds for n, e in self.measured(way).items()}
            most_s = agreeing(seconds)
            for n, s in seconds.items():
                words = f"{n} tokens {way} would take {s:.3g} s"
                if not _LEAST_S <= s <= _MOST_S:
                    return words
                if s > _ABSURD * most_s[n]:
                    return f"{words}, and other sizes leave {most_s[n]:.3g} s"
        return ""

    def without_modelled(self) -> CostTable:
        ways = {way: self.measured(way) for way in self.ways}
        return replace(self, ways={way: entries for way, entries in ways.items() if entries})

    def experts(self, n: int) -> float | None:
        """Return the counted experts of a layer that n tokens used; None if they are not known."""
        sizes = sorted(self.unions)
        if not sizes or not sizes[0] <= n <= sizes[-1]:
            return None
        at = bisect_left(sizes, n)
        if sizes[at] == n:
            return self.unions[n]
        low, high = sizes[at - 1], sizes[at]
        part = (n - low) / (high - low)
        return (1.0 - part) * self.unions[low] + part * self.unions[high]

    # -- the one interpolation ---------------------------------------------------------------------

    def seconds(self, way: Way, n: int) -> float:
        """Return the seconds of a decode of `n` tokens.

        Between known sizes the time is interpolated. Beyond the last measured size, or if only one
        is measured, it follows the machine model's times. If there are no such times, the line
        through the last two sizes is extended.

        Streaming is interpolated over the share of the weights that n tokens need, everything else
        over n. Raises KeyError for a way without entries.
        """
        return self._line(way)(n)

    def _line(self, way: Way) -> Callable[[int], float]:
        """Return `seconds` of a way as a function of n, for many calls."""
        entries = self.ways[way]
        measured = {size: e.seconds for size, e in entries.items() if not e.is_modelled}
        known = measured or {size: e.seconds for size, e in entries.items()}
        modelled = {size: e.seconds for size, e in entries.items() if e.is_modelled}
        last = max(measured, default=0)
        follows_model = bool(measured) and max(modelled, default=0) > last
        its_points, points = self._points(way, modelled), self._points(way, known)
        is_lone = len(known) == 1 and way is Way.IN_PLACE and self.n_experts

        def seconds(n: int) -> float:
            if follows_model and (len(measured) == 1 or n > last):
                factor = measured[last] / _on_line(its_points, self._at(way, last))
                return (
                    factor * _on_line(its_points, self._at(way, n)) if n != last else measured[last]
                )
            if is_lone:
                ((size, its_s),) = known.items()
                return its_s * max(1.0, self._on_cpu(n) / self._on_cpu(size))
            return max(_on_line(points, self._at(way, n)), 1e-9)

        return seconds

    def _points(self, way: Way, seconds: Mapping[int, float]) -> list[tuple[float, float]]:
        return sorted((self._at(way, n), s) for n, s in seconds.items())

    def _at(self, way: Way, n: int) -> float:
        return self._need(n) if way in (Way.STREAMED, Way.DENSE) else float(n)

    def _need(self, n: int) -> float:
        """Return the share of the streamed weights that n neighbouring tokens are expected to need.

        The result includes a small amount for each token, for the device's computation.
        """
        return (self._union(n) / self.n_experts if self.n_experts else 1.0) + _COMPUTING * n

    def _on_cpu(self, n: int) -> float:
        """Return the CPU's time for the experts of n tokens, as a multiple of one token's."""
        unions = self._union(n) / self.n_used
        return float(unions * product_s(1.0, ROW_SHARE, n / unions))

    def _union(self, n: int) -> float:
        return float(union_of_neighbours(n, self.n_used, self.n_experts))

    # -- derived answers ---------------------------------------------------------------------------

    def min_batch(self, n_most: int) -> MinBatch:
        """Return the thresholds from which streaming pays, for batches of up to `n_most` tokens.

        Weights without times get the threshold of ik_llama.cpp's rule.
        """
        rule = by_rule(self.n_experts, self.n_used)
        thresholds: list[list[int]] = []
        for way, guess in ((Way.STREAMED, rule.experts), (Way.DENSE, rule.dense)):
            parts = regimes(n_most)
            thresholds.append([self.threshold(way, regime, guess) for regime in parts])
        experts, dense = thresholds
        prefill = (experts[1], dense[1]) if len(experts) > 1 else (None, None)
        return MinBatch(experts[0], dense[0], *prefill)

    def threshold(self, way: Way, regime: Regime, guess: int) -> int:
        """Return the least size of the regime from which on `way` beats the CPU at every size.

        Returns `NEVER` if there is no such size. If either way has no times, returns `guess`, or
        the regime's first size if that is larger.
        """
        if not (self.has(way) and self.has(Way.IN_PLACE)):
            return max(guess, regime.first) if guess <= regime.last else NEVER
        least = NEVER
        timed = (n for w in (way, Way.IN_PLACE) for n in self.entries(w))
        inside = {n for n in timed if regime.first <= n <= regime.last}
        for n in sorted({*regime.sizes(), *inside}, reverse=True):
            if self.seconds(way, n) > PAYS * self.seconds(Way.IN_PLACE, n):
                break
            least = n
        return least

    def best(self, n: int, ways: Collection[Way] | None = None) -> tuple[Way, float]:
        """Return the fastest allowed way of computing experts at `n` tokens, and its seconds.

        `ways` are the allowed ways; None: all. If streaming dense weights saves time, the saving is
        subtracted for every way. Raises KeyError if no allowed way has times.
        """
        return self._bests(ways)(n)

    def _bests(self, ways: Collection[Way] | None) -> Callable[[int], tuple[Way, float]]:
        """Return `best` of these ways as a function of n, for many calls."""
        has_dense = self.has(Way.DENSE) and self.has(Way.IN_PLACE)
        in_place, dense = (
            (self._line(way) if has_dense else None) for way in (Way.IN_PLACE, Way.DENSE)
        )
        wanted = ways or (Way.FIXED, Way.IN_PLACE, Way.STREAMED, Way.SPLIT)
        known = [way for way in wanted if self.has(way) and way is not Way.DENSE]
        if not known:
            raise KeyError(f"no time of {', '.join(wanted)}")
        lines = {way: self._line(way) for way in known}

        def best(n: int) -> tuple[Way, float]:
            dense_s, share = 0.0, 1.0
            if in_place is not None and dense is not None:
                dense_s = min(0.0, dense(n) - in_place(n))
                share = min(1.0, dense(n) / in_place(n))
            times_s = {way: line(n) for way, line in lines.items()}
            way = min(times_s, key=lambda w: times_s[w] * (1.0 if w is known[0] else 1 / PAYS))
            # A disturbed time in place would make the saving larger than the whole time.
            floor_s = times_s[way] * max(_LEAST_LEFT, share * _LEAST_OF_SHARE)
            return way, max(times_s[way] + dense_s, floor_s)

        return best

    def curve(self, n_max: int, ways: Collection[Way] | None = None) -> list[float]:
        """Return T(1) to T(n_max) in seconds, each in its fastest way."""
        best = self._bests(ways)
        return [best(n)[1] for n in range(1, n_max + 1)]

    def doubted(self, way: Way, most: int = 1 << 30) -> list[int]:
        """Return measured sizes up to `most` whose times contradict others and are not settled.

        A time is settled after `SETTLED` starts that measured it again and found it as long.
        """
        measured = {n: e for n, e in self.measured(way).items() if n <= most}
        seconds = {n: e.seconds for n, e in measured.items()}
        return [n for n in contradicting(seconds) if measured[n].n_retried < SETTLED]

    def retried(self, way: Way, n: int, entry: DecodeTime) -> None:
        """Take a repeated time for a doubted size, and count the retry if the doubt remains."""
        before = self.ways[way][n]
        most = agreeing({m: e.seconds for m, e in self.measured(way).items()})
        kept = entry if is_believed(entry.seconds, before.seconds, most[n]) else before
        n_timed = before.n_timed + entry.n_timed
        self.add(way, n, replace(kept, n_timed=n_timed, date=entry.date, n_retried=0))
        if n in self.doubted(way):
            self.add(way, n, replace(self.ways[way][n], n_retried=before.n_retried + 1))


def _on_line(points: Sequence[tuple[float, float]], x: float) -> float:
    if len(points) == 1:
        return points[0][1] * max(1.0, x / points[0][0])
    low, high = points[-2], points[-1]
    for left, right in zip(points, points[1:], strict=False):
        if x <= right[0]:
            low, high = left, right
            break
    slope = (high[1] - low[1]) / (high[0] - low[0])
    if x > high[0]:
        return high[1] + max(0.0, slope) * (x - high[0])
    if x < low[0]:
        return low[1]
    return low[1] + slope * (x - low[0])


def ranges(numbers: Iterable[int]) -> str:
    """Return numbers as text, with neighbours joined: "1 to 3, 8"; "" for no numbers."""
    listed = tuple(numbers)
    return format_list(listed).replace(",", ", ").replace("-", " to ") if listed else ""
