"""When each streamed piece is copied, and over what: a pure, deterministic planner.

What happens around it
----------------------
A graph computes its *cuts*, each of which uses a group of streamed weights, in order 0..n-1. Copies
go into one queue in order. For every graph the executor calls

    begin(n_cuts)           then need() for what is known and predict() for what is guessed
    per cut: issue(cut)     commands to enqueue before the cut is reached
             need(...)      for the cuts of a layer whose router's ids have just been read
             enter(cut)     where the pieces are, and which copies to wait for
             leave(cut)     once the cut is submitted and a fence is behind it

Rules
-----
1. Needed pieces are copied in cut order, at most `depth` cuts ahead; guesses only behind them, and
   no more than `guess_limit` at a time, since a copy in an in-order queue delays all that follow.
2. Slots are taken as offload/schedule/victims.py says; a slot in use never.
3. What is promoted, which is used by later graphs, is copied behind all these, spread evenly over
   the graph from its first cut on, and dropped where no slot is free or plainly cached.
4. What cannot be placed stays pending, and is tried again when something has been left. `enter`
   places what is still missing, over anything that is not in use: nothing waits for ever.
5. Weights that are known from the start come round in every graph, and would flush each other out
   of a small cache just before their next use. So all but a few slots keep *pinned* ones, spread
   evenly over the graph so that the link copies the others while these compute. Of whole layers
   that may lie anywhere they are the pieces that the cache rule ranks highest: decodes' experts.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Sequence

from offload.schedule.cache_rules import CacheRule
from offload.schedule.commands import (
    AHEAD,
    FILLED,
    NEEDED,
    PREDICTED,
    PROMOTED,
    Command,
    Copy,
    Counters,
    Entered,
    Evict,
    Need,
)
from offload.schedule.slots import IN_USE, LOADING, READY, Piece, SlotTable
from offload.schedule.victims import Agenda, Placer, add, discard

__all__ = ["Command", "Copy", "Counters", "Entered", "Evict", "Need", "Schedule"]

# Through how many units the others stream past the pinned ones, at most (docs/log.md).
_RING = 4  # dense weights
_LAYER_RING = 3  # layers of experts
_LOOSE_RING = 2  # layers of experts that may lie anywhere
_LEAST_SAVED = 1 / 32  # of a graph's copies: fewer are not worth that they are short ones

_Units = tuple[tuple[Piece, ...], ...]


class Schedule:
    """Plans one graph after another over a slot table. Not to be shared between threads."""

    def __init__(
        self, table: SlotTable, rule: CacheRule, depth: int, guess_limit: int = 16
    ) -> None:
        """`depth`: cuts to copy ahead; 0 copies nothing before `enter`, the serial twin."""
        if depth < 0 or guess_limit < 0:
            raise ValueError(f"depth {depth} and guess_limit {guess_limit} must not be negative")
        self.table, self.depth, self.guess_limit = table, depth, guess_limit
        self.counters = Counters()
        self._rule = rule
        self._agendas = {pool: Agenda(pool, slots, rule) for pool, slots in table.pools.items()}
        self._placer = Placer(self.counters)
        self._n_cuts = self._at = self._use = 0
        self._needs: dict[int, Need] = {}  # known, by cut
        self._guesses: dict[int, Need] = {}  # of cuts that are not known
        self._kept: dict[int, tuple[_Units, frozenset[Piece]]] = {}  # by pool, of the last graph
        self._promotions: list[Need] = []  # of one piece each
        self._n_promoted = 0  # of these, copied or dropped
        self._open: dict[int, tuple[Agenda, list[int]]] = {}  # entered, not left: slots
        self._known: list[Need] = []  # what was known before anything of this graph ran
        self._planned = False  # whether this graph has started

    # -- what is known ---------------------------------------------------------------------------

    def begin(self, n_cuts: int) -> None:
        """A new graph; what is cached stays. Raises RuntimeError if a cut is still open."""
        if self._open:
            raise RuntimeError(f"cuts {sorted(self._open)} were entered and not left: abort first")
        self._n_cuts, self._at, self._planned = n_cuts, 0, False
        self._known = []
        self._forget_graph()

    def _forget_graph(self) -> None:
        self._needs.clear()
        self._guesses.clear()
        self._promotions, self._n_promoted = [], 0
        self._placer.wanted.clear()
        self._placer.in_flight.clear()
        for agenda in self._agendas.values():
            agenda.clear()

    def need(self, need: Need) -> None:
        """Hear what a cut uses, once known. Raises ValueError for a cut that cannot have it."""
        cut = need.cut
        if not self._at <= cut < self._n_cuts or cut in self._needs:
            raise ValueError(
                f"cut {cut} is known already, or not in {self._at}..{self._n_cuts - 1}"
            )
        agenda = self._agendas[need.pool]
        self._needs[cut] = need
        if cut in self._guesses:
            self._expire(agenda, self._guesses.pop(cut))
        if not self._planned:
            self._known.append(need)
        elif agenda.pinned and not need.contiguous and len(need.pieces) > 1:
            agenda.unpin()  # the pinned would leave too few slots for experts
        where, wanted = agenda.slots.where, self._placer.wanted
        there = not need.contiguous
        for piece in need.pieces:
            cuts = wanted.get(piece)
            if cuts is None:
                wanted[piece] = [cut]
            else:
                insort(cuts, cut)
            if piece not in where:
                there = False
        if not there:
            add(agenda.pending, cut)
            agenda.changed()

    def saves_out_of_order(self, pool: int, groups: Collection[int], n_experts: int) -> bool:
        """True if whole layers need markedly fewer copies where their pieces may lie anywhere than
        in order.

        Markedly, since pieces are then copied one by one, and the computation waits for the ids of
        each router.
        """
        in_place: dict[tuple[int, int], int] = {}
        agenda, n_there = self._agendas[pool], 0
        for (group, expert), slot in agenda.slots.where.items():
            if group in groups:
                n_there += 1
                if slot % n_experts == expert:
                    region = group, slot // n_experts
                    in_place[region] = in_place.get(region, 0) + 1
        best: dict[int, int] = {}
        for (group, _), n in in_place.items():
            best[group] = max(n, best.get(group, 0))
        saved = min(n_there, _n_kept(agenda, n_experts)) - sum(best.values())
        return saved > len(groups) * max(1.0, _LEAST_SAVED * n_experts)

    def predict(self, guess: Need) -> None:
        """A guess, the likeliest pieces first. Ignored once the cut is known or behind."""
        cut = guess.cut
        if cut in self._needs or cut in self._guesses or cut < self._at or guess.contiguous:
            return
        self._guesses[cut] = guess
        add(self._agendas[guess.pool].guesses, cut)

    def promote(self, promotions: Sequence[Need]) -> None:
        """Hear of pieces, one in each need, to be copied for later graphs: in this order, spread
        over this one. Their cuts say no more than where such pieces are used."""
        self._promotions = list(promotions)

    def fill(self, pool: int, pieces: Sequence[Piece]) -> Iterator[list[Command]]:
        """Between two graphs: copy these pieces, the likeliest first, into slots that are free or
        hold other pieces. Yields the commands of one copy at a time; call `arrived` after each.

        Counts all of them as used for the cache rule, the likeliest last.
        """
        agenda = self._agendas[pool]
        pieces = pieces[: agenda.slots.n_slots]
        for piece in reversed(pieces):
            self._use += 1
            self._rule.touched((piece,), self._use)
        kept = frozenset(pieces)
        for piece in pieces:
            out: list[Command] = []
            if piece in agenda.slots.where:
                continue
            if not self._placer.place_filled(agenda, piece, kept, out):
                return
            yield out

    def _expire(self, agenda: Agenda, guess: Need) -> None:
        """The truth about a cut is known: what was guessed for it is plainly cached now."""
        discard(agenda.guesses, guess.cut)
        for piece in guess.pieces:
            if agenda.guessed_for.get(piece) == guess.cut:
                del agenda.guessed_for[piece]
                self._placer.in_flight.discard(piece)
                agenda.queue.offer(agenda.slots.where[piece])
        agenda.changed()

    # -- copies ahead ----------------------------------------------------------------------------

    def issue(self, at: int) -> list[Command]:
        """Everything that may be enqueued now that the computation stands before cut `at`."""
        self._at = max(self._at, at)
        out: list[Command] = []
        if not self._planned:
            self._plan()
        if not self.depth:
            return out
        horizon = at + self.depth
        while (found := self._next_needed(horizon)) is not None:
            need = self._needs[found.pending[0]]
            reason = AHEAD if need.cut > at else NEEDED
            if self._placer.place(found, need, reason, out):
                discard(found.pending, need.cut)
            else:
                found.stuck = True
        while (found := self._next_guessed(horizon)) is not None:
            self._issue_guess(found, self._guesses[found.guesses[0]], out)
        self._issue_promoted(at, out)
        return out

    def _next_needed(self, horizon: int) -> Agenda | None:
        best, found = horizon + 1, None
        for agenda in self._agendas.values():
            pending = agenda.pending
            while pending and pending[0] < self._at:  # passed over; `enter` would place it
                del pending[0]
            if pending and not agenda.stuck and pending[0] < best:
                best, found = pending[0], agenda
        return found

    def _next_guessed(self, horizon: int) -> Agenda | None:
        if len(self._placer.in_flight) >= self.guess_limit:
            return None
        best, found = horizon + 1, None
        for agenda in self._agendas.values():
            guesses = agenda.guesses
            if guesses and guesses[0] < best and not (agenda.stuck or agenda.guessing_stuck):
                best, found = guesses[0], agenda
        return found

    def _issue_guess(self, agenda: Agenda, guess: Need, out: list[Command]) -> None:
        """Copy what is guessed for one cut, as far as the limit and plain victims allow."""
        for piece in guess.pieces:
            if piece in agenda.slots.where:
                agenda.guessed_for.setdefault(piece, guess.cut)
            elif len(self._placer.in_flight) >= self.guess_limit:
                return
            elif not self._placer.place_guess(agenda, piece, guess.cut, out):
                agenda.guessing_stuck = True
                return
        discard(agenda.guesses, guess.cut)

    def _issue_promoted(self, at: int, out: list[Command]) -> None:
        """Copy as many of the promoted pieces as are due before cut `at`."""
        due = -(-len(self._promotions) * (at + 1) // max(1, self._n_cuts))
        for cut, pool, pieces, _ in self._promotions[self._n_promoted : due]:
            agenda = self._agendas[pool]
            if pieces[0] not in agenda.slots.where and not agenda.stuck:
                self._placer.place_promoted(agenda, pieces[0], cut, out)
            self._n_promoted += 1

    def _plan(self) -> None:
        """Before the first cut: choose what is pinned."""
        self._planned = True
        kept, self._kept = self._kept, {}
        for agenda in self._agendas.values():
            known = [need for need in self._known if need.pool == agenda.pool]
            ring = 1 + min(max(1, self.depth), _RING - 1)
            agenda.pinned = _pinned(known, agenda.slots.n_slots, ring)
            units = tuple(need.pieces for need in known)
            if _may_lie_anywhere(known):
                before, pieces = kept.get(agenda.pool, ((), frozenset()))
                agenda.pinned = self._most_worth(
                    agenda, len(units[0]), pieces if before == units else frozenset()
                )
                self._kept[agenda.pool] = units, agenda.pinned

    def _most_worth(
        self, agenda: Agenda, n_experts: int, before: frozenset[Piece]
    ) -> frozenset[Piece]:
        """The pieces to keep while whole layers stream past: those that were kept `before`, since
        what streamed past was used later and is worth no more, then by the cache rule's rank."""
        there, rank = agenda.slots.where, self._rule.rank
        n = _n_kept(agenda, n_experts)
        return frozenset(sorted(there, key=lambda p: (p in before, rank(p)), reverse=True)[:n])

    # -- one cut ---------------------------------------------------------------------------------

    def ready(self, cut: int) -> bool:
        """True if the cut could be entered without a copy or a wait."""
        need = self._needs.get(cut)
        if need is None:
            return False
        agenda = self._agendas[need.pool]
        slots, state = self._placer.resident(agenda, need), agenda.slots.state
        return slots is not None and all(state[slot] in (READY, IN_USE) for slot in slots)

    def enter(self, cut: int, elsewhere: Collection[Piece] = ()) -> Entered:
        """Make all the cut's pieces resident and mark them in use, until `leave`.

        `elsewhere`: pieces that the cut uses where they lie, without slots. The cache rule hears of
        all as of one use.
        Raises DoesNotFit, and changes nothing, if the pool is too small for the need beside the
        cuts that are entered and not left; ValueError if the cut's need is not known.
        """
        need = self._needs.get(cut)
        if need is None or cut in self._open:
            raise ValueError(f"cut {cut} is entered already, or its need is not known")
        if not self._planned:
            self._plan()
        agenda, placer = self._agendas[need.pool], self._placer
        issued: list[Command] = []
        slots = placer.resident(agenda, need)
        if slots is None:
            placer.require_room(agenda, need)
            placer.place(agenda, need, NEEDED, issued, forced=True)
            slots = placer.resident(agenda, need)
            assert slots is not None, f"{need} was placed and is not there"
        self._at = max(self._at, cut)
        discard(agenda.pending, cut)
        self._use += 1
        waits, misses = self._take(agenda, need, slots)
        agenda.slots.acquire(slots, self._use)
        self._rule.touched((*need.pieces, *elsewhere) if elsewhere else need.pieces, self._use)
        self._open[cut] = agenda, slots
        hits = len(slots) - misses
        self.counters.hits += hits
        self.counters.misses += misses
        return Entered(tuple(slots), tuple(waits), tuple(issued), hits, misses, self._use)

    def _take(self, agenda: Agenda, need: Need, slots: list[int]) -> tuple[list[Piece], int]:
        """The need is met: order it behind its copies; (pieces to wait for, misses)."""
        waits: list[Piece] = []
        misses, cut = 0, need.cut
        state, copy_reason, wanted = agenda.slots.state, agenda.copy_reason, self._placer.wanted
        for piece, slot in zip(need.pieces, slots, strict=True):
            if state[slot] == LOADING:
                agenda.slots.landed(slot)
                self._placer.in_flight.discard(piece)
                waits.append(piece)
            why = copy_reason[slot]
            if why is not None:
                copy_reason[slot] = None
                misses += why not in (PREDICTED, PROMOTED, FILLED)
                self.counters.prefetched_used += why != NEEDED
            cuts = wanted[piece]
            if len(cuts) == 1:
                del wanted[piece]
            else:
                cuts.remove(cut)
        return waits, misses

    def leave(self, cut: int) -> None:
        """The cut is submitted. Raises ValueError if it was not entered."""
        if cut not in self._open:
            raise ValueError(f"cut {cut} was not entered, or left already")
        agenda, slots = self._open.pop(cut)
        agenda.slots.release(slots)
        queued, offer = agenda.queue.queued, agenda.queue.offer
        for slot in slots:
            if not queued[slot]:
                offer(slot)
        agenda.changed()

    def used_elsewhere(self, pieces: Collection[Piece]) -> None:
        """A cut uses these alone, where they lie, and is not entered: the rule hears of it."""
        self._use += 1
        self._rule.touched(pieces, self._use)

    def arrived(self, pool: int, piece: Piece) -> None:
        """A copy that nothing was ordered behind is complete: its piece is there for whoever."""
        slots = self._agendas[pool].slots
        slots.landed(slots.where[piece])
        self._placer.in_flight.discard(piece)

    def abort(self) -> None:
        """A step failed: forget what its copies and cuts leave in doubt, keep what is READY.

        Copies may still be on their way; whoever executes them drains the queue.
        """
        for agenda in self._agendas.values():
            before = list(agenda.slots.piece)
            for slot in agenda.slots.abort():
                piece = before[slot]
                assert piece is not None
                self._placer.forget(agenda, slot, piece)
        self._open.clear()
        self._known, self._n_cuts = [], 0
        self._forget_graph()

    def check(self) -> None:
        """Raise AssertionError if table and plan disagree."""
        self.table.check()
        for agenda in self._agendas.values():
            assert agenda.guessed_for.keys() <= agenda.slots.where.keys(), "a guess is not there"
            assert agenda.pending == sorted(set(agenda.pending)), agenda.pending
            in_use = {slot for open_agenda, slots in self._open.values() if open_agenda is agenda
                      for slot in slots}  # fmt: skip
            assert agenda.slots.counts[IN_USE] == len(in_use), "a slot is in use by no open cut"


def _n_kept(agenda: Agenda, n_experts: int) -> int:
    """Pieces that stay while layers of so many experts, which may lie anywhere, stream past."""
    return max(0, agenda.slots.n_slots - _LOOSE_RING * n_experts)


def _may_lie_anywhere(known: list[Need]) -> bool:
    """True if these are whole layers, none of which has to lie in order."""
    size = len(known[0].pieces) if known else 0
    return size > 1 and not any(n.contiguous or len(n.pieces) != size for n in known)


def _pinned(known: list[Need], n_slots: int, ring: int) -> frozenset[Piece]:
    """The part to keep of needs that recur, when not all fit: every so many, first ones first.

    `ring` is how many of them stream past, fewer if they are layers. Only for dense weights or all
    experts of layers, of one size and used once: where some are used more often, the farthest next
    use is the better rule.
    """
    units = list(dict.fromkeys(need.pieces for need in known))
    n = len(units)
    size = len(units[0]) if units else 0
    if n < len(known) or any(
        len(need.pieces) != size or (size > 1 and not need.contiguous) for need in known
    ):
        return frozenset()
    capacity = n_slots // size if size else n
    n_pinned = capacity - (ring if size == 1 else min(ring, _LAYER_RING))
    if n <= capacity or n_pinned <= 0:
        return frozenset()
    kept = [u for i, u in enumerate(units) if -(-i * n_pinned // n) != -(-(i + 1) * n_pinned // n)]
    return frozenset(piece for unit in kept for piece in unit)
