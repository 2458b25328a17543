"""Huge pages under the streamed weights, made in the background once everything is read.

Asking for them before (MADV_HUGEPAGE) makes the reads wait for the kernel to find and clear 2 MiB
at a time: loading took two to three times as long where memory was fragmented or, in a virtual
machine, not yet backed (docs/background.md, pinning).
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from numa.errors import PlacementRefused
from numa.memory import PlacedMemory

_STEP_BYTES = 32 << 20


@dataclass(frozen=True)
class HugePages:
    """Bytes in huge pages, the kernel's refusals, and the time that making them took."""

    size_bytes: int
    why_not: str
    seconds: float = 0.0


class Collapsing:
    """A thread that makes the pages of a memory huge; others may use their contents meanwhile."""

    def __init__(self, memory: PlacedMemory) -> None:
        self._memory = memory
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
        return HugePages(self._memory.huge_bytes(), why_not, self._seconds)

    def stop(self) -> None:
        """End early, and wait for that; the memory may be given back afterwards."""
        self._stopping = True
        self._thread.join()

    def _work(self) -> None:
        start = time.perf_counter()
        if self._memory.placement is not None:
            self._why_not = "; ".join(self._memory.collapse())
        else:
            self._collapse()
        self._seconds = time.perf_counter() - start

    def _collapse(self) -> None:
        for start in range(0, self._memory.mapped_bytes, _STEP_BYTES):
            if self._stopping:
                return
            try:
                self._memory.make_huge(start, _STEP_BYTES)
            except PlacementRefused as refusal:
                self._why_not = str(refusal)
                return
