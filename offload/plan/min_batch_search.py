"""Which decodes to time, so that the thresholds of streaming are known in a few seconds. Pure.

A first start has 7 s. Where a batch of the size in question takes longer, as with models of
hundreds of GB, it is broken off behind a few layers: they are alike, so that these tell what all
take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from offload.plan.min_batch import (
    SIDES,
    Regime,
    Share,
    Side,
    Times,
    expected_s,
    regimes,
    rule,
    share_of,
    threshold,
)

# As many seconds as a start may spend on it, or times T(1) where that is more.
_BUDGET_S, _BUDGET_TOKENS, _MOST_BUDGET_S = 2.0, 40.0, 7.0
_IN_PART_FROM_S = 0.4  # a decode that takes so long is broken off
_LEAST_LAYERS = 2
_CLOSE = 1.15  # a threshold is known when it lies so close to timed sizes on both sides
_SAME = 1.07  # sizes so close to each other tell the same
_FURTHER = 1.5  # a size is worth timing on the way to one that takes too long
_CONTRADICTS = 1.2  # times what other sizes of a side allow: something disturbed it
_MOST_SIZES = 8  # timed of verification, and of prefill

# (kind, side, tokens, layers to break off behind or 0) -> seconds of the whole decode
Timer = Callable[[str, Side, int, int], float]


@dataclass(frozen=True)
class Streaming:
    """The parts of a plan that decide what has to be timed."""

    kinds: tuple[str, ...]  # of "experts" and "dense", those that stream
    n_most: int  # tokens of the largest batch, the ubatch
    n_layers: int  # whose weights stream
    n_held: float = 0.0  # layers of which the slots hold all
    n_experts: int = 0
    n_used: int = 0
    min_batch: int | None = None  # that of the machine model

    def guess(self, kind: str) -> int:
        """The threshold that is expected: the machine model's, or by rule."""
        if kind == "experts":
            return self.min_batch or rule(self.n_experts, self.n_used)
        return rule(0, 0)

    def share(self, kind: str) -> Share:
        return share_of(kind, self.n_experts, self.n_used)

    def n_timed(self, kind: str, n: int, side: Side) -> int:
        """Layers that tell what all take; more than the slots hold, lest they find themselves."""
        held = self.n_held / self.share(kind)(n) if side == "streamed" else 0.0
        return max(_LEAST_LAYERS, math.ceil(held) + 1)

    def part(self, kind: str, n: int, side: Side) -> float:
        """The part of a decode that has to be waited for: the layers timed, and one before."""
        n_layers = self.n_timed(kind, n, side) + 1
        return n_layers / self.n_layers if n_layers < self.n_layers else 1.0


def budget_s(one_s: float) -> float:
    """Seconds for the search on a machine whose T(1) is `one_s`."""
    return min(max(_BUDGET_S, _BUDGET_TOKENS * one_s), _MOST_BUDGET_S)


def search(
    streaming: Streaming, decode_s: Timer, spent_s: Callable[[], float], most_s: float
) -> dict[str, Times]:
    """Both sides' times of every kind that streams, at the sizes that tell most, within `most_s`.

    The CPU's times are those of all kinds. A time that contradicts others of its side is taken
    again, once, and the shorter one counts.
    """
    again: set[tuple[str, Side, int]] = set()
    cpu: dict[int, float] = {}
    found: dict[str, Times] = {}
    kinds = streaming.kinds
    for i, kind in enumerate(kinds):
        times = found[kind] = Times(cpu=cpu)
        guess, share = streaming.guess(kind), streaming.share(kind)
        part = partial(streaming.part, kind)
        parts = regimes(streaming.n_most)
        for nth, regime in enumerate(parts, 1):
            # Time that a kind and a regime do not use is left to those that follow.
            until_s = most_s * (i + nth / len(parts)) / len(kinds)
            while asked := next_time(times, regime, share, guess, until_s - spent_s(), part):
                n, side = asked
                known = times.of(side)
                takes_long = known and expected_s(times, side, n, share) >= _IN_PART_FROM_S
                n_layers = 0
                if takes_long and part(n, side) < 1.0:
                    n_layers = streaming.n_timed(kind, n, side)
                known[n] = decode_s(kind, side, n, n_layers)
                for size in contradicting(known):
                    if (kind, side, size) in again or spent_s() >= until_s:
                        continue
                    again.add((kind, side, size))
                    known[size] = min(known[size], decode_s(kind, side, size, n_layers))
    return found


def contradicting(seconds: Mapping[int, float]) -> list[int]:
    """Sizes that took longer than a larger one, or than smaller ones that make them up one after
    the other, by more than noise."""

    def most_s(n: int) -> float:
        others = ((m, s) for m, s in seconds.items() if m != n)
        return min((s if m > n else math.ceil(n / m) * s for m, s in others), default=math.inf)

    return [n for n, s in sorted(seconds.items()) if s > _CONTRADICTS * most_s(n)]


def next_time(
    times: Times,
    regime: Regime,
    share: Share,
    guess: int,
    left_s: float,
    part: Callable[[int, Side], float] = lambda n, side: 1.0,
) -> tuple[int, Side] | None:
    """The size and the side to time next, or None when the threshold is known or nothing more fits
    `left_s`. Of a decode that is broken off once some of its layers are timed, `part` is what has
    to be waited for.

    One token first, whatever it takes, then the guess; from then on where the times so far expect
    the threshold. A side that would take too long there is timed as far up as fits.
    """
    for side in SIDES:
        if not times.of(side):
            return regime.first, side
    inside = range(regime.first, regime.last + 1)
    known = {side: [n for n in times.of(side) if n in inside] for side in SIDES}
    both = sorted(set(known["cpu"]) & set(known["streamed"]))
    if sum(map(len, known.values())) >= 2 * _MOST_SIZES:
        return None
    asked: int | None = min(max(guess, regime.first), regime.last)
    if both and both != [1]:
        asked = _to_confirm(both, threshold(times, regime, share, guess), regime)
    if asked is None:
        return None
    # A size of which one side is known tells as much, and takes one decode.
    half = [n for n in known["cpu"] + known["streamed"] if n != 1 and n not in both]
    near = [(abs(n - asked), n) for n in half if max(n, asked) <= min(n, asked) * _SAME]
    wanted = min(near)[1] if near else asked
    missing = [side for side in SIDES if wanted not in known[side]]
    for i, side in enumerate(missing):
        fits_s = left_s / (len(missing) - i)  # half of it for the CPU where both are missing
        largest = max(times.of(side))
        between = [n for n in regime.sizes() if largest * _FURTHER <= n < wanted]
        for n in (wanted, *reversed(between)):
            if expected_s(times, side, n, share) * part(n, side) <= fits_s:
                return n, side
    return None


def _to_confirm(timed: Sequence[int], found: int, regime: Regime) -> int | None:
    """The size whose time would tell most about a threshold that is expected at `found`; `timed`
    are those of which both sides are known."""
    if found > regime.last:
        return None if regime.last in timed else regime.last
    above = min((n for n in timed if n >= found), default=None)
    if above is None or above > found * _CLOSE:
        return found
    below = max((n for n in timed if n < found), default=None)
    if found > regime.first and (below is None or below * _CLOSE < found - 1):
        return max(regime.first, min(found - 1, math.ceil(found / _CLOSE)))
    return None
