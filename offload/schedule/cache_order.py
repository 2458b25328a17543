"""Foresees which caches in RAM a graph copies to a device after those of a layer. Pure.

Each batch copies the caches of its layers in the same order. So the order of one pass over the
layers tells what the next pass copies while a layer is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile


@dataclass(frozen=True)
class CachePart:
    """Bytes of a layer's keys or values that a graph reads."""

    cache: Hashable  # the cache's tensor
    layer: int
    start_bytes: int  # where the bytes begin in the cache
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.start_bytes + self.size_bytes


class CacheOrder:
    """The parts that a pass over the layers copies, and those of the pass before it."""

    def __init__(self) -> None:
        self._known: list[CachePart] = []
        self._passed: list[CachePart] = []

    def begins(self, part: CachePart) -> bool:
        """True if `part` is the first of a new pass. Call it once for each part, before `after`."""
        passed = self._passed
        starts = not passed or (
            part.cache == passed[0].cache and passed[-1].layer != passed[0].layer
        )
        if starts:
            self._known, self._passed = passed, []
        self._passed.append(part)
        return starts

    def after(self) -> Sequence[CachePart]:
        """Return the parts of the next layer if the last part ends its own layer, or ().

        They are those of the pass before. A longer context reads more of each cache now.
        """
        at, known = len(self._passed) - 1, self._known
        if at + 1 >= len(known) or known[at].cache != self._passed[at].cache:
            return ()
        layer = known[at + 1].layer
        if layer == known[at].layer:
            return ()
        return [*takewhile(lambda part: part.layer == layer, known[at + 1 :])]


def stale_bytes(staged: CachePart, wanted: CachePart, rows: range, row_bytes: int) -> list[range]:
    """Return the bytes of the cache that a graph wants and that `staged` does not have as they are.

    `staged` begins where `wanted` does. It was copied before `rows` of the cache were written.
    """
    start, end = wanted.start_bytes, wanted.end_bytes
    there = min(end, staged.end_bytes)
    first, last = max(start, rows.start * row_bytes), min(there, rows.stop * row_bytes)
    ranges = [range(first, last), range(there, end)]
    if ranges[0] and ranges[0].stop == there:  # both in one copy
        ranges = [range(first, end)]
    return [part for part in ranges if part]
