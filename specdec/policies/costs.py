"""`costs`: v4, GGML_BATCH_COSTS with GGML_MAX_LOOK_AHEAD (B12 to B14).

A draft of m tokens is +EV when its sequence probability exceeds c[m + 1]; drafting stops once
more than `look_ahead` sizes past the best were tried. Element m of the array is batch m + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.policies.walk import ProductWalk
from specdec.types import Round


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
    name = "costs"

    def __init__(self, costs: Sequence[float], look_ahead: int = 0, n_max: int = 64) -> None:
        self._costs = tuple(costs)
        self._look_ahead = look_ahead
        self.n_max = min(n_max, len(self._costs) - 1)

    def begin(self, limit: int, source: str) -> CostsWalk:
        return CostsWalk(min(limit, self.n_max), self._costs, self._look_ahead)

    def learn(self, round_: Round) -> None:
        pass
