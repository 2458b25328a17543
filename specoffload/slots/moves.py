"""Copies of slots' texts to RAM and back, made part by part between the decodes of others."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from offload.errors import DeviceFailed
from specoffload.slots.choosing import StoredPrompt
from specoffload.slots.slot import Slot


class LeavingPrompt:
    """The copy of an idle slot's text. The slot keeps its cells until all is copied."""

    def __init__(self, slot: Slot) -> None:
        self.slot, self._tokens = slot, slot.tokens
        self._saving = slot.saving()
        self._prompt: StoredPrompt | None = None  # the whole copy
        self.spent_s = 0.0

    @property
    def is_void(self) -> bool:
        """True if the slot has changed since, or runs a request."""
        return self.slot.is_busy or self.slot.tokens is not self._tokens

    def advance(self) -> bool:
        """Copy a part. Returns True when all is copied. Raises DeviceFailed, MemoryError."""
        began_s = perf_counter()
        try:
            next(self._saving)
        except StopIteration as e:
            if e.value is None:
                raise DeviceFailed("an earlier part of the copy has failed") from None
            self._prompt = e.value
        self.spent_s += perf_counter() - began_s
        return self._prompt is not None

    def whole(self) -> StoredPrompt:
        """Copy what is left, and return the copy. Raises what `advance` raises."""
        while self._prompt is None:
            self.advance()
        return self._prompt


class ComingPrompt:
    """A kept prompt that is copied into a slot, which a request waits for."""

    def __init__(self, slot: Slot, stored: StoredPrompt, *, is_from_disk: bool) -> None:
        self.slot, self.stored, self.is_from_disk = slot, stored, is_from_disk
        self._loading = slot.loading(stored)
        self._has_failed = False
        self.spent_s = 0.0

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens that the slot holds so far."""
        return self.stored.tokens[: self.slot.n_held]

    def advance(self) -> bool:
        """Copy a part. Returns True when all is copied. Raises DeviceFailed, MemoryError."""
        if self._has_failed:
            raise DeviceFailed("an earlier part of the copy has failed")
        began_s, self._has_failed = perf_counter(), True
        is_whole = next(self._loading, True) is True
        self._has_failed = False
        self.spent_s += perf_counter() - began_s
        return is_whole


def advance_for(most_s: float, advance: Callable[[], bool]) -> bool:
    """Call `advance` for about `most_s` seconds, at least once. Returns True if it ended.

    It is not called again if another call as long as the last one would exceed the time.
    """
    end_s = perf_counter() + most_s
    while True:
        began_s = perf_counter()
        if advance():
            return True
        now_s = perf_counter()
        if now_s + (now_s - began_s) > end_s:
            return False
