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
    """`hashed` is the hash of the last n of the `n_tokens` that are in the table."""

    n_tokens: int = 0
    hashed: int = 0


class NgramMod:
    """`n_match` tokens are hashed; drafts have `n_min` to `n_max` tokens or none.

    llama.cpp's n_min of 48 suits dense models; the policy prices drafts, so 1 is safe here.
    """

    name = "ngram-mod"

    def __init__(
        self, n_match: int = 24, n_min: int = 1, n_max: int = 64, n_slots: int = 4 << 20
    ) -> None:
        self._n, self._n_min, self._n_max = n_match, n_min, n_max
        self._oldest = pow(_MULTIPLIER, n_match, _MASK + 1)  # the weight of a token that goes
        self._table = np.full(n_slots, _EMPTY, np.int32)
        self._slots = self._table.data  # single items are read four times as fast
        self._n_slots, self._most_used = n_slots, _FULLEST * n_slots
        self._n_used = 0
        self._indexed = PerSequence(_Indexed)
        self._was_reset = False
        self._n_poor = 0
        self._new = nothing(self.name, f"the last {n_match} tokens are new")

    def _slide(self, hashed: int, old: int, new: int) -> int:
        """The hash of n tokens, one on."""
        return (hashed * _MULTIPLIER + new + 1 - (old + 1) * self._oldest) & _MASK

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        hashed = self._index(sequence, history)
        if len(history) < self._n:
            return nothing(self.name, f"fewer than {self._n} tokens")
        tokens: list[int] = []
        most = min(self._n_max, limit)
        while len(tokens) < most:
            token = self._slots[(hashed ^ (hashed >> 29)) % self._n_slots]
            if token == _EMPTY:
                break
            old = history[len(tokens) - self._n] if len(tokens) < self._n else tokens[-self._n]
            hashed = self._slide(hashed, old, token)
            tokens.append(token)
        if not tokens:
            return self._new
        if len(tokens) < min(self._n_min, limit):
            return nothing(self.name, f"{len(tokens)} tokens known, at least {self._n_min} wanted")
        p = match_probability(self._n)
        return offer(self.name, tokens, [p] * len(tokens), policy, limit)

    def _index(self, sequence: int, history: Sequence[int]) -> int:
        """Add what is new of `history` to the table; the hash of its last n tokens."""
        n, slots = self._n, self._slots
        indexed = self._indexed.of(sequence, history)
        hashed, i, end = indexed.hashed, indexed.n_tokens, len(history)
        while i < end:
            token = history[i]
            if i < n:
                hashed = (hashed * _MULTIPLIER + token + 1) & _MASK
            else:
                slot = (hashed ^ (hashed >> 29)) % self._n_slots
                if slots[slot] == _EMPTY:
                    self._n_used += 1
                slots[slot] = token
                # As `_slide`, in place: this is every token's.
                going = (history[i - n] + 1) * self._oldest
                hashed = (hashed * _MULTIPLIER + token + 1 - going) & _MASK
            i += 1
        indexed.n_tokens, indexed.hashed = end, hashed
        if self._n_used > self._most_used:
            self.reset()
        return hashed

    def reset(self) -> None:
        """Forget every n-gram of every sequence. Histories are added again at their next turn."""
        self._table.fill(_EMPTY)
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
