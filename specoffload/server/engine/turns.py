"""Decides, from plain numbers, whose request is next and who gets a place in a full queue.

Clients are served by turns (round robin, as in J. Nagle, "On packet switches with infinite
storage", RFC 970). Turns alone are fair only to clients that are in the queue. If the queue is
full, a client that was just served asks first, and would get each place that becomes free. So
places are promised to clients that were refused and told when to come back. Without promises, 44
of 64 clients that share 4 slots and 16 places never got an answer in 1,920, whether their retries
were spread at random or not. With them, each got 28 to 32 (the play of tests/server/test_turns.py).

Announced waits are spread by up to 10 %, because waits longer than MOST_RETRY_AFTER_S are all cut
to it: clients refused at one moment would otherwise all come back at one moment.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_RETRY_AFTER_S = 60
_LEAST_RETRY_AFTER_S = 0.1
_GRACE_S = 2.0  # seconds that a client may be late, in addition to half of its announced wait
_MOST_PROMISES = 1024
_T = TypeVar("_T")


@dataclass
class _Promise:
    """A place promised to a client until `until_s`. It was told to retry at each of `due_s`."""

    due_s: list[float] = field(default_factory=list)
    until_s: float = 0.0


class FairQueue(Generic[_T]):
    """A queue of at most `limit` waiting requests, which serves clients by turns.

    The next request is the first one of the client with the fewest running requests. Ties go to the
    client that has waited longest since it came into the queue or had its last turn.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: OrderedDict[str, deque[_T]] = OrderedDict()  # clients in order of turns
        self._n_running: Counter[str] = Counter()
        self._promises: dict[str, _Promise] = {}  # in the order of the first refusals

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def enter(
        self, client: str, item: _T, *, n_slots: int, n_idle: int, place_s: float, now_s: float
    ) -> float | None:
        """Queue `item` and return None, or return the seconds after which to retry.

        Idle slots (`n_idle` of `n_slots`) count as places too. A place becomes free about every
        `place_s` seconds. Places promised to other clients are kept only while enough requests
        wait to keep the slots busy.
        """
        n_waiting = len(self)
        n_free = self.limit + n_idle - n_waiting
        is_low = n_waiting < n_idle + min(n_slots, self.limit // 2)
        if not is_low and self._n_before(client, now_s) >= n_free:
            return self._promise(client, place_s, now_s)
        self._promises.pop(client, None)
        self._waiting.setdefault(client, deque()).append(item)
        return None

    def full_words(self, now_s: float) -> str:
        """Return a sentence on why a request finds no place, for the client that was refused.

        Fewer requests than `limit` may wait then, because clients refused before keep a place.
        """
        self._drop_late(now_s)
        waiting = f"{len(self)} {'request waits' if len(self) == 1 else 'requests wait'}"
        n_kept = min(max(0, self.limit - len(self)), len(self._promises))
        kept = f", and {n_kept} places are kept for clients that were refused before"
        if n_kept == 1:
            kept = ", and a place is kept for a client that was refused before"
        return (
            f"the queue has no place for this request: {waiting}{kept if n_kept else ''}; "
            f"the limit is {self.limit} (--max-queue)"
        )

    def _drop_late(self, now_s: float) -> None:
        late = [name for name, promise in self._promises.items() if promise.until_s < now_s]
        for name in late:
            del self._promises[name]

    def _n_before(self, client: str, now_s: float) -> int:
        """Return the number of clients refused before this one that may still come back."""
        self._drop_late(now_s)
        names = list(self._promises)
        return names.index(client) if client in self._promises else len(names)

    def _promise(self, client: str, place_s: float, now_s: float) -> float:
        """Promise the client a place; returns the seconds until it is free.

        The clients refused before, and the client's own earlier requests, come first.
        """
        n_before = self._n_before(client, now_s)
        promise = self._promises.setdefault(client, _Promise())
        promise.due_s = [s for s in promise.due_s if s > now_s][-_MOST_PROMISES:]
        wait_s = min((n_before + len(promise.due_s) + 1) * place_s, float(MOST_RETRY_AFTER_S))
        promise.due_s.append(now_s + wait_s)
        promise.until_s = max(promise.until_s, now_s + 1.5 * wait_s + _GRACE_S)
        while len(self._promises) > _MOST_PROMISES:
            del self._promises[next(iter(self._promises))]
        return wait_s

    def next(self) -> _T:
        """Remove and return the next request, which counts as running until `ended` is called.

        The queue must not be empty.
        """
        client = min(self._waiting, key=lambda name: self._n_running[name])  # the first of equals
        item = self._waiting[client].popleft()
        if self._waiting[client]:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        self._n_running[client] += 1
        return item

    def ended(self, client: str) -> None:
        """Record that one of the client's running requests has ended."""
        self._n_running[client] -= 1
        if self._n_running[client] <= 0:
            del self._n_running[client]

    def remove(self, client: str, item: _T) -> None:
        """Remove a waiting request. Does nothing if it does not wait."""
        mine = self._waiting.get(client)
        if mine is None or item not in mine:
            return
        mine.remove(item)
        if not mine:
            del self._waiting[client]

    def clear(self) -> list[_T]:
        """Remove and return all waiting requests."""
        waited = [item for mine in self._waiting.values() for item in mine]
        self._waiting.clear()
        return waited


def spread_s(wait_s: float, chance: float) -> float:
    """Return `wait_s` changed by up to 10 %. `chance` is a random number between 0 and 1."""
    return min(max(wait_s, _LEAST_RETRY_AFTER_S) * (0.9 + chance / 5), MOST_RETRY_AFTER_S)


def whole_s(wait_s: float, chance: float) -> int:
    """Return `wait_s` rounded up or down at random, at least 1.

    `chance` is a random number between 0 and 1. On average, the result equals `wait_s`.
    """
    return max(1, min(MOST_RETRY_AFTER_S, math.floor(wait_s + chance)))
