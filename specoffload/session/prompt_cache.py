"""Finds how much of a prompt the target's sequence holds, and goes back to where a new one differs.

A recurrent memory cannot be cut there. So a checkpoint is kept of the end of each prompt, as
llama.cpp's server does (--ctx-checkpoints): a conversation that goes on differently is
evaluated again from the last prompt that both have in common, not from its first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from offload.engine import Engine
from offload.sequences import Checkpoint


class PromptCache:
    """The tokens that `sequence` of `target` holds, and checkpoints on the way to them."""

    def __init__(self, target: Engine, sequence: int, n_checkpoints: int) -> None:
        self._target, self._sequence = target, sequence
        self._held: list[int] = []
        self._checkpoints: deque[Checkpoint] = deque(maxlen=n_checkpoints)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Cut the sequence back to what it shares with `tokens`, without the last of them, which
        is evaluated anew; how many tokens it holds then."""
        target, sequence = self._target, self._sequence
        common = 0
        for held, wanted in zip(self._held, tokens[:-1], strict=False):
            if held != wanted:
                break
            common += 1
        while self._checkpoints and self._checkpoints[-1].length > common:
            self._checkpoints.pop()
        self._held = []  # until it is known what is left
        if target.sequences.can_drop(sequence, target.sequences.length(sequence) - common):
            target.sequences.rewind(sequence, common)
        elif self._checkpoints:
            target.sequences.restore(sequence, self._checkpoints[-1])
        else:
            target.sequences.rewind(sequence, 0)
        n_held = target.sequences.length(sequence)
        self._held = list(tokens[:n_held])
        return n_held

    def mark(self) -> None:
        """The prompt has been evaluated: keep a checkpoint of it where cutting is impossible."""
        target, sequence = self._target, self._sequence
        length = target.sequences.length(sequence)
        newest = self._checkpoints[-1].length if self._checkpoints else 0
        if not target.sequences.can_rewind and self._checkpoints.maxlen and length > newest:
            self._checkpoints.append(target.sequences.checkpoint(sequence, lasting=True))

    def keep(self, history: Sequence[int]) -> None:
        """The sequence holds the beginning of `history`."""
        self._held = list(history[: self._target.sequences.length(self._sequence)])
        while self._checkpoints and self._checkpoints[-1].length > len(self._held):
            self._checkpoints.pop()

    def forget(self) -> None:
        """Drop everything: the next prompt is evaluated whole."""
        self._target.sequences.rewind(self._sequence, 0)
        self._held.clear()
        self._checkpoints.clear()
