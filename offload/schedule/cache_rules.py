"""Cache rules: which pieces are worth keeping, and the queue of those that are not.

A rule gives each piece a rank; the lowest goes first. A rank may change only when the piece is
touched, and only upwards, so that a queue can be kept sorted lazily: `VictimQueue` looks at a rank
again only when its piece has come to the front.
"""

from __future__ import annotations

import difflib
import heapq
import math
from collections.abc import Collection, Container
from typing import Protocol

from offload.errors import OffloadError
from offload.schedule.slots import LOADING, READY, Piece, PoolSlots

NEVER = -math.inf  # the rank of a piece that was copied but never used


class CacheRule(Protocol):
    """Ranks pieces, whatever pool they are in."""

    def touched(self, pieces: Collection[Piece], now: int) -> None:
        """A cut uses the pieces; `now` grows by one with each cut."""

    def rank(self, piece: Piece) -> float:
        """The piece with the lowest rank goes first."""


class Lru:
    """Keep what was used last."""

    def __init__(self) -> None:
        self._last: dict[Piece, int] = {}

    def touched(self, pieces: Collection[Piece], now: int) -> None:
        last = self._last
        for piece in pieces:
            last[piece] = now

    def rank(self, piece: Piece) -> float:
        return self._last.get(piece, NEVER)


class Lrfu:
    """Keep what is used often, a use counting half after every `half_life` cuts.

    Recency first, frequency second (LRFU: Lee and others, IEEE Transactions on Computers 50, 2001):
    what was used in this cut outranks any one use before, and what recurs stays for longer. A cut
    of `n_scan` pieces and more counts as much as one of `n_used`, which its pieces share: a prompt,
    which uses all experts of a layer, leaves those of a decode where they are.

    All counts decay alike, so instead of shrinking the old ones each new use weighs more; the rank
    is the base-2 logarithm of the weighted count, which cannot overflow.
    """

    def __init__(self, half_life: float, n_used: int = 1, n_scan: int = 0) -> None:
        if half_life <= 0:
            raise OffloadError(f"the half-life of lrfu must be over 0 cuts, not {half_life}")
        self._half_life, self._n_used = half_life, max(1, n_used)
        self._n_scan = max(n_scan, self._n_used + 1)
        self._rank: dict[Piece, float] = {}

    def touched(self, pieces: Collection[Piece], now: int) -> None:
        rank, new, log2 = self._rank, now / self._half_life, math.log2
        if len(pieces) >= self._n_scan:
            new -= log2(len(pieces) / self._n_used)
        get = rank.get
        for piece in pieces:  # log2(2**old + 2**new), of any size
            old = get(piece)
            if old is None:
                rank[piece] = new
            elif old > new:
                rank[piece] = old + log2(1.0 + 2.0 ** (new - old))
            else:
                rank[piece] = new + log2(1.0 + 2.0 ** (old - new))

    def rank(self, piece: Piece) -> float:
        return self._rank.get(piece, NEVER)


HALF_LIFE_STEPS = 4.0  # decodes (docs/log.md)
_SCAN_SHARE = 0.9  # of a layer's experts, which verification batches do not reach
CACHE_RULES = ("lrfu", "lru")


def make_cache_rule(name: str, n_cuts: int = 1, n_used: int = 1, n_experts: int = 0) -> CacheRule:
    """The rule of that name, for graphs of `n_cuts` cuts and tokens that use `n_used` of a layer's
    `n_experts`.

    Raises OffloadError for a name that is not in CACHE_RULES.
    """
    if name not in CACHE_RULES:
        near = difflib.get_close_matches(name, CACHE_RULES, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(CACHE_RULES)}"
        raise OffloadError(f"no cache rule is called {name!r}: {hint}")
    if name == "lru":
        return Lru()
    return Lrfu(HALF_LIFE_STEPS * max(1, n_cuts), n_used, math.ceil(_SCAN_SHARE * n_experts))


class VictimQueue:
    """The plainly cached pieces of one pool, the one to lose first in front.

    Plain means: nobody uses it, no known need wants it, no guess that still stands names it.
    Entries that turn out not to be plain are dropped when they reach the front; whoever makes a
    slot plain again offers it again. So a hit costs the queue nothing.
    """

    __slots__ = ("_heap", "_rule", "_slots", "_version", "dropped", "queued")

    def __init__(self, slots: PoolSlots, rule: CacheRule) -> None:
        self._slots, self._rule = slots, rule
        self._heap: list[tuple[float, int, int]] = []  # rank, slot, version
        self._version = [0] * slots.n_slots  # counts the pieces a slot has held
        self.queued = [False] * slots.n_slots
        self.dropped: list[int] = []  # slots to offer again when a new graph begins

    def renew(self, slot: int) -> None:
        """The slot has been given to another piece, which is not plain yet."""
        self._version[slot] += 1
        self.queued[slot] = False
        self.dropped.append(slot)

    def offer(self, slot: int) -> None:
        """The slot may be plain now."""
        piece = self._slots.piece[slot]
        if piece is not None and not self.queued[slot]:
            self.queued[slot] = True
            heapq.heappush(self._heap, (self._rule.rank(piece), slot, self._version[slot]))

    def offer_dropped(self) -> None:
        """Nothing is wanted any more: every slot may be plain."""
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
        pinned: Container[Piece] = (),
    ) -> int | None:
        """Remove and return the first slot whose piece is in none of the three; None if none."""
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
                or piece in pinned
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
