"""Whose request is next, and who gets a place in a full queue: pure decisions over plain numbers.

Clients are served by turns (round robin, as in J. Nagle, "On packet switches with infinite
storage", RFC 970). A place that becomes free is kept for those who were told to come back: without
that it goes to whoever has just been served, since nobody asks sooner.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MOST_RETRY_AFTER_S = 60
_LEAST_RETRY_AFTER_S = 0.1
_GRACE_S = 2.0  # a client may come so much later than it was told, and half as much again
_MOST_PROMISES = 1024
_T = TypeVar("_T")


class Turns(Generic[_T]):
    """Requests that wait. Next is the first of the client with the fewest at work, and among those
    of the one that has waited longest since its last turn."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[_T]] = OrderedDict()  # in the order of their turns
        self._n_running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, client: str, item: _T) -> None:
        self._waiting.setdefault(client, deque()).append(item)

    def next(self) -> _T:
        """Takes what is next; it is at work until `ended`. Raises IndexError when nothing waits."""
        if not self._waiting:
            raise IndexError("nothing waits")
        client = min(self._waiting, key=lambda name: self._n_running[name])  # the first of equals
        item = self._waiting[client].popleft()
        if self._waiting[client]:
            self._waiting.move_to_end(client)
        else:
            del self._waiting[client]
        self._n_running[client] += 1
        return item

    def ended(self, client: str) -> None:
        """One that was at work is so no more."""
        self._n_running[client] -= 1
        if self._n_running[client] <= 0:
            del self._n_running[client]

    def remove(self, client: str, item: _T) -> None:
        """Forget one that waits, if it does."""
        mine = self._waiting.get(client)
        if mine is None or item not in mine:
            return
        mine.remove(item)
        if not mine:
            del self._waiting[client]

    def clear(self) -> list[_T]:
        """All that waited."""
        waited = [item for mine in self._waiting.values() for item in mine]
        self._waiting.clear()
        return waited


@dataclass
class _Promise:
    """Of a client that was refused. `due_s` are the times at which it was told to come back."""

    due_s: list[float] = field(default_factory=list)
    until_s: float = 0.0  # is kept so long


class Promises:
    """Who was told to come back, in the order in which they were first refused."""

    def __init__(self) -> None:
        self._promises: dict[str, _Promise] = {}

    def n_before(self, client: str, now_s: float) -> int:
        """Clients that were refused before this one was, and may still come back."""
        late = [name for name, promise in self._promises.items() if promise.until_s < now_s]
        for name in late:
            del self._promises[name]
        names = list(self._promises)
        return names.index(client) if client in self._promises else len(names)

    def keep(self, client: str) -> None:
        """It has come back and was let in."""
        self._promises.pop(client, None)

    def give(self, client: str, place_s: float, now_s: float) -> float:
        """The seconds after which the client finds a place, where one becomes free each `place_s`:
        after those before it, and its own that were refused before."""
        n_before = self.n_before(client, now_s)
        promise = self._promises.setdefault(client, _Promise())
        promise.due_s = [s for s in promise.due_s if s > now_s][-_MOST_PROMISES:]
        wait_s = min((n_before + len(promise.due_s) + 1) * place_s, float(MOST_RETRY_AFTER_S))
        promise.due_s.append(now_s + wait_s)
        promise.until_s = max(promise.until_s, now_s + 1.5 * wait_s + _GRACE_S)
        while len(self._promises) > _MOST_PROMISES:
            del self._promises[next(iter(self._promises))]
        return wait_s


class FairQueue(Generic[_T]):
    """At most `limit` requests that wait, by turns."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._turns: Turns[_T] = Turns()
        self._promises = Promises()

    def __len__(self) -> int:
        return len(self._turns)

    def enter(
        self, client: str, item: _T, *, n_slots: int, n_idle: int, place_s: float, now_s: float
    ) -> float | None:
        """None when the request waits now, for one of the `n_idle` of `n_slots` slots too.

        Else there is no place for it: the seconds after which there is, one becoming free each
        `place_s`. An empty place that is promised stays empty only while enough others wait to keep
        the slots at work.
        """
        n_waiting = len(self._turns)
        n_free = self.limit + n_idle - n_waiting
        is_low = n_waiting < n_idle + min(n_slots, self.limit // 2)
        n_before = 0 if is_low else self._promises.n_before(client, now_s)
        if n_before >= n_free:
            return self._promises.give(client, place_s, now_s)
        self._promises.keep(client)
        self._turns.add(client, item)
        return None

    def next(self) -> _T:
        """As `Turns.next`."""
        return self._turns.next()

    def ended(self, client: str) -> None:
        self._turns.ended(client)

    def remove(self, client: str, item: _T) -> None:
        self._turns.remove(client, item)

    def clear(self) -> list[_T]:
        return self._turns.clear()


def spread_s(wait_s: float, chance: float) -> float:
    """`wait_s`, by a number between 0 and 1 up to 10 % less or more."""
    return min(max(wait_s, _LEAST_RETRY_AFTER_S) * (0.9 + chance / 5), MOST_RETRY_AFTER_S)


def whole_s(wait_s: float, chance: float) -> int:
    """One of the whole seconds around it, 1 at least; by a number between 0 and 1, right on
    average."""
    return max(1, min(MOST_RETRY_AFTER_S, math.floor(wait_s + chance)))
