"""Idle slots pay for the cells that decodes of others pass over, and leave when they have paid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.ggml.cells import Cells
from offload.sequences.saved_state import PART_BYTES
from specoffload.slots.draft_texts import DraftCells
from specoffload.slots.idle_cells import IdleCells

N_CELLS = 100


@dataclass
class FakeSlot:
    """A slot whose tokens lie in `cells`."""

    number: int
    cells: Cells
    saved_bytes: int = 4
    is_busy: bool = False
    last_used: int = 0

    @property
    def n_held(self) -> int:
        return len(self.cells._cells[self.number])


@dataclass
class SecondPerCell:
    """Times in which each cell adds a second to a decode, and a byte takes half a second."""

    copy_bytes_per_s: float = 2.0

    def attention_s(self, n_cells: float, n_tokens: int) -> float:
        return n_cells * n_tokens

    def rent_s(self, end: int, n_cells: float, n_tokens: int) -> float:
        return self.attention_s(n_cells, n_tokens)


@dataclass
class Place:
    """Slots in a cache of `N_CELLS`, and those that were told to move out."""

    n_slots: int = 3
    can_move: bool = True
    moved: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cells = Cells(N_CELLS, self.n_slots)
        self.slots = [FakeSlot(i, self.cells) for i in range(self.n_slots)]
        slots: Any = self.slots
        times: Any = SecondPerCell()
        self.idle = IdleCells(slots, self.cells, times, self._move_out, moves=True)

    def hold(self, slot: int, n_tokens: int) -> None:
        at = self.slots[slot].n_held
        self.cells.place([slot] * n_tokens, range(at, at + n_tokens))

    def _move_out(self, slot: Any) -> bool:
        self.moved.append(slot.number)
        if self.can_move:
            self.cells.remove(slot.number, 0)
        return self.can_move

    def steps_until_moved(self, slot: int, most: int = 100) -> int:
        """The decodes of one token before which the slot did not have to leave."""
        self.moved.clear()
        for n in range(most):
            self.idle.before_step(1)
            if slot in self.moved:
                return n
        return most


def test_a_slot_leaves_when_its_rents_exceed_its_move_out_and_back() -> None:
    place = Place()
    place.hold(0, 1)
    place.hold(1, 5)
    place.slots[1].is_busy = True
    place.slots[0].saved_bytes = 10  # 5 s out, and 5 s back
    assert place.steps_until_moved(0) == 10
    place.idle.moved_out(10, 2.0)
    place.idle.moved_back(10, 8.0)
    counters = place.idle.counters
    assert (counters.idle_moves, counters.idle_move_bytes, counters.idle_move_s) == (1, 10, 2.0)
    assert (counters.idle_returns, counters.idle_return_s) == (1, 8.0)
    place.idle.moved_out(10, 4.0)
    assert place.idle.costs.seconds(10) == pytest.approx(11.0), (
        "the mean of both ways out, and back"
    )


def test_the_account_of_a_slot_that_is_used_again_begins_anew() -> None:
    place = Place()
    place.hold(0, 1)
    place.slots[0].saved_bytes = 10
    for _ in range(9):
        place.idle.before_step(1)
    place.slots[0].is_busy, place.slots[0].last_used = True, 1
    place.idle.before_step(1)
    place.slots[0].is_busy = False
    assert place.steps_until_moved(0) == 10


def test_the_bytes_of_a_slot_are_looked_up_again_when_it_has_grown() -> None:
    place = Place(can_move=False)
    place.hold(0, 10)
    place.slots[0].saved_bytes = 20  # 20 s at 10 s a step
    assert place.steps_until_moved(0) == 2
    place.slots[0].is_busy = True
    place.hold(0, 10)
    place.idle.before_step(1)
    place.slots[0].is_busy, place.slots[0].saved_bytes = False, 100  # 100 s at 20 s a step
    assert place.steps_until_moved(0) == 5


@pytest.mark.parametrize("can_move", [True, False])
def test_the_time_over_idle_cells_is_counted_while_they_stay(can_move: bool) -> None:
    place = Place(can_move=can_move)
    place.hold(0, 1)
    place.slots[0].saved_bytes = 3
    for _ in range(4):
        place.idle.before_step(1)
    assert place.moved == [0]
    assert place.idle.counters.idle_cells_s == (3.0 if can_move else 4.0)


def test_a_gap_is_paid_by_the_idle_slot_above_it() -> None:
    """With the slot, the gap below it leaves too."""
    place = Place()
    place.hold(0, 8)
    place.hold(1, 2)
    place.slots[1].saved_bytes = 40
    place.cells.remove(0, 0)
    assert place.steps_until_moved(1) == 4, "10 cells a step"
    assert place.cells.end == 0


def test_a_gap_below_a_running_slot_is_nobodys_rent_and_moves_it_down() -> None:
    place = Place()
    place.hold(0, 1)
    place.hold(2, 9)
    place.hold(1, 5)
    place.slots[1].is_busy = True
    place.slots[0].saved_bytes, place.slots[1].saved_bytes = 15, 45
    place.cells.remove(2, 0)
    found: list[Any] = [place.idle.before_step(1) for _ in range(6)]
    assert [slot and slot.number for slot in found] == [None] * 5 + [1]
    assert place.moved == [], "one cell a step: 6 of 15 s"


def test_a_running_slot_that_shares_cells_stays_above_its_gap() -> None:
    place = Place()
    place.hold(2, 9)
    place.hold(1, 5)
    place.cells.copy(1, 0)
    place.slots[1].is_busy = place.slots[0].is_busy = True
    place.cells.remove(2, 0)
    assert [place.idle.before_step(1) for _ in range(20)] == [None] * 20


class Drafting(Place):
    """Slots whose texts a draft model holds, too. It has decoded `n_decoded` tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.n_decoded, self.drafts = 0, Cells(N_CELLS, self.n_slots)
        slots: Any = self.slots
        times: Any = SecondPerCell()
        draft = DraftCells(self.drafts, times, lambda: self.n_decoded)
        self.idle = IdleCells(slots, self.cells, times, self._move_out, moves=True, draft=draft)

    def hold_both(self, slot: int, n_tokens: int) -> None:
        self.hold(slot, n_tokens)
        self.drafts.place([slot] * n_tokens, range(n_tokens))


def test_a_slot_pays_for_the_decodes_of_a_draft_model_too() -> None:
    """Three drafted tokens are three decodes, each of which passes over the draft's cells."""
    place = Drafting()
    place.hold_both(0, 2)
    place.slots[0].saved_bytes = 20  # 20 s at 2 s a step, and 6 s more for drafts
    place.idle.before_step(1)
    assert place.idle.counters.idle_cells_s == 2.0
    for n in range(2):
        place.n_decoded += 3
        assert not place.moved, n
        place.idle.before_step(1)
    assert place.idle.counters.idle_cells_s == 2.0 + 2 * 8.0
    place.n_decoded += 3
    place.idle.before_step(1)
    assert place.moved == [0]


def test_a_prompt_that_a_draft_model_reads_is_one_decode() -> None:
    place = Drafting()
    place.hold_both(0, 1)
    place.slots[0].saved_bytes = 1000
    place.n_decoded += 200
    place.idle.before_step(1)
    assert place.idle.counters.idle_cells_s == 1.0 + 200.0


def test_cells_that_a_running_request_shares_in_the_draft_model_are_free() -> None:
    place = Drafting()
    place.hold_both(0, 2)
    place.drafts.copy(0, 1)
    place.slots[1].is_busy = True
    place.n_decoded = 5
    place.idle.before_step(1)
    assert place.idle.counters.idle_cells_s == 2.0


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=40),
    st.integers(1, 5),
    st.floats(0.5, 60.0),
)
def test_with_a_draft_model_idle_cells_cost_at_most_twice_the_best_choice(
    steps: list[tuple[int, int]], n_held: int, cost_s: float
) -> None:
    """A step's drafts are not known before it, so they may be added once more."""
    place = Drafting()
    place.hold_both(0, n_held)
    place.slots[0].saved_bytes = max(1, round(cost_s))
    cost_s = float(place.slots[0].saved_bytes)
    spent_s = all_s = worst_s = 0.0
    for n_tokens, n_drafted in steps:
        place.idle.before_step(n_tokens)
        step_s = n_held * float(n_tokens + n_drafted)
        all_s, worst_s = all_s + step_s, max(worst_s, n_held * float(n_drafted))
        if not place.moved:
            spent_s += step_s
        place.n_decoded += n_drafted
    spent_s += cost_s if place.moved else 0.0
    assert spent_s <= 2.0 * min(all_s, cost_s) + 2.0 * worst_s + 1e-9


def test_a_slot_that_moves_part_by_part_leaves_earlier_by_what_it_pays_meanwhile() -> None:
    """The copy takes as long as five steps, in each of which a cell costs a second."""
    place = Place()
    slots: Any = place.slots
    times: Any = SecondPerCell(copy_bytes_per_s=float(PART_BYTES))
    place.idle = IdleCells(slots, place.cells, times, place._move_out, moves=True, in_parts=True)
    place.hold(0, 1)
    place.slots[0].saved_bytes = 10 * PART_BYTES  # 10 s out and 10 s back
    left = [place.idle.before_step(1, 2.0) or place.moved[:] for _ in range(17)]
    assert left.index([0]) == 15, "15 s before, and five steps of 2 s while it moves"


def test_a_short_slot_moves_at_once_and_pays_nothing_meanwhile() -> None:
    place = Place()
    slots: Any = place.slots
    times: Any = SecondPerCell()
    place.idle = IdleCells(slots, place.cells, times, place._move_out, moves=True, in_parts=True)
    place.hold(0, 1)
    place.slots[0].saved_bytes = 10
    for _ in range(10):
        place.idle.before_step(1, 2.0)
    assert not place.moved
    place.idle.before_step(1, 2.0)
    assert place.moved == [0]
