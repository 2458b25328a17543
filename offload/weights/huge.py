"""Huge pages under the streamed weights: asked for before they are read, made afterwards.

A page that is faulted in huge costs no copy; what the kernel had no huge page for at that moment is
collapsed when everything is read (PEERS 1b: collapsing layer by layer while loading stalls).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from numa import sys
from numa.arena import Arena
from numa.errors import PlacementRefused

_STEP_BYTES = 256 << 20


@dataclass(frozen=True)
class HugePages:
    """How many bytes lie in huge pages, and what the kernel refused."""

    size_bytes: int
    why_not: str


def ask_for_huge_pages(arena: Arena) -> None:
    """Let the memory be faulted in huge. A refusal shows when `collapse` is refused too."""
    try:
        sys.advise(arena.address, arena.mapped_bytes, sys.MADV_HUGEPAGE)
    except PlacementRefused:
        return


def collapse(arena: Arena, n_threads: int = 2) -> str:
    """Make huge what is not; what the kernel refused first, or ''. Contents are kept."""
    if arena.placement is not None:
        return "; ".join(arena.collapse())
    pieces = [
        (start, min(_STEP_BYTES, arena.mapped_bytes - start))
        for start in range(0, arena.mapped_bytes, _STEP_BYTES)
    ]

    def one(piece: tuple[int, int]) -> str:
        start, size = piece
        try:
            sys.advise(arena.address + start, size, sys.MADV_COLLAPSE)
        except PlacementRefused as refusal:
            return str(refusal)
        return ""

    with ThreadPoolExecutor(n_threads) as pool:
        refused = [answer for answer in pool.map(one, pieces) if answer]
    return refused[0] if refused else ""


def huge_bytes_at(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes in huge pages of the mappings from `address` on, up to a gap; 0 if unknown."""
    total, expected, inside = 0, address, False
    try:
        with smaps.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                head = line.split(" ", 1)[0]
                if "-" in head and not head.endswith(":"):
                    start, stop = (int(part, 16) for part in head.split("-"))
                    inside = start == expected or start <= address < stop
                    expected = stop if inside else expected
                elif inside and head == "AnonHugePages:":
                    total += int(line.split()[1]) << 10
    except OSError:
        return 0
    return total
