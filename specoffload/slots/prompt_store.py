"""Prompts kept in host memory when their slot was needed for others (llama.cpp's --cache-ram)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.errors import DoesNotFit
from offload.sequences import Checkpoint
from specoffload.slots.slot import common


@dataclass(frozen=True)
class StoredPrompt:
    """A sequence as it was: its tokens, its state, and where a recurrent one can go back to."""

    tokens: tuple[int, ...]
    state: bytes
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def size_bytes(self) -> int:
        return len(self.state) + sum(len(c.state) for c in self.checkpoints)

    def reusable(self, tokens: Sequence[int], *, can_cut: bool) -> int:
        """The number of tokens of a prompt that need not be evaluated behind this."""
        n = common(self.tokens, tokens)
        if can_cut or n == len(self.tokens):
            return n
        return max((c.length for c in self.checkpoints if c.length <= n), default=0)


class PromptStore:
    """Stored prompts, the least recently used of which go when they exceed `limit_bytes` (None: no
    limit; 0: nothing is stored)."""

    def __init__(self, limit_bytes: int | None, *, can_cut: bool) -> None:
        """`can_cut` says whether a state that is longer than what is wanted of it has any use."""
        self._limit_bytes, self._can_cut = limit_bytes, can_cut
        self._prompts: list[StoredPrompt] = []  # the most recently used last

    @property
    def size_bytes(self) -> int:
        return sum(prompt.size_bytes for prompt in self._prompts)

    def __len__(self) -> int:
        return len(self._prompts)

    def fits(self, n_bytes: int) -> bool:
        """True if a prompt of that size can be stored, perhaps instead of all others."""
        return self._limit_bytes is None or n_bytes <= self._limit_bytes

    def add(
        self,
        tokens: Sequence[int],
        checkpoints: tuple[Checkpoint, ...],
        save: Callable[[], bytes],
    ) -> None:
        """Store what `save` gives; it is not called where that is of no use.

        Raises DoesNotFit for a prompt that is larger than the whole store.
        """
        if self._limit_bytes == 0 or any(self._serves(p.tokens, tokens) for p in self._prompts):
            return
        prompt = StoredPrompt(tuple(tokens), save(), checkpoints)
        if self._limit_bytes is not None and prompt.size_bytes > self._limit_bytes:
            raise DoesNotFit(
                f"its state takes {prompt.size_bytes / 2**20:.0f} MiB, and --cache-ram is "
                f"{self._limit_bytes / 2**20:.0f} MiB"
            )
        self._prompts = [p for p in self._prompts if not self._serves(tokens, p.tokens)]
        self._prompts.append(prompt)
        while self._limit_bytes is not None and self.size_bytes > self._limit_bytes:
            self._prompts.pop(0)

    def reusable(self, tokens: Sequence[int]) -> int:
        """The most tokens of a prompt that need not be evaluated behind a stored one."""
        return max((p.reusable(tokens, can_cut=self._can_cut) for p in self._prompts), default=0)

    def take(self, tokens: Sequence[int]) -> StoredPrompt:
        """The stored prompt that `reusable` found, which leaves the store."""
        best = max(self._prompts, key=lambda p: p.reusable(tokens, can_cut=self._can_cut))
        self._prompts.remove(best)
        return best

    def clear(self) -> None:
        self._prompts.clear()

    def _serves(self, longer: Sequence[int], shorter: Sequence[int]) -> bool:
        """True if whoever could use the state of `shorter` can use that of `longer` as well."""
        if not self._can_cut and len(longer) != len(shorter):
            return False
        return tuple(longer[: len(shorter)]) == tuple(shorter)
