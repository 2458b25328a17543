"""`p-mins`: v1, the sequence probability against a table of thresholds (B03, B04, B05).

The table is the normalised cost curve read as the break-even probability of a whole draft: a
draft of m tokens is a batch of m + 1, and pays if it is accepted whole more often than c[m + 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.policies.walk import ProductWalk
from specdec.types import Round

RECALIBRATION_POWER = 1.02  # above 1 lowers every p < 1; also a small minimum edge (B04)
MAX_LOOKAHEAD = 5

Threshold = Callable[[int], float]


class ThresholdWalk(ProductWalk):
    """Keeps the last size whose P reaches its threshold; stops when P is below the threshold
    `MAX_LOOKAHEAD` sizes past the best. Reaching the cap keeps everything (B11)."""

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
    name = "p-mins"

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
