"""How much longer decodes take than a cost table says, by way and batch size. Pure.

A *pair* is a way with a batch size. All numbers here are logarithms of seconds over the table's
seconds, unless their names say otherwise. Two estimates follow the decodes of each pair:

- Its *level* moves slowly. It follows short times at once, because other programs only make decodes
  longer. It follows long times by `_CREEP` a decode, so that one busy minute hardly moves it. It
  follows them faster if other sizes take their usual time. After `_MINUTE` long decodes in a row
  the table is stale, and every level moves to what was seen.
- Its *surplus* is what recent decodes took above the level. It ends with the busy minute, and is at
  most `MOST_SURPLUS`.

Pairs that are not decoded follow the others. The mean of a way's pairs is its common level, with a
prior that pulls it to 0. Each mean lies between decodes that were seen and 0, and no mean is made
of another one. So no two factors can explain each other away, and no product of them grows.

As a last bound, `seconds` stays between half the shortest and twice the longest time of the nearest
sizes that are known: those that the table has measured, and those that were decoded `_KNOWN` times.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from offload.times.table import Way

BOUND = 2.0  # ratio to the times that were seen of the nearest sizes; a price never leaves it
MOST_SURPLUS = math.log(2.0)
_WINDOW = 16  # decodes of a pair that its estimates are made of
_OLD = 128  # decodes of any pair after which a time no longer counts as recent
# Quantile of a window by which outliers are capped; up to 60 % of its decodes may be disturbed.
_QUANTILE = 0.4
_OUTLIER = 3.0  # cap on the ratio of a time to `_QUANTILE`
_SHORT, _ALIKE = 0.25, math.log(1.5)  # quantile of short decodes, and what counts as alike
_RATE = 0.2  # share of the way to the window's mean that a level moves in a decode
_BAND = 0.25  # the most that a level is below the window's mean before it only creeps
_CREEP = 0.0008  # the most that a level rises in a decode beyond the band
_SURE_CREEP = 0.02  # `_CREEP` while decodes of other pairs take their usual time
_CALM = 0.25  # the most that a decode differs from its price in a calm time
_N_CALM = 3  # decodes of other pairs, among the last `_N_LAST`, that show a calm time
_N_LAST = 8
_MINUTE = 256  # decodes in a row above their usual time that no busy minute explains
_PRIOR = 8.0  # weight of a mean's prior, in decodes; a pair weighs as much at most
_KNOWN = 64  # decodes after which the times of a size bound those of its neighbours
_LEVEL_HALF_LIFE, _SURPLUS_HALF_LIFE = 1024.0, 48.0  # decodes until a pair weighs half


@dataclass
class _Pair:
    """The times of decodes of one batch size in one way."""

    # Number and ratio of the last decodes, and the ratios and their exponentials in order of size.
    recent: deque[tuple[int, float]] = field(default_factory=deque)
    ratios: list[float] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    level: float = 0.0
    surplus: float = 0.0
    common_level: float = 0.0  # the way's common level when this pair was last decoded
    n_seen: int = 0
    last: int = 0  # number of the last decode
    least_s: float = math.inf
    most_s: float = 0.0
    is_distrusted: bool = False  # its times contradict each other, so others do not follow it

    def add(self, n: int, ratio: float) -> None:
        """Add decode number `n` to the window, and drop old ones."""
        while self.recent and (len(self.recent) == _WINDOW or n - self.recent[0][0] > _OLD):
            at = bisect_left(self.ratios, self.recent.popleft()[1])
            del self.ratios[at], self.factors[at]
        self.recent.append((n, ratio))
        insort(self.ratios, ratio)
        insort(self.factors, math.exp(ratio))

    def undisturbed(self) -> float:
        """The mean of the window's ratios that are hardly above the short ones."""
        most = self.ratios[int(_SHORT * len(self.ratios))] + _ALIKE
        n = bisect_right(self.ratios, most)
        return sum(self.ratios[:n]) / n

    def typical(self) -> float:
        """The logarithm of the window's mean ratio, with outliers capped."""
        count = len(self.factors)
        cap = _OUTLIER * self.factors[int(_QUANTILE * count)]
        n = bisect_right(self.factors, cap)
        return math.log((sum(self.factors[:n]) + cap * (count - n)) / count)


@dataclass
class _Common:
    """The means of a way's pairs."""

    level: float = 0.0
    surplus: float = 0.0


class Corrections:
    """Corrects the seconds of a table by the seconds of decodes. `reach` and `see` change it."""

    def __init__(self) -> None:
        self.base_s: dict[Way, list[float]] = {}  # seconds by the table; index n - 1
        self._pairs: dict[Way, dict[int, _Pair]] = {}
        self._seen: dict[Way, dict[int, tuple[float, float]]] = {}  # least and most seconds by size
        self._common: dict[Way, _Common] = {}
        self._machine = _Common()
        self._bounds: dict[Way, tuple[list[float], list[float]]] = {}  # least and most seconds
        self._arrays: dict[Way, NDArray[np.float64]] = {}  # the table's seconds, and the bounds
        self._last: deque[tuple[Way, int, bool]] = deque(maxlen=_N_LAST)
        self._n = self._n_long = 0  # decodes seen, and those since one took its usual time

    def reach(self, way: Way, n: int, seconds: float, *, is_measured: bool) -> None:
        """Extend the table's seconds of a way up to batches of `n` tokens, which take `seconds`.

        `is_measured`: the table has measured this size.
        """
        base_s = self.base_s.setdefault(way, [])
        self._pairs.setdefault(way, {})
        self._common.setdefault(way, _Common(self._machine.level, self._machine.surplus))
        base_s += [seconds] * (n - len(base_s))
        if is_measured:
            self._seen.setdefault(way, {})[n] = (seconds, seconds)
        self._forget_bounds(way)

    def knows(self, way: Way, n: int) -> bool:
        """True if the table has seconds of this pair."""
        return n <= len(self.base_s.get(way, ()))

    def n_seen(self) -> dict[tuple[Way, int], int]:
        """Return the number of decodes of each pair that was decoded."""
        return {(w, n): p.n_seen for w, pairs in self._pairs.items() for n, p in pairs.items()}

    # -- learning ----------------------------------------------------------------------------------

    def see(self, decodes: Sequence[tuple[int, Way, float]]) -> None:
        """Learn from decodes of n tokens in a way that took that many seconds."""
        touched = []
        for n, way, seconds in decodes:
            self._n += 1
            pair = self._pairs[way].get(n)
            if pair is None:
                level = self._common[way].level
                pair = self._pairs[way][n] = _Pair(level=level, common_level=level)
            else:
                pair.level += self._common[way].level - pair.common_level
                pair.common_level = self._common[way].level
            ratio = math.log(seconds / self.base_s[way][n - 1])
            if not pair.n_seen:
                pair.level = min(pair.level, max(ratio, 0.0))
            is_usual = abs(ratio - pair.level) <= _CALM
            self._last.append((way, n, is_usual))
            self._n_long = 0 if is_usual else self._n_long + 1
            pair.add(self._n, ratio)
            pair.n_seen, pair.last = pair.n_seen + 1, self._n
            self._bound_by(way, n, pair, seconds)
            self._follow(pair, is_sure=self._is_calm(way, n))
            touched.append((way, pair))
        if self._n_long >= _MINUTE:
            self._believe()
            touched = [(way, pair) for way, pairs in self._pairs.items() for pair in pairs.values()]
        self._find_common()
        for way, pair in touched:
            pair.common_level = self._common[way].level

    def _believe(self) -> None:
        """Replace the table's times of decoded pairs by the times of their last decodes."""
        self._n_long = 0
        self._last.clear()
        for way, pairs in self._pairs.items():
            seen: dict[int, tuple[float, float]] = {}
            for n, pair in pairs.items():
                if not pair.recent:
                    continue
                pair.level, pair.surplus = pair.undisturbed(), 0.0
                base_s = self.base_s[way][n - 1]
                seen[n] = (base_s * pair.factors[0], base_s * pair.factors[-1])
            if seen:
                self._seen[way] = seen
                self._forget_bounds(way)

    def _is_calm(self, way: Way, n: int) -> bool:
        """True if most of the last decodes of other pairs took their usual time."""
        others = [usual for w, m, usual in self._last if (w, m) != (way, n)]
        return sum(others) >= max(_N_CALM, 0.75 * len(others))

    def _bound_by(self, way: Way, n: int, pair: _Pair, seconds: float) -> None:
        """Let a decode's time bound the prices of its neighbours."""
        pair.least_s, pair.most_s = min(pair.least_s, seconds), max(pair.most_s, seconds)
        seen = self._seen.setdefault(way, {})
        if n not in seen and pair.n_seen < _KNOWN:
            return
        if n in seen:
            least_s, most_s = seen[n]
        else:
            # All decodes of this size may have been disturbed. So they may lower the least time
            # that follows from other sizes, and never raise it.
            others_s = self._bounds_of(way)[0][n - 1] * BOUND if seen else self.base_s[way][n - 1]
            least_s, most_s = others_s, pair.most_s
        new = (min(least_s, pair.least_s), max(most_s, pair.most_s))
        if seen.get(n) != new:
            seen[n] = new
            self._forget_bounds(way)

    @staticmethod
    def _follow(pair: _Pair, *, is_sure: bool) -> None:
        above = pair.undisturbed() - pair.level
        most = _SURE_CREEP if is_sure else _CREEP
        pair.level += _RATE * above if above <= _BAND else min(_RATE * above, most)
        trust = min(1.0, (len(pair.recent) + 2) / 8)
        pair.surplus = min(MOST_SURPLUS, pair.typical() - pair.level) * trust

    def _find_common(self) -> None:
        """Compute the means of each way and of the machine from the pairs alone."""
        level, surplus = _Mean(), _Mean()
        of_ways = []
        for way, pairs in self._pairs.items():
            own_level, own_surplus = _Mean(), _Mean()
            for pair in pairs.values():
                if pair.is_distrusted:
                    continue
                age, weight = self._n - pair.last, min(_PRIOR, pair.n_seen)
                own_level.add(weight * 0.5 ** (age / _LEVEL_HALF_LIFE), pair.level)
                own_surplus.add(weight * 0.5 ** (age / _SURPLUS_HALF_LIFE), pair.surplus)
            level.join(own_level)
            surplus.join(own_surplus)
            of_ways.append((way, own_level, own_surplus))
        machine = self._machine = _Common(level.around(0.0), surplus.around(0.0))
        for way, own_level, own_surplus in of_ways:
            self._common[way] = _Common(
                own_level.around(machine.level), own_surplus.around(machine.surplus)
            )

    def scale(self, factor: float) -> None:
        """Multiply the table's seconds, as when their unit becomes known."""
        for base_s in self.base_s.values():
            base_s[:] = [s * factor for s in base_s]
        for seen in self._seen.values():
            seen |= {n: (low * factor, high * factor) for n, (low, high) in seen.items()}
        self._bounds, self._arrays = {}, {}

    def distrust(self, way: Way, n: int) -> None:
        """Let no other pair follow this one from now on. Its times contradict each other."""
        if pair := self._pairs[way].get(n):
            pair.is_distrusted = True

    def is_distrusted(self, way: Way, n: int) -> bool:
        """True if the times of a pair contradicted each other."""
        pair = self._pairs.get(way, {}).get(n)
        return pair is not None and pair.is_distrusted

    def correct(self, way: Way, n: int, seconds: float) -> None:
        """Replace the table's seconds of a pair that was wrong from the start."""
        common = self._common[way].level
        self.base_s[way][n - 1] = seconds / math.exp(common)
        before = self._pairs[way].get(n, _Pair())
        self._pairs[way][n] = _Pair(
            level=common, common_level=common, n_seen=before.n_seen + 1, last=self._n,
            is_distrusted=True,
        )  # fmt: skip
        self._seen.setdefault(way, {})[n] = (seconds, seconds)
        self._forget_bounds(way)

    def follow(self, way: Way, curve_s: Sequence[float]) -> None:
        """Take new seconds for sizes that were neither measured nor decoded. Index n - 1."""
        base_s, pairs, seen = self.base_s[way], self._pairs[way], self._seen.get(way, {})
        for n, seconds in enumerate(curve_s[: len(base_s)], 1):
            if n not in pairs and n not in seen:
                base_s[n - 1] = seconds
        self._forget_bounds(way)

    # -- what a decode takes -----------------------------------------------------------------------

    def seconds(self, way: Way, n: int) -> float:
        """Return the expected seconds of the next decode of `n` tokens in this way."""
        least_s, most_s = self._bounds_of(way)
        corrected_s = self.base_s[way][n - 1] * math.exp(self._shift(way, n))
        return min(most_s[n - 1], max(least_s[n - 1], corrected_s))

    def all_seconds(self, way: Way) -> list[float]:
        """Return `seconds` of all sizes from 1 on."""
        arrays = self._arrays.get(way)
        if arrays is None:
            arrays = self._arrays[way] = np.array([self.base_s[way], *self._bounds_of(way)])
        base_s, least_s, most_s = arrays
        common = self._common[way]
        corrected_s = base_s * math.exp(common.level + common.surplus)
        for n in self._pairs[way]:
            corrected_s[n - 1] = self.base_s[way][n - 1] * math.exp(self._shift(way, n))
        # Not np.clip: if the least is above the most, the most is what counts.
        all_s: list[float] = np.minimum(most_s, np.maximum(least_s, corrected_s)).tolist()
        return all_s

    def kept_s(self, way: Way, n: int) -> float:
        """Return the seconds that a later start may rely on. A busy minute does not count."""
        least_s, most_s = self._bounds_of(way)
        pair, level = self._pairs[way].get(n), self._common[way].level
        if pair is not None:
            level += pair.level - pair.common_level
        return min(most_s[n - 1], max(least_s[n - 1], self.base_s[way][n - 1] * math.exp(level)))

    def known_s(self, way: Way) -> dict[int, float]:
        """Return `kept_s` of the sizes that were measured, or decoded often."""
        return {n: self.kept_s(way, n) for n in self._seen.get(way, ())}

    def recent_s(self, way: Way, n: int) -> float:
        """Return the typical seconds of a pair's last decodes; 0 if there were none."""
        pair = self._pairs[way].get(n)
        if pair is None or not pair.recent:
            return 0.0
        return self.base_s[way][n - 1] * math.exp(pair.typical())

    def common_level(self, way: Way) -> float:
        """Return the logarithm of the factor by which all times of a way have changed."""
        return self._common[way].level

    def _shift(self, way: Way, n: int) -> float:
        common, pair = self._common[way], self._pairs[way].get(n)
        if pair is None:
            return common.level + common.surplus
        # A pair that was decoded long ago is assumed to have the others' surplus.
        own = math.pow(0.5, (self._n - pair.last) / _SURPLUS_HALF_LIFE)
        surplus = own * pair.surplus + (1.0 - own) * common.surplus
        return pair.level + common.level - pair.common_level + surplus

    def _forget_bounds(self, way: Way) -> None:
        self._bounds.pop(way, None)
        self._arrays.pop(way, None)

    def _bounds_of(self, way: Way) -> tuple[list[float], list[float]]:
        """The least and the most seconds of each size, by the nearest decoded sizes."""
        bounds = self._bounds.get(way)
        if bounds is None:
            bounds = self._bounds[way] = self._new_bounds(way)
        return bounds

    def _new_bounds(self, way: Way) -> tuple[list[float], list[float]]:
        seen, n_max = self._seen.get(way, {}), len(self.base_s[way])
        sizes = sorted(seen)
        if not sizes:
            return [0.0] * n_max, [math.inf] * n_max
        least_s, most_s = [], []
        for n in range(1, n_max + 1):
            at = bisect_left(sizes, n)
            above = sizes[at] if at < len(sizes) else None
            below = n if above == n else sizes[at - 1] if at else None
            if below is not None:
                least = seen[below][0]
            else:
                assert above is not None
                least = seen[above][0] / -(-above // n)
            if above is not None:
                most = seen[above][1]
            else:
                assert below is not None
                most = seen[below][1] * -(-n // below)
            least_s.append(least / BOUND)
            most_s.append(most * BOUND)
        return least_s, most_s


class _Mean:
    """A weighted mean with a prior."""

    def __init__(self) -> None:
        self.weight = self.sum = 0.0

    def add(self, weight: float, value: float) -> None:
        self.weight += weight
        self.sum += weight * value

    def join(self, other: _Mean) -> None:
        self.weight += other.weight
        self.sum += other.sum

    def around(self, prior: float) -> float:
        """The mean, with `prior` as one more value of weight `_PRIOR`."""
        return (self.sum + _PRIOR * prior) / (self.weight + _PRIOR)
