"""Gives slots to pieces, and decides which pieces are evicted. Pure; only the schedule uses it.

Slots are taken in this order:

1. free slots
2. plainly cached pieces, the lowest rank of the cache rule first
3. guessed pieces, the one for the latest cut first
4. pieces needed at a later cut than the one served, the latest first
5. any piece not in use, if the computation is at the cut and cannot go on otherwise (`forced`)

A guess may take slots of the first two kinds, and those of pieces guessed for later cuts.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter

from offload.errors import DoesNotFit
from offload.schedule.cache import CacheRule, VictimQueue
from offload.schedule.slots import (
    AHEAD,
    CLOSED,
    FILLED,
    FREE,
    IN_USE,
    LOADING,
    NEEDED,
    PREDICTED,
    PROMOTED,
    READY,
    REASONS,
    Copy,
    CutNeed,
    Piece,
    PoolSlots,
    StreamCounters,
)

_FAR = 1 << 60


class PoolPlanner:
    """The slots of one pool, the needs that still lack slots, and the pieces that should stay."""

    def __init__(
        self, pool: int, n_slots: int, rule: CacheRule, in_flight: set[Piece],
        counters: StreamCounters, n_experts: int = 0, homes: Mapping[int, int] | None = None,
        n_lent: int = 0,
    ) -> None:  # fmt: skip
        """`in_flight`: guesses whose copy no computation has waited for, in all pools.

        `homes`, `n_lent`: as for Schedule, of this pool.
        """
        self.homes = homes or {}
        self.n_at_home = len(self.homes) * n_experts
        self.pool, self.slots = pool, PoolSlots(n_slots, n_experts, n_lent)
        self._in_flight, self._counters = in_flight, counters
        self.queue = VictimQueue(self.slots, rule)
        # Number of the reason for which a slot's piece was copied, until its first use.
        self.copy_reason = array("b", bytes(n_slots + n_lent))
        # Slots that pieces pass through, the oldest first, and the last use by such a piece.
        self.ring: dict[int, int] = {}
        self.clear()

    def clear(self) -> None:
        """Start a new graph: no need is known, and all pieces in slots are plainly cached."""
        self.pending: list[int] = []  # cuts that need a piece without a slot, in order
        self.guesses: list[int] = []  # cuts with a guess not placed yet, in order
        self.guessed_for: dict[Piece, int] = {}  # guessed pieces with slots -> their cut
        self.wanted: dict[Piece, list[int]] = {}  # piece -> sorted cuts to enter that need it
        self.keep(frozenset())
        self.retry()

    def retry(self) -> None:
        """Try pending pieces again, because they may fit now."""
        self.stuck = self.guessing_stuck = False

    def keep(self, pieces: frozenset[Piece]) -> None:
        """Replace the set of kept pieces. They are evicted only if no other piece can be."""
        self.kept = pieces
        if self.queue.dropped:
            self.queue.offer_dropped()

    def resident(self, need: CutNeed) -> list[int] | None:
        """Return the need's slots in order, whatever their state, or None if a piece has none."""
        slots, pieces = self.slots, need.pieces
        if need.contiguous:
            n = len(pieces)
            first = slots.where.get(pieces[0])
            if first is None or first % n or slots.piece[first : first + n] != list(pieces):
                return None
            return list(range(first, first + n))
        try:
            return [slots.where[piece] for piece in pieces]
        except KeyError:
            return None

    def place(self, need: CutNeed, reason: str, out: list[Copy], *, forced: bool = False) -> bool:
        """Append the copies of the need's missing pieces. Returns whether all have slots now."""
        if need.contiguous:
            return self._place_region(need, reason, out, forced)
        where = self.slots.where
        missing = [piece for piece in dict.fromkeys(need.pieces) if piece not in where]
        if self.homes:
            own = [(piece, slot) for piece in missing if (slot := self._home(piece)) is not None]
            self._copy_all(own, need.cut, reason, out)
            missing = [piece for piece in missing if piece not in where]
        if need.ring:
            slots = sorted(self._ring_room(len(missing), need.ring))
            if forced and len(slots) < len(missing):
                slots = self._make_room(len(missing), need, forced)
                self.ring |= dict.fromkeys(slots, 0)
        else:
            slots = self._make_room(len(missing), need, forced)
        pairs = _pairs(missing[: len(slots)], slots)
        self._copy_all(pairs, need.cut, reason, out, passing=need.ring > 0)
        return len(slots) == len(missing)

    def place_passing(self, guess: CutNeed, out: list[Copy]) -> bool:
        """Append the copies of missing pieces guessed for passes, the first ones if not all fit.

        Returns whether all have slots now.
        """
        where, missing = self.slots.where, []
        for piece in guess.pieces:
            if piece in where:
                self.guessed_for.setdefault(piece, guess.cut)
            else:
                missing.append(piece)
        slots = self._ring_room(len(missing), guess.ring)
        # In the order of the slots' last uses: a copy waits for the computation of its slot's use.
        pairs = list(zip(missing, slots, strict=False))
        self.guessed_for |= dict.fromkeys([piece for piece, _ in pairs], guess.cut)
        self._copy_all(pairs, guess.cut, AHEAD, out, passing=True)
        return len(slots) == len(missing)

    def passed(self, slots: Iterable[int], use: int) -> None:
        """Record that a pass used `slots`. Slots of the ring that others use later leave it."""
        for slot in slots:
            if slot in self.ring:
                self.ring[slot] = use

    def _ring_room(self, n: int, most: int) -> list[int]:
        """Return up to `n` free slots for pieces that pass through a ring of at most `most` slots.

        Slots that were used longest ago come first.

        Slots that were free before do not join the ring, so that they keep what they get. A slot
        leaves the ring if another cut has used its piece.
        """
        slots, wanted, guessed = self.slots, self.wanted, self.guessed_for
        got = list(islice(reversed(slots.free), n))
        for slot, use in list(self.ring.items()):
            piece = slots.piece[slot]
            if piece is None or (use and slots.last_use[slot] != use):
                del self.ring[slot]
            elif (
                len(got) < n
                and slots.state[slot] != IN_USE
                and piece not in wanted
                and piece not in guessed
            ):
                del self.ring[slot]
                self._evict(slot)
                self.ring[slot] = 0
                got.append(slot)
        while len(got) < n and len(self.ring) < most:
            victim = self.queue.take(wanted, guessed, self.kept)
            if victim is None:
                break
            self._evict(victim)
            self.ring[victim] = 0
            got.append(victim)
        return sorted(got, key=slots.last_use.__getitem__)

    def place_for_later(self, piece: Piece, cut: int, reason: str, out: list[Copy]) -> bool:
        """Append the copy of a PREDICTED or PROMOTED piece. Returns False if it gets no slot."""
        slot = self._home(piece)
        if slot is None:
            slot = self._plain(self.wanted, self.guessed_for, self.kept)
        if slot is None and reason == PREDICTED:
            slot = self._farther_guess(cut)
        if slot is None:
            return False
        self.guessed_for[piece] = cut
        self._put(piece, slot, cut, reason, out)
        if reason == PREDICTED:
            self._in_flight.add(piece)
        return True

    def place_filled(self, piece: Piece, kept: Collection[Piece], out: list[Copy]) -> bool:
        """Append the copy of a piece between two graphs. Returns False if all slots are `kept`."""
        slot = self._home(piece)
        if slot is None:
            slot = self._plain(kept)
        if slot is not None:
            self._put(piece, slot, 0, FILLED, out)
        return slot is not None

    def _put(self, piece: Piece, slot: int, cut: int, reason: str, out: list[Copy]) -> None:
        if self.slots.state[slot] != FREE:
            self._evict(slot)
        self._copy_all([(piece, slot)], cut, reason, out)

    def _home(self, piece: Piece) -> int | None:
        """Return the piece's own slot if it has one and it is free."""
        group, expert = piece
        first = self.homes.get(group, -1)
        return first + expert if first >= 0 and self.slots.state[first + expert] == FREE else None

    def _plain(self, *stay: Collection[Piece]) -> int | None:
        """Return a free slot, or else the first one to evict whose piece is in none of `stay`."""
        slot: int | None = next(reversed(self.slots.free), None)
        return self.queue.take(*stay) if slot is None else slot

    def require_room(self, need: CutNeed) -> None:
        """Raise DoesNotFit if not even `forced` could place the need's pieces."""
        slots, pieces = self.slots, need.pieces
        busy = slots.counts[IN_USE]
        if need.contiguous:
            if self._region(need, forced=True) is None:
                raise DoesNotFit(
                    f"cut {need.cut} needs {len(pieces)} slots of pool {self.pool} in a row, but "
                    f"it has {slots.n_own}, {busy} of them in use; raise --vram"
                )
            return
        own = set(pieces)
        shared = sum(1 for p in own & slots.where.keys() if slots.users[slots.where[p]])
        n_slots = slots.n_slots - slots.counts[CLOSED]
        if len(own) + busy - shared > n_slots:
            raise DoesNotFit(
                f"cut {need.cut} needs {len(own)} slots of pool {self.pool}, but it has "
                f"{n_slots}, {busy - shared} of them in use; raise --vram"
            )

    # -- victims ---------------------------------------------------------------------------------

    def _make_room(self, n: int, need: CutNeed, forced: bool) -> list[int]:
        """Evict pieces until `n` slots are free, if possible. Return up to `n` slots, sorted."""
        got = list(islice(reversed(self.slots.free), n))
        take, wanted = self.queue.take, self.wanted
        while len(got) < n:
            slot = take(wanted, self.guessed_for, self.kept)
            if slot is None:
                break
            self._evict(slot)
            got.append(slot)
        if len(got) < n:
            for slot in self._costly_victims(n - len(got), need, forced):
                self._evict(slot)
                got.append(slot)
        return sorted(got)

    def _farther_guess(self, cut: int) -> int | None:
        slots = self.slots
        farther = [
            (guessed_for, slots.where[piece])
            for piece, guessed_for in self.guessed_for.items()
            if guessed_for > cut
            and piece not in self.wanted
            and piece not in self.kept
            and slots.state[slots.where[piece]] != IN_USE
        ]
        return max(farther)[1] if farther else None

    def _costly_victims(self, n: int, need: CutNeed, forced: bool) -> list[int]:
        """Return up to `n` slots of pieces that are expected to be used, the least costly first."""
        slots, wanted, guessed_for = self.slots, self.wanted, self.guessed_for
        own = set(need.pieces)
        ranked: list[tuple[int, int, int]] = []
        for piece, slot in slots.where.items():
            if slots.state[slot] not in (LOADING, READY) or piece in own:
                continue
            cuts = wanted.get(piece)
            if cuts is None and piece in guessed_for and piece not in self.kept:
                ranked.append((0, -guessed_for[piece], slot))
            elif cuts is not None and cuts[0] > need.cut and piece not in self.kept:
                ranked.append((1, -cuts[0], slot))
            elif forced:
                ranked.append((2, -cuts[0] if cuts else -_FAR, slot))
        ranked.sort()
        return [slot for _, _, slot in ranked[:n]]

    def _evict(self, slot: int) -> None:
        piece = self.slots.evict(slot)
        self.forget(slot, piece)
        self._counters.evictions += 1
        for cut in self.wanted.get(piece, ()):
            add(self.pending, cut)

    def close_slots(self, n: int) -> None:
        """Let only the first `n` of the lent slots be closed, none of which may be in use.

        Pieces in slots that are closed now leave them.
        """
        slots, own = self.slots, self.slots.n_own
        for slot in range(own, own + n):
            if slots.state[slot] != CLOSED:
                if slots.state[slot] != FREE:
                    self._evict(slot)
                    self._counters.n_lent_dropped += 1
                slots.close(slot)
        for slot in range(own + n, slots.n_slots):
            if slots.state[slot] == CLOSED:
                slots.reopen(slot)
        self.retry()

    def evict_all(self) -> None:
        """Evict all pieces. No slot may be in use."""
        for slot in list(self.slots.where.values()):
            self._evict(slot)

    def forget(self, slot: int, piece: Piece) -> None:
        """Clear the records of a piece that has left its slot: its copy's reason and its guess."""
        if number := self.copy_reason[slot]:
            self._counters.prefetched_wasted += REASONS[number] != NEEDED
            self.copy_reason[slot] = 0
        self.guessed_for.pop(piece, None)
        self._in_flight.discard(piece)

    # -- whole layers ----------------------------------------------------------------------------

    def _place_region(self, need: CutNeed, reason: str, out: list[Copy], forced: bool) -> bool:
        if self.resident(need) is not None:
            return True  # the cheapest region would be the one that it has
        first = self._region(need, forced)
        if first is None:
            return False
        slots = self.slots
        for slot, piece in enumerate(need.pieces, first):
            elsewhere = slots.where.get(piece)
            if elsewhere is not None and elsewhere != slot:
                self._evict(elsewhere)
        missing: list[tuple[Piece, int]] = []
        for slot, piece in enumerate(need.pieces, first):
            there = slots.piece[slot]
            if there == piece:
                continue
            if there is not None:
                self._evict(slot)
            missing.append((piece, slot))
        self._copy_all(missing, need.cut, reason, out)
        return True

    def _region(self, need: CutNeed, forced: bool) -> int | None:
        n = len(need.pieces)
        home = self.homes.get(need.pieces[0][0], -1)
        if home >= 0 and all(
            there is None or there == piece
            for there, piece in zip(self.slots.piece[home : home + n], need.pieces, strict=True)
        ):
            return home
        regions: Iterable[int] = range(0, self.slots.n_own - n + 1, n)
        anchors = self._anchors(need, forced)
        if anchors:
            regions = anchors & set(regions) if len(anchors) == 1 else ()
        costs = [self._region_cost(need, first, forced) for first in regions]
        possible = [cost for cost in costs if cost is not None]
        return min(possible)[-1] if possible else None

    def _anchors(self, need: CutNeed, forced: bool) -> set[int]:
        """Return the first slots of regions that the need's immovable pieces require."""
        slots, anchors = self.slots, set()
        for i, piece in enumerate(need.pieces):
            slot = slots.where.get(piece)
            if slot is not None and (
                slots.state[slot] == IN_USE or (not forced and self.wanted[piece][0] < need.cut)
            ):
                anchors.add(slot - i)
        return anchors

    def _region_cost(self, need: CutNeed, first: int, forced: bool) -> tuple[int, ...] | None:
        """Return (wanted pieces lost, guessed pieces lost, copies, last use, first), or None.

        None: the need's pieces cannot be placed from slot `first` on.
        """
        slots, wanted, own = self.slots, self.wanted, set(need.pieces)
        n_wanted = n_guessed = n_copies = last_use = 0
        for slot, piece in enumerate(need.pieces, first):
            there = slots.piece[slot]
            if there == piece:
                continue
            n_copies += 1
            if there is None:
                continue
            if slots.state[slot] == IN_USE:
                return None
            if there not in own:
                cuts = wanted.get(there)
                if not forced and (there in self.kept or (cuts and cuts[0] <= need.cut)):
                    return None
                n_wanted += cuts is not None or there in self.kept
                n_guessed += there in self.guessed_for
            last_use = max(last_use, slots.last_use[slot])
        return n_wanted, n_guessed, n_copies, last_use, first

    def _copy_all(
        self,
        pairs: Sequence[tuple[Piece, int]],
        cut: int,
        reason: str,
        out: list[Copy],
        *,
        passing: bool = False,
    ) -> None:
        slots, copy_reason, renew = self.slots, self.copy_reason, self.queue.renew
        number = REASONS.index(reason)
        for piece, slot in pairs:
            slots.load(slot, piece)
            if not passing:
                self.ring.pop(slot, None)
            copy_reason[slot] = number
            renew(slot)
            out.append(Copy(self.pool, slot, piece, cut, reason, slots.last_use[slot] or None))
            self._counters.n_lent_copies += slot >= slots.n_own
        self._counters.streamed_experts += len(pairs)
        self._counters.n_promoted += len(pairs) if reason == PROMOTED else 0


def add(cuts: list[int], cut: int) -> None:
    """Insert `cut` into a sorted list, unless it is there."""
    at = bisect_left(cuts, cut)
    if at == len(cuts) or cuts[at] != cut:
        cuts.insert(at, cut)


def discard(cuts: list[int], cut: int) -> None:
    """Remove `cut` from a sorted list, if it is there."""
    at = bisect_left(cuts, cut)
    if at < len(cuts) and cuts[at] == cut:
        del cuts[at]


def _pairs(pieces: Sequence[Piece], slots: Sequence[int]) -> list[tuple[Piece, int]]:
    """Give each piece a slot, so that neighbouring experts get neighbouring slots if possible.

    The longest run of neighbouring experts goes to the shortest run of slots that holds it.
    """
    if len(pieces) < 2:
        return list(zip(pieces, slots, strict=True))
    want = _runs([group << 32 | expert for group, expert in sorted(pieces)])
    have = _runs(slots)
    pairs: list[tuple[int, int]] = []
    want.sort(key=lambda run: -run[1])
    while want and want[0][1] > 1:
        first, n = want.pop(0)
        run = min((r for r in have if r[1] >= n), key=itemgetter(1), default=None)
        if run is None:
            run = max(have, key=itemgetter(1))
            insort(want, (first + run[1], n - run[1]), key=lambda r: -r[1])
            n = run[1]
        have.remove(run)
        pairs += [(first + i, run[0] + i) for i in range(n)]
        if run[1] > n:
            have.append((run[0] + n, run[1] - n))
    have.sort(key=itemgetter(1))
    left = [first + i for first, n in have for i in range(n)]
    pairs += zip((first for first, _ in want), left, strict=True)
    return [((piece >> 32, piece & 0xFFFFFFFF), slot) for piece, slot in sorted(pairs)]


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first, length) of each run of consecutive numbers; `numbers` ascend."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][0] + runs[-1][1] == number:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((number, 1))
    return runs
