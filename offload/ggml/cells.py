"""Knows which cells of the KV cache each sequence holds, by libllama's rule of placement.

The library puts new tokens into the lowest free cells. Attention passes over all cells up to the
highest one in use, those of other sequences included, and masks what a token may not see. The
library tells nobody which cells these are. Source: llama.cpp, src/llama-kv-cache.cpp (`find_slot`,
`seq_rm`, `get_n_kv`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray


class Cells:
    """The cells of one unified cache. Layers with sliding windows have other cells."""

    def __init__(self, n_cells: int, n_sequences: int) -> None:
        self._n_owners = np.zeros(n_cells, np.uint16)  # sequences that hold each cell
        self._cells: list[list[int]] = [[] for _ in range(n_sequences)]  # in order of positions
        self._positions: list[list[int]] = [[] for _ in range(n_sequences)]  # ascending
        self._lowest = 0  # no cell below it is free
        self._end = 0  # an upper bound of `end`
        self.n_used = 0

    def __repr__(self) -> str:
        return f"Cells({self.n_used} used, up to {self.end} of {len(self._n_owners)})"

    @property
    def end(self) -> int:
        """The number of cells up to the highest one in use, which attention passes over."""
        owners, end = self._n_owners, self._end
        while end and not owners[end - 1]:
            below = owners[max(0, end - 4096) : end]
            held = np.flatnonzero(below)
            end = end - len(below) + (int(held[-1]) + 1 if len(held) else 0)
        self._end = end
        return end

    def place(self, sequences: Sequence[int | Sequence[int]], positions: Sequence[int]) -> None:
        """Take cells for new tokens, each of which belongs to one sequence or to several."""
        cells = self._free(len(positions))
        for cell, of, position in zip(cells, sequences, positions, strict=False):
            owners = (of,) if isinstance(of, int) else of
            self._n_owners[cell] = len(owners)
            for sequence in owners:
                self._cells[sequence].append(cell)
                self._positions[sequence].append(position)
        if cells:
            self._lowest = cells[-1] + 1
            self._end = max(self._end, self._lowest)
            self.n_used += len(cells)

    def remove(self, sequence: int, start: int) -> None:
        """Let a sequence forget its positions from `start` on."""
        at = bisect_left(self._positions[sequence], start)
        gone = self._cells[sequence][at:]
        if not gone:
            return
        del self._cells[sequence][at:], self._positions[sequence][at:]
        cells = np.array(gone)
        self._n_owners[cells] -= 1
        freed = cells[self._n_owners[cells] == 0]
        if len(freed):
            self._lowest = min(self._lowest, int(freed.min()))
            self.n_used -= len(freed)

    def copy(self, source: int, target: int, start: int = -1, end: int = -1) -> None:
        """Let `target` share the cells of `source` at positions [start, end); -1: all."""
        positions = self._positions[source]
        first = bisect_left(positions, start)
        last = len(positions) if end < 0 else bisect_left(positions, end)
        cells = self._cells[source][first:last]
        if cells:
            self._n_owners[np.array(cells)] += 1
            self._cells[target] += cells
            self._positions[target] += positions[first:last]

    def clear(self) -> None:
        """Free all cells."""
        self._n_owners[:] = 0
        for lists in (self._cells, self._positions):
            for held in lists:
                held.clear()
        self._lowest = self._end = self.n_used = 0

    def top_of(self, sequence: int) -> int:
        """Return the number of cells up to the highest one of a sequence."""
        return max(self._cells[sequence], default=-1) + 1

    def freed_by(self, sequence: int, needed: Collection[int]) -> float:
        """Return the cells that leave with a sequence, beside those that `needed` ones hold.

        Sequences that share a cell count for equal parts of it.
        """
        cells = np.array(self._cells[sequence], int)
        is_needed = np.zeros(len(self._n_owners), bool)
        for other in needed:
            is_needed[np.array(self._cells[other], int)] = True
        own = cells[~is_needed[cells]]
        return float((1.0 / self._n_owners[own]).sum())

    def shares(self, sequence: int) -> bool:
        """True if another sequence holds cells of this one."""
        return bool((self._n_owners[np.array(self._cells[sequence], int)] > 1).any())

    def _free(self, n: int) -> Sequence[int]:
        """Return the lowest `n` free cells, or fewer if there are not as many."""
        first = self._lowest
        if n == 1 and first < len(self._n_owners) and not self._n_owners[first]:
            return (first,)
        free: NDArray[np.int64] = np.flatnonzero(self._n_owners[first:] == 0)[:n] + first
        return [int(cell) for cell in free]


class OwnCells(Cells):
    """The cells of sequences that have their own. None passes over another's, so none is counted.

    `n_used` and `end` are 0.
    """

    def __init__(self) -> None:
        super().__init__(0, 0)

    def place(self, sequences: Sequence[int | Sequence[int]], positions: Sequence[int]) -> None:
        pass

    def remove(self, sequence: int, start: int) -> None:
        pass

    def clear(self) -> None:
        pass

    def top_of(self, sequence: int) -> int:
        return 0

    def freed_by(self, sequence: int, needed: Collection[int]) -> float:
        return 0.0

    def shares(self, sequence: int) -> bool:
        return False
