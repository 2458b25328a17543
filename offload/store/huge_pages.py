"""Huge pages under the streamed weights, made in the background once everything is read.

Asking for them before (MADV_HUGEPAGE) makes the reads wait for the kernel to find and clear 2 MiB
at a time: loading took two to three times as long where memory was fragmented or, in a virtual
machine, not yet backed (docs/results.md; PEERS 1b tells the same of another engine).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from numa import sys
from numa.arena import Arena
from numa.errors import PlacementRefused

_STEP_BYTES = 32 << 20


@dataclass(frozen=True)
class HugePages:
    """How many bytes lie in huge pages, what the kernel refused, and how long making them took."""

    size_bytes: int
    why_not: str
    seconds: float = 0.0


class Collapsing:
    """A thread that makes an arena's pages huge, contents kept; others may use them meanwhile."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._address, self._mapped_bytes = arena.address, arena.mapped_bytes
        self._stopping = False
        self._why_not = ""
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="huge-pages", daemon=True)
        self._thread.start()

    def wait(self) -> HugePages:
        """Until all pages are huge that the kernel makes huge."""
        self._thread.join()
        return self.so_far()

    def so_far(self) -> HugePages:
        why_not = "being made" if self._thread.is_alive() else self._why_not
        return HugePages(huge_bytes_at(self._address), why_not, self._seconds)

    def stop(self) -> None:
        """End early, and wait for that; the arena may be given back afterwards."""
        self._stopping = True
        self._thread.join()

    def _work(self) -> None:
        start = time.perf_counter()
        if self._arena.placement is not None:
            self._why_not = "; ".join(self._arena.collapse())
        else:
            self._collapse()
        self._seconds = time.perf_counter() - start

    def _collapse(self) -> None:
        for start in range(0, self._mapped_bytes, _STEP_BYTES):
            if self._stopping:
                return
            size = min(_STEP_BYTES, self._mapped_bytes - start)
            try:
                sys.advise(self._address + start, size, sys.MADV_COLLAPSE)
            except PlacementRefused as refusal:
                self._why_not = str(refusal)
                return


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
