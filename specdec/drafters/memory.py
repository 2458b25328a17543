"""A draft model's memory, brought up to a text: what is known of it, and what it lacks.

It is kept for what was accepted and rolled back to what was kept, so that a round decodes one or
two new tokens and then one per drafted token; the last drafted is never decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from specdec.types import Target

BATCHED_TAIL = 8  # new tokens of a sequence that may join the others' decode


class _Held:
    """One sequence of the model's memory, as far as it is known here."""

    __slots__ = ("catch_up_s", "checkpoint", "checkpoint_length", "n_checked", "tokens")

    def __init__(self) -> None:
        self.catch_up_s = 0.0  # of the draft in hand
        self.tokens: list[int] = []
        self.n_checked = 0  # of them, known to equal the history
        self.checkpoint: object = None
        self.checkpoint_length = -1


class DraftMemory:
    """The sequences of `model`, which nobody else writes to."""

    def __init__(self, model: Target) -> None:
        self._model = model
        self._held: dict[int, _Held] = {}
        self.n_rows = 0  # tokens decoded so far, to see that none is evaluated twice

    def catch_up(self, sequence: int, history: Sequence[int]) -> NDArray[np.float32]:
        """Make the model hold `history`; logits [n_vocab] after it."""
        new = self.tail(sequence, history)
        logits: NDArray[np.float32] = self._model.extend(sequence, new, 1)[0]
        self.fed(sequence, new)
        self.mark(sequence)
        return logits

    def step(self, sequence: int, token: int) -> NDArray[np.float32]:
        """Append one drafted token; logits [n_vocab] after it."""
        logits: NDArray[np.float32] = self._model.extend(sequence, [token], 1)[0]
        self.fed(sequence, (token,))
        return logits

    def catch_up_s(self, sequence: int) -> float:
        """Seconds that the last `tail` took to evaluate what no draft step is charged with."""
        return self._held[sequence].catch_up_s

    def tail(self, sequence: int, history: Sequence[int]) -> list[int]:
        """The last tokens the model lacks, few enough for a step; the others are evaluated here,
        and the time that takes is set apart, for it comes once per prompt."""
        new = self._missing(sequence, history)
        held = self._held[sequence]
        held.catch_up_s = 0.0
        if len(new) > BATCHED_TAIL:
            began = perf_counter()
            self._model.extend(sequence, new[:-1], 0)
            self.fed(sequence, new[:-1])
            held.catch_up_s = perf_counter() - began
            new = new[-1:]
        return new

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        """The model was extended by these."""
        self._held[sequence].tokens += tokens
        self.n_rows += len(tokens)

    def mark(self, sequence: int) -> None:
        """All that is held now is history; from here on it is draft."""
        held = self._held[sequence]
        held.n_checked = len(held.tokens)
        if not self._model.can_rewind:
            held.checkpoint = self._model.checkpoint(sequence)
            held.checkpoint_length = len(held.tokens)

    def forget(self, sequence: int) -> None:
        """The history may be another: what is held is compared from its first token."""
        held = self._held.get(sequence)
        if held is not None:
            held.n_checked = 0

    def _missing(self, sequence: int, history: Sequence[int]) -> list[int]:
        """Cut the model back to what it shares with `history`; the tokens it lacks."""
        held = self._held.setdefault(sequence, _Held())
        if self._model.length(sequence) != len(held.tokens):
            # A decode failed: what a recurrent memory held went with it, or it was not noted here.
            self._model.rewind(sequence, 0)
            held.tokens, held.n_checked = [], 0
            held.checkpoint, held.checkpoint_length = None, -1
        n = _n_common(held, history)
        if len(held.tokens) > n:
            n = self._cut(sequence, held, n)
        return list(history[n:])

    def _cut(self, sequence: int, held: _Held, n: int) -> int:
        """Roll the model back to at most `n` tokens; how many it holds then."""
        if self._model.can_rewind:
            self._model.rewind(sequence, n)
        elif 0 <= held.checkpoint_length <= n:
            self._model.restore(sequence, held.checkpoint)
            n = held.checkpoint_length
        else:
            self._model.rewind(sequence, 0)
            n = 0
            held.checkpoint, held.checkpoint_length = None, -1
        del held.tokens[n:]
        return n


def _n_common(held: _Held, history: Sequence[int]) -> int:
    """The number of tokens held that are the history's. Its last never counts: its logits are
    wanted."""
    tokens, most = held.tokens, min(len(held.tokens), len(history) - 1)
    n = min(held.n_checked, most)
    while n < most and tokens[n] == history[n]:
        n += 1
    return n
