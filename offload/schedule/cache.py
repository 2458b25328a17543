"""The cache rule, which decides which piece is evicted first, and the queue of victims. Pure.

The rule gives each piece a rank, and the piece with the lowest rank is evicted first. A rank may
change only when the piece is used, and only upwards. So `VictimQueue` can stay sorted lazily: it
looks at a rank again only when its piece has come to the front.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Collection, Container
from typing import Protocol

from offload.routing.routing import HALF_LIFE_STEPS
from offload.schedule.slots import LOADING, READY, Piece, PoolSlots

NEVER = -math.inf  # the rank of a piece that was copied but never used
_SCAN_SHARE = 0.9  # share of a layer's experts from which a cut counts as one of a prompt


class CacheRule(Protocol):
    """The cache rule, as the schedule uses it.

    The player has a twin of `Lrfu` in C. Another rule needs a twin of its own there.
    """

    skipped: int  # uses that do not count as time, because they are parts of one use

    def touched(self, pieces: Collection[Piece], now: int, *, is_scan: bool = False) -> None:
        """Raise the ranks of pieces that a cut uses.

        `now` is the number of the use, which grows by one with each cut. With `is_scan`, the pieces
        are those of a prompt, however few they are.
        """

    def rank(self, piece: Piece) -> float:
        """Return the piece's rank; the lowest is evicted first."""

    def ranks(self, group: int, expert: int = 0) -> array[float]:
        """Return the rank of each expert of a group, as an array that includes `expert`.

        The player writes to it.
        """


class Lrfu:
    """The cache rule that keeps often used pieces. A use's weight halves every `half_life` cuts.

    The rule is LRFU, recency first and frequency second (Lee and others, IEEE Transactions on
    Computers 50, 2001). A piece used in this cut outranks any piece with one earlier use, and
    pieces that recur stay longer. A prompt uses all experts of a layer, and would evict those that
    decodes need. So a cut of at least `n_scan` pieces counts as much as one of `n_used` pieces, and
    shares that weight among its pieces.

    All weights decay at the same rate. So stored weights are left unchanged, and each new use
    weighs more. A rank is the base-2 logarithm of a piece's total weight, which cannot overflow.
    """

    def __init__(
        self, half_life: float, n_used: int = 1, n_scan: int = 0, n_experts: int = 0
    ) -> None:
        assert half_life > 0
        self.half_life, self.n_used = half_life, max(1, n_used)
        self.n_scan = max(n_scan, self.n_used + 1)
        self._n_experts = n_experts
        self._ranks: dict[int, array[float]] = {}  # each expert's rank, by group
        self.skipped = 0  # uses that do not count as time, because they are parts of one use

    @classmethod
    def for_model(cls, n_cuts: int, n_used: int = 1, n_experts: int = 0) -> Lrfu:
        """Return the rule for graphs of `n_cuts` cuts.

        A token uses `n_used` of a layer's `n_experts` experts.
        """
        n_scan = math.ceil(_SCAN_SHARE * n_experts)
        return cls(HALF_LIFE_STEPS * max(1, n_cuts), n_used, n_scan, n_experts)

    def touched(self, pieces: Collection[Piece], now: int, *, is_scan: bool = False) -> None:
        """Raise the ranks of pieces that a cut uses.

        `now` is the number of the use, which grows by one with each cut. With `is_scan`, the pieces
        share the weight of a token's pieces, however few they are.
        """
        new, log2 = (now - self.skipped) / self.half_life, math.log2
        if len(pieces) >= self.n_scan or (is_scan and len(pieces) > self.n_used):
            new -= log2(len(pieces) / self.n_used)
        group, ranks = -1, array("d")
        for piece in pieces:  # log2(2**old + 2**new) without overflow
            if piece[0] != group or piece[1] >= len(ranks):
                group, ranks = piece[0], self.ranks(*piece)
            expert = piece[1]
            old = ranks[expert]
            if old > new:
                ranks[expert] = old + log2(1.0 + 2.0 ** (new - old))
            else:
                ranks[expert] = new + log2(1.0 + 2.0 ** (old - new))

    def rank(self, piece: Piece) -> float:
        """Return the piece's rank; the lowest is evicted first."""
        group, expert = piece
        ranks = self._ranks.get(group)
        return ranks[expert] if ranks is not None and expert < len(ranks) else NEVER

    def ranks(self, group: int, expert: int = 0) -> array[float]:
        """Return the rank of each expert of a group, as an array that includes `expert`.

        The player updates it as `touched` does.
        """
        ranks = self._ranks.setdefault(group, array("d", [NEVER]) * self._n_experts)
        if expert >= len(ranks):
            ranks.extend([NEVER] * (expert + 1 - len(ranks)))
        return ranks


class VictimQueue:
    """A queue of one pool's plainly cached pieces, in the order of eviction.

    A piece is *plainly cached* if it is not in use, not wanted by a known need and not guessed for
    a later cut. Entries of other pieces are dropped when they reach the front, so a hit costs the
    queue nothing. Code that makes a slot's piece plainly cached again has to offer the slot again.
    """

    __slots__ = ("_heap", "_rule", "_slots", "_version", "dropped", "queued")

    def __init__(self, slots: PoolSlots, rule: CacheRule) -> None:
        self._slots, self._rule = slots, rule
        self._heap: list[tuple[float, int, int]] = []  # rank, slot, version
        self._version = [0] * slots.n_slots  # number of pieces that a slot has held
        self.queued = [False] * slots.n_slots
        self.dropped: list[int] = []  # slots to offer again when a new graph begins

    def renew(self, slot: int) -> None:
        """Record that the slot was given to another piece, which is not plainly cached yet."""
        self._version[slot] += 1
        self.queued[slot] = False
        self.dropped.append(slot)

    def offer(self, slot: int) -> None:
        """Queue a slot whose piece may be plainly cached now."""
        piece = self._slots.piece[slot]
        if piece is not None and not self.queued[slot]:
            self.queued[slot] = True
            heapq.heappush(self._heap, (self._rule.rank(piece), slot, self._version[slot]))

    def offer_dropped(self) -> None:
        """Queue all dropped slots again. Call it when fewer pieces are wanted, guessed or kept."""
        dropped, self.dropped = self.dropped, []
        for slot in dropped:
            self.offer(slot)
        if len(self._heap) > 4 * self._slots.n_slots:  # entries of pieces evicted out of turn
            self._heap = [e for e in self._heap if e[2] == self._version[e[1]]]
            heapq.heapify(self._heap)

    def take(
        self,
        wanted: Container[Piece],
        guessed: Container[Piece] = (),
        kept: Container[Piece] = (),
    ) -> int | None:
        """Remove and return the first slot whose piece is in none of the arguments, or None."""
        heap, slots = self._heap, self._slots
        while heap:
            rank, slot, version = heap[0]
            if version != self._version[slot]:
                heapq.heappop(heap)
                continue
            piece = slots.piece[slot]
            state = slots.state[slot]
            if (
                piece is None
                or (state != READY and state != LOADING)
                or piece in wanted
                or piece in guessed
                or piece in kept
            ):
                heapq.heappop(heap)
                self.queued[slot] = False
                self.dropped.append(slot)
                continue
            now = self._rule.rank(piece)
            if now != rank:
                heapq.heapreplace(heap, (now, slot, version))
                continue
            heapq.heappop(heap)
            self.queued[slot] = False
            return slot
        return None
