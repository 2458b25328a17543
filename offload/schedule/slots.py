"""Slots of device memory with their states, and the arguments and results of a schedule. Pure.

A *pool* is device memory cut into equal *slots*. One slot holds one *piece*, which is named
`(group, expert)`: gate, up and down of one expert of a layer, or a dense weight as `(group, 0)`.

    FREE ──load──> LOADING ──landed──> READY <──acquire, release──> IN_USE
      ^               │                  │                            │
      └───────────────┴──────evict───────┘                            │
      └───────────────────────────────abort───────────────────────────┘

    FREE      holds nothing
    LOADING   its copy is in the copy queue; no computation may read it yet
    READY     later computations are ordered behind its copy and may read it
    IN_USE    entered cuts read it; cuts can share a slot, so its users are counted
    CLOSED    a lent slot whose bytes graphs use; it holds nothing (offload/schedule/lending.py)

1. A state changes when a move is *decided*, not when the device performs it. READY means that the
   compute queue contains a wait for the copy, not that the bytes have arrived.
2. All copies go through one queue in order. So a LOADING slot may be given to another piece: the
   later copy then overwrites the earlier one. A copy into a slot has to wait for the slot's
   `last_use`.
3. A piece is in at most one slot.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Piece = tuple[int, int]
NOWHERE = -1  # the slot of a piece that has none
_LEAST_EXPERTS = 64  # least length of a group's array of slots

FREE, LOADING, READY, IN_USE, CLOSED = range(5)
STATES = ("free", "loading", "ready", "in use", "closed")

# Reasons to copy a piece. NEEDED: the computation is at the cut that reads it. AHEAD: a later cut
# of this graph reads it. PREDICTED: it is guessed for a later cut. PROMOTED: it is for later
# graphs. FILLED: it is copied between two graphs, while no computation waits.
NEEDED, AHEAD, PREDICTED, PROMOTED = "needed", "ahead", "predicted", "promoted"
FILLED = "filled"
REASONS = ("", NEEDED, AHEAD, PREDICTED, PROMOTED, FILLED)  # a reason's number is its position


class CutNeed(NamedTuple):
    """The pieces of one pool that a cut uses; a piece may occur twice.

    `contiguous`: the pieces are experts 0..n-1 of one group, and must be in slots [r*n, (r+1)*n) in
    order for some r, so that the router's ids are slot numbers. `ring`: the pieces are not kept for
    later, and pass through at most this many slots of the pool (offload/schedule/passes.py). 0: the
    pieces are kept.
    """

    cut: int
    pool: int
    pieces: tuple[Piece, ...]
    contiguous: bool = False
    ring: int = 0


class Copy(NamedTuple):
    """Copy the piece into the slot, after the use with number `after` has finished."""

    pool: int
    slot: int
    piece: Piece
    cut: int
    reason: str
    after: int | None  # None: nothing has ever read the slot


class Span(NamedTuple):
    """Copy experts `expert`..`expert + n - 1` of a group into slots `slot`..`slot + n - 1`."""

    pool: int
    slot: int
    group: int
    expert: int
    n: int
    after: int | None  # as in Copy


class Entered(NamedTuple):
    """The slots that an entered cut reads, and the copies that it has to wait for."""

    slots: tuple[int, ...]  # slots in the order of the need's pieces
    waits: tuple[Piece, ...]  # pieces whose copies the computation has to wait for
    issued: tuple[Copy, ...]  # copies to enqueue before waiting
    hits: int  # pieces that were in slots, cached or guessed, before the need was known
    misses: int  # pieces that were copied because of the need
    use: int  # number of this use of the slots; grows by one with each cut


def coalesce(copies: Iterable[Copy]) -> list[Span]:
    """Join copies of neighbouring experts into neighbouring slots, in their order.

    Only consecutive copies are joined, so no copy overtakes one that is needed earlier.
    """
    spans: list[Span] = []
    for pool, slot, (group, expert), _, _, after in copies:
        if spans:
            last = spans[-1]
            n = last.n
            if (
                last.slot + n == slot
                and last.expert + n == expert
                and last.group == group
                and last.pool == pool
            ):
                latest = last.after if after is None else max(after, last.after or 0)
                spans[-1] = Span(pool, last.slot, group, last.expert, n + 1, latest)
                continue
        spans.append(Span(pool, slot, group, expert, 1, after))
    return spans


@dataclass
class StreamCounters:
    """Counts of streaming's work since the engine was opened."""

    graphs: int = 0
    cuts: int = 0
    passes: int = 0  # passes over groups of a layer's experts
    bands: int = 0  # cuts whose nodes were given a range of the slots instead of all slots
    copies: int = 0
    streamed_bytes: int = 0
    bounced_bytes: int = 0  # copied bytes that went through a ring of pinned memory
    streamed_experts: int = 0
    router_reads: int = 0
    hits: int = 0  # pieces that were in slots before they were needed
    misses: int = 0
    evictions: int = 0
    prefetched_used: int = 0
    prefetched_wasted: int = 0
    n_pairs_hit: int = 0  # pairs in split layers, computed on the device without a copy
    n_pairs_streamed: int = 0  # pairs in split layers, computed on the device after a copy
    n_pairs_host: int = 0  # pairs in split layers, computed by the CPU
    n_promoted: int = 0  # experts of split layers that were copied for later batches
    # Graphs whose copies began while an earlier device computed, or the ubatch before.
    n_early: int = 0
    n_deferred: int = 0  # graphs computed while other devices computed the next ubatch
    n_filled: int = 0  # experts copied between two graphs, for a warm start
    n_recorded: int = 0  # tokens, counted in each layer, whose experts were recorded
    layers_out_of_order: int = 0  # whole layers that were read from any slots
    n_nodes_ahead: int = 0  # nodes that the device computed before the CPU's rows were placed
    whole_graphs: int = 0  # graphs submitted at once, as all experts were in slots in order
    layers_rung: int = 0  # split layers that ran without a wait of the host for the device
    rows_by_kernels: int = 0  # their rows that kernels read over the link, in place of a copy
    layers_ahead: int = 0  # layers computed before their ids were known, with all experts in slots
    layers_repeated: int = 0  # layers computed again, because they or earlier ones lacked experts
    n_repairs: int = 0  # times that the device computed layers again
    n_lent_copies: int = 0  # pieces that were copied into slots of the compute buffer
    n_lent_dropped: int = 0  # pieces that left such slots because a graph took their bytes
    cache_bytes: int = 0  # bytes of a KV cache in RAM that were copied to the device
    cache_ahead_bytes: int = 0  # those that were there before the layer that reads them
    n_small_plans: int = 0  # times that the scheduler planned a small graph, to free such slots
    # Choices of an expert for a token, in batches whose routers prefer cached experts.
    routed_choices: int = 0
    routed_kept: int = 0  # those that the router would have made, too
    routed_hits: int = 0  # those of experts that were in slots before the batch
    routed_own_hits: int = 0  # the router's own choices of such experts
    host_s: float = 0.0  # seconds in which the CPU computed pairs of split layers
    split_layers: int = 0
    # Seconds from the division of a layer until the CPU's rows were handed over.
    split_s: float = 0.0

    def __add__(self, other: StreamCounters) -> StreamCounters:
        names = [field.name for field in fields(self)]
        return StreamCounters(**{n: getattr(self, n) + getattr(other, n) for n in names})


class IllegalMove(AssertionError):
    """A slot was asked for a transition that is not allowed: a bug in the caller."""


class PoolSlots:
    """The slots of one pool. Other modules read the fields; only this class writes them.

    The player (offload/stream/play.py) reads the arrays too. It writes
    `last_use` when it uses slots.
    """

    __slots__ = ("_least_experts", "_of_group", "counts", "free", "last_use", "loading", "n_own",
                 "n_slots", "piece", "state", "users", "where")  # fmt: skip

    def __init__(self, n_slots: int, n_experts: int = 0, n_lent: int = 0) -> None:
        """`n_experts`: most experts of a group, so that arrays of groups keep their addresses.

        `n_lent`: slots after the first `n_slots` ones that are not always there. They are CLOSED
        at first.
        """
        if n_slots < 1:
            raise ValueError(f"a pool needs at least one slot, not {n_slots}")
        self.n_own, n_slots = n_slots, n_slots + n_lent
        self.n_slots = n_slots
        self.state = array("i", [FREE]) * self.n_own + array("i", [CLOSED]) * n_lent
        self.piece: list[Piece | None] = [None] * n_slots
        self.users = [0] * n_slots
        self.last_use = array("q", [0]) * n_slots  # 0: never used
        self.where: dict[Piece, int] = {}
        self.loading: dict[int, set[int]] = {}  # group -> experts whose slots are LOADING
        self._least_experts = max(_LEAST_EXPERTS, n_experts)
        self._of_group: dict[int, NDArray[np.int32]] = {}  # `where` as an array for each group
        # The last key is given out first.
        self.free = dict.fromkeys(range(self.n_own - 1, -1, -1))
        self.counts = [self.n_own, 0, 0, 0, n_lent]  # slots by state

    def __repr__(self) -> str:
        free, loading, ready, in_use, closed = self.counts
        return (
            f"PoolSlots({self.n_slots}: {ready} ready, {in_use} in use, {loading} loading, "
            f"{free} free, {closed} closed)"
        )

    def _move(self, slot: int, old: tuple[int, ...], new: int) -> None:
        state = self.state[slot]
        if state not in old:
            raise IllegalMove(f"slot {slot} is {STATES[state]} and cannot become {STATES[new]}")
        self.state[slot] = new
        self.counts[state] -= 1
        self.counts[new] += 1

    def of_group(self, group: int, n_experts: int) -> NDArray[np.int32]:
        """Return the slot of each expert of a group, or NOWHERE: [n_experts], read-only."""
        slots = self._of_group.get(group)
        if slots is None or len(slots) < n_experts:
            wider = np.full(max(self._least_experts, n_experts), NOWHERE, np.int32)
            if slots is not None:
                wider[: len(slots)] = slots
            slots = self._of_group[group] = wider
        return slots[:n_experts]

    def load(self, slot: int, piece: Piece) -> None:
        """Give a free slot to a piece without a slot. The caller enqueues the copy."""
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
        """End a submitted use of these slots. `acquire` has already set their `last_use`."""
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

    def close(self, slot: int) -> None:
        """Close a free slot: its bytes belong to somebody else."""
        self._move(slot, (FREE,), CLOSED)
        del self.free[slot]

    def reopen(self, slot: int) -> None:
        """Make a closed slot free."""
        self._move(slot, (CLOSED,), FREE)
        self.free[slot] = None

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
