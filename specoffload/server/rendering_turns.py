"""Decides which conversation is rendered next, and whether another process may start. Pure.

A conversation takes milliseconds or, if it is large or its template slow, seconds. So a process
that has taken long no longer counts as one of the quick ones, and another may take its place.
Clients take turns. Of one client's conversations the small ones come first, until a large one has
waited for `_PATIENCE_S`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_QUICK = 2  # processes that render and are not slow, as many as small machines have cores
# Kept beyond MOST_QUICK, because starting a process takes a second of processor time.
_MOST_SPARE = 1
MOST_PROCESSES = 8  # of which each takes about 60 MB
_PATIENCE_S = 2.0
_T = TypeVar("_T")


@dataclass
class _Waiting(Generic[_T]):
    client: str
    n_bytes: int
    since_s: float
    item: _T


@dataclass
class Turns(Generic[_T]):
    """The conversations that wait, and the clients of those that are being rendered."""

    n_quick: int = 0  # processes that render or are idle
    n_slow: int = 0  # processes that have rendered one conversation for long
    _waiting: list[_Waiting[_T]] = field(default_factory=list)
    _n_running: Counter[str] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def may_start(self) -> bool:
        """True if another process may start."""
        return self.n_quick < MOST_QUICK and self.n_quick + self.n_slow < MOST_PROCESSES

    @property
    def is_one_too_many(self) -> bool:
        """True if a process that has become quick again should end."""
        return self.n_quick > MOST_QUICK + _MOST_SPARE

    def enter(self, client: str, n_bytes: int, item: _T, now_s: float) -> None:
        self._waiting.append(_Waiting(client, n_bytes, now_s, item))

    def next(self, now_s: float) -> tuple[str, _T] | None:
        """Remove the next conversation and count it as running; returns its client and item."""
        if not self._waiting:
            return None

        def order(at: int) -> tuple[int, int, int]:
            one = self._waiting[at]
            is_late = now_s - one.since_s > _PATIENCE_S
            # Sizes count by powers of two, so that conversations of like size keep their order.
            return self._n_running[one.client], 0 if is_late else one.n_bytes.bit_length(), at

        one = self._waiting.pop(min(range(len(self._waiting)), key=order))
        self._n_running[one.client] += 1
        return one.client, one.item

    def ended(self, client: str) -> None:
        """Count a conversation of this client as no longer running."""
        self._n_running[client] -= 1
        if self._n_running[client] <= 0:
            del self._n_running[client]

    def clear(self) -> list[_T]:
        """Remove and return all that wait."""
        waited = [one.item for one in self._waiting]
        self._waiting.clear()
        return waited
