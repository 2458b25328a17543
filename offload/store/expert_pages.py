"""Gives experts pages when they enter memory, and takes the pages away when they leave.

Pages of experts that leave are moved to the experts that enter (mremap). Fresh pages would cost a
fault and zeroing each. On the machine that was measured, this took five times the CPU time of the
read itself. Only units of equal size can be moved, so each matrix is cut into such units. Pages
that belong to no unit are given back to the kernel and faulted in again by the next read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from numa.errors import PlacementRefused
from offload.ggml.memory import HostRange
from offload.plan.store_layout import PAGE_BYTES, ExpertMatrices, Spot
from offload.store.residency import LayerExpert

_MOST_MAPPINGS = 65_530  # the kernel's default limit for a process
_MOVE_PAGES = 4  # pages whose faults take as long as moving a unit
Leave = Callable[[HostRange], None]  # takes the pages of a range away


class ExpertPages:
    """The pages of all experts' matrices. Not thread-safe."""

    def __init__(
        self,
        memory: HostRange,
        layers: Mapping[int, Sequence[ExpertMatrices]],
        n_experts: int,
        others: Iterable[Spot],
        leave: Leave,
    ) -> None:
        """Take all pages of the experts away. `others` are weights that stay in `memory`."""
        self._memory, self._layers, self._leave = memory, layers, leave
        self._edges: Counter[int] = Counter()  # experts and others that use a page, by page
        for spot in others:
            self._edges[spot.at_bytes // PAGE_BYTES * PAGE_BYTES] += 1
            self._edges[(spot.at_bytes + spot.size_bytes - 1) // PAGE_BYTES * PAGE_BYTES] += 1
        kinds = {m: m.least_whole_bytes(n_experts) for ms in layers.values() for m in ms}
        self._unit_bytes = unit_bytes(kinds.values())
        self._n_units = {m: size // self._unit_bytes for m, size in kinds.items()}
        self._spare: dict[int, None] = {}  # units with pages, whose experts have left
        self._moved: set[int] = set()  # units that are mappings of their own, since pages moved
        self._most_moved = most_mappings() // 4  # each one may split another mapping in two
        self.moved_bytes = 0
        memory.use_small_pages()
        for matrices in kinds:
            leave(memory.part(*matrices.inner_pages))

    def enter(self, piece: LayerExpert) -> int:
        """Give an expert pages of experts that have left. Returns how many bytes it has now.

        An expert that has just left itself keeps its own pages.
        """
        before_bytes, kept_bytes, (layer, expert) = self.moved_bytes, 0, piece
        self._count_edges(piece, 1)
        for matrices in self._layers[layer]:
            for target in self._units(matrices, expert):
                if target in self._spare:
                    del self._spare[target]
                    kept_bytes += self._unit_bytes
                elif self._spare and len(self._moved) < self._most_moved:
                    self._move(self._spare.popitem()[0], target)
        return self.moved_bytes - before_bytes + kept_bytes

    def leave(self, piece: LayerExpert) -> None:
        """Take away the pages that only this expert uses. `give_back` returns them if unused."""
        self._count_edges(piece, -1)
        layer, expert = piece
        for matrices in self._layers[layer]:
            start, stop = matrices.pages_of(expert)
            if self._edges[start]:
                start += PAGE_BYTES
            if start < stop and self._edges[stop - PAGE_BYTES]:
                stop -= PAGE_BYTES
            units = self._units(matrices, expert)
            self._spare.update(dict.fromkeys(units))
            if units:
                self._give_back(start, units[0])
                start = units[-1] + self._unit_bytes
            self._give_back(start, stop)

    def give_back(self) -> None:
        """Return the pages to the kernel that no expert has taken since others left."""
        for start in self._spare:
            self._map_again(start)
            self._give_back(start, start + self._unit_bytes)
        self._spare.clear()

    def _units(self, matrices: ExpertMatrices, expert: int) -> range:
        start = matrices.whole_pages_of(expert)[0]
        return range(start, start + self._n_units[matrices] * self._unit_bytes, self._unit_bytes)

    def _move(self, source: int, target: int) -> None:
        size_bytes = self._unit_bytes
        try:
            self._memory.part(source, size_bytes).move_to(self._memory.part(target, size_bytes))
        except PlacementRefused:
            self._spare[source] = None
            self._most_moved = 0  # an old kernel, or too many mappings
            return
        self._moved.add(target)
        self._map_again(source)
        if self._leave is not HostRange.give_back:
            self._leave(self._memory.part(source, size_bytes))
        self.moved_bytes += size_bytes

    def _map_again(self, start: int) -> None:
        if start in self._moved:
            with suppress(PlacementRefused):
                self._memory.part(start, self._unit_bytes).map_again()
                self._moved.remove(start)

    def _give_back(self, start: int, stop: int) -> None:
        if start < stop:
            self._leave(self._memory.part(start, stop - start))

    def _count_edges(self, piece: LayerExpert, n: int) -> None:
        layer, expert = piece
        for matrices in self._layers[layer]:
            start, stop = matrices.pages_of(expert)
            for page in {start, stop - PAGE_BYTES}:
                self._edges[page] += n
                if not self._edges[page]:
                    del self._edges[page]


def unit_bytes(sizes: Iterable[int]) -> int:
    """Return the size of units with which experts of these matrices get pages fastest.

    Pages that belong to no unit have to be faulted in, and each unit takes a move.
    """
    counts = Counter(size // PAGE_BYTES for size in sizes if size >= PAGE_BYTES)

    def cost(unit: int) -> int:
        parts = ((n, *divmod(n_pages, unit)) for n_pages, n in counts.items())
        return sum(n * (_MOVE_PAGES * n_units + n_left) for n, n_units, n_left in parts)

    return PAGE_BYTES * min(range(1, min(counts, default=1) + 1), key=cost)


def most_mappings(root: Path = Path("/")) -> int:
    """Return the number of mappings that a process may have."""
    with suppress(OSError, ValueError):
        return int((root / "proc/sys/vm/max_map_count").read_text())
    return _MOST_MAPPINGS
