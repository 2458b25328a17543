"""Parallel reads of real files: contents, the page cache, refusals, failures, Ctrl-C."""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from offload.errors import BadModel
from offload.ggml.memory import HostRange
from offload.plan.store_layout import PAGE_BYTES, Chunk, Run, cut_into_chunks
from offload.store.reading import OpenFile, ReadAhead, ReadCounters, Readers

SIZE_BYTES = (1 << 20) + 1234  # the last page is not whole


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(random.Random(3).randbytes(SIZE_BYTES))
    drop(path)
    return path


def drop(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def n_cached_pages(path: Path) -> int:
    """Number of the file's pages that are in the page cache."""
    with (
        path.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as mapping,
    ):
        return HostRange.of_mapping(mapping).resident_bytes() // PAGE_BYTES


def runs_of(path: Path) -> list[Run]:
    """Two parts of the file. The second part ends at the file's end."""
    half = SIZE_BYTES // 2 // PAGE_BYTES * PAGE_BYTES
    whole = -(-SIZE_BYTES // PAGE_BYTES) * PAGE_BYTES
    first = Run(path, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES - 40, 0)
    return [first, Run(path, half, whole, SIZE_BYTES, first.size_bytes)]


def read_all(
    path: Path, *, n_threads: int = 3, chunk_bytes: int = 8 * PAGE_BYTES
) -> tuple[OpenFile, ReadCounters]:
    """Read the runs and compare every byte."""
    runs = runs_of(path)
    memory = memory_for(runs)
    opened = OpenFile(path)
    readers = Readers([opened], cut_into_chunks(runs, chunk_bytes), memory, n_threads)
    readers.start()
    readers.wait()
    opened.close()
    data = path.read_bytes()
    for run in runs:
        got = memory[run.at_bytes : run.at_bytes + run.end_bytes - run.start_bytes]
        assert got == data[run.start_bytes : run.end_bytes]
    return opened, readers.counters


def memory_for(runs: Sequence[Run]) -> memoryview:
    """Page-aligned memory, as direct reads want it."""
    return memoryview(mmap.mmap(-1, sum(run.size_bytes for run in runs)))


def test_direct_reads_bring_the_bytes_and_leave_nothing_in_the_page_cache(file: Path) -> None:
    if n_cached_pages(file):
        pytest.skip("the page cache of this file system cannot be dropped")
    runs = runs_of(file)
    opened = OpenFile(file)
    if not opened.is_direct:
        pytest.skip(opened.not_direct_reason)
    readers = Readers([opened], cut_into_chunks(runs, 1 << 18), memory_for(runs), 2)
    readers.start()
    readers.wait()
    opened.close()
    assert n_cached_pages(file) == 0
    assert readers.counters.direct_bytes >= sum(r.end_bytes - r.start_bytes for r in runs)
    assert readers.counters.buffered_bytes == readers.counters.cached_bytes == 0
    read_all(file)


def test_what_the_page_cache_holds_is_copied_from_there_and_dropped(file: Path) -> None:
    file.read_bytes()
    _, counters = read_all(file)
    assert counters.cached_bytes > 0
    assert counters.read_bytes >= sum(r.end_bytes - r.start_bytes for r in runs_of(file))


@pytest.mark.parametrize("when", ["open", "read"])
def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache_and_named(
    file: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_preadv = os.open, os.preadv
    direct: list[int] = []

    def open_(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and when == "open":
            raise OSError(errno.EINVAL, "Invalid argument")
        descriptor = real_open(path, flags)
        if flags & os.O_DIRECT:
            direct.append(descriptor)
        return descriptor

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    opened, counters = read_all(file)
    assert counters.direct_bytes == 0
    assert counters.buffered_bytes > 0
    assert "refuses O_DIRECT (Invalid argument)" in opened.not_direct_reason


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match="none: cannot be read"):
        OpenFile(tmp_path / "none")


def test_ctrl_c_while_waiting_stops_the_readers(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = OpenFile(file)
    going = threading.Event()
    real_read: Callable[[Readers, OpenFile, Chunk], None] = Readers._read

    def slow(self: Readers, file: OpenFile, chunk: Chunk) -> None:
        going.wait(timeout=60)
        real_read(self, file, chunk)

    monkeypatch.setattr(Readers, "_read", slow)

    def interrupt() -> None:
        going.set()
        raise KeyboardInterrupt

    before = threading.active_count()
    readers = Readers(
        [opened], cut_into_chunks(runs_of(file), PAGE_BYTES), memory_for(runs_of(file)), 2
    )
    readers.start()
    with pytest.raises(KeyboardInterrupt):
        readers.wait(interrupt)
    assert threading.active_count() == before
    assert readers.counters.reads < SIZE_BYTES // 2 // PAGE_BYTES
    opened.close()


def test_read_ahead_fills_the_page_cache(file: Path) -> None:
    if n_cached_pages(file):
        pytest.skip("the page cache of this file system cannot be dropped")
    opened = OpenFile(file)
    ahead = ReadAhead([(opened, 0, SIZE_BYTES)])
    ahead.start()
    ahead.wait()
    for at in range(0, SIZE_BYTES, PAGE_BYTES):
        os.pread(opened.buffered, 1, at)
    assert n_cached_pages(file) > 0
    opened.close()
