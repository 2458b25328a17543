"""Opens and closes the slots of a pool that lie in a scheduler's compute buffer."""

from __future__ import annotations

from offload.ggml.compute_buffer import ComputeBuffer
from offload.schedule.lending import LentSlots
from offload.schedule.schedule import Schedule
from offload.schedule.slots import LOADING
from offload.stream.copy_queue import CopyQueue
from offload.stream.slot_memory import SlotMemory


class LentPool:
    """The lent slots of one executor.

    Before libllama places a graph in the compute buffer, no copy into a lent slot may be under way.
    It would overwrite the graph's inputs, which are set before the graph is handed over.
    """

    def __init__(
        self, compute: ComputeBuffer, memory: SlotMemory, pool: int, schedule: Schedule,
        copies: CopyQueue,
    ) -> None:  # fmt: skip
        """`pool`: number of the pool whose slots continue in the buffer."""
        self._compute, self._memory, self._pool = compute, memory, pool
        self._schedule, self._copies = schedule, copies
        self.slots = LentSlots(memory.n_slots - memory.pool.n_slots)
        compute.before_graph = self._before_graph

    def see(self) -> None:
        """Close the slots that graphs have reached since the last call, or open others."""
        n = self._memory.n_touched(self._compute.touched_bytes())
        if self.slots.reached(n):
            self._move()

    def planned_small(self) -> None:
        """Let the next graph open slots. Graphs before it may have been computed unseen."""
        self.see()
        self._compute.planned_small()
        self.slots.planned_small()

    def close_all(self) -> None:
        if self.slots.reached(self.slots.n_lent):
            self._before_graph()
            self._move()

    def _move(self) -> None:
        self._schedule.close_slots(self._pool, self.slots.n_closed)
        self._compute.lend(on=self.slots.n_open > 0)

    def _before_graph(self) -> None:
        slots = self._schedule.pools[self._pool]
        lent = [s for s in range(slots.n_own, slots.n_slots) if slots.state[s] == LOADING]
        pieces = [piece for slot in lent if (piece := slots.piece[slot]) is not None]
        if not all(self._copies.has_arrived(piece) for piece in pieces):
            self._copies.settle()
