"""Prices what drafters cost before they have drafted a token: looks, and reading a prompt. Pure.

A *look* asks drafters without a model, such as n-grams, whether they have a proposal. It costs
microseconds, which is much for a small model. A draft model must read the prompt before its first
draft, which may cost as much as many tokens.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low

_SHARE = 0.003  # share of the time that looks may take if they gain nothing
_FIRST_TOKENS = 0.5  # tokens of plain decoding whose time looks may take in advance
_MOST_TOKENS = 1.5  # most tokens of earlier gains that later looks may cost
_LONGEST_REST = 32  # rounds
_MOST_TIMES_USUAL = 4.0  # cost of a look that is charged, relative to the median
_LOOKS_SEEN = 9  # newest looks whose time counts
_READ_SHARE = 1 / 16  # first guess of a prompt token's time, as a share of a draft step
_READS_SEEN = 5


class Looks:
    """Decides how many rounds to rest after a look that found nothing.

    Looks go on in each round while they gain more tokens than they cost. Otherwise they may take a
    small share of the time. If a decode takes long, a look costs less than this share, so no round
    rests.
    """

    def __init__(self) -> None:
        self._tokens = _FIRST_TOKENS  # tokens of plain decoding whose time looks may take now
        self._costs: deque[float] = deque(maxlen=_LOOKS_SEEN)

    def emitted(self, n_tokens: int) -> None:
        self._tokens = min(_MOST_TOKENS, self._tokens + _SHARE * n_tokens)

    def looked(self, cost: float) -> None:
        """Take the cost of a look, in tokens of plain decoding.

        A look that took much longer than most was disturbed by another program, or it indexed a
        whole prompt, which occurs once. So at most a few times the median is charged.
        """
        self._costs.append(cost)
        self._tokens = max(0.0, self._tokens - min(cost, _MOST_TIMES_USUAL * self._usual))

    def gained(self, n_tokens: float) -> None:
        """Take what the draft of a look gained over plain decoding, or lost if it is negative.

        Losses count, too. Otherwise drafts that gain nothing on average would pay for looks.
        """
        self._tokens = max(0.0, min(_MOST_TOKENS, self._tokens + n_tokens))

    @property
    def rest(self) -> int:
        """Number of rounds without a look, after one that found nothing."""
        lacking = self._usual - self._tokens
        return min(_LONGEST_REST, math.ceil(lacking / _SHARE)) if lacking > 0.0 else 0

    @property
    def _usual(self) -> float:
        return median_low(self._costs) if self._costs else 0.0


class ReadingTimes:
    """The seconds in which each draft model reads a token of a prompt."""

    def __init__(self) -> None:
        self._seen: dict[str, deque[float]] = {}  # seconds of a token, by drafter
        self._asked: dict[str, int] = {}  # tokens that each drafter is to read now

    def expected_s(self, source: str, n_tokens: int, step_s: float) -> float:
        """Seconds of reading `n_tokens` and of the first draft step, which takes `step_s`."""
        self._asked[source] = n_tokens
        seen = self._seen.get(source)
        token_s = median_low(seen) if seen else _READ_SHARE * step_s
        return step_s + n_tokens * token_s

    def took(self, source: str, seconds: float) -> None:
        """Learn from the reading that was asked for last."""
        n_tokens = self._asked.pop(source, 0)
        if n_tokens and seconds > 0.0:
            self._seen.setdefault(source, deque(maxlen=_READS_SEEN)).append(seconds / n_tokens)
