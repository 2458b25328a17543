"""Idle slots pay for the cells that decodes of others pass over, and leave when they have paid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from offload.ggml.cells import Cells
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
