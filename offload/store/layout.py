"""Computes the layout of streamed weights in host memory, and the file reads that fill it. Pure.

Direct reads need file offset, address and length aligned to pages, but tensors are aligned only to
32 bytes. So memory keeps the file's own layout. Neighbouring tensors form a run, which begins and
ends on page borders of the file. A tensor's address and its file offset are equal modulo a page.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from offload.model import WeightPlace

PAGE_BYTES = 4096
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
class Layout:
    """The runs in reading order, and each tensor's place by name."""

    runs: tuple[Run, ...]
    spots: dict[str, Spot]

    @property
    def size_bytes(self) -> int:
        """Bytes of memory that the runs take."""
        return self.runs[-1].at_bytes + self.runs[-1].size_bytes if self.runs else 0


@dataclass(frozen=True)
class Chunk:
    """One read of `size_bytes` of a file, from offset `start_bytes` to offset `at_bytes` of memory.

    At least `least_bytes` must be read. The remaining bytes come after the last tensor, and may be
    beyond the file's end.
    """

    file: Path
    start_bytes: int
    size_bytes: int
    least_bytes: int
    at_bytes: int


def plan_layout(places: Iterable[WeightPlace]) -> Layout:
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
    return Layout(tuple(runs), spots)


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
