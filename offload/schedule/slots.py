"""The state of every slot of device memory, with legal transitions only. Pure.

A *pool* is device memory cut into equal *slots*. A *piece* `(group, expert)` is what one slot
holds: gate, up and down of one expert of a layer, or a dense weight as `(group, 0)`.

    FREE ──load──> LOADING ──landed──> READY <──acquire, release──> IN_USE
      ^               │                  │                            │
      └───────────────┴──────evict───────┘                            │
      └───────────────────────────────abort───────────────────────────┘

    FREE      holds nothing
    LOADING   its copy is in the copy queue; no computation may read it yet
    READY     later computations are ordered behind its copy and may read it
    IN_USE    entered cuts read it; cuts can share a slot, so its users are counted

1. A state changes when something is *decided*, not when the device does it. READY means that the
   compute queue contains the wait, not that the bytes have arrived.
2. All copies go through one queue in order. So a LOADING slot may be given to another piece: the
   later copy lands later. `last_use` is the use of a slot that a copy into it has to come after.
3. A piece is in at most one slot.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Piece = tuple[int, int]
NOWHERE = -1  # the slot of a piece that has none
_LEAST_EXPERTS = 64  # initial length of a group's array

FREE, LOADING, READY, IN_USE = range(4)
STATES = ("free", "loading", "ready", "in use")


class IllegalMove(AssertionError):
    """A slot was asked for a transition that is not allowed: a bug in the caller."""


class PoolSlots:
    """The slots of one pool. Other modules read the fields; only this class writes them."""

    __slots__ = ("_of_group", "counts", "free", "last_use", "loading", "n_slots", "piece", "state",
                 "users", "where")  # fmt: skip

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"a pool needs at least one slot, not {n_slots}")
        self.n_slots = n_slots
        self.state = [FREE] * n_slots
        self.piece: list[Piece | None] = [None] * n_slots
        self.users = [0] * n_slots
        self.last_use = [0] * n_slots  # 0: never used
        self.where: dict[Piece, int] = {}
        self.loading: dict[int, set[int]] = {}  # group -> experts whose slots are LOADING
        self._of_group: dict[int, NDArray[np.int32]] = {}  # `where` as an array for each group
        self.free = dict.fromkeys(range(n_slots - 1, -1, -1))  # the last key is given out first
        self.counts = [n_slots, 0, 0, 0]  # slots by state

    def _move(self, slot: int, old: tuple[int, ...], new: int) -> None:
        state = self.state[slot]
        if state not in old:
            raise IllegalMove(f"slot {slot} is {STATES[state]} and cannot become {STATES[new]}")
        self.state[slot] = new
        self.counts[state] -= 1
        self.counts[new] += 1

    def of_group(self, group: int, n_experts: int) -> NDArray[np.int32]:
        """Return the slot of each expert of a group, or NOWHERE: [n_experts], read-only."""
        found = self._of_group.get(group)
        if found is None or len(found) < n_experts:
            wider = np.full(max(_LEAST_EXPERTS, n_experts), NOWHERE, np.int32)
            if found is not None:
                wider[: len(found)] = found
            found = self._of_group[group] = wider
        return found[:n_experts]

    def load(self, slot: int, piece: Piece) -> None:
        """Give a free slot to a piece without a slot. Its copy is in the copy queue."""
        if piece in self.where:
            raise IllegalMove(f"piece {piece} is already in slot {self.where[piece]}")
        self._move(slot, (FREE,), LOADING)
        del self.free[slot]
        self.piece[slot] = piece
        self.where[piece] = slot
        group, expert = piece
        self.of_group(group, expert + 1)[expert] = slot
        self.loading.setdefault(group, set()).add(expert)

    def landed(self, slot: int) -> None:
        """Make a LOADING slot READY: its copy is complete, or the computation waits for it."""
        self._move(slot, (LOADING,), READY)
        self._no_longer_loading(slot)

    def _no_longer_loading(self, slot: int) -> Piece:
        piece = self.piece[slot]
        assert piece is not None
        group, expert = piece
        experts = self.loading.get(group)
        if experts is not None:
            experts.discard(expert)
        return piece

    def acquire(self, slots: Iterable[int], use: int) -> None:
        """Mark slots as read by use number `use`. They must be READY or IN_USE."""
        # The same as _move, without a call for every expert of every layer.
        state, users, last_use, counts = self.state, self.users, self.last_use, self.counts
        for slot in slots:
            if not users[slot] and state[slot] == READY:
                state[slot] = IN_USE
                counts[READY] -= 1
                counts[IN_USE] += 1
            elif state[slot] != IN_USE:
                raise IllegalMove(f"slot {slot} is {STATES[state[slot]]} and cannot become in use")
            users[slot] += 1
            last_use[slot] = use

    def release(self, slots: Iterable[int]) -> None:
        """End a use of these slots, which was submitted; `last_use` covers its reads."""
        users, state, counts = self.users, self.state, self.counts
        for slot in slots:
            if not users[slot]:
                raise IllegalMove(f"slot {slot} is released more often than it was acquired")
            users[slot] -= 1
            if not users[slot]:
                state[slot] = READY
                counts[IN_USE] -= 1
                counts[READY] += 1

    def evict(self, slot: int) -> Piece:
        """Free a slot that is not in use; return its piece."""
        return self._forget(slot, (LOADING, READY))

    def abort(self) -> list[tuple[int, Piece]]:
        """Free every slot whose contents a failed step leaves in doubt; return them."""
        doubtful = [s for s, state in enumerate(self.state) if state in (LOADING, IN_USE)]
        for slot in doubtful:
            self.users[slot] = 0
        return [(slot, self._forget(slot, (LOADING, IN_USE))) for slot in doubtful]

    def _forget(self, slot: int, old: tuple[int, ...]) -> Piece:
        self._move(slot, old, FREE)
        piece = self._no_longer_loading(slot)
        self.piece[slot] = None
        del self.where[piece]
        self._of_group[piece[0]][piece[1]] = NOWHERE
        self.free[slot] = None
        return piece
