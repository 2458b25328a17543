"""Computes the layout of streamed weights in host memory, and the file reads that fill it. Pure.

Direct reads need file offset, address and length aligned to pages, but tensors are aligned only to
32 bytes. So memory keeps the file's own layout. Neighbouring tensors form a run, which begins and
ends on page borders of the file. A tensor's address and its file offset are equal modulo a page.

A single expert's matrix is read in whole pages, too. Its first and last page may hold bytes of its
neighbours. These bytes are read, but only the expert's own bytes are written to its memory. So a
read that fails does not harm a neighbour that is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from mmap import PAGESIZE
from pathlib import Path

from offload.model import TensorEntry, WeightPlace, layer_of

PAGE_BYTES = PAGESIZE  # 4 KiB on x86; 16 or 64 KiB on some arm64 systems
_GAP_BYTES = 64 << 10  # gap between two tensors below which it is read along with them


@dataclass(frozen=True)
class Run:
    """Bytes [start, stop) of a file and their place in memory. All three are page aligned.

    The last tensor ends at `end_bytes`, which must not be beyond the file's end. `stop_bytes` may
    be beyond it.
    """

    file: Path
    start_bytes: int
    stop_bytes: int
    end_bytes: int
    at_bytes: int

    @property
    def size_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


@dataclass(frozen=True)
class Spot:
    """The place of one tensor, in its file and in memory."""

    file: Path
    offset_bytes: int  # in the file
    at_bytes: int  # in the memory
    size_bytes: int


@dataclass(frozen=True)
class StoreLayout:
    """The runs in reading order, and each tensor's place by name."""

    runs: tuple[Run, ...]
    spots: dict[str, Spot]

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the runs take."""
        return self.runs[-1].at_bytes + self.runs[-1].size_bytes if self.runs else 0

    def run_of(self, spot: Spot) -> Run:
        """Return the whole pages of one tensor as a run."""
        before = spot.at_bytes % PAGE_BYTES  # also of the offset in the file
        end = spot.offset_bytes + spot.size_bytes
        return Run(spot.file, spot.offset_bytes - before, _up(end), end, spot.at_bytes - before)


@dataclass(frozen=True)
class Chunk:
    """One read of `size_bytes` of a file, from offset `start_bytes` to offset `at_bytes` of memory.

    At least `least_bytes` must be read. The remaining bytes come after the last tensor, and may be
    beyond the file's end. The first `before_bytes` and last `after_bytes`, less than a page each,
    are those of neighbours.
    """

    file: Path
    start_bytes: int
    size_bytes: int
    least_bytes: int
    at_bytes: int
    before_bytes: int = 0
    after_bytes: int = 0


@dataclass(frozen=True)
class ExpertMatrices:
    """One kind of weight of a layer's experts. Each expert has a matrix of `matrix_bytes`."""

    spot: Spot
    matrix_bytes: int

    def pages_of(self, expert: int) -> tuple[int, int]:
        """Return [start, stop) in memory of the whole pages that hold an expert's matrix."""
        start = self.spot.at_bytes + expert * self.matrix_bytes
        return start // PAGE_BYTES * PAGE_BYTES, _up(start + self.matrix_bytes)

    def whole_pages_of(self, expert: int) -> tuple[int, int]:
        """Return [start, stop) in memory of the pages that hold nothing but an expert's matrix."""
        start = self.spot.at_bytes + expert * self.matrix_bytes
        stop = (start + self.matrix_bytes) // PAGE_BYTES * PAGE_BYTES
        return min(_up(start), stop), stop

    def least_whole_bytes(self, n_experts: int) -> int:
        """Return the bytes in whole pages that each expert's matrix has at least."""
        pages = (self.whole_pages_of(expert) for expert in range(min(n_experts, PAGE_BYTES)))
        return min(stop - start for start, stop in pages)

    @property
    def inner_pages(self) -> tuple[int, int]:
        """Return (start, size) in memory of the pages that hold nothing but these matrices."""
        start = _up(self.spot.at_bytes)
        stop = (self.spot.at_bytes + self.spot.size_bytes) // PAGE_BYTES * PAGE_BYTES
        return min(start, stop), max(0, stop - start)

    def chunks(self, experts: Iterable[int], chunk_bytes: int) -> Iterator[Chunk]:
        """Yield reads of these experts' pages. Neighbouring experts are read together.

        `experts` ascend.
        """
        runs: list[list[int]] = []
        for expert in experts:
            if runs and expert == runs[-1][1]:
                runs[-1][1] += 1
            else:
                runs.append([expert, expert + 1])
        end = self.spot.at_bytes + self.spot.size_bytes
        to_file = self.spot.offset_bytes - self.spot.at_bytes
        for first, after_last in runs:
            own_start, own_stop = (
                self.spot.at_bytes + expert * self.matrix_bytes for expert in (first, after_last)
            )
            start, stop = own_start // PAGE_BYTES * PAGE_BYTES, _up(own_stop)
            for at in range(start, stop, chunk_bytes):
                size = min(chunk_bytes, stop - at)
                # The file may end inside the tensor's last page.
                yield Chunk(
                    self.spot.file, at + to_file, size, min(size, end - at), at,
                    max(0, own_start - at), max(0, at + size - own_stop),
                )  # fmt: skip


def expert_matrices(
    layout: StoreLayout, experts: Iterable[TensorEntry]
) -> dict[int, list[ExpertMatrices]]:
    """Return the matrices of the `experts` that have a place in the layout, by layer."""
    by_layer: dict[int, list[ExpertMatrices]] = {}
    for entry in experts:
        spot = layout.spots.get(entry.name)
        if spot is not None:
            matrices = ExpertMatrices(spot, spot.size_bytes // entry.shape[2])
            by_layer.setdefault(layer_of(entry.name), []).append(matrices)
    return by_layer


def largest_experts(
    layers: Mapping[int, Sequence[ExpertMatrices]], n_experts: int
) -> dict[int, int]:
    """Return the bytes of the pages of each layer's largest expert."""
    # Experts whose numbers differ by a page's bytes begin at the same place in a page.
    numbers = range(min(n_experts, PAGE_BYTES))
    return {
        layer: max(
            sum(stop - start for start, stop in (m.pages_of(expert) for m in matrices))
            for expert in numbers
        )
        for layer, matrices in layers.items()
    }


def plan_layout(places: Iterable[WeightPlace]) -> StoreLayout:
    """Lay out weights in the order of their files and offsets, one run after the other."""
    runs: list[Run] = []
    spots: dict[str, Spot] = {}
    at = 0
    in_order = sorted(places, key=lambda place: (place.file, place.entry.offset_bytes))
    for file, of_file in groupby(in_order, key=lambda place: place.file):
        for group in _neighbours(list(of_file)):
            start = group[0].entry.offset_bytes // PAGE_BYTES * PAGE_BYTES
            end = max(p.entry.offset_bytes + p.entry.size_bytes for p in group)
            for p in group:
                offset = p.entry.offset_bytes
                spots[p.entry.name] = Spot(file, offset, at + offset - start, p.entry.size_bytes)
            runs.append(Run(file, start, _up(end), end, at))
            at += runs[-1].size_bytes
    return StoreLayout(tuple(runs), spots)


def cut_into_chunks(runs: Sequence[Run], chunk_bytes: int) -> tuple[Chunk, ...]:
    """Cut the runs into reads of `chunk_bytes` (a multiple of a page) or less."""
    chunks: list[Chunk] = []
    for run in runs:
        for start in range(run.start_bytes, run.stop_bytes, chunk_bytes):
            size = min(chunk_bytes, run.stop_bytes - start)
            least = min(size, run.end_bytes - start)
            at = run.at_bytes + start - run.start_bytes
            chunks.append(Chunk(run.file, start, size, least, at))
    return tuple(chunks)


def _neighbours(places: list[WeightPlace]) -> list[list[WeightPlace]]:
    groups = [[places[0]]]
    for place in places[1:]:
        last = groups[-1][-1].entry
        # Two runs may not share a page, because its bytes would have to be in two places.
        gap = place.entry.offset_bytes - _up(last.offset_bytes + last.size_bytes)
        if gap < _GAP_BYTES:
            groups[-1].append(place)
        else:
            groups.append([place])
    return groups


def _up(n_bytes: int) -> int:
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES
