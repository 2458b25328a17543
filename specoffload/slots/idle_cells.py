"""Watches the cells that no running request needs, and says which conversations have to move.

Every decode passes over them. The rule is in `idle_rents.py`, and `PromptSlots` moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.ggml.cells import Cells
from offload.plan.cell_times import CellTimes
from offload.sequences.saved_state import PART_BYTES
from specoffload.slots.draft_texts import DraftCells
from specoffload.slots.idle_rents import IdleRents, MoveCosts
from specoffload.slots.slot import Slot

_GAP = -1  # the account of free cells below the highest one in use
# Steps after which the highest busy slot is looked up again. That takes longer than a step's rents.
_LOOKUP_STEPS = 32


@dataclass
class IdleCounters:
    """Counts of moved conversations, and of cells that no running request needed."""

    idle_cells_read: int = 0  # once for each step
    idle_cells_s: float = 0.0  # the time of attention over them, by the machine model
    idle_moves: int = 0
    idle_move_bytes: int = 0
    idle_move_s: float = 0.0
    idle_returns: int = 0
    idle_return_s: float = 0.0
    idle_compactions: int = 0


class IdleCells:
    """Charges idle slots for each step, and says which leave before it."""

    def __init__(
        self,
        slots: Sequence[Slot],
        cells: Cells,
        times: CellTimes,
        move_out: Callable[[Slot], bool],
        *,
        moves: bool,
        in_parts: bool = False,
        draft: DraftCells | None = None,
    ) -> None:
        """`move_out` saves and empties an idle slot. It returns False if the slot has to stay, or
        if its copy has only begun. With `in_parts`, long copies are made during several steps.

        With `moves` False, cells are only counted. `draft` prices the cells of a draft model, whose
        decodes pass over idle conversations too.
        """
        self._slots, self._cells, self._times = slots, cells, times
        self._move_out, self._moves, self._draft = move_out, moves, draft
        self._in_parts, self._step_s = in_parts, 0.0
        self._rents, self.costs = IdleRents(), MoveCosts(times.copy_bytes_per_s)
        self.counters = IdleCounters()
        self._seen: tuple[tuple[bool, int, int], ...] = ()  # the slots' state at the last step
        self._freed: dict[int, float] = {}  # cells that would leave with each idle slot
        self._draft_s: dict[int, float] = {}  # seconds that each adds to the drafts of a step
        self._top = -1  # the idle slot with the highest cell; -1: none is idle
        self._top_end = 0  # cells up to that one
        self._high: Slot | None = None  # the busy slot that lies highest, as it was looked up
        self._n_until_lookup = 0  # steps for which `_high` is still taken
        self._bytes: dict[int, tuple[int, int]] = {}  # by slot: tokens held, and bytes of its state

    def before_step(self, n_tokens: int, step_s: float = 0.0) -> Slot | None:
        """Move idle slots whose accounts are due. `n_tokens` are decoded next.

        `step_s`: the seconds of a step, for which parts of a long copy are made before it. 0: that
        is not known, or all parts are.

        Returns a busy slot that lies above a gap, if moving it down has become worth its cost.
        """
        self._look()
        self._step_s = step_s
        self._draft_s = {} if self._draft is None else self._draft.rents_s()
        rents_s = self._rents_s(n_tokens)
        if not rents_s:
            return None
        due = self._rents.leaving(rents_s, self._cost_s, self._lead_s) if self._moves else []
        stays = {who: rent_s for who, rent_s in rents_s.items() if who not in due}
        for who in due:
            if who != _GAP and not self._move_out(self._slots[who]):
                stays[who] = rents_s[who]
        if due and _GAP not in due:
            # A running request may lie above the cells that are free now. These are charged at
            # once.
            more_s = self._rents_s(n_tokens).get(_GAP, 0.0) - rents_s.get(_GAP, 0.0)
            due += self._rents.leaving({_GAP: more_s}, self._cost_s)
            stays[_GAP] = stays.get(_GAP, 0.0) + more_s
        if _GAP in due:
            stays.pop(_GAP, None)
        self.counters.idle_cells_s += sum(stays.values())
        self.counters.idle_cells_read += round(self.n_idle_cells)
        return self._highest() if _GAP in due else None

    def moved_out(self, n_bytes: int, seconds: float) -> None:
        """Count a conversation that moved to RAM."""
        self.costs.took(n_bytes, seconds, is_out=True)
        self.counters.idle_moves += 1
        self.counters.idle_move_bytes += n_bytes
        self.counters.idle_move_s += seconds

    def moved_back(self, n_bytes: int, seconds: float) -> None:
        """Count a conversation that came back from RAM."""
        self.costs.took(n_bytes, seconds, is_out=False)
        self.counters.idle_returns += 1
        self.counters.idle_return_s += seconds

    @property
    def n_idle_cells(self) -> float:
        """Cells up to the highest one in use that no running request needs."""
        cells = self._cells
        gap = cells.end - cells.n_used
        return gap + sum(n for who, n in self._freed.items() if self._slots[who].n_held)

    def _rents_s(self, n_tokens: int) -> dict[int, float]:
        """Return the seconds that each idle slot, and the gap, adds to a decode."""
        self._look()
        cells = self._cells
        gap, freed = cells.end - cells.n_used, dict(self._freed)
        if gap > 0:
            above = self._top if self._top_end == cells.end else _GAP
            freed[above] = freed.get(above, 0.0) + gap
        rents_s = {
            who: self._times.rent_s(cells.end, n, n_tokens) for who, n in freed.items() if n >= 1.0
        }
        for who, rent_s in self._draft_s.items():
            if self._slots[who].n_held:
                rents_s[who] = rents_s.get(who, 0.0) + rent_s
        return {who: rent_s for who, rent_s in rents_s.items() if rent_s}

    def _look(self) -> None:
        """Count each idle slot's cells again if a slot has changed."""
        slots = self._slots
        seen = tuple([(s.is_busy, 0 if s.is_busy else s.n_held, s.last_used) for s in slots])
        if seen == self._seen:
            return
        self._seen, self._n_until_lookup = seen, 0
        busy = [i for i, slot in enumerate(slots) if slot.is_busy]
        idle = [i for i, slot in enumerate(slots) if not slot.is_busy and slot.n_held]
        for i in {*range(len(slots))} - {*idle}:
            self._rents.close(i)
        self._freed = {i: self._cells.freed_by(i, busy) for i in idle}
        if self._draft is not None:
            self._draft.look(idle, busy)
        self._top = max(idle, key=self._cells.top_of, default=-1)
        self._top_end = self._cells.top_of(self._top) if idle else 0

    def _cost_s(self, who: int) -> float:
        """Return the seconds of moving a slot out and back, or the highest one down."""
        slot = self._high_slot() if who == _GAP else self._slots[who]
        return float("inf") if slot is None else self.costs.seconds(self._bytes_of(slot))

    def _lead_s(self, who: int, rent_s: float) -> float:
        """Return the seconds that a slot pays while it moves out: one rent for each step."""
        if who == _GAP or not (self._in_parts and self._step_s):
            return 0.0
        n_bytes = self._bytes_of(self._slots[who])
        out_s = self.costs.out_seconds(n_bytes) if n_bytes > PART_BYTES else 0.0
        return out_s * min(1.0, rent_s / self._step_s)

    def _bytes_of(self, slot: Slot) -> int:
        """Return the bytes of a slot's state, looked up again when the slot has grown."""
        n_tokens, n_bytes = self._bytes.get(slot.number, (0, 0))
        if not n_tokens <= slot.n_held <= 1.1 * n_tokens:
            n_bytes = slot.saved_bytes
            self._bytes[slot.number] = slot.n_held, n_bytes
        return n_bytes

    def _high_slot(self) -> Slot | None:
        """Return the busy slot that lay highest at the last lookup."""
        if not self._n_until_lookup:
            self._high, self._n_until_lookup = self._highest(), _LOOKUP_STEPS
        self._n_until_lookup -= 1
        return self._high

    def _highest(self) -> Slot | None:
        """Return the busy slot with the highest cell in use, unless it shares cells."""
        busy = [slot for slot in self._slots if slot.is_busy and slot.n_held]
        highest = max(busy, key=lambda s: self._cells.top_of(s.number), default=None)
        return None if highest is None or self._cells.shares(highest.number) else highest
