"""Huge pages under the streamed weights, made in the background once everything is read.

Asking for them before (MADV_HUGEPAGE) makes the reads wait for the kernel to find and clear 2 MiB
at a time: loading took two to three times as long where memory was fragmented or, in a virtual
machine, not yet backed (docs/background.md, pinning).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from numa.errors import PlacementRefused
from numa.memory import PlacedMemory

_STEP_BYTES = 32 << 20
_POLL_S = 0.05


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
        self._done = 0.0
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._work, name="huge-pages", daemon=True)
        self._thread.start()

    def wait(self, on_poll: Callable[[float], object] = lambda _: None) -> HugePages:
        """Wait until the kernel has made all pages huge that it makes huge.

        `on_poll` is told the share that is done about 20 times a second, and once at the end. An
        exception that it raises stops the thread and is raised here.
        """
        try:
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
                on_poll(self._done)
            on_poll(self._done)  # the thread may have ended before the first poll
        except BaseException:
            self.stop()
            raise
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
            self._why_not = "; ".join(self._memory.collapse(self._goes_on))
        else:
            self._collapse()
        self._seconds = time.perf_counter() - start

    def _collapse(self) -> None:
        total_bytes = self._memory.mapped_bytes
        for start in range(0, total_bytes, _STEP_BYTES):
            if not self._goes_on(start, total_bytes):
                return
            try:
                self._memory.make_huge(start, _STEP_BYTES)
            except PlacementRefused as refusal:
                self._why_not = str(refusal)
                return

    def _goes_on(self, done_bytes: int, total_bytes: int) -> bool:
        self._done = done_bytes / total_bytes
        return not self._stopping
