"""A simulated cache of experts, and the LRU rule to compare ours with."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from offload.schedule.cache import Lrfu
from offload.schedule.slots import Piece


class Lru(Lrfu):
    """The rule that evicts the least recently used piece."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def touched(self, pieces: Collection[Piece], now: int) -> None:
        for piece in pieces:
            self.ranks(*piece)[piece[1]] = now


def simulated_hits(
    rule: Lrfu, n_slots: int, cuts: Iterable[tuple[bool, Sequence[Piece]]], *, holds_used: bool
) -> float:
    """Return the share of uses whose piece was in a slot.

    Only marked cuts count. With `holds_used` a cut's own pieces stay until the next cut, as in
    slots that are in use; otherwise they may be evicted at once.
    """
    held: set[Piece] = set()
    n_found = n_uses = 0
    for now, (counts, pieces) in enumerate(cuts, 1):
        if counts:
            n_found += len(held.intersection(pieces))
            n_uses += len(pieces)
        rule.touched(pieces, now)
        held.update(pieces)
        while len(held) > n_slots:
            others = (held.difference(pieces) or held) if holds_used else held
            held.remove(min(others, key=lambda piece: (rule.rank(piece), piece)))
    return n_found / max(1, n_uses)
