"""The schedule's questions and answers: small frozen tuples."""

from __future__ import annotations

from typing import NamedTuple

from offload.schedule.slots import Piece

NEEDED, AHEAD, PREDICTED, PROMOTED = "needed", "ahead", "predicted", "promoted"
FILLED = "filled"  # between graphs, while nobody waits


class Need(NamedTuple):
    """The pieces that a cut uses, of one pool; they may repeat.

    `contiguous`: the pieces are experts 0..n-1 of one group and must lie in slots [r*n, (r+1)*n)
    for some r, in order, so that the router's ids hold without a remap.
    """

    cut: int
    pool: int
    pieces: tuple[Piece, ...]
    contiguous: bool = False


class Evict(NamedTuple):
    """The slot's piece is gone; nothing to execute."""

    pool: int
    slot: int
    piece: Piece


class Copy(NamedTuple):
    """Copy the piece into the slot, after the use that is numbered `after` has finished."""

    pool: int
    slot: int
    piece: Piece
    cut: int
    reason: str  # NEEDED: the computation stands before the cut; AHEAD of it; PREDICTED;
    # PROMOTED for later graphs; FILLED between two
    after: int | None  # None: nobody has ever read the slot


Command = Evict | Copy


class Entered(NamedTuple):
    """A cut may run: what it reads, and what it has to wait for."""

    slots: tuple[int, ...]  # in the order of the need's pieces
    waits: tuple[Piece, ...]  # order the computation behind the copies of these first
    issued: tuple[Command, ...]  # enqueue these before that
    hits: int  # pieces that were there before the need was known, cached or guessed
    misses: int  # pieces that were copied because of the need
    use: int  # number of this use of the slots; grows by one with each cut


class Counters:
    """Counts of what a schedule did since it was made."""

    __slots__ = ("copies", "evictions", "hits", "misses", "prefetched_used", "prefetched_wasted")

    def __init__(self) -> None:
        self.hits = self.misses = self.evictions = 0
        self.prefetched_used = self.prefetched_wasted = 0  # pieces not copied as NEEDED
        self.copies = dict.fromkeys((NEEDED, AHEAD, PREDICTED, PROMOTED, FILLED), 0)

    def __repr__(self) -> str:
        return f"<Counters {', '.join(f'{name}={getattr(self, name)}' for name in self.__slots__)}>"
