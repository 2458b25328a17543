"""A tree of drafted tokens as libllama's sequences: pure.

Every leaf gets a temporary sequence, and a node's row belongs to the sequences of all leaves below
it. So a row attends to its ancestors, whose cells share one of its sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.errors import BadRequest


class LeafSequences:
    """Depths, rows and leaves of a tree given by parents."""

    def __init__(self, tokens: Sequence[int], parents: Sequence[int], first_sequence: int) -> None:
        """Raises BadRequest unless every parent comes before its child."""
        if len(tokens) != len(parents) or not tokens:
            raise BadRequest(f"a tree of {len(tokens)} tokens has {len(parents)} parents")
        self.parents = tuple(parents)
        self.depths: list[int] = []
        has_child = [False] * len(tokens)
        for i, parent in enumerate(self.parents):
            if not -1 <= parent < i:
                raise BadRequest(f"node {i} of a tree has parent {parent}, which is not before it")
            self.depths.append(0 if parent < 0 else self.depths[parent] + 1)
            if parent >= 0:
                has_child[parent] = True
        self._leaves = [i for i, parent_of_any in enumerate(has_child) if not parent_of_any]
        self.sequences = [first_sequence + k for k in range(len(self._leaves))]
        rows: list[list[int]] = [[] for _ in tokens]
        for leaf, sequence in zip(self._leaves, self.sequences, strict=True):
            for node in self._ancestors(leaf):
                rows[node].append(sequence)
        self.rows = [tuple(row) for row in rows]

    @property
    def n_leaves(self) -> int:
        return len(self._leaves)

    def _ancestors(self, node: int) -> list[int]:
        """The node and everything above it, from the node up."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        return path

    def leaf_below(self, path: Sequence[int]) -> int:
        """A sequence that holds the whole path. Raises BadRequest when it is not a path."""
        if not path:
            return self.sequences[0]
        if self._ancestors(path[-1])[::-1] != list(path):
            raise BadRequest(f"{list(path)} is not a path from the root of the tree")
        return self.rows[path[-1]][0]
