"""A model of a device with two queues, for tests of the schedule.

Copies run in one queue in order, computations in another. Tests advance each queue by half steps: a
copy in progress has destroyed its slot's old piece, and a computation in progress still reads.
Reading wrong weights raises AssertionError.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from offload.errors import DoesNotFit
from offload.schedule.schedule import Schedule
from offload.schedule.slots import (
    FREE,
    IN_USE,
    LOADING,
    NOWHERE,
    STATES,
    Copy,
    CutNeed,
    Entered,
    Piece,
    PoolSlots,
    coalesce,
)

Place = tuple[int, int]  # pool, slot


@dataclass
class Transfer:
    number: int
    after: int | None
    writes: dict[Place, Piece]
    started: bool = False


@dataclass
class Kernel:
    use: int
    cut: int
    waits: int  # number of transfers that must land first
    reads: dict[Place, Piece]
    started: bool = False


@dataclass
class Machine:
    """Executes commands. Raises AssertionError if wrong weights would be read."""

    memory: dict[Place, Piece | None] = field(default_factory=dict)
    copies: deque[Transfer] = field(default_factory=deque)
    kernels: deque[Kernel] = field(default_factory=deque)
    computed: list[tuple[int, tuple[Piece, ...]]] = field(default_factory=list)
    n_enqueued: int = 0
    n_landed: int = 0
    last_finished: int = 0
    ticket_of: dict[Piece, int] = field(default_factory=dict)

    def enqueue(self, copies: Sequence[Copy]) -> None:
        places = [(copy.pool, copy.slot) for copy in copies]
        assert len(places) == len(set(places)), "two copies of one batch into the same slot"
        for span in coalesce(copies):
            writes: dict[Place, Piece] = {
                (span.pool, span.slot + i): (span.group, span.expert + i) for i in range(span.n)
            }
            self.n_enqueued += 1
            self.copies.append(Transfer(self.n_enqueued, span.after, writes))
            for piece in writes.values():
                self.ticket_of[piece] = self.n_enqueued

    def submit(self, cut: int, pool: int, pieces: tuple[Piece, ...], entered: Entered) -> None:
        waits = max((self.ticket_of[piece] for piece in entered.waits), default=0)
        reads = {(pool, s): p for s, p in zip(entered.slots, pieces, strict=True)}
        self.kernels.append(Kernel(entered.use, cut, waits, reads))

    def step_copy(self) -> bool:
        """Advance the copy queue by half a copy; False if it cannot."""
        if not self.copies:
            return False
        transfer = self.copies[0]
        if transfer.after is not None and transfer.after > self.last_finished:
            return False
        for place in transfer.writes:
            reader = next((k for k in self.kernels if k.started and place in k.reads), None)
            assert reader is None, f"{place} is overwritten while cut {reader} reads it"
        if not transfer.started:
            transfer.started = True
            self.memory.update(dict.fromkeys(transfer.writes))
        else:
            self.copies.popleft()
            self.memory.update(transfer.writes)
            self.n_landed = transfer.number
        return True

    def step_compute(self) -> bool:
        """Advance the compute queue by half a computation; False if it cannot."""
        if not self.kernels:
            return False
        kernel = self.kernels[0]
        if kernel.waits > self.n_landed:
            return False
        for place, piece in kernel.reads.items():
            found = self.memory.get(place)
            assert found == piece, f"cut {kernel.cut} reads {found} at {place} instead of {piece}"
        if not kernel.started:
            kernel.started = True
        else:
            self.kernels.popleft()
            self.last_finished = kernel.use
            self.computed.append((kernel.cut, tuple(kernel.reads.values())))
        return True

    def finish(self, until: Callable[[], bool] | None = None) -> None:
        """Run both queues empty, or until the condition holds."""
        while not (until() if until else not (self.copies or self.kernels)):
            moved = self.step_compute()
            assert self.step_copy() or moved, "deadlock: neither queue can advance"


@dataclass
class Graph:
    """One graph to run: the needs of each cut, the cuts known at the start, and the groups of
    unknown cuts."""

    needs: list[CutNeed]
    known: set[int]
    groups: dict[int, tuple[int, ...]]  # first cut -> cuts whose needs become known there
    guesses: list[CutNeed]
    promotions: list[CutNeed] = field(default_factory=list)


class Driver:
    """Acts as the executor with random timing, and checks the rules at every step."""

    def __init__(self, schedule: Schedule, rng: random.Random, hold: int = 3) -> None:
        self.schedule, self.rng, self.hold = schedule, rng, hold
        self.machine = Machine()
        self.open: list[int] = []
        self.hits = self.misses = 0

    def run(self, graph: Graph, abort_at: int | None = None) -> None:
        schedule = self.schedule
        schedule.begin(len(graph.needs))
        for cut in sorted(graph.known):
            schedule.need(graph.needs[cut])
        for guess in graph.guesses:
            schedule.predict(guess)
        schedule.promote(graph.promotions)
        for cut in range(len(graph.needs)):
            if cut == abort_at:
                self._abort()
                return
            self._issue(graph, cut)
            if cut in graph.groups:
                self._read_router()
                for member in graph.groups[cut]:
                    schedule.need(graph.needs[member])
                self._issue(graph, cut)
            self._enter(graph, cut)
        self._leave_all()
        assert schedule.n_slots_by_state()[IN_USE] == 0

    def _arrive(self) -> None:
        """Report some of the completed copies to the schedule, at random."""
        for number, slots in self.schedule.pools.items():
            for group, experts in list(slots.loading.items()):
                for expert in list(experts):
                    done = self.machine.ticket_of[group, expert] <= self.machine.n_landed
                    if done and self.rng.random() < 0.3:
                        self.schedule.arrived(number, (group, expert))

    def _issue(self, graph: Graph, cut: int) -> None:
        self._arrive()
        before = {pool: set(slots.where) for pool, slots in self.schedule.pools.items()}
        copies = self.schedule.issue(cut)
        if not self.schedule.depth:
            assert copies == []
        self._check_victims(graph, cut, copies, before)
        self._after(copies)

    def _check_victims(
        self, graph: Graph, at: int, copies: list[Copy], before: dict[int, set[Piece]]
    ) -> None:
        """Check that prefetching evicts no piece that a known cut needs earlier."""
        known = self.schedule._needs
        assert all(c.cut <= at + self.schedule.depth for c in copies if c.reason != "promoted")
        for pool, slots in self.schedule.pools.items():
            evicted = before[pool] - slots.where.keys()
            needed = [c.cut for c in copies if c.pool == pool and c.cut in known]
            needed = [cut for cut in needed if cut not in self.open]
            for cut in range(at, max(needed, default=at) + 1 if needed else at):
                if cut in known and cut not in self.open and cut < min(needed):
                    assert not evicted & set(known[cut].pieces), f"pieces of cut {cut} went"
            if copies and all(c.reason in ("promoted", "predicted") for c in copies):
                wanted = {p for n in known.values() if n.cut >= at for p in n.pieces}
                assert not wanted & evicted, "a wanted piece went for a guess or a later graph"

    def _read_router(self) -> None:
        """Wait until the device has computed everything submitted so far, as reading a router
        does."""
        self._leave_all()
        last = self.machine.kernels[-1].use if self.machine.kernels else 0
        self.machine.finish(lambda: self.machine.last_finished >= last)

    def _enter(self, graph: Graph, cut: int) -> None:
        need, schedule = graph.needs[cut], self.schedule
        ready = schedule.ready(cut)
        if not ready and self.rng.random() < 0.5:
            self._leave_all()
        try:
            entered = schedule.enter(cut)
        except DoesNotFit:
            check(schedule)
            assert self.open, "the smallest legal pool has to do when nothing else is open"
            self._leave_all()
            entered = schedule.enter(cut)
        if ready:
            assert not entered.waits
            assert not entered.issued
        assert entered.hits + entered.misses == len(need.pieces) == len(entered.slots)
        self.hits += entered.hits
        self.misses += entered.misses
        if need.contiguous:
            n = len(need.pieces)
            assert entered.slots[0] % n == 0
            assert entered.slots == tuple(range(entered.slots[0], entered.slots[0] + n))
        self._after(list(entered.issued))
        self.machine.submit(cut, need.pool, need.pieces, entered)
        self.open.append(cut)
        if len(self.open) > self.rng.randint(0, self.hold):
            self._leave_all()

    def _after(self, copies: Sequence[Copy]) -> None:
        check(self.schedule)
        self.machine.enqueue(copies)
        for _ in range(self.rng.randint(0, 6)):
            if self.rng.random() < 0.5:
                self.machine.step_copy()
            else:
                self.machine.step_compute()

    def _leave_all(self) -> None:
        for cut in self.open:
            self.schedule.leave(cut)
        self.open.clear()
        check(self.schedule)

    def _abort(self) -> None:
        self.open.clear()
        self.schedule.abort()
        check(self.schedule)
        counts = self.schedule.n_slots_by_state()
        assert counts[LOADING] == counts[IN_USE] == 0
        self.machine.finish()


def check(schedule: Schedule) -> None:
    """Raise AssertionError if slots and plan disagree."""
    seen: set[Piece] = set()
    for pool, slots in schedule.pools.items():
        check_slots(slots)
        assert not seen & slots.where.keys(), "a piece is in two pools"
        seen |= slots.where.keys()
        planner = schedule._planners[pool]
        assert planner.guessed_for.keys() <= slots.where.keys(), "a guess is not there"
        assert planner.pending == sorted(set(planner.pending)), planner.pending
        in_use = {s for its, taken in schedule._open.values() if its is planner for s in taken}
        assert slots.counts[IN_USE] == len(in_use), "a slot is in use by no open cut"


def check_slots(slots: PoolSlots) -> None:
    """Raise AssertionError unless all fields agree."""
    for slot, (state, piece) in enumerate(zip(slots.state, slots.piece, strict=True)):
        at = f"slot {slot}, {STATES[state]} with {piece}"
        assert (state == FREE) == (piece is None) == (slot in slots.free), at
        assert piece is None or slots.where.get(piece) == slot, at
        assert (state == IN_USE) == (slots.users[slot] > 0), at
    assert len(slots.where) == slots.n_slots - len(slots.free), "a piece is in two slots"
    placed = {
        (group, expert): slot
        for group, found in slots._of_group.items()
        for expert, slot in enumerate(found.tolist())
        if slot != NOWHERE
    }
    assert placed == slots.where, "a group's array is not what `where` says"
    loading = {(group, e) for group, experts in slots.loading.items() for e in experts}
    assert loading == {p for p, s in slots.where.items() if slots.state[s] == LOADING}, loading
    assert slots.counts == [slots.state.count(s) for s in range(len(STATES))], slots.counts
