"""`speed`: v3a and v3b, all-or-nothing expected tokens per second from measured batch speeds.

(B07 to B10.) v3b differs in two ways: the cap keeps the previous best, and one token more than
the best is returned, as its authors held it to be free.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.policies.walk import ProductWalk
from specdec.types import Round

MAX_LOOKAHEAD = 5


class SpeedWalk(ProductWalk):
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
    """`speeds[n-1]` and `draft_speed` in tokens per second; variant "a" or "b"."""

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
