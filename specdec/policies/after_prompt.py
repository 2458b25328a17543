"""Learns how much longer the first decodes after a prompt take. Pure.

A prompt leaves other experts in the device's slots than its answer uses. So the first decodes of an
answer copy more, and each further row of them adds more than T(n) says.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low

N_ROUNDS = 4  # rounds after a prompt that are learnt apart
_SEEN = 9  # newest prompts that count
_MOST_TIMES = 16.0  # cap on a ratio


class AfterPrompt:
    """Ratios of the seconds of an answer's first decodes to those of later ones, by round."""

    def __init__(self) -> None:
        self._n_rounds = N_ROUNDS  # since the last prompt
        self.is_over = True  # N_ROUNDS rounds passed: later ones are not learnt from
        self._seen = [deque[float](maxlen=_SEEN) for _ in range(N_ROUNDS)]

    def begins(self) -> None:
        """The next round is the first one after a prompt."""
        self._n_rounds, self.is_over = 0, False

    def ends(self) -> None:
        """The next round is not one of the first ones, because other texts share its batch."""
        self._n_rounds, self.is_over = N_ROUNDS, True

    def observe(self, seconds: float, usual_s: float) -> None:
        """Learn from a round whose decode took `seconds`, where `usual_s` are usual."""
        at, self._n_rounds = self._n_rounds, self._n_rounds + 1
        self.is_over = self._n_rounds >= N_ROUNDS
        if at < N_ROUNDS and usual_s > 0.0:
            self._seen[at].append(min(_MOST_TIMES, max(1.0, seconds / usual_s)))

    @property
    def factor(self) -> float:
        """How many times as long the next round's decode takes as usual, by a lower median.

        An unknown round is as long as the one before it. If no first round was seen yet, the most
        is assumed, so that the very first round shows what plain decoding takes there.
        """
        if self.is_over:
            return 1.0
        known = [seen for seen in self._seen[: self._n_rounds + 1] if seen]
        return median_low(known[-1]) if known else _MOST_TIMES
