"""The schedule's inputs and outputs, as small tuples."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offload.schedule.slots import Piece

# Why a piece is copied. NEEDED: the computation is at the cut that reads it. AHEAD: a later cut of
# this graph reads it. PREDICTED: guessed for a later cut. PROMOTED: for later graphs. FILLED:
# between two graphs, while nobody waits.
NEEDED, AHEAD, PREDICTED, PROMOTED = "needed", "ahead", "predicted", "promoted"
FILLED = "filled"


class Need(NamedTuple):
    """The pieces of one pool that a cut uses; a piece may occur twice.

    `contiguous`: the pieces are experts 0..n-1 of one group, and must be in slots [r*n, (r+1)*n) in
    order for some r, so that the router's ids are slot numbers.
    """

    cut: int
    pool: int
    pieces: tuple[Piece, ...]
    contiguous: bool = False


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


class Counters:
    """Counts of what a schedule has done."""

    __slots__ = ("copies", "evictions", "hits", "misses", "prefetched_used", "prefetched_wasted")

    def __init__(self) -> None:
        self.hits = self.misses = self.evictions = 0
        self.prefetched_used = self.prefetched_wasted = 0  # pieces not copied as NEEDED
        self.copies = dict.fromkeys((NEEDED, AHEAD, PREDICTED, PROMOTED, FILLED), 0)


def coalesce(copies: Iterable[Copy]) -> list[Span]:
    """Join copies of neighbouring experts into neighbouring slots, in their order.

    Only copies that follow each other are joined, so nothing overtakes what is needed earlier.
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
