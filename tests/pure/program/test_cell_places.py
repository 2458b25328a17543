"""The record of a cache's cells equals a plain list of owners, after any series of changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.ggml.cells import Cells, OwnCells

N_CELLS, N_SEQUENCES = 24, 4
_SEQUENCE = st.integers(0, N_SEQUENCES - 1)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("place"), _SEQUENCE, st.integers(1, 8)),
        st.tuples(st.just("remove"), _SEQUENCE, st.integers(0, 8)),
        st.tuples(st.just("copy"), _SEQUENCE, _SEQUENCE),
    ),
    max_size=30,
)


class PlainCells:
    """The owners of each cell, and each sequence's cells in the order of its positions."""

    def __init__(self) -> None:
        self.owners: list[set[int]] = [set() for _ in range(N_CELLS)]
        self.of: list[list[int]] = [[] for _ in range(N_SEQUENCES)]

    def place(self, sequence: int, n_tokens: int) -> None:
        free = [cell for cell in range(N_CELLS) if not self.owners[cell]]
        for cell in free[:n_tokens]:
            self.owners[cell].add(sequence)
            self.of[sequence].append(cell)

    def remove(self, sequence: int, start: int) -> None:
        for cell in self.of[sequence][start:]:
            self.owners[cell].discard(sequence)
        del self.of[sequence][start:]

    def copy(self, source: int, target: int) -> None:
        for cell in self.of[source]:
            self.owners[cell].add(target)
        self.of[target] = list(self.of[source])

    @property
    def end(self) -> int:
        return max([cell + 1 for cell, owners in enumerate(self.owners) if owners], default=0)

    def freed_by(self, sequence: int, needed: set[int]) -> float:
        return sum(
            1 / len(self.owners[cell])
            for cell in self.of[sequence]
            if not self.owners[cell] & needed
        )


@given(CHANGES, st.sets(_SEQUENCE))
def test_cells_are_those_of_a_plain_list(
    changes: list[tuple[str, int, int]], needed: set[int]
) -> None:
    cells, plain = Cells(N_CELLS, N_SEQUENCES), PlainCells()
    for kind, sequence, n in changes:
        if kind == "place":
            n = min(n, N_CELLS - sum(map(bool, plain.owners)))
            at = len(plain.of[sequence])
            cells.place([sequence] * n, range(at, at + n))
            plain.place(sequence, n)
        elif kind == "remove":
            cells.remove(sequence, n)
            plain.remove(sequence, n)
        elif sequence != n:
            cells.remove(n, 0)
            cells.copy(sequence, n)
            plain.remove(n, 0)
            plain.copy(sequence, n)
        assert cells.end == plain.end
        assert cells.n_used == sum(map(bool, plain.owners))
        for one in range(N_SEQUENCES):
            assert cells.top_of(one) == max(plain.of[one], default=-1) + 1
            assert cells.shares(one) == any(len(plain.owners[cell]) > 1 for cell in plain.of[one])
            found, others = cells.freed_by(one, needed - {one}), needed - {one}
            assert abs(found - plain.freed_by(one, others)) < 1e-9
    cells.clear()
    assert (cells.end, cells.n_used) == (0, 0)


def test_the_end_is_found_far_below_the_cells_that_were_freed() -> None:
    cells = Cells(20_000, 2)
    cells.place([0] * 15_000, range(15_000))
    cells.place([1], [0])
    cells.remove(0, 10)
    assert cells.end == 15_001
    cells.remove(1, 0)
    assert (cells.end, cells.n_used) == (10, 10)


def test_cells_that_others_need_do_not_leave_with_a_sequence() -> None:
    cells = Cells(N_CELLS, 3)
    cells.place([0] * 6, range(6))
    cells.copy(0, 1, 0, 4)
    cells.copy(0, 2, 0, 2)
    assert abs(cells.freed_by(0, ()) - (2 / 3 + 2 / 2 + 2)) < 1e-9
    assert cells.freed_by(0, [1]) == 2.0
    assert cells.freed_by(0, [2]) == 3.0
    assert cells.freed_by(1, [0]) == 0.0


def test_sequences_with_cells_of_their_own_pass_over_none_of_others() -> None:
    cells = OwnCells()
    cells.place([0, 0, 1], [0, 1, 0])
    cells.remove(0, 1)
    assert (cells.end, cells.n_used) == (0, 0)
    assert (cells.top_of(0), cells.freed_by(0, [1]), cells.shares(0)) == (0, 0.0, False)
    cells.clear()
    assert cells.end == 0
