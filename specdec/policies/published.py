"""The draft-length rules that others published, as they published them.

`p-mins` (v1), `rational` (v2), `speed-a` and `speed-b` (v3) and `ratio` are of the discussion
llama.cpp #10466; `costs` (v4) is llama.cpp #17034. docs/background.md tells their story.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.options import P_TOP_K
from specdec.policies.cost_curve import PUBLISHED, CostCurve
from specdec.policies.fixed import FixedWalk
from specdec.policies.walk import ProductWalk
from specdec.types import Round

MAX_LOOKAHEAD = 5

# -- v1 and v2: the sequence probability against thresholds ----------------------------------------

RECALIBRATION_POWER = 1.02  # above 1 lowers every p < 1; also a small minimum edge

Threshold = Callable[[int], float]


class ThresholdWalk(ProductWalk):
    """Keeps the last size whose P reaches its threshold; stops when P is below the threshold
    `MAX_LOOKAHEAD` sizes past the best. Reaching the cap keeps everything."""

    __slots__ = ("_p", "_power", "_threshold")

    def __init__(self, limit: int, threshold: Threshold, power: float) -> None:
        super().__init__(limit)
        self._threshold = threshold
        self._power = power
        self._p = 1.0

    def _judge(self, p: float) -> bool:
        if self.n >= self.limit:
            self.n_best = self.n
            self.reason = "longest draft"
            return False
        self._p *= p**self._power
        if self._p >= self._threshold(self.n):
            self.n_best = self.n
        bound = self._threshold(self.n_best + MAX_LOOKAHEAD)
        self.reason = f"P {self._p:.3f} against {bound:.3f}"
        return self._p >= bound


class PMins:
    """`p-mins`: v1. The table is the normalised cost curve read as the break-even probability of
    a whole draft: one of m tokens is a batch of m + 1, and pays if it is accepted whole more
    often than c[m + 1]."""

    name = "p-mins"
    p_top_k = P_TOP_K

    def __init__(
        self, p_mins: Sequence[float], n_max: int = 64, power: float = RECALIBRATION_POWER
    ) -> None:
        self._p_mins = tuple(p_mins)
        self.n_max = n_max
        self._power = power

    def _threshold(self, m: int) -> float:
        return self._p_mins[min(m, len(self._p_mins) - 1)]

    def begin(self, limit: int, source: str) -> ThresholdWalk:
        return ThresholdWalk(min(limit, self.n_max), self._threshold, self._power)

    def learn(self, round_: Round) -> None:
        pass


class Rational:
    """`rational`: v2, the table of v1 replaced by a fitted curve."""

    name = "rational"
    p_top_k = P_TOP_K

    def __init__(
        self, curve: CostCurve = PUBLISHED, n_max: int = 64, power: float = RECALIBRATION_POWER
    ) -> None:
        self.n_max = n_max
        self._power = power
        self._thresholds = [curve.threshold(m) for m in range(n_max + MAX_LOOKAHEAD + 1)]

    def begin(self, limit: int, source: str) -> ThresholdWalk:
        return ThresholdWalk(min(limit, self.n_max), self._thresholds.__getitem__, self._power)

    def learn(self, round_: Round) -> None:
        pass


# -- v3: all-or-nothing expected tokens per second -------------------------------------------------


class SpeedWalk(ProductWalk):
    """v3b differs from v3a in two ways: the cap keeps the previous best, and one token more than
    the best is returned, as its authors held it to be free."""

    __slots__ = ("_best", "_best_ev", "_speeds", "_step", "_v3b")

    def __init__(self, limit: int, speeds: Sequence[float], step: float, v3b: bool) -> None:
        super().__init__(limit)
        self._speeds = speeds
        self._step = step  # one draft step, as the source uses it: t/s per t/s
        self._v3b = v3b
        self._best = 0
        self._best_ev = speeds[0]

    def _judge(self, p: float) -> bool:
        go_on = self._better(p)
        self.n_best = min(self._best + 1, self.n) if self._v3b else self._best
        self.reason = f"best {self._best_ev:.2f} t/s if accepted whole"
        return go_on

    def _better(self, p: float) -> bool:
        m = self.n
        if m >= self.limit:
            if not self._v3b:
                self._best = m
            return False
        ev = self.product * self._speeds[m]
        if ev > self._best_ev:
            self._best, self._best_ev = m, ev
            return True
        last = min(len(self._speeds) - 1, self._best + MAX_LOOKAHEAD)
        return any(
            self.product * (self._speeds[j] - self._step * (j - m)) > self._best_ev
            for j in range(m + 1, last + 1)
        )


class Speed:
    """`speed-a`, `speed-b`: v3. `speeds[n-1]` and `draft_speed` in tokens per second."""

    p_top_k = P_TOP_K

    def __init__(
        self,
        speeds: Sequence[float],
        draft_speed: float,
        variant: str = "b",
        n_max: int | None = None,
    ) -> None:
        self.name = f"speed-{variant}"
        self._speeds = tuple(speeds)
        self.n_max = len(self._speeds) if n_max is None else n_max
        self._step = self._speeds[0] / draft_speed
        self._v3b = variant == "b"

    def begin(self, limit: int, source: str) -> SpeedWalk:
        return SpeedWalk(min(limit, self.n_max), self._speeds, self._step, self._v3b)

    def learn(self, round_: Round) -> None:
        pass


# -- v4: normalised costs with look-ahead ----------------------------------------------------------


class CostsWalk(ProductWalk):
    __slots__ = ("_costs", "_look_ahead")

    def __init__(self, limit: int, costs: Sequence[float], look_ahead: int) -> None:
        super().__init__(limit)
        self._costs = costs
        self._look_ahead = look_ahead

    def _judge(self, p: float) -> bool:
        cost = self._costs[self.n]
        if self.product > cost:
            self.n_best = self.n
        self.reason = f"P {self.product:.3f} against cost {cost:.3f} of batch {self.n + 1}"
        return self.n - self.n_best <= self._look_ahead


class Costs:
    """`costs`: v4, GGML_BATCH_COSTS with GGML_MAX_LOOK_AHEAD.

    A draft of m tokens pays when its sequence probability exceeds c[m + 1]; drafting stops once
    more than `look_ahead` sizes past the best were tried. `costs[m]` is that of batch m + 1.
    """

    name = "costs"
    p_top_k = P_TOP_K

    def __init__(self, costs: Sequence[float], look_ahead: int = 0, n_max: int = 64) -> None:
        self._costs = tuple(costs)
        self._look_ahead = look_ahead
        self.n_max = min(n_max, len(self._costs) - 1)

    def begin(self, limit: int, source: str) -> CostsWalk:
        return CostsWalk(min(limit, self.n_max), self._costs, self._look_ahead)

    def learn(self, round_: Round) -> None:
        pass


# -- accepted over drafted tokens (DA/DN) ----------------------------------------------------------

_KEEP = 0.8  # of the running counts per round: about five rounds are remembered
_MIN_ROUNDS = 3


def ratio_threshold(length: int) -> float:
    """The DA/DN below which a block of this length has diminishing returns: 0.3 at length 1,
    0.5 from length 8 on."""
    return 0.3 + 0.2 * min(length - 1, 7) / 7


class Ratio:
    """`ratio`: the block grows while accepted over drafted tokens is above `ratio_threshold`, and
    shrinks below it. No probabilities are needed."""

    name = "ratio"
    p_top_k = 0

    def __init__(self, n_max: int = 16, start: int = 4) -> None:
        self.n_max = n_max
        self.length = min(start, n_max)
        self._drafted = self._accepted = 0.0
        self._n_rounds = 0

    def begin(self, limit: int, source: str) -> FixedWalk:
        return FixedWalk(min(limit, self.length))

    def learn(self, round_: Round) -> None:
        if not round_.n_drafted:
            return
        self._drafted = self._drafted * _KEEP + round_.n_drafted
        self._accepted = self._accepted * _KEEP + round_.n_accepted
        self._n_rounds += 1
        if self._n_rounds < _MIN_ROUNDS:
            return
        ratio = self._accepted / self._drafted
        if ratio > ratio_threshold(self.length) and self.length < self.n_max:
            self._move(1)
        elif ratio < ratio_threshold(self.length) and self.length > 1:
            self._move(-1)

    def _move(self, by: int) -> None:
        self.length += by
        self._drafted = self._accepted = 0.0
        self._n_rounds = 0
