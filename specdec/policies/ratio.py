"""`ratio`: accepted over drafted tokens decides the block length (DA/DN, B18, B19).

The block grows while the ratio is above a threshold that rises from 0.3 at length 1 to 0.5 at
length 8, and shrinks below it. No probabilities are needed.
"""

from __future__ import annotations

from specdec.policies.fixed import FixedWalk
from specdec.types import Round

_KEEP = 0.8  # of the running counts per round: about five rounds are remembered
_MIN_ROUNDS = 3


def threshold(length: int) -> float:
    """The DA/DN below which a block of this length has diminishing returns."""
    return 0.3 + 0.2 * min(length - 1, 7) / 7


class Ratio:
    name = "ratio"

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
        if ratio > threshold(self.length) and self.length < self.n_max:
            self._move(1)
        elif ratio < threshold(self.length) and self.length > 1:
            self._move(-1)

    def _move(self, by: int) -> None:
        self.length += by
        self._drafted = self._accepted = 0.0
        self._n_rounds = 0
