"""Learns how many times as long as T(n) the batches of drafts took lately. Pure.

T(n) is learnt over many texts. If the tokens of a text use the same experts, plain decoding finds
them in slots. Drafts that are wrong use others, so a larger batch takes longer than T(n) says.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

_SEEN = 5  # newest batches that count
_LEAST_SEEN = 3
_MOST_TIMES = 3.0  # cap on a ratio
_FORGET_ROUNDS = 96  # rounds without a draft after which the oldest batch is forgotten


class Lately:
    """Ratios of the seconds of drafts' batches to T(n)."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=_SEEN)
        self._n = 0  # batches in `_seen`, since asking for its length costs a call in each round
        # The round of the last batch, moved on by `_FORGET_ROUNDS` for each forgotten batch.
        self._at = 0
        self.last_factor = 1.0  # as `factor` was when something was learnt or forgotten last

    def observe(self, seconds: float, usual_s: float, at: int) -> None:
        """Learn from a batch of round `at` that took `seconds`, where T(n) is `usual_s`."""
        if usual_s <= 0.0:
            return
        ratio = seconds / usual_s
        self._seen.append(1.0 if ratio < 1.0 else ratio if ratio < _MOST_TIMES else _MOST_TIMES)
        self._at = at
        if self._n < _SEEN:
            self._n += 1
        if ratio > 1.0 or self.last_factor > 1.0 or self._n == _LEAST_SEEN:
            self._restate()

    def factor(self, at: int) -> float:
        """How many times as long as T(n) a batch of round `at` probably takes: a lower median.

        If nothing was drafted for long, all is forgotten.
        """
        while self._seen and at - self._at >= _FORGET_ROUNDS:
            self._seen.popleft()
            self._n -= 1
            self._at += _FORGET_ROUNDS
            self._restate()
        return self.last_factor

    def _restate(self) -> None:
        self.last_factor = median_low(self._seen) if self._n >= _LEAST_SEEN else 1.0
