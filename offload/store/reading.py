"""Reads file chunks into our memory in parallel, bypassing the page cache if possible.

Chunks that are in the page cache already are copied from there. Others are read directly
(O_DIRECT), or through the cache if the file system refuses direct reads. After each chunk its copy
in the cache is dropped. The threads that load a model share one list of chunks, and the first
failure stops them all. `FileReaders` is also the base of the threads that read single experts while
the model runs (offload/store/expert_memory.py).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.errors import BadModel, ModelChanged
from offload.ggml.memory import HostRange
from offload.plan.store_layout import PAGE_BYTES, Chunk

_POLL_S = 0.05
_REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)  # answers of file systems without direct reads
_READAHEAD_BYTES = 128 << 10  # bytes of one call, as the kernel reads no more than its read-ahead


@dataclass
class ReadCounters:
    """Counts of the readers' work."""

    direct_bytes: int = 0
    cached_bytes: int = 0  # bytes that were in the page cache already
    buffered_bytes: int = 0  # bytes read through the page cache, because direct reads are refused
    reads: int = 0
    busy_s: float = 0.0  # seconds in which at least one read of an expert was under way
    under_way_s: float = 0.0  # seconds of each read of an expert, summed up

    @property
    def read_bytes(self) -> int:
        return self.direct_bytes + self.cached_bytes + self.buffered_bytes


class OpenFile:
    """A model file opened twice: through the page cache, and directly if that works."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises BadModel if it cannot be read."""
        self.path = path
        self.not_direct_reason = ""
        self.direct = -1
        try:
            self.buffered = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self._mapping = mmap.mmap(self.buffered, 0, prot=mmap.PROT_READ)
            self._stamp = self._stamp_now()
        except (OSError, ValueError) as e:
            raise BadModel(f"{path}: cannot be read ({e})") from e
        self._mapped = HostRange.of_mapping(self._mapping)
        # The kernel does not report cached pages of files that this user may not write.
        self._tells = os.access(path, os.W_OK)
        try:
            self.direct = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as e:
            self.read_buffered(e)

    def read_buffered(self, error: OSError) -> None:
        """Read through the page cache from now on.

        The direct descriptor stays open, because other threads may still use it.
        """
        self.not_direct_reason = (
            f"the file system of {self.path} refuses O_DIRECT ({error.strerror})"
        )

    @property
    def is_direct(self) -> bool:
        return not self.not_direct_reason

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self.buffered)
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise ModelChanged if another program wrote to the file since it was opened."""
        if self._stamp_now() != self._stamp:
            raise ModelChanged(
                f"{self.path}: another program wrote to the file while the model was open, so its "
                "weights can no longer be read; start again",
                self.path,
            )

    def is_cached(self, start_bytes: int, size_bytes: int) -> bool:
        """True if a range that begins on a page border is known to be wholly in the page cache.

        The pages are counted in a mapping, because a non-blocking read would start read-ahead of
        missing pages.
        """
        size_bytes = min(size_bytes, len(self._mapping) - start_bytes)
        if not self._tells or size_bytes <= 0:
            return False
        try:
            return self._mapped.part(start_bytes, size_bytes).resident_bytes() >= size_bytes
        except OSError:
            return False

    def forget(self, start_bytes: int, size_bytes: int) -> None:
        """Drop a range from the page cache. Pages that a process has mapped stay."""
        with contextlib.suppress(OSError):
            os.posix_fadvise(self.buffered, start_bytes, size_bytes, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for descriptor in (self.buffered, self.direct):
            if descriptor >= 0:
                os.close(descriptor)
        self.buffered = self.direct = -1
        self._mapping.close()


class Workers:
    """Threads that do one task together. They end when it is done, on a failure, or on `stop`."""

    def __init__(self, name: str, work: Callable[[], None], n_threads: int = 1) -> None:
        """Each thread calls `work`, which returns early if `is_stopping`."""
        self.is_stopping = False
        self._work = work
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(n_threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def is_working(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def stop(self) -> None:
        """Tell the threads to end early, and wait until they have ended."""
        self.is_stopping = True
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def wait(self, on_poll: Callable[[], object] = lambda: None) -> None:
        """Wait until the task is done. Raises the first failure.

        `on_poll` is called on the caller's thread about 20 times a second, and once at the end. If
        it raises, or on Ctrl-C, the threads are stopped before the exception is passed on.
        """
        try:
            for thread in self._threads:
                while thread.is_alive():
                    thread.join(_POLL_S)
                    on_poll()
            on_poll()
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as e:
            self._error, self.is_stopping = self._error or e, True


class FileReaders(Workers):
    """Threads that read chunks of files into one block of memory, and count what they read."""

    _looks_in_cache = True  # copy chunks that are in the page cache from there

    def __init__(
        self,
        name: str,
        work: Callable[[], None],
        files: Iterable[OpenFile],
        target: memoryview,
        n_threads: int,
    ) -> None:
        super().__init__(name, work, n_threads)
        self.counters = ReadCounters()
        self._files = {file.path: file for file in files}
        self._target = target
        self._lock = threading.Lock()

    def check_unchanged(self) -> None:
        """Raise ModelChanged if another program wrote to a file since it was opened."""
        for file in self._files.values():
            file.check_unchanged()

    def _place(self, chunk: Chunk) -> memoryview:
        return self._target[chunk.at_bytes : chunk.at_bytes + chunk.size_bytes]

    def _read(self, file: OpenFile, chunk: Chunk, into: Sequence[memoryview]) -> None:
        """Read a chunk into parts of memory, which have its size together."""
        is_cached = self._looks_in_cache and file.is_cached(chunk.start_bytes, chunk.least_bytes)
        done = 0
        while done < chunk.least_bytes:
            if self.is_stopping:
                return
            n = self._read_some(file, chunk.start_bytes + done, _behind(into, done), is_cached)
            if n == 0:
                size_bytes = os.fstat(file.buffered).st_size
                raise ModelChanged(
                    f"{file.path}: the file ends at byte {size_bytes} but weights "
                    f"reach to byte {chunk.start_bytes + chunk.least_bytes}; it was cut short "
                    "while it was open",
                    file.path,
                )
            done += n
        # A copy of these bytes in the page cache would be a second copy of the weights.
        file.forget(chunk.start_bytes, chunk.size_bytes)

    def _read_some(
        self, file: OpenFile, start_bytes: int, into: Sequence[memoryview], is_cached: bool
    ) -> int:
        # Direct reads have to begin on a page border. A read after a short one may begin elsewhere.
        if file.is_direct and not is_cached and start_bytes % PAGE_BYTES == 0:
            try:
                n = os.preadv(file.direct, into, start_bytes)
            except OSError as e:
                if e.errno not in _REFUSALS:
                    raise BadModel(
                        f"{file.path}: reading failed at byte {start_bytes} ({e})"
                    ) from e
                file.read_buffered(e)
            else:
                self._count("direct_bytes", n)
                return n
        try:
            n = os.preadv(file.buffered, into, start_bytes)
        except OSError as e:
            raise BadModel(f"{file.path}: reading failed at byte {start_bytes} ({e})") from e
        self._count("cached_bytes" if is_cached else "buffered_bytes", n)
        return n

    def _count(self, what: str, n_bytes: int) -> None:
        with self._lock:
            setattr(self.counters, what, getattr(self.counters, what) + n_bytes)


def _behind(parts: Sequence[memoryview], n_bytes: int) -> Sequence[memoryview]:
    """Return the parts of memory that follow the first `n_bytes`."""
    if not n_bytes:
        return parts
    ends = itertools.accumulate(map(len, parts))
    return [
        part[max(0, len(part) - (end - n_bytes)) :]
        for part, end in zip(parts, ends, strict=True)
        if end > n_bytes
    ]


class Readers(FileReaders):
    """Threads that read chunks in order. Call `start`, then `wait` or `stop`."""

    def __init__(
        self, files: Iterable[OpenFile], chunks: Sequence[Chunk], target: memoryview, n_threads: int
    ) -> None:
        n_threads = min(n_threads, max(1, len(chunks)))
        super().__init__("weights", self._read_all, files, target, n_threads)
        self._chunks = iter(chunks)

    def _read_all(self) -> None:
        while not self.is_stopping:
            with self._lock:
                chunk = next(self._chunks, None)
                self.counters.reads += chunk is not None
            if chunk is None:
                return
            self._read(self._files[chunk.file], chunk, [self._place(chunk)])


class ReadAhead(Workers):
    """A thread that asks the kernel to read file ranges into the page cache, for libllama."""

    def __init__(self, ranges: Sequence[tuple[OpenFile, int, int]]) -> None:
        """`ranges` are (file, start, stop) in bytes, in the order in which they are wanted."""
        super().__init__("read-ahead", self._ask)
        self._ranges = ranges

    def _ask(self) -> None:
        for file, start, stop in self._ranges:
            for at in range(start, stop, _READAHEAD_BYTES):
                if self.is_stopping:
                    return
                size = min(_READAHEAD_BYTES, stop - at)
                with contextlib.suppress(OSError):
                    os.posix_fadvise(file.buffered, at, size, os.POSIX_FADV_WILLNEED)
