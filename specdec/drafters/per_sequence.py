"""State of drafters that outlives a turn of a conversation, one value per sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    tokens: list[int]
    is_stale: bool = False


class PerSequence(Generic[T]):
    """One value per sequence, made anew when its history does not go on from what was seen.

    Indexing takes 1 to 3 us a token, so that a long conversation would pay 0.1 s at each turn.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._entries: dict[int, _Entry[T]] = {}

    def of(self, sequence: int, history: Sequence[int]) -> T:
        """The sequence's value, to be brought up to `history` by the caller."""
        entry = self._entries.get(sequence)
        if entry is None or (entry.is_stale and not _goes_on(entry.tokens, history)):
            entry = self._entries[sequence] = _Entry(self._make(), [])
        entry.is_stale = False
        entry.tokens += history[len(entry.tokens) :]
        return entry.value

    def get(self, sequence: int) -> T | None:
        """The sequence's value as it is."""
        entry = self._entries.get(sequence)
        return None if entry is None else entry.value

    def forget(self, sequence: int) -> None:
        """The next history may be another: it is compared first."""
        entry = self._entries.get(sequence)
        if entry is not None:
            entry.is_stale = True

    def clear(self) -> None:
        """Drop every sequence's value."""
        self._entries.clear()


def _goes_on(tokens: list[int], history: Sequence[int]) -> bool:
    return len(tokens) <= len(history) and tokens == list(history[: len(tokens)])
