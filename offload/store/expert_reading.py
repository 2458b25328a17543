"""Reads batches of experts with several threads: needed batches first, then those ahead."""

from __future__ import annotations

import mmap
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from offload.errors import ModelChanged
from offload.plan.store_layout import PAGE_BYTES, Chunk
from offload.store.disk_speed import HeldDisk
from offload.store.reading import FileReaders, OpenFile
from offload.store.residency import LayerExpert

_MOST_AHEAD = 2  # most single experts that are read ahead at once; two keep a disk busy


class ExpertReads:
    """Experts of a layer that are read together."""

    def __init__(
        self, pieces: Sequence[LayerExpert], chunks: Sequence[Chunk], moved_bytes: int = 0
    ) -> None:
        """`moved_bytes`: bytes of the pages that the experts have before they are read."""
        self.pieces, self.chunks, self.layer = pieces, chunks, pieces[0][0]
        self.n_left = len(chunks)
        self._unread_bytes = sum(chunk.size_bytes for chunk in chunks)
        self.absent_bytes = max(0, self._unread_bytes - moved_bytes)  # most bytes without pages
        self.error: BaseException | None = None

    def has_read(self, chunk: Chunk) -> int:
        """Count a chunk as read. Returns the number of bytes that now have pages for certain."""
        self._unread_bytes -= chunk.size_bytes
        before_bytes = self.absent_bytes
        self.absent_bytes = min(before_bytes, self._unread_bytes)
        return before_bytes - self.absent_bytes


class _Edges:
    """Two pages for the first and last page of a chunk, if they also hold bytes of neighbours.

    The neighbours may be in memory, and a read that fails may have written anything.
    """

    def __init__(self) -> None:
        self._pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        self._first, self._last = self._pages[:PAGE_BYTES], self._pages[PAGE_BYTES:]

    def around(self, chunk: Chunk, place: memoryview) -> list[memoryview]:
        """Return the memory to read the chunk into. `place` is where it belongs."""
        has_first, has_last = self._has(chunk)
        inner = place[PAGE_BYTES * has_first : len(place) - PAGE_BYTES * has_last]
        parts = [*[self._first] * has_first, inner, *[self._last] * has_last]
        return [part for part in parts if part]

    def copy_own(self, chunk: Chunk, place: memoryview) -> None:
        """Copy the chunk's own bytes in these pages to their place."""
        has_first, has_last = self._has(chunk)
        stop = len(place) - chunk.after_bytes
        if has_first:
            own = slice(chunk.before_bytes, min(PAGE_BYTES, stop))
            place[own] = self._first[own]
        if has_last:
            place[len(place) - PAGE_BYTES : stop] = self._last[: PAGE_BYTES - chunk.after_bytes]

    @staticmethod
    def _has(chunk: Chunk) -> tuple[bool, bool]:
        """Return whether the first and the last page of a chunk are shared.

        A chunk of one page has only a first one.
        """
        is_one = chunk.size_bytes == PAGE_BYTES
        has_first = chunk.before_bytes > 0 or (is_one and chunk.after_bytes > 0)
        return has_first, chunk.after_bytes > 0 and not is_one


class ExpertReaders(FileReaders):
    """Threads that read batches. Needed batches are read before those that are read ahead."""

    _looks_in_cache = False

    def __init__(
        self,
        files: Iterable[OpenFile],
        target: memoryview,
        n_threads: int,
        done: threading.Condition,
        held_to: float | None = None,
    ) -> None:
        """`done` is notified when a batch has been read, or has failed.

        `held_to`: bytes/s of a simulated disk, None for the real one.
        """
        super().__init__("experts", self._read_batches, files, target, n_threads)
        self._needed: deque[tuple[ExpertReads, Chunk]] = deque()
        self._ahead: deque[tuple[ExpertReads, Chunk]] = deque()
        self._has_work, self._done = threading.Condition(), done
        self.last_read_s = time.perf_counter()
        self._held_disk = None if held_to is None else HeldDisk(held_to)
        self.absent_bytes = 0  # bytes that have no pages until queued chunks are read
        self._n_busy = 0  # threads that read now
        self._n_ahead = 0  # those of them that read ahead
        self._busy_since_s = 0.0

    def enqueue(self, batch: ExpertReads, *, ahead: bool) -> None:
        """Read a batch. Those that are read `ahead` are read in the order of their layers."""
        entries = [(batch, chunk) for chunk in batch.chunks]
        with self._has_work:
            if ahead:
                self._ahead += entries
                if len(self._ahead) > len(entries):
                    self._ahead = deque(sorted(self._ahead, key=lambda entry: entry[0].layer))
            else:
                self._needed += entries
            self.absent_bytes += batch.absent_bytes
            # Each wake-up takes time from the caller. A thread that reads ahead wakes the next one.
            self._has_work.notify(1 if ahead else len(entries))

    def hurry(self, batches: Collection[ExpertReads]) -> None:
        """Read these batches before others that are read ahead."""
        with self._has_work:
            if self._ahead:
                self._needed += [entry for entry in self._ahead if entry[0] in batches]
                self._ahead = deque(e for e in self._ahead if e[0] not in batches)
                self._has_work.notify(len(self._needed))

    def cancel(self, batches: Collection[ExpertReads]) -> list[ExpertReads]:
        """Cancel the batches that are read ahead and have not begun. Returns the cancelled ones."""
        with self._has_work:
            n_queued = Counter(id(batch) for batch, _ in self._ahead)
            cancelled = [b for b in batches if n_queued[id(b)] == len(b.chunks)]
            if cancelled:
                self._ahead = deque(e for e in self._ahead if e[0] not in cancelled)
                self.absent_bytes -= sum(batch.absent_bytes for batch in cancelled)
        return cancelled

    def silent_s(self, start_s: float) -> float:
        """Return the seconds since a read last returned, or since the running reads began.

        If no read is running, they are counted from `start_s` at the earliest.
        """
        with self._has_work:
            asked_s = self._busy_since_s if self._n_busy else start_s
        return time.perf_counter() - max(asked_s, self.last_read_s)

    def stop(self) -> None:
        with self._has_work:
            self.is_stopping = True
            self._has_work.notify_all()
        super().stop()

    def _next_queue(self) -> deque[tuple[ExpertReads, Chunk]]:
        """Return the queue to take the next read from. It may be empty.

        Few single experts are read ahead at once, so that a needed one does not wait for many.
        """
        if self._needed or not self._ahead:
            return self._needed
        is_single = len(self._ahead[0][0].pieces) == 1
        return self._needed if is_single and self._n_ahead >= _MOST_AHEAD else self._ahead

    def _read_batches(self) -> None:
        held, edges = self._held_disk, _Edges()
        while True:
            with self._has_work:
                while not (self._next_queue() or self.is_stopping):
                    self._has_work.wait()
                if self.is_stopping:
                    return
                is_ahead = not self._needed
                batch, chunk = self._next_queue().popleft()
                self._n_ahead += is_ahead
                self.counters.reads += 1
                began_s = time.perf_counter()
                if not self._n_busy:
                    self._busy_since_s = began_s
                self._n_busy += 1
                if self._next_queue():
                    self._has_work.notify()
                end_s = 0.0 if held is None else held.begin(chunk.size_bytes)
            error: BaseException | None = None
            file = self._files[chunk.file]
            try:
                place = self._place(chunk)
                self._read(file, chunk, edges.around(chunk, place))
                if held is not None:
                    held.wait(end_s)
                file.check_unchanged()
                edges.copy_own(chunk, place)
            except BaseException as e:
                error = _cause(file, e)
            now_s = time.perf_counter()
            with self._has_work:
                self._n_busy -= 1
                self.absent_bytes -= batch.has_read(chunk)
                self._n_ahead -= is_ahead
                self.counters.under_way_s += now_s - began_s
                if not self._n_busy:
                    self.counters.busy_s += now_s - self._busy_since_s
            with self._done:
                self.last_read_s = now_s
                batch.error = batch.error or error
                batch.n_left -= 1
                if not batch.n_left:
                    self._done.notify_all()


def _cause(file: OpenFile, error: BaseException) -> BaseException:
    """Return ModelChanged if a read may have failed because the file changed, else `error`."""
    try:
        file.check_unchanged()
    except ModelChanged as changed:
        return changed
    except OSError:
        pass
    return error
