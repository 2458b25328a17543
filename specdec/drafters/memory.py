"""Which tokens a draft model holds, and which it lacks before a draft."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol, runtime_checkable

from specdec.types import Target

BATCHED_TAIL = 8  # most missing tokens that the draft's first decode evaluates


class TokenMemory(Protocol):
    """Tracks the tokens that a draft model holds for each sequence."""

    n_rows: int  # tokens decoded so far

    def n_unread(self, sequence: int, history: Sequence[int]) -> int:
        """The number of tokens that `tail` would evaluate before the draft's first decode."""

    def tail(self, sequence: int, history: Sequence[int]) -> tuple[list[int], float]:
        """The tokens that the draft must decode first, and the seconds spent on earlier ones."""

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the model was extended by these tokens."""

    def mark(self, sequence: int) -> None:
        """Record that all tokens held now are history. The tokens fed later are drafted ones."""

    def forget(self, sequence: int, n_same: int = 0) -> None:
        """Rely no longer on what is known of the model's tokens after the first `n_same`."""


@runtime_checkable
class ForgettingModel(Protocol):
    """A draft model whose memory may lack old keys, as sliding windows do."""

    def can_drop(self, sequence: int, n_tokens: int) -> bool:
        """True if `rewind` can remove the last `n_tokens` of the sequence now."""
        ...


class _HeldTokens:
    """The tokens and the checkpoint that one sequence of the model is known to hold."""

    __slots__ = ("checkpoint", "checkpoint_length", "n_checked", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_checked = 0  # number of first tokens known to equal the history
        self.checkpoint: object = None
        self.checkpoint_length = -1


class DraftMemory:
    """The sequences of a draft model, updated to the current text before each draft.

    Accepted tokens stay and rejected ones are rewound. So a round usually decodes one or two new
    tokens, and then all drafted tokens but the last.
    """

    def __init__(self, model: Target) -> None:
        self._model = model
        self._forgetting = model if isinstance(model, ForgettingModel) else None
        self._held: dict[int, _HeldTokens] = {}
        self.n_rows = 0  # tokens decoded so far

    def n_unread(self, sequence: int, history: Sequence[int]) -> int:
        held = self._held.get(sequence)
        n_held = 0
        # If the lengths differ, the model was emptied, and all is read again.
        if held is not None and self._model.length(sequence) == len(held.tokens):
            n_held = _n_same(held, history, min(len(held.tokens), len(history) - 1))
            if len(held.tokens) > n_held:
                n_held = self._n_after_cut(sequence, held, n_held)
        n = len(history) - n_held
        return n - 1 if n > BATCHED_TAIL else 0

    def tail(self, sequence: int, history: Sequence[int]) -> tuple[list[int], float]:
        """The last tokens of `history` that the model lacks, and the seconds spent on earlier ones.

        If more than BATCHED_TAIL tokens are missing, as after a new prompt, all but the last are
        evaluated here.
        """
        new = self._missing(sequence, history)
        if len(new) <= BATCHED_TAIL:
            return new, 0.0
        began = perf_counter()
        self._model.extend(sequence, new[:-1], 0)
        self.fed(sequence, new[:-1])
        return new[-1:], perf_counter() - began

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the model was extended by these tokens."""
        self._held[sequence].tokens += tokens
        self.n_rows += len(tokens)

    def mark(self, sequence: int) -> None:
        """Record that all tokens held now are history. The tokens fed later are drafted ones."""
        held = self._held[sequence]
        held.n_checked = len(held.tokens)
        if not self._model.can_rewind:
            held.checkpoint = self._model.checkpoint(sequence)
            held.checkpoint_length = len(held.tokens)

    def forget(self, sequence: int, n_same: int = 0) -> None:
        """Next time, compare the held tokens after the first `n_same` with the history."""
        if sequence in self._held:
            held = self._held[sequence]
            held.n_checked = min(held.n_checked, n_same)

    def settled(self, sequence: int) -> tuple[int, ...]:
        """Remove drafted tokens. Returns the tokens that the model then holds; (): not known."""
        held = self._held.get(sequence)
        if held is None or self._model.length(sequence) != len(held.tokens):
            return ()
        n = held.n_checked if self._model.can_rewind else held.checkpoint_length
        if 0 < n < len(held.tokens):
            self._cut(sequence, held, n)
        return tuple(held.tokens)

    def loaded(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the model holds these tokens, since a saved state of it was loaded."""
        held = self._held[sequence] = _HeldTokens()
        held.tokens = list(tokens)

    def _missing(self, sequence: int, history: Sequence[int]) -> list[int]:
        """Cut the model back to what it shares with `history`. Returns the tokens that it lacks."""
        held = self._held.setdefault(sequence, _HeldTokens())
        if self._model.length(sequence) != len(held.tokens):
            # After a failed decode, the model's tokens differ from those recorded here.
            self._model.rewind(sequence, 0)
            held = self._held[sequence] = _HeldTokens()
        # The last token of the history is always decoded, since its logits are needed.
        tokens, most = held.tokens, min(len(held.tokens), len(history) - 1)
        n = _n_same(held, history, most)
        if len(tokens) > n:
            n = self._cut(sequence, held, n)
        return list(history[n:])

    def _n_after_cut(self, sequence: int, held: _HeldTokens, n: int) -> int:
        """The number of tokens that `_cut` would leave."""
        if self._model.can_rewind:
            forgetting, n_dropped = self._forgetting, len(held.tokens) - n
            # 0: sliding windows have passed what comes before
            return n if forgetting is None or forgetting.can_drop(sequence, n_dropped) else 0
        return held.checkpoint_length if 0 <= held.checkpoint_length <= n else 0

    def _cut(self, sequence: int, held: _HeldTokens, n: int) -> int:
        """Rewind the model to at most `n` tokens. Returns the number that it then holds."""
        if self._model.can_rewind:
            n = self._n_after_cut(sequence, held, n)
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


def _n_same(held: _HeldTokens, history: Sequence[int], most: int) -> int:
    """The number of first tokens, at most `most`, that the model holds as in `history`."""
    n = min(held.n_checked, most)
    while n < most and held.tokens[n] == history[n]:
        n += 1
    return n
