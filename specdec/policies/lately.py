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
        self._n_without = 0

    def observe(self, seconds: float, usual_s: float) -> None:
        """Learn from a batch with drafted tokens that took `seconds`, where T(n) is `usual_s`."""
        if usual_s > 0.0:
            self._seen.append(min(_MOST_TIMES, max(1.0, seconds / usual_s)))
            self._n_without = 0

    def passed(self, n_rounds: int) -> None:
        """Count rounds without a draft. If nothing is drafted for long, all is forgotten."""
        self._n_without += n_rounds
        while self._seen and self._n_without >= _FORGET_ROUNDS:
            self._seen.popleft()
            self._n_without -= _FORGET_ROUNDS

    @property
    def factor(self) -> float:
        """How many times as long as T(n) the next batch probably takes, by a lower median."""
        return median_low(self._seen) if len(self._seen) >= _LEAST_SEEN else 1.0
