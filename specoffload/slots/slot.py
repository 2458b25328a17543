"""A slot: one sequence of the target and of the draft, and what they hold of past requests.

A recurrent memory cannot be cut where a new prompt differs. So a checkpoint is kept of the end of
each prompt, as llama.cpp's server does (--ctx-checkpoints): a conversation that goes on differently
is evaluated again from the last prompt that both have in common, not from its first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from offload.errors import BadRequest
from offload.sequences import Checkpoint, Sequences
from specdec.types import Target
from specoffload.slots.sequence_file import read_sequence, write_sequence


class Slot:
    """Sequence `number` of the target, and of the draft model if there is one."""

    def __init__(
        self, number: int, target: Sequences, draft: Target | None, n_checkpoints: int
    ) -> None:
        self.number = number
        self.is_busy = False
        self.last_used = 0  # a running number, greater for later
        self.tokens: list[int] = []  # those that the target holds, while no request runs
        self._target, self._draft = target, draft
        self._checkpoints: deque[Checkpoint] = deque(maxlen=n_checkpoints)

    @property
    def n_held(self) -> int:
        """Tokens that the target holds now."""
        return self._target.length(self.number)

    @property
    def checkpoints(self) -> tuple[Checkpoint, ...]:
        return tuple(self._checkpoints)

    def reusable(self, tokens: Sequence[int]) -> int:
        """The number of tokens of a prompt that need not be evaluated here. Its last always is."""
        n = common(self.tokens, tokens)
        if self._target.can_drop(self.number, self.n_held - n):
            return n
        return max((c.length for c in self._checkpoints if c.length <= n), default=0)

    def reuse(self, tokens: Sequence[int]) -> int:
        """Cut the sequence back to what it shares with `tokens`, without the last of them, which
        is evaluated anew; how many tokens it holds then."""
        target, number = self._target, self.number
        n = common(self.tokens, tokens)
        self._drop_checkpoints(n)
        self.tokens = []  # until it is known what is left
        if target.can_drop(number, target.length(number) - n):
            target.rewind(number, n)
        elif self._checkpoints:
            target.restore(number, self._checkpoints[-1])
        else:
            target.rewind(number, 0)
        self.tokens = list(tokens[: self.n_held])
        return self.n_held

    def mark(self) -> None:
        """The prompt has been evaluated: keep a checkpoint of it where cutting is impossible."""
        newest = self._checkpoints[-1].length if self._checkpoints else 0
        if not self._target.can_rewind and self._checkpoints.maxlen and self.n_held > newest:
            self._checkpoints.append(self._target.checkpoint(self.number, lasting=True))

    def keep(self, history: Sequence[int]) -> None:
        """The sequence holds the beginning of `history`."""
        self.tokens = list(history[: self.n_held])
        self._drop_checkpoints(len(self.tokens))

    def clear(self) -> None:
        """Drop everything, the draft's too: its cells are for others."""
        self._target.rewind(self.number, 0)
        if self._draft is not None:
            self._draft.rewind(self.number, 0)
        self.tokens = []
        self._checkpoints.clear()

    def share(self, source: Slot, n_tokens: int, tokens: Sequence[int]) -> None:
        """Begin with the first `n_tokens` of another slot, which are those of `tokens`."""
        self.clear()
        self._target.share(source.number, self.number, n_tokens)
        self.tokens = list(tokens[:n_tokens])

    @property
    def saved_bytes(self) -> int:
        """The size of what is held, and of its checkpoints, in host memory."""
        return self._target.saved_bytes(self.number) + sum(len(c.state) for c in self._checkpoints)

    def save(self) -> bytes:
        """All that the target holds, for `load`."""
        return self._target.save(self.number)

    def load(self, tokens: Sequence[int], state: bytes, checkpoints: Sequence[Checkpoint]) -> None:
        """Hold what a slot held when it was saved, with its checkpoints. Raises DeviceFailed when
        there is no room for it: the slot is empty then."""
        self.clear()
        self._target.load(self.number, state, len(tokens))
        self.tokens = list(tokens)
        self._checkpoints.extend(self._target.adopted(self.number, c) for c in checkpoints)

    def write(self, path: Path) -> int:
        """Write what the slot holds to a file; its bytes. Raises OSError, BadRequest."""
        if not self.tokens:
            raise BadRequest(f"slot {self.number} holds nothing to save")
        return write_sequence(path, self._target, self.number, self.tokens)

    def read(self, path: Path) -> int:
        """Hold what was written to a file; its bytes. Raises OSError, BadRequest: then the slot
        is empty."""
        self.clear()
        self.tokens, n_bytes = read_sequence(path, self._target, self.number)
        self.mark()
        return n_bytes

    def _drop_checkpoints(self, n_tokens: int) -> None:
        """Those of more than `n_tokens`."""
        while self._checkpoints and self._checkpoints[-1].length > n_tokens:
            self._checkpoints.pop()


def common(held: Sequence[int], tokens: Sequence[int]) -> int:
    """The tokens that both begin with, not counting the last of `tokens`: its logits are wanted."""
    n = 0
    for a, b in zip(held, tokens[:-1], strict=False):
        if a != b:
            break
        n += 1
    return n
