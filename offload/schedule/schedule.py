"""Decides when each streamed piece is copied, and which piece it replaces. Pure, deterministic.

A graph computes its *cuts* in order 0..n-1. Each cut uses some streamed pieces. All copies go into
one queue, which runs them in order. For every graph the executor calls

    begin(n_cuts)           then need() for each known cut, and predict() for each guessed one
    per cut: issue(cut)     returns copies to enqueue before the cut is reached
             need(...)      for a layer whose router's ids have just been read
             enter(cut)     returns the pieces' slots, and the copies to wait for
             leave(cut)     after the cut and a fence behind it were submitted

1. Needed pieces are copied in the order of cuts, at most `depth` cuts ahead. Guesses come after
   them, at most `guess_limit` at a time, because each copy delays all later copies in the queue.
2. offload/schedule/placing.py decides which slots are taken. A slot in use is never taken.
3. Promoted pieces, for later graphs, come last, and are spread evenly over the graph. A promoted
   piece is skipped if no slot is free or plainly cached.
4. A need that cannot be placed stays pending, and is tried again when a cut has been left. `enter`
   places the pieces still missing into any slots that are not in use, so no cut waits for ever.
5. Weights whose needs are known before the graph runs are needed again in every graph. In a small
   cache each would be evicted just before its next use. So all slots but a few *keep* some of these
   weights. The kept ones are spread evenly over the graph, and the link copies the others while the
   kept ones are computed. For whole layers that may be in any slots, the kept pieces are those that
   the cache rule ranks highest.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Collection, Iterator, Mapping, Sequence

from offload.schedule.batch import LAYER_RING
from offload.schedule.cache import CacheRule
from offload.schedule.placing import PoolPlanner, add, discard
from offload.schedule.slots import (
    AHEAD,
    FILLED,
    IN_USE,
    LOADING,
    NEEDED,
    PREDICTED,
    PROMOTED,
    READY,
    REASONS,
    STATES,
    Copy,
    CutNeed,
    Entered,
    Piece,
    StreamCounters,
)

# Sizes of the ring, the slots left for pieces that are not kept (docs/log.md).
_RING = 4  # most slots for dense weights
_LOOSE_RING = 2  # layers of experts that may be in any slots
# Least share of a layer's copies that reading layers out of order must save. Out of order, pieces
# are copied one by one.
_LEAST_SAVED = 1 / 32

_Units = tuple[tuple[Piece, ...], ...]


class Schedule:
    """Plans one graph after another over the slots of its pools. Not thread-safe."""

    def __init__(
        self,
        pools: Mapping[int, int],
        rule: CacheRule,
        depth: int,
        guess_limit: int = 16,
        *,
        keeps: bool = True,
        counters: StreamCounters | None = None,
        n_experts: int = 0,
        homes: Mapping[int, Mapping[int, int]] | None = None,
        n_lent: Mapping[int, int] | None = None,
    ) -> None:
        """`pools`: number of slots by pool. `depth`: most cuts to copy ahead.

        With a `depth` of 0, pieces are copied only in `enter`. `guess_limit`: most guesses under
        way. Without `keeps`, each graph starts with empty slots. `n_experts`: most experts of a
        layer. `homes`: for pools that have a slot for each piece, the first slot of each group's
        pieces in order. `n_lent`: by pool, slots after its own that are closed at first.
        """
        assert depth >= 0
        self.depth, self.guess_limit, self._keeps = depth, guess_limit, keeps
        self.counters = counters or StreamCounters()
        self.rule = rule
        self._in_flight: set[Piece] = set()  # guesses whose copy no computation has waited for
        self._planners = {
            pool: PoolPlanner(
                pool,
                n_slots,
                rule,
                self._in_flight,
                self.counters,
                n_experts,
                (homes or {}).get(pool),
                (n_lent or {}).get(pool, 0),
            )  # fmt: skip
            for pool, n_slots in pools.items()
        }
        self.pools = {pool: planner.slots for pool, planner in self._planners.items()}
        self._n_cuts = self._at = 0
        self.n_uses = 0  # number of uses so far; the player adds its own uses
        self._needs: dict[int, CutNeed] = {}  # known needs by cut
        self._guesses: dict[int, CutNeed] = {}  # guesses by cut, for cuts without a known need
        self._kept: dict[int, tuple[_Units, frozenset[Piece]]] = {}  # last graph's pieces by pool
        self._promotions: list[CutNeed] = []  # needs of one promoted piece each
        self._n_promoted = 0  # promotions that were copied or skipped
        self._open: dict[int, tuple[PoolPlanner, list[int]]] = {}  # slots of entered cuts
        self._known: list[CutNeed] = []  # needs known before this graph began to run
        self._planned = False  # whether this graph has begun to run

    def copy_reasons(self, pool: int) -> array[int]:
        """Return the number of the reason of each slot's copy, 0 from its first use on."""
        return self._planners[pool].copy_reason

    def home(self, pool: int, group: int) -> int:
        """Return the first slot of a group's pieces in order, or -1 if they have no own slots."""
        return self._planners[pool].homes.get(group, -1)

    def is_filling(self, pool: int) -> bool:
        """True if a piece is missing or still being copied, in a pool with a slot for each."""
        planner = self._planners[pool]
        slots = planner.slots
        return slots.counts[LOADING] > 0 or len(slots.where) < planner.n_at_home

    def is_in_order(self, pool: int, group: int, n_experts: int) -> bool:
        """True if all experts of a group are in its own slots, in order."""
        first = self.home(pool, group)
        slots = self.pools[pool].of_group(group, n_experts)
        return first >= 0 and slots.tolist() == [*range(first, first + n_experts)]

    def n_slots_by_state(self) -> Sequence[int]:
        """Return the number of slots in each of STATES."""
        columns = [slots.counts for slots in self.pools.values()]
        return [sum(column) for column in zip(*columns, strict=True)] or [0] * len(STATES)

    # -- needs and guesses -----------------------------------------------------------------------

    def __repr__(self) -> str:
        pools = ", ".join(map(repr, self.pools.values()))
        return f"Schedule(cut {self._at} of {self._n_cuts}, {pools})"

    def begin(self, n_cuts: int, *, before_end: bool = False) -> None:
        """Start a new graph. Cached pieces stay. Every entered cut must have been left.

        With `before_end`, the last graph may have cuts to leave, but no more cuts to enter.
        """
        is_left = before_end or not self._open
        assert is_left, f"cuts {sorted(self._open)} were entered and not left: abort first"
        self._n_cuts, self._at, self._planned = n_cuts, 0, False
        self._known = []
        self._forget_graph()
        if not self._keeps:
            for planner in self._planners.values():
                planner.evict_all()

    def _forget_graph(self) -> None:
        self._needs.clear()
        self._guesses.clear()
        self._promotions, self._n_promoted = [], 0
        self._in_flight.clear()
        for planner in self._planners.values():
            planner.clear()

    def need(self, need: CutNeed) -> None:
        """Tell the schedule which pieces a cut uses, once for each cut, as early as possible."""
        cut = need.cut
        assert self._at <= cut < self._n_cuts, need
        assert cut not in self._needs, need
        planner = self._planners[need.pool]
        self._needs[cut] = need
        if cut in self._guesses:
            self._expire(planner, self._guesses.pop(cut))
        if not self._planned:
            self._known.append(need)
        elif planner.kept and not need.contiguous and len(need.pieces) > 1:
            planner.keep(frozenset())  # kept pieces would leave too few slots for experts
        where, wanted = planner.slots.where, planner.wanted
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
            add(planner.pending, cut)
            planner.retry()

    def saves_out_of_order(self, pool: int, groups: Collection[int], n_experts: int) -> bool:
        """True if whole layers (`groups`) need markedly fewer copies out of order than in order.

        Out of order, pieces are copied one by one and the computation waits for each router's ids.
        """
        in_place: dict[tuple[int, int], int] = {}
        planner, n_there = self._planners[pool], 0
        for (group, expert), slot in planner.slots.where.items():
            if group in groups:
                n_there += 1
                if slot % n_experts == expert:
                    region = group, slot // n_experts
                    in_place[region] = in_place.get(region, 0) + 1
        best: dict[int, int] = {}
        for (group, _), n in in_place.items():
            best[group] = max(n, best.get(group, 0))
        saved = min(n_there, _n_kept(planner, n_experts)) - sum(best.values())
        return saved > len(groups) * max(1.0, _LEAST_SAVED * n_experts)

    def predict(self, guess: CutNeed) -> None:
        """Guess which pieces a cut uses, likeliest first.

        Ignored if the cut's need is known or guessed already, or if the cut was passed.
        """
        cut = guess.cut
        if cut in self._needs or cut in self._guesses or cut < self._at or guess.contiguous:
            return
        self._guesses[cut] = guess
        add(self._planners[guess.pool].guesses, cut)

    def promote(self, promotions: Sequence[CutNeed]) -> None:
        """Copy pieces for later graphs during this graph. Each of `promotions` holds one piece.

        The pieces are copied in this order, spread evenly over the graph.
        """
        self._promotions = list(promotions)

    def fill(self, pool: int, pieces: Sequence[Piece]) -> Iterator[list[Copy]]:
        """Copy pieces, likeliest first, between two graphs into slots that hold none of them.

        Yields one copy at a time; call `arrived` after each. The cache rule counts each piece as
        used, the likeliest as used last.
        """
        planner = self._planners[pool]
        pieces = pieces[: planner.slots.n_slots]
        for piece in reversed(pieces):
            self.n_uses += 1
            self.rule.touched((piece,), self.n_uses)
        kept = frozenset(pieces)
        for piece in pieces:
            out: list[Copy] = []
            if piece in planner.slots.where:
                continue
            if not planner.place_filled(piece, kept, out):
                return
            yield out

    def _expire(self, planner: PoolPlanner, guess: CutNeed) -> None:
        """Drop the guess for a cut whose need is known now. Its pieces become plainly cached."""
        discard(planner.guesses, guess.cut)
        for piece in guess.pieces:
            if planner.guessed_for.get(piece) == guess.cut:
                del planner.guessed_for[piece]
                self._in_flight.discard(piece)
                planner.queue.offer(planner.slots.where[piece])
        planner.retry()

    # -- copies ahead ----------------------------------------------------------------------------

    def issue(self, at: int, n_promoted: int = 0, *, n_ahead: int | None = None) -> list[Copy]:
        """Return the copies that may be enqueued now that the computation is before cut `at`.

        `n_promoted`: number of promotions to be copied by now, if more than is due at `at`.
        `n_ahead`: copy for so many later cuts while there are slots, instead of `depth`.
        """
        self._at = max(self._at, at)
        out: list[Copy] = []
        if not self._planned:
            self._plan()
        if not self.depth or not self._has_work():
            return out
        horizon = at + (self.depth if n_ahead is None else n_ahead)
        while (planner := self._next_needed(horizon)) is not None:
            need = self._needs[planner.pending[0]]
            reason = AHEAD if need.cut > at else NEEDED
            if planner.place(need, reason, out):
                discard(planner.pending, need.cut)
            else:
                planner.stuck = True
        while (planner := self._next_guessed(horizon)) is not None:
            self._issue_guess(planner, self._guesses[planner.guesses[0]], out)
        due = -(-len(self._promotions) * (at + 1) // max(1, self._n_cuts))
        self._issue_promoted(max(due, n_promoted), out)
        return out

    def _has_work(self) -> bool:
        """True if pieces may have to be copied before their cut is entered."""
        for planner in self._planners.values():
            if planner.pending:
                return True
        return bool(self._guesses or self._promotions)

    def _next_needed(self, horizon: int) -> PoolPlanner | None:
        best, first = horizon + 1, None
        for planner in self._planners.values():
            pending = planner.pending
            while pending and pending[0] < self._at:  # a cut passed over; `enter` would place it
                del pending[0]
            if pending and not planner.stuck and pending[0] < best:
                best, first = pending[0], planner
        return first

    def _next_guessed(self, horizon: int) -> PoolPlanner | None:
        if len(self._in_flight) >= self.guess_limit:
            return None
        best, first = horizon + 1, None
        for planner in self._planners.values():
            guesses = planner.guesses
            if guesses and guesses[0] < best and not (planner.stuck or planner.guessing_stuck):
                best, first = guesses[0], planner
        return first

    def _issue_guess(self, planner: PoolPlanner, guess: CutNeed, out: list[Copy]) -> None:
        """Copy the pieces guessed for one cut, until the limit is reached or no slot is found."""
        if guess.ring and not planner.place_passing(guess, out):
            planner.guessing_stuck = True
            return
        for piece in guess.pieces:
            if piece in planner.slots.where:
                planner.guessed_for.setdefault(piece, guess.cut)
            elif len(self._in_flight) >= self.guess_limit:
                return
            elif not planner.place_for_later(piece, guess.cut, PREDICTED, out):
                planner.guessing_stuck = True
                return
        discard(planner.guesses, guess.cut)

    def _issue_promoted(self, due: int, out: list[Copy]) -> None:
        """Copy promoted pieces until `due` of them are copied or skipped."""
        for promotion in self._promotions[self._n_promoted : due]:
            planner, piece = self._planners[promotion.pool], promotion.pieces[0]
            if piece not in planner.slots.where and not planner.stuck:
                planner.place_for_later(piece, promotion.cut, PROMOTED, out)
            self._n_promoted += 1

    def _plan(self) -> None:
        """Choose the kept pieces, before the first cut."""
        self._planned = True
        kept, self._kept = self._kept, {}
        for planner in self._planners.values():
            known = [need for need in self._known if need.pool == planner.pool]
            ring = 1 + min(max(1, self.depth), _RING - 1)
            planner.kept = _kept(known, planner.slots.n_own, ring)
            units = tuple(need.pieces for need in known)
            size = len(known[0].pieces) if known else 0
            # All needs are whole layers that may be in any slots.
            if size > 1 and not any(n.contiguous or len(n.pieces) != size for n in known):
                before, pieces = kept.get(planner.pool, ((), frozenset()))
                planner.kept = self._most_worth(
                    planner, len(units[0]), pieces if before == units else frozenset()
                )
                self._kept[planner.pool] = units, planner.kept

    def _most_worth(
        self, planner: PoolPlanner, n_experts: int, before: frozenset[Piece]
    ) -> frozenset[Piece]:
        """Return the pieces to keep while whole layers of `n_experts` stream through other slots.

        Pieces that were kept `before` come first. Otherwise pieces would replace them that were
        used later, but are worth no more. Then the cache rule's rank decides.
        """
        there, rank = planner.slots.where, self.rule.rank
        n = _n_kept(planner, n_experts)
        return frozenset(sorted(there, key=lambda p: (p in before, rank(p)), reverse=True)[:n])

    # -- one cut ---------------------------------------------------------------------------------

    def ready(self, cut: int) -> bool:
        """True if the cut can be entered without a copy or a wait."""
        need = self._needs.get(cut)
        if need is None:
            return False
        planner = self._planners[need.pool]
        where, state = planner.slots.where, planner.slots.state
        for piece in need.pieces:
            slot = where.get(piece)
            if slot is None or state[slot] not in (READY, IN_USE):
                return False
        return not need.contiguous or planner.resident(need) is not None

    def enter(self, cut: int, elsewhere: Collection[Piece] = ()) -> Entered:
        """Give all the cut's pieces slots and mark the slots in use, until `leave`.

        `elsewhere`: pieces that the cut uses without slots. The cache rule counts the cut's pieces
        and these as one use. It does not count a need with a `ring`; see `scanned`. Raises
        DoesNotFit, and changes nothing, if the pool cannot hold the pieces of this cut and of all
        cuts that are entered and not left.
        """
        assert cut not in self._open
        need = self._needs[cut]
        if not self._planned:
            self._plan()
        planner = self._planners[need.pool]
        issued: list[Copy] = []
        slots = planner.resident(need)
        if slots is None:
            planner.require_room(need)
            planner.place(need, NEEDED, issued, forced=True)
            slots = planner.resident(need)
            assert slots is not None, f"{need} was placed and is not there"
        self._at = max(self._at, cut)
        discard(planner.pending, cut)
        self.n_uses += 1
        waits, misses = self._take(planner, need, slots)
        planner.slots.acquire(slots, self.n_uses)
        if need.ring:
            planner.passed(slots, self.n_uses)
            self.rule.skipped += 1
        else:
            pieces = (*need.pieces, *elsewhere) if elsewhere else need.pieces
            self.rule.touched(pieces, self.n_uses)
        self._open[cut] = planner, slots
        hits = len(slots) - misses
        self.counters.hits += hits
        self.counters.misses += misses
        return Entered(tuple(slots), tuple(waits), tuple(issued), hits, misses, self.n_uses)

    def _take(
        self, planner: PoolPlanner, need: CutNeed, slots: list[int]
    ) -> tuple[list[Piece], int]:
        """Count the entered need. Returns (pieces to wait for, misses)."""
        waits: list[Piece] = []
        misses, cut = 0, need.cut
        state, copy_reason, wanted = planner.slots.state, planner.copy_reason, planner.wanted
        for piece, slot in zip(need.pieces, slots, strict=True):
            if state[slot] == LOADING:
                planner.slots.landed(slot)
                self._in_flight.discard(piece)
                waits.append(piece)
            if number := copy_reason[slot]:
                copy_reason[slot], reason = 0, REASONS[number]
                misses += reason not in (PREDICTED, PROMOTED, FILLED)
                self.counters.prefetched_used += reason != NEEDED
            cuts = wanted[piece]
            if len(cuts) == 1:
                del wanted[piece]
            else:
                cuts.remove(cut)
        return waits, misses

    def scanned(self, pieces: Collection[Piece]) -> None:
        """Count the pieces of all passes of a layer as one use, for the cache rule."""
        self.rule.skipped -= 1
        self.rule.touched(pieces, self.n_uses, is_scan=True)

    def leave(self, cut: int) -> None:
        """Release an entered cut's slots. Call it after the cut and its fence were submitted."""
        planner, slots = self._open.pop(cut)
        planner.slots.release(slots)
        queued, offer = planner.queue.queued, planner.queue.offer
        for slot in slots:
            if not queued[slot]:
                offer(slot)
        planner.retry()

    def close_slots(self, pool: int, n: int) -> None:
        """Let only the first `n` of a pool's lent slots be closed, between two graphs.

        Copies into slots that are closed now must be complete.
        """
        self._planners[pool].close_slots(n)

    def arrived(self, pool: int, piece: Piece) -> None:
        """Mark a piece's slot as READY: its copy is complete, and no computation waits for it."""
        slots = self._planners[pool].slots
        slots.landed(slots.where[piece])
        self._in_flight.discard(piece)

    def abort(self) -> None:
        """Forget the failed graph, and evict all pieces whose slots are LOADING or IN_USE.

        Pieces in READY slots stay. Copies may still be under way, so the caller has to drain the
        copy queue.
        """
        for planner in self._planners.values():
            for slot, piece in planner.slots.abort():
                planner.forget(slot, piece)
        self._open.clear()
        self._known, self._n_cuts = [], 0
        self._forget_graph()


def _n_kept(planner: PoolPlanner, n_experts: int) -> int:
    """Return the number of pieces to keep while layers of `n_experts` stream out of order."""
    return max(0, planner.slots.n_own - _LOOSE_RING * n_experts)


def _kept(known: list[CutNeed], n_slots: int, ring: int) -> frozenset[Piece]:
    """Return the pieces to keep if needs recur in every graph and do not all fit.

    Kept pieces are spread evenly over the needs. `ring` is the number of needs whose slots hold no
    kept pieces, at most `LAYER_RING` for layers. Returns an empty set unless all needs have the
    same size, are used once, and are dense weights or whole layers in order. For other needs,
    evicting the piece with the farthest next use is the better rule.
    """
    units = list(dict.fromkeys(need.pieces for need in known))
    n = len(units)
    size = len(units[0]) if units else 0
    if n < len(known) or any(
        len(need.pieces) != size or (size > 1 and not need.contiguous) for need in known
    ):
        return frozenset()
    capacity = n_slots // size if size else n
    n_kept = capacity - (ring if size == 1 else min(ring, LAYER_RING))
    if n <= capacity or n_kept <= 0:
        return frozenset()
    kept = [u for i, u in enumerate(units) if -(-i * n_kept // n) != -(-(i + 1) * n_kept // n)]
    return frozenset(piece for unit in kept for piece in unit)
