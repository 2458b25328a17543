"""Trees as sequences: a row shares a sequence with its ancestors and with nobody else before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest
from offload.leaf_sequences import LeafSequences


@st.composite
def parents(draw: st.DrawFn) -> list[int]:
    n = draw(st.integers(1, 12))
    return [draw(st.integers(-1, i - 1)) for i in range(n)]


def ancestors(parents: list[int], node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = parents[node]
    return found


@given(parents())
def test_a_row_sees_its_ancestors_and_no_other_node_of_less_depth(parents: list[int]) -> None:
    tree = LeafSequences([1] * len(parents), parents, first_sequence=3)
    for i in range(len(parents)):
        above = ancestors(parents, i)
        for j in range(len(parents)):
            if tree.depths[j] <= tree.depths[i]:
                shares = bool(set(tree.rows[i]) & set(tree.rows[j]))
                assert shares == (j in above)


@given(parents(), st.data())
def test_any_path_is_held_whole_by_one_sequence(parents: list[int], data: st.DataObject) -> None:
    tree = LeafSequences([1] * len(parents), parents, first_sequence=3)
    end = data.draw(st.integers(0, len(parents) - 1))
    path = sorted(ancestors(parents, end))
    sequence = tree.leaf_below(path)
    assert all(sequence in tree.rows[node] for node in path)


@pytest.mark.parametrize("bad", [[0], [-1, 1], [-1, 5], [-2]])
def test_a_parent_must_come_before_its_child(bad: list[int]) -> None:
    with pytest.raises(BadRequest):
        LeafSequences([1] * len(bad), bad, 0)


def test_what_is_not_a_path_is_refused() -> None:
    tree = LeafSequences([1, 2, 3], [-1, 0, 0], 0)
    with pytest.raises(BadRequest, match="not a path"):
        tree.leaf_below([1, 2])
