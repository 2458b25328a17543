"""`bandit`: epsilon-greedy over block lengths, by measured tokens per second.

The idea of ik_llama.cpp's autotune: no model of costs or probabilities, only outcomes. Times
decay, so that another kind of text is noticed; exploring costs its share for ever.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from specdec.policies.fixed import FixedWalk
from specdec.types import Round

ARMS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_EPSILON = 0.15
_KEEP = 0.95


class Bandit:
    name = "bandit"
    p_top_k = 0

    def __init__(self, n_max: int = 16, arms: Sequence[int] = ARMS, seed: int = 0) -> None:
        self.n_max = n_max
        self._arms = [a for a in arms if a <= n_max]
        self._tokens = [0.0] * len(self._arms)
        self._seconds = [0.0] * len(self._arms)
        self._random = random.Random(seed)
        self._arm: int | None = None  # of the round in play, one for all drafters of a chain

    def begin(self, limit: int, source: str) -> FixedWalk:
        if self._arm is None:
            self._arm = self._choose(sum(a <= limit for a in self._arms))
        return FixedWalk(min(limit, self._arms[self._arm]))

    def _choose(self, n_arms: int) -> int:
        """One of the first `n_arms`, those there is room for."""
        untried = [i for i, s in enumerate(self._seconds[:n_arms]) if s == 0.0]
        if untried:
            return untried[0]
        if self._random.random() < _EPSILON:
            return self._random.randrange(n_arms)
        return max(range(n_arms), key=lambda i: self._tokens[i] / self._seconds[i])

    def learn(self, round_: Round) -> None:
        self._arm = None
        # What was played: a drafter may have had less to propose than the arm asked for.
        i = sum(a <= round_.n_drafted for a in self._arms) - 1
        self._tokens[i] = self._tokens[i] * _KEEP + len(round_.emitted)
        self._seconds[i] = self._seconds[i] * _KEEP + round_.draft_s + round_.verify_s
