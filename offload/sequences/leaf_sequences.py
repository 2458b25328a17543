"""Maps a tree of drafted tokens to libllama's sequences. Pure.

libllama lets a row see the cells that share a sequence with it. So each path of the tree gets a
temporary sequence, and a node belongs to the sequences of all leaves below it. A tree may grow in
several decodes: a new leaf continues its ancestor's sequence, or copies it if another leaf took it.
llama.cpp's examples/speculative does the same with n_seq_dft sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.errors import BadRequest, DoesNotFit


@dataclass(frozen=True)
class SharedPrefix:
    """Positions [0, end) of the sequence `source` are shared with the sequence `target`."""

    source: int
    target: int
    end: int


@dataclass(frozen=True)
class Level:
    """One decode of a tree: copies to make first, then each row's position and sequences."""

    copies: tuple[SharedPrefix, ...]
    positions: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


class LeafSequences:
    """A tree after the `start` tokens of `main`, with the free `sequences` for its leaves."""

    def __init__(self, main: int, start: int, sequences: Sequence[int]) -> None:
        self._main, self.start = main, start
        self._free = list(sequences)[::-1]
        self._parents: list[int] = []
        self._depths: list[int] = []
        self._rows: list[tuple[int, ...]] = []
        self._tips: dict[int, int] = {}  # sequence that ends at a node and may be continued
        self.used: list[int] = []

    def __len__(self) -> int:
        return len(self._parents)

    def grow(self, parents: Sequence[int]) -> Level:
        """Add nodes. `parents` are indices of earlier nodes, new ones included, or -1: the root.

        Raises BadRequest unless every parent comes before its child, and DoesNotFit if there are
        more leaves than sequences. The tree does not change then.
        """
        first = len(self._parents)
        for i, parent in enumerate(parents, first):
            if not -1 <= parent < i:
                raise BadRequest(f"node {i} of a tree has parent {parent}, which is not before it")
        inner = {parent for parent in parents if parent >= first}
        every = [*self._parents, *parents]
        leaves = [i for i in range(first, len(every)) if i not in inner]
        tips, free = dict(self._tips), list(self._free)
        copies: list[SharedPrefix] = []
        rows: dict[int, list[int]] = {i: [] for i in range(first, len(every))}
        for leaf in leaves:
            path = [leaf]
            while every[path[-1]] >= first:
                path.append(every[path[-1]])
            above = every[path[-1]]  # the old node, or the root, that the path continues
            if above in tips:
                sequence = tips.pop(above)
            elif free:
                sequence = free.pop()
                source = self._rows[above][0] if above >= 0 else self._main
                end = self.start + (self._depths[above] + 1 if above >= 0 else 0)
                copies.append(SharedPrefix(source, sequence, end))
            else:
                raise DoesNotFit(
                    f"a tree with more than {len(self.used) + len(self._free)} leaves has no "
                    "sequence left"
                )
            for node in path:
                rows[node].append(sequence)
            tips[leaf] = sequence
        for parent in parents:
            self._depths.append(0 if parent < 0 else self._depths[parent] + 1)
        self._parents, self._tips = every, tips
        self.used += [copy.target for copy in copies]
        self._free = free
        self._rows += [tuple(row) for row in rows.values()]
        positions = tuple(self.start + depth for depth in self._depths[first:])
        return Level(tuple(copies), positions, tuple(self._rows[first:]))

    def holder_of(self, path: Sequence[int]) -> int:
        """A sequence that holds the whole path of nodes. Raises BadRequest if it is no path."""
        nodes, node = [], path[-1]
        while node >= 0:
            nodes.append(node)
            node = self._parents[node]
        if nodes[::-1] != list(path):
            raise BadRequest(f"{list(path)} is not a path from the root of the tree")
        return self._rows[path[-1]][0]
