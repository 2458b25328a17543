"""`ngram-mod`: one flat table from the hash of n tokens to the next token.

All sequences share it, so one conversation drafts from another. There is no check for collisions:
verification is the check. Streaks of poor drafts, or a table that is too full, reset it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec.drafters.offer import match_probability, nothing, offer
from specdec.drafters.per_sequence import PerSequence
from specdec.types import Draft, Policy, Round

_EMPTY = -1
_MULTIPLIER = 6364136223846793005  # of Knuth's 64-bit LCG, as in llama.cpp
_MASK = (1 << 64) - 1
_POOR, _POOR_STREAK = 0.25, 5
_FULLEST = 0.25


@dataclass(slots=True)
class _Indexed:
    n_tokens: int = 0


class NgramMod:
    """`n_match` tokens are hashed; drafts have `n_min` to `n_max` tokens or none.

    llama.cpp's n_min of 48 suits dense models; the policy prices drafts, so 1 is safe here.
    """

    name = "ngram-mod"

    def __init__(
        self, n_match: int = 24, n_min: int = 1, n_max: int = 64, n_slots: int = 4 << 20
    ) -> None:
        self._n, self._n_min, self._n_max = n_match, n_min, n_max
        self._slots = np.full(n_slots, _EMPTY, np.int32)
        self._n_used = 0
        self._indexed = PerSequence(_Indexed)
        self._was_reset = False
        self._n_poor = 0

    def _slot(self, tokens: Sequence[int]) -> int:
        h = 0
        for token in tokens:
            h = (h * _MULTIPLIER + token + 1) & _MASK
        return (h ^ (h >> 29)) % len(self._slots)

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        self._index(sequence, history)
        window = list(history[-self._n :])
        if len(window) < self._n:
            return nothing(self.name, f"fewer than {self._n} tokens")
        tokens: list[int] = []
        while len(tokens) < min(self._n_max, limit):
            token = int(self._slots[self._slot(window)])
            if token == _EMPTY:
                break
            tokens.append(token)
            window = [*window[1:], token]
        if not tokens or len(tokens) < min(self._n_min, limit):
            return nothing(self.name, f"{len(tokens)} tokens known, at least {self._n_min} wanted")
        p = match_probability(self._n)
        return offer(self.name, tokens, [p] * len(tokens), policy, limit)

    def _index(self, sequence: int, history: Sequence[int]) -> None:
        n, slots = self._n, self._slots
        indexed = self._indexed.of(sequence, history)
        for i in range(max(indexed.n_tokens, n), len(history)):
            slot = self._slot(history[i - n : i])
            self._n_used += slots[slot] == _EMPTY
            slots[slot] = history[i]
        indexed.n_tokens = len(history)
        if self._n_used > _FULLEST * len(slots):
            self.reset()

    def reset(self) -> None:
        """Forget every n-gram of every sequence. Histories are added again at their next turn."""
        self._slots.fill(_EMPTY)
        self._n_used = 0
        self._n_poor = 0
        self._was_reset = True

    def learn(self, sequence: int, round_: Round) -> None:
        if round_.draft.source != self.name or not round_.n_drafted:
            return
        poor = round_.n_accepted < _POOR * round_.n_drafted
        self._n_poor = self._n_poor + 1 if poor else 0
        if self._n_poor >= _POOR_STREAK:
            self.reset()

    def forget(self, sequence: int) -> None:
        """The table stays; what is new in the next history is added to it."""
        self._indexed.forget(sequence)
        if self._was_reset:
            self._indexed.clear()
            self._was_reset = False
