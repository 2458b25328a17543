"""Decides which experts are in memory, if memory cannot hold them all. Pure.

Slots have the same rule (`Lrfu`): the expert with the lowest rank is evicted first. A prompt uses
many of a layer's experts. Its uses do not raise ranks, and experts that were read for it are
evicted first, the newest of them before the others. So a prompt passes through the memory of two
layers, and replaces no expert that decodes use. If there is more memory, experts of the prompt's
first layers stay there for the next prompt. Evicting the oldest first would leave nothing for the
next prompt, because each prompt needs the layers in the same order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Collection, Container, Iterator, Mapping, Sequence

from offload.schedule.cache import Lrfu

LayerExpert = tuple[int, int]  # (layer, expert)
_MANY_SHARE = 0.5  # share of a layer's experts from which a batch counts as a prompt's


class Residency:
    """The experts that are in memory or being read, and the bytes that they take."""

    def __init__(
        self, sizes: Mapping[int, int], n_experts: int, n_used: int, capacity_bytes: int
    ) -> None:
        """`sizes`: bytes of one expert's pages, by layer. A token uses `n_used` of `n_experts`."""
        self.sizes, self._n_experts = sizes, n_experts
        self._rule = Lrfu.for_model(len(sizes), n_used, n_experts)
        self._n_many = max(n_used + 1, math.ceil(_MANY_SHARE * n_experts))
        self._scanned: dict[
            int, frozenset[int]
        ] = {}  # experts of the last prompt's batch, by layer
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._number: dict[LayerExpert, int] = {}  # number of the reading that brought the piece
        self._heap: list[tuple[float, int, LayerExpert]] = []  # rank, number of the reading, piece
        self._numbers = itertools.count(0, -1)  # of equal ranks, the newest leaves first
        self._uses = 0

    def __contains__(self, piece: LayerExpert) -> bool:
        return piece in self._number

    def __len__(self) -> int:
        return len(self._number)

    def are_many(self, n_experts: int) -> bool:
        """True if a batch uses half of a layer's experts or more, as prompts do."""
        return n_experts >= self._n_many

    def likely(self, layer: int, n: int) -> list[LayerExpert]:
        """Return the `n` experts of a layer that a prompt's batch is most likely to use.

        These are the experts that the last such batch used, then those that rank highest.
        """
        last, rank = self._scanned.get(layer, frozenset()), self._rule.rank
        pieces = [(layer, expert) for expert in range(self._n_experts)]
        return sorted(pieces, key=lambda p: (p[1] in last, rank(p)), reverse=True)[:n]

    def touch(self, pieces: Sequence[LayerExpert], *, is_scan: bool) -> list[LayerExpert]:
        """Count one use of a layer's experts. Returns those that are not in memory.

        `is_scan`: whether a prompt uses them.
        """
        if not pieces:
            return []
        if is_scan:
            self._scanned[pieces[0][0]] = frozenset(expert for _, expert in pieces)
        else:
            self._uses += 1
            self._rule.touched(pieces, self._uses)
        return [piece for piece in pieces if piece not in self._number]

    def expect(self, pieces: Sequence[LayerExpert]) -> None:
        """Count each piece as used once, the first one as used last."""
        for piece in reversed(pieces):
            self._uses += 1
            self._rule.touched((piece,), self._uses)

    def fits(self, piece: LayerExpert) -> bool:
        """True if the piece can be added without evicting another one."""
        return self.used_bytes + self.sizes[piece[0]] <= self.capacity_bytes

    def add(self, piece: LayerExpert) -> None:
        """Count a piece as in memory."""
        number = self._number[piece] = next(self._numbers)
        self.used_bytes += self.sizes[piece[0]]
        heapq.heappush(self._heap, (self._rule.rank(piece), number, piece))

    def remove(self, piece: LayerExpert) -> None:
        """Count a piece as no longer in memory."""
        del self._number[piece]
        self.used_bytes -= self.sizes[piece[0]]

    def victims(
        self, needed_bytes: int, kept: Sequence[Container[LayerExpert]]
    ) -> Iterator[LayerExpert]:
        """Remove and yield pieces, lowest rank first, until `needed_bytes` more fit.

        Pieces in one of `kept` stay. Ends early if no other piece is left.
        """
        aside: list[tuple[float, int, LayerExpert]] = []
        heap = self._heap
        while self.used_bytes + needed_bytes > self.capacity_bytes and heap:
            entry = rank, number, piece = heapq.heappop(heap)
            if self._number.get(piece) != number:
                continue  # the piece has left
            now = self._rule.rank(piece)
            if now != rank:
                heapq.heappush(heap, (now, number, piece))
            elif any(piece in some for some in kept):
                aside.append(entry)
            else:
                self.remove(piece)
                yield piece
        for entry in aside:
            heapq.heappush(heap, entry)


def bytes_of(sizes: Mapping[int, int], pieces: Collection[LayerExpert]) -> int:
    """Return the bytes that pieces take."""
    return sum(sizes[layer] for layer, _ in pieces)
