"""Trees as sequences: a row shares a sequence with its ancestors, and with no other node above."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest, DoesNotFit
from offload.sequences.leaf_sequences import LeafSequences

START = 5


@st.composite
def grown(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Parents of a tree's nodes, and the numbers of nodes that each decode adds."""
    n = draw(st.integers(1, 14))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    ends = sorted(draw(st.sets(st.integers(1, n), max_size=3)) | {n})
    return parents, [b - a for a, b in zip([0, *ends], ends, strict=False)]


def ancestors(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


class Cells:
    """A unified KV cache: cells of (position, sequences), and which of them a row sees."""

    def __init__(self) -> None:
        self.cells = [(i, {0}) for i in range(START)]
        self.nodes: list[int] = []  # cell of each node

    def decode(self, tree: LeafSequences, parents: list[int]) -> list[set[int]]:
        level = tree.grow(parents)
        for copy in level.copies:
            for position, held in self.cells:
                if copy.source in held and position < copy.end:
                    held.add(copy.target)
        for position, row in zip(level.positions, level.rows, strict=True):
            self.nodes.append(len(self.cells))
            self.cells.append((position, set(row)))
        return [
            {
                i
                for i, (other, held) in enumerate(self.cells)
                if other <= position and held & set(row)
            }
            for position, row in zip(level.positions, level.rows, strict=True)
        ]


@given(grown())
def test_a_row_sees_the_text_and_its_own_ancestors_only(tree: tuple[list[int], list[int]]) -> None:
    parents, sizes = tree
    cells, leaves, at = Cells(), LeafSequences(0, START, range(1, 20)), 0
    for n in sizes:
        seen = cells.decode(leaves, parents[at : at + n])
        for node, sees in enumerate(seen, at):
            own = {cells.nodes[i] for i in ancestors(parents, node)}
            assert sees == set(range(START)) | own
        at += n
    for node in range(len(parents)):
        path = sorted(ancestors(parents, node))
        holder = leaves.holder_of(path)
        assert all(holder in cells.cells[cells.nodes[i]][1] for i in path)


@pytest.mark.parametrize("bad", [[0], [-1, 1], [-1, 5], [-2]])
def test_a_parent_must_come_before_its_child(bad: list[int]) -> None:
    with pytest.raises(BadRequest):
        LeafSequences(0, 0, range(1, 4)).grow(bad)


def test_more_leaves_than_sequences_are_refused_and_change_nothing() -> None:
    tree = LeafSequences(0, START, range(1, 3))
    tree.grow([-1])
    with pytest.raises(DoesNotFit, match="more than 2 leaves"):
        tree.grow([0, 0, 0])
    assert len(tree) == 1
    assert len(tree.grow([0, 0]).copies) == 1


def test_what_is_not_a_path_is_refused() -> None:
    tree = LeafSequences(0, 0, range(1, 4))
    tree.grow([-1, 0, 0])
    with pytest.raises(BadRequest, match="not a path"):
        tree.holder_of([1, 2])
