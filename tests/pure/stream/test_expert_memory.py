"""Experts that are read when they are needed: bytes, limits, faults, memory that others need.

Pages that are taken away are filled with NaN (bytes of 0xFF), so that every later use is found.
"""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from numa import sys as numa_sys
from numa.errors import PlacementRefused
from numa.memory import PlacedMemory
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.memory import HostRange
from offload.model import TensorEntry, WeightPlace
from offload.plan.store_layout import PAGE_BYTES, StoreLayout, expert_matrices, plan_layout
from offload.store import expert_memory as module
from offload.store import expert_pages, memory_budget
from offload.store.expert_memory import ExpertMemory, ExpertPlaces
from offload.store.expert_pages import unit_bytes
from offload.store.memory_budget import MemoryLimits, PressureWatch
from offload.store.reading import OpenFile

N_LAYERS, N_EXPERTS, N_USED = 3, 8, 2
MATRIX_BYTES = 5 * PAGE_BYTES + 11 * PAGE_BYTES // 128  # no matrix begins or ends on a page border
KINDS = ("gate", "up", "down")
NAN = 0xFF


def poison(pages: HostRange) -> None:
    pages.array()[:] = NAN


@pytest.fixture(autouse=True)
def _moved_pages_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    real = HostRange.move_to

    def move_to(self: HostRange, target: HostRange) -> None:
        real(self, target)
        poison(target)

    monkeypatch.setattr(HostRange, "move_to", move_to)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experts"
    path.write_bytes(random.Random(5).randbytes(N_LAYERS * 3 * N_EXPERTS * MATRIX_BYTES + 64))
    return path


def entries() -> list[TensorEntry]:
    found, size_bytes = [], N_EXPERTS * MATRIX_BYTES
    for layer in range(N_LAYERS):
        for kind in KINDS:
            name = f"blk.{layer}.ffn_{kind}_exps.weight"
            at = 64 + len(found) * size_bytes
            found.append(TensorEntry(name, "f32", (1, 1, N_EXPERTS), at, size_bytes))
    return found


class Opened:
    """An expert memory over a file, and the contents that it must have."""

    def __init__(self, path: Path, n_places: float, **more: object) -> None:
        self.layout: StoreLayout = plan_layout(WeightPlace(path, entry) for entry in entries())
        self.placed = PlacedMemory(self.layout.size_bytes)
        whole = HostRange.of_placed(self.placed).part(0, self.layout.size_bytes)
        self.whole = whole
        self.data = path.read_bytes()
        self.file = OpenFile(path)
        most = MemoryLimits(int(n_places * 3 * (MATRIX_BYTES + 2 * PAGE_BYTES)))
        arguments = {"leave": poison, "limits": most} | more
        limits = arguments.pop("limits")
        matrices = expert_matrices(self.layout, entries())
        self.memory = ExpertMemory(
            [self.file],
            ExpertPlaces(whole, matrices, N_EXPERTS, N_USED),
            limits,  # type: ignore[arg-type]
            **arguments,  # type: ignore[arg-type]
        )

    def is_there(self, layer: int, expert: int) -> bool:
        """True if the bytes of all matrices of an expert are those of the file."""
        for kind in KINDS:
            spot = self.layout.spots[f"blk.{layer}.ffn_{kind}_exps.weight"]
            start = expert * MATRIX_BYTES
            got = self.whole.part(spot.at_bytes + start, MATRIX_BYTES).array().tobytes()
            at = spot.offset_bytes + start
            if got != self.data[at : at + MATRIX_BYTES]:
                return False
        return True

    def close(self) -> None:
        self.memory.close()
        self.file.close()
        self.placed.close()


@contextmanager
def opened(path: Path, n_places: float, **more: object) -> Iterator[Opened]:
    made = Opened(path, n_places, **more)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("n_places", [N_EXPERTS, 11.5, 30])
def test_needed_experts_have_the_files_bytes_and_those_that_left_are_nan(
    file: Path, n_places: float
) -> None:
    chance = random.Random(n_places)
    with opened(file, n_places) as made:
        assert not any(made.is_there(0, expert) for expert in range(N_EXPERTS))
        for step in range(120):
            layer = step % N_LAYERS
            experts = chance.sample(range(N_EXPERTS), chance.choice([1, 2, 2, 5, N_EXPERTS]))
            made.memory.need(layer, experts)
            assert all(made.is_there(layer, expert) for expert in experts)
            assert made.memory.used_bytes <= made.memory.capacity_bytes
        n_there = sum(made.is_there(i, e) for i in range(N_LAYERS) for e in range(N_EXPERTS))
        assert n_there <= n_places + 0.5
        counters = made.memory.counters
        assert counters.n_read + counters.n_read_ahead >= n_there
        assert counters.reads.read_bytes >= counters.n_read * 3 * MATRIX_BYTES
        assert (counters.moved_bytes > counters.reads.read_bytes / 4) == (n_places < 30)


@pytest.mark.parametrize("reason", ["kernel", "mappings"])
def test_experts_are_read_into_fresh_pages_if_pages_cannot_be_moved(
    file: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def refuse(*_: int) -> None:
        raise PlacementRefused("the kernel refused mremap")

    if reason == "kernel":
        monkeypatch.setattr(numa_sys, "move_pages", refuse)
    monkeypatch.setattr(expert_pages, "most_mappings", lambda: 20)
    with opened(file, N_EXPERTS, leave=HostRange.give_back) as made:
        for step in range(4 * N_LAYERS):
            made.memory.need(step % N_LAYERS, range(N_EXPERTS))
            assert all(made.is_there(step % N_LAYERS, expert) for expert in range(N_EXPERTS))
            assert made.whole.resident_bytes() <= made.memory.capacity_bytes
        assert (made.memory.counters.moved_bytes > 0) == (reason == "mappings")
        assert n_mappings(made.whole) <= 20


def n_mappings(memory: HostRange) -> int:
    """Return the number of the process's mappings that begin in a range."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    starts = (int(line.split("-")[0], 16) for line in lines)
    return sum(0 <= start - memory.address < memory.size_bytes for start in starts)


@pytest.mark.parametrize(
    ("pages", "unit"), [([215, 215, 315], 105), ([7, 7, 7], 7), ([4, 5], 4), ([1], 1), ([0, 9], 9)]
)
def test_units_of_equal_size_cover_most_of_each_matrix(pages: list[int], unit: int) -> None:
    found = unit_bytes(PAGE_BYTES * n for n in pages)
    assert found == PAGE_BYTES * unit
    assert sum(n % unit for n in pages) <= 0.05 * sum(pages) or max(pages) < 6


def test_experts_of_a_small_batch_are_read_one_after_the_other(file: Path) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        made.memory.need(0, [3])
        assert made.memory.is_there(0, 3)
        assert not made.memory.is_there(0, 1)
        groups = made.memory.begin(0, [1, 3, 5])
        assert groups == [[1], [5]]
        for (expert,) in groups:
            made.memory.wait(0, [expert])
            assert made.memory.is_there(0, expert)
            assert made.is_there(0, expert)
        assert made.memory.begin(0, [1, 3, 5]) == []


def test_reads_of_a_simulated_disk_take_the_time_of_its_rate(file: Path) -> None:
    with opened(file, 2 * N_EXPERTS, held_to=4e6) as made:
        assert made.memory.bytes_per_s == 4e6
        assert made.memory.read_s(0) == made.memory.least_bytes / N_EXPERTS / 4e6
        start_s = time.monotonic()
        made.memory.need(0, [1, 2])
        read_bytes = made.memory.counters.reads.read_bytes
        assert time.monotonic() - start_s >= 0.99 * read_bytes / 4e6
        made.memory.close()  # its readers have counted their last reads
        reads = made.memory.counters.reads
        assert reads.busy_s >= 0.99 * read_bytes / 4e6
        assert reads.busy_s <= reads.under_way_s + 1e-9 <= reads.reads * reads.busy_s + 2e-9


def test_pages_go_back_to_the_kernel(file: Path) -> None:
    with opened(file, N_EXPERTS, leave=HostRange.give_back) as made:
        for step in range(4 * N_LAYERS):
            made.memory.need(step % N_LAYERS, range(N_EXPERTS))
            in_memory = made.whole.resident_bytes()
            assert in_memory <= made.memory.capacity_bytes
            assert all(made.is_there(step % N_LAYERS, expert) for expert in range(N_EXPERTS))


def test_the_next_layer_of_a_prompt_is_read_ahead(file: Path) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        made.memory.need(0, range(N_EXPERTS))
        assert made.memory.counters.n_read_ahead == N_EXPERTS
        made.memory.need(1, range(N_EXPERTS))
        assert made.memory.counters.n_read == N_EXPERTS, "those of layer 1 were there"
        assert all(made.is_there(1, expert) for expert in range(N_EXPERTS))


@pytest.mark.parametrize(("n_used", "is_ahead"), [(N_EXPERTS // 2, True), (2, False)])
def test_drafts_that_use_half_of_a_layer_read_the_next_one_ahead(
    file: Path, n_used: int, is_ahead: bool
) -> None:
    with opened(file, 3 * N_EXPERTS) as made:
        made.memory.expect(n_tokens=16, n_wanted=16)
        made.memory.need(0, range(n_used))
        assert (made.memory.counters.n_read_ahead > 0) == is_ahead


def test_experts_that_were_read_ahead_in_vain_are_not_read(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, goes_on, n_read = os.preadv, threading.Event(), [0]

    def preadv(*arguments: object) -> int:
        n_read[0] += 1
        goes_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    with opened(file, 2 * N_EXPERTS, n_readers=1) as made:
        memory = made.memory
        monkeypatch.setattr(os, "preadv", preadv)
        memory.read_ahead(0, [0, 1, 2])
        deadline = time.monotonic() + 30
        while not n_read[0]:  # the only thread reads a part of expert 0
            assert time.monotonic() < deadline
        memory.decided(0, [5, 2])
        assert memory.begin(0, [5, 2]) == [[2], [5]]
        assert memory.counters.n_read_ahead == 2, "experts 0 and 2"
        goes_on.set()
        memory.wait(0, [2, 5])
        assert made.is_there(0, 5)
        assert made.is_there(0, 2)
        assert not made.is_there(0, 1)
        memory.need(0, [1])
        assert made.is_there(0, 1)


def test_a_prompt_of_few_experts_is_read_ahead_too(file: Path) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        made.memory.expect(n_tokens=100, n_wanted=100)
        made.memory.need(1, [4, 6])
        made.memory.need(2, range(N_EXPERTS))
        made.memory.need(0, [1, 3])
        assert made.memory.counters.n_read_ahead >= 2
        assert made.memory.begin(1, [4, 6]) in ([], [[4, 6]])


def test_experts_that_are_expected_stay_until_their_layer_has_chosen(file: Path) -> None:
    with opened(file, N_EXPERTS) as made:
        memory = made.memory
        memory.expect(n_tokens=4, n_wanted=4)  # no prompt, so no whole layer is read ahead
        memory.need(2, [0, 1])
        memory.read_ahead(2, [0, 1, 2])
        memory.need(0, [0, 1, 2])
        memory.need(1, [0, 1, 2])
        memory.wait(2, [2])  # its read ahead may not have ended
        assert all(made.is_there(2, expert) for expert in (0, 1, 2))
        memory.need(2, [1])  # copies an expert before the router has chosen
        assert memory.counters.n_unused == 0
        memory.decided(2, [1])
        counters = memory.counters
        assert (counters.n_read_ahead, counters.n_unused) == (1, 1), "expert 2 was read in vain"
        # Half of a layer would be many experts, after which layer 2 is read ahead again.
        memory.need(0, [0, 1, 2])
        memory.need(1, [0, 1, 2])
        assert not made.is_there(2, 2)
        assert made.is_there(2, 1)


def test_expected_experts_leave_if_a_layer_needs_all_memory(file: Path) -> None:
    with opened(file, N_EXPERTS) as made:
        made.memory.read_ahead(2, [0, 1, 2])
        made.memory.need(0, range(N_EXPERTS))
        assert all(made.is_there(0, expert) for expert in range(N_EXPERTS))


def test_the_nearest_layer_is_read_first_and_few_reads_ahead_are_under_way(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, goes_on, offsets = os.preadv, threading.Event(), list[int]()

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, *more: int) -> int:
        offsets.append(offset)
        goes_on.wait(30)
        return real(descriptor, buffers, offset, *more)

    with opened(file, 3 * N_EXPERTS) as made:
        memory = made.memory
        monkeypatch.setattr(os, "preadv", preadv)
        memory.read_ahead(2, [0, 1])
        memory.read_ahead(1, [0])
        until(lambda: len(offsets) >= 2)
        time.sleep(0.1)
        assert len(offsets) == 2, "six reads could be under way"
        needed = memory.begin(0, [5])
        deadline = time.monotonic() + 30
        while len(offsets) < 5:  # a needed expert is read at once
            assert time.monotonic() < deadline
        goes_on.set()
        memory.wait(0, needed[0])
        memory.need(1, [0])
        memory.need(2, [0, 1])
        layers = [offset // (3 * N_EXPERTS * MATRIX_BYTES) for offset in offsets]
        assert layers[2:5] == [0, 0, 0]
        assert layers[:9].count(1) == 3


def test_needed_experts_whose_reads_ahead_wait_are_read_by_all_threads(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, goes_on, all_read = os.preadv, threading.Event(), threading.Barrier(7)

    def preadv(descriptor: int, buffers: list[memoryview], offset: int, *more: int) -> int:
        all_read.wait(30)
        goes_on.wait(30)
        return real(descriptor, buffers, offset, *more)

    with opened(file, 3 * N_EXPERTS) as made:
        monkeypatch.setattr(os, "preadv", preadv)
        made.memory.read_ahead(2, [0, 1])
        until(lambda: all_read.n_waiting >= 2)
        time.sleep(0.1)
        assert all_read.n_waiting == 2
        made.memory.begin(2, [0, 1])
        all_read.wait(30)  # all six matrices are being read
        goes_on.set()
        made.memory.wait(2, [0, 1])
        assert all(made.is_there(2, expert) for expert in (0, 1))


@pytest.mark.parametrize(("n_wanted", "stay"), [(16, True), (1, False)])
def test_drafts_with_many_experts_are_no_prompt(file: Path, n_wanted: int, stay: bool) -> None:
    """Experts that a prompt used leave first, those of drafts as late as those of a token."""
    with opened(file, 12.5) as made:
        memory = made.memory
        memory.expect(n_tokens=1, n_wanted=1)
        memory.need(0, [6, 7])
        memory.expect(n_tokens=16, n_wanted=n_wanted)
        memory.need(1, range(5))
        memory.expect(n_tokens=1, n_wanted=1)
        for experts in ((0, 1), (2, 3), (4, 5), (6, 7)):
            memory.need(2, experts)
        n_there = sum(made.is_there(1, expert) for expert in range(5))
        assert (n_there == 5) == stay


def test_memory_for_less_than_a_layer_is_refused(file: Path) -> None:
    with pytest.raises(DoesNotFit, match=r"are needed for the experts of one layer.*raise --ram"):
        Opened(file, N_EXPERTS - 1)


def test_experts_stay_until_their_copies_are_done(file: Path) -> None:
    finished: list[int] = []
    with opened(file, N_EXPERTS) as made:
        made.memory.need(0, range(4))

        def finish() -> None:
            assert all(made.is_there(0, expert) for expert in range(4))
            finished.append(0)

        made.memory.copying(0, range(4), finish)
        made.memory.need(1, range(4))
        assert not finished
        assert all(made.is_there(0, expert) for expert in range(4))
        made.memory.need(2, range(5))
        assert finished == [0]
        made.memory.copying(2, range(5), lambda: finished.append(2))
        made.memory.finish_copies()
        made.memory.finish_copies()
        assert finished == [0, 2]


def test_memory_is_filled_with_the_most_used_experts_and_no_more(file: Path) -> None:
    uses = {layer: [layer + expert for expert in range(N_EXPERTS)] for layer in range(N_LAYERS)}
    with opened(file, 13) as made:
        steps = list(made.memory.fill(uses))
        n_fit = made.memory.capacity_bytes // (made.memory.least_bytes // N_EXPERTS)
        assert made.memory.counters.n_filled == n_fit
        assert 1 < len(steps) <= n_fit
        assert made.is_there(2, 7)
        assert made.is_there(2, 6)
        assert not made.is_there(0, 1)
        assert list(made.memory.fill(uses)) == []
        made.memory.need(0, [0, 1])
        assert made.is_there(2, 7), "the least used ones leave first"


def test_memory_is_filled_with_the_first_layers_if_no_uses_are_known(file: Path) -> None:
    with opened(file, 13) as made:
        for _ in made.memory.fill(None):
            pass
        n_fit = made.memory.capacity_bytes // (made.memory.least_bytes // N_EXPERTS)
        assert made.memory.counters.n_filled == n_fit > N_EXPERTS
        places = [(layer, e) for layer in range(N_LAYERS) for e in range(N_EXPERTS)]
        assert [made.is_there(*place) for place in places] == [i < n_fit for i in range(24)]
        made.memory.need(0, range(N_EXPERTS))
        assert made.memory.counters.n_read == 0


# -- faults ------------------------------------------------------------------------------------


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads fail while the event is set."""
    real, is_broken = os.preadv, threading.Event()

    def preadv(*arguments: object) -> int:
        if is_broken.is_set():
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", preadv)
    return is_broken


def test_a_read_error_fails_the_request_and_the_next_one_works(
    file: Path, broken: threading.Event
) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        broken.set()
        with pytest.raises(DeviceFailed, match="could not be read: .*Input/output error"):
            made.memory.need(0, [1, 2])
        assert made.memory.used_bytes == 0
        broken.clear()
        made.memory.need(0, [1, 2])
        assert made.is_there(0, 1)
        assert made.is_there(0, 2)


def test_a_read_error_is_not_lost_if_room_is_made_before_the_wait(
    file: Path, broken: threading.Event
) -> None:
    """Reading ahead, or the watch of free memory, finds the failed batch first."""
    with opened(file, 2 * N_EXPERTS) as made:
        memory = made.memory
        broken.set()
        (group,) = memory.begin(0, [1])
        until(lambda: not memory._reading[0, 1].n_left)
        memory.read_ahead(1, [3])
        broken.clear()
        with pytest.raises(DeviceFailed, match="could not be read: .*Input/output error"):
            memory.wait(0, group)
        memory.need(0, [1])
        assert made.is_there(0, 1)


def test_a_guessed_read_that_fails_while_its_layer_begins_is_an_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer counts the expert as being read, and then makes room for another one."""
    real, ends = os.preadv, threading.Event()

    def preadv(*arguments: object) -> int:
        ends.wait(30)
        raise OSError(errno.EIO, "Input/output error")

    with opened(file, 2 * N_EXPERTS) as made:
        memory, touch = made.memory, made.memory._residency.touch

        def touch_and_fail(*pieces: Any, **more: Any) -> list[tuple[int, int]]:
            missing = touch(*pieces, **more)
            ends.set()
            until(lambda: not memory._reading[0, 1].n_left)
            monkeypatch.setattr(os, "preadv", real)
            return missing

        monkeypatch.setattr(os, "preadv", preadv)
        memory.read_ahead(0, [1])
        monkeypatch.setattr(memory._residency, "touch", touch_and_fail)
        with pytest.raises(DeviceFailed, match="could not be read: .*Input/output error"):
            memory.need(0, [1, 2])
        monkeypatch.undo()
        memory.need(0, [1, 2])
        assert made.is_there(0, 1)


def test_an_expert_that_leaves_and_enters_at_once_keeps_its_pages(
    file: Path, broken: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its failed read is found when its layer begins again, which reads it anew."""
    with opened(file, 2 * N_EXPERTS) as made:
        memory = made.memory
        give_back = memory._pages.give_back

        def give_back_late() -> None:
            until(lambda: not any(batch.n_left for batch in memory._reading.values()))
            give_back()

        broken.set()
        memory.begin(0, [1])
        until(lambda: not memory._reading[0, 1].n_left)
        broken.clear()
        monkeypatch.setattr(memory._pages, "give_back", give_back_late)
        memory.need(0, [1])
        assert made.is_there(0, 1)


def test_an_expert_whose_read_failed_is_never_there(
    file: Path, broken: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even while it leaves, since `is_there` takes no lock."""
    with opened(file, 2 * N_EXPERTS) as made:
        memory, real, seen = made.memory, made.memory._residency.remove, list[bool]()

        def remove(piece: tuple[int, int]) -> None:
            seen.append(memory.is_there(*piece))
            real(piece)

        monkeypatch.setattr(memory._residency, "remove", remove)
        broken.set()
        with pytest.raises(DeviceFailed):
            memory.need(0, [1])
        assert seen == [False]


def test_filling_goes_on_if_its_reads_are_cancelled(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes memory while the server fills its own before the first request."""
    free, real, goes_on = [1 << 30], os.preadv, threading.Event()
    monkeypatch.setattr(module, "_WATCH_S", 1e6)
    limits = MemoryLimits(1 << 30, free_bytes=1 << 20, available=lambda: free[0])

    def preadv(*arguments: object) -> int:
        goes_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    with opened(file, 0, limits=limits, n_readers=1) as made:
        memory = made.memory
        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(module, "_MOST_STALL_S", 5.0)

        def take_memory() -> None:
            until(lambda: memory.counters.reads.reads > 0)
            free[0] = 0
            memory.adapt()
            goes_on.set()

        other = threading.Thread(target=take_memory)
        other.start()
        steps = memory.fill({0: [9, 8, 7, 6, 0, 0, 0, 0]})
        next(steps)
        other.join()
        assert memory.counters.n_filled == 1, "the read that had begun"
        assert memory.counters.n_read_ahead == 0
        assert made.is_there(0, 0)
        free[0] = 1 << 30
        memory.need(0, range(4))
        assert all(made.is_there(0, expert) for expert in range(4))


def test_a_stalled_read_that_keeps_memory_fails_the_request(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer needs all memory, of which a guessed read under way has a part."""
    real, goes_on = os.preadv, threading.Event()

    def preadv(*arguments: object) -> int:
        goes_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    with opened(file, N_EXPERTS) as made:
        memory = made.memory
        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(module, "_MOST_STALL_S", 0.2)
        threading.Timer(10, goes_on.set).start()
        memory.read_ahead(2, [0])
        until(lambda: memory.counters.reads.reads > 0)
        with pytest.raises(DeviceFailed, match="the disk has returned nothing for"):
            memory.need(0, range(N_EXPERTS))
        assert not goes_on.is_set()
        goes_on.set()
        memory.need(0, range(N_EXPERTS))
        assert all(made.is_there(0, expert) for expert in range(N_EXPERTS))


@pytest.mark.parametrize("how", ["shrinks", "is overwritten"])
def test_a_file_that_changes_is_an_error_and_never_wrong_numbers(file: Path, how: str) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        made.memory.need(0, [1])
        if how == "shrinks":
            os.truncate(file, file.stat().st_size // 2)
        else:
            with file.open("r+b") as other:
                other.write(b"other")
            os.utime(file, ns=(1, 1))
        with pytest.raises(DeviceFailed, match=r"cut short|another program wrote to the file"):
            made.memory.need(2, [7])
        assert made.is_there(0, 1)
        made.memory.need(0, [1])


def test_a_failed_read_does_not_harm_neighbours_that_share_its_pages(file: Path) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        made.memory.need(0, [2, 4])
        size_bytes = file.stat().st_size
        file.write_bytes(b"x" * size_bytes)
        os.utime(file, ns=(1, 1))
        with pytest.raises(DeviceFailed, match="another program wrote to the file"):
            made.memory.need(0, [3])
        assert made.is_there(0, 2)
        assert made.is_there(0, 4)


def test_a_file_that_is_replaced_is_still_read_as_it_was(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(file.stat().st_size))
    with opened(file, 2 * N_EXPERTS) as made:
        other.replace(file)
        made.memory.need(1, [3])
        assert made.is_there(1, 3)


@pytest.mark.parametrize("recovers", [True, False])
def test_a_disk_that_stalls_is_waited_for_but_not_for_ever(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recovers: bool,
) -> None:
    real, goes_on = os.preadv, threading.Event()

    def preadv(*arguments: object) -> int:
        goes_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    with opened(file, 2 * N_EXPERTS) as made:
        monkeypatch.setattr(os, "preadv", preadv)
        if recovers:
            monkeypatch.setattr(module, "_SILENT_S", 0.1)
            threading.Timer(1.3, goes_on.set).start()
            made.memory.need(0, [1])
            assert made.is_there(0, 1)
            assert caplog.text.count("the disk has returned nothing for") == 1
            return
        monkeypatch.setattr(module, "_MOST_STALL_S", 0.2)
        with pytest.raises(DeviceFailed, match="the disk has returned nothing for"):
            made.memory.need(0, [1])
        goes_on.set()
        made.memory.need(0, [1])
        assert made.is_there(0, 1)


def test_the_limit_of_a_stalled_disk_does_not_begin_again_at_each_batch(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, goes_on = os.preadv, threading.Event()

    def preadv(*arguments: object) -> int:
        goes_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    with opened(file, 2 * N_EXPERTS) as made:
        monkeypatch.setattr(os, "preadv", preadv)
        monkeypatch.setattr(module, "_MOST_STALL_S", 2.5)
        with pytest.raises(DeviceFailed, match="the disk has returned nothing for"):
            made.memory.need(0, [1])
        begin_s = time.perf_counter()
        with pytest.raises(DeviceFailed, match=r"returned nothing for [3-9] s"):
            made.memory.need(1, [2])
        assert time.perf_counter() - begin_s < 2.5, "the limit began again"
        goes_on.set()
        made.memory.need(1, [2])
        assert made.is_there(1, 2)


# -- memory that others need -------------------------------------------------------------------


def test_memory_is_given_back_under_pressure_and_taken_again(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = [1 << 30]
    limits = MemoryLimits(1 << 30, free_bytes=1 << 20, available=lambda: free[0])
    with opened(file, 0, limits=limits) as made:
        memory = made.memory
        for layer in range(N_LAYERS):
            memory.need(layer, range(N_EXPERTS))
        assert memory.used_bytes == memory.all_bytes
        free[0] = -(memory.all_bytes // 2)  # others need half of it
        memory.adapt()
        assert memory.used_bytes < 0.6 * memory.all_bytes
        assert all(made.is_there(N_LAYERS - 1, expert) for expert in range(N_EXPERTS))
        free[0] = -(1 << 40)
        memory.adapt()
        assert memory.capacity_bytes == memory.least_bytes
        memory.adapt()
        told = [r for r in caplog.records if "other programs need memory" in r.message]
        assert len(told) == 1, "no more was given back after that"
        free[0] = 1 << 30
        memory.adapt()
        assert memory.capacity_bytes == memory.all_bytes
        memory.need(0, [0, 1])
        assert made.is_there(0, 1)


def test_memory_is_given_back_if_programs_wait_for_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Although the kernel says that much is free."""
    clock, stalled = [100.0], [0.0]
    watch = PressureWatch(lambda: stalled[0], lambda: clock[0])
    monkeypatch.setattr(memory_budget, "PressureWatch", lambda *_: watch)
    monkeypatch.setattr(module, "_WATCH_S", 1e6)
    margin = 8 * 3 * (MATRIX_BYTES + 2 * PAGE_BYTES)
    limits = MemoryLimits(1 << 30, free_bytes=margin, available=lambda: 1 << 30)
    with opened(file, 0, limits=limits) as made:
        memory = made.memory
        for layer in range(N_LAYERS):
            memory.need(layer, range(N_EXPERTS))
        clock[0] += 1.5
        stalled[0] += 0.2  # 13 % of the time
        memory.adapt()
        assert memory.used_bytes == memory.all_bytes
        clock[0] += 1.5
        stalled[0] += 0.9
        memory.adapt()
        assert memory.used_bytes <= memory.all_bytes - margin
        assert "other programs need memory" in caplog.text
        clock[0] += 1.5
        memory.adapt()
        assert memory.capacity_bytes < memory.all_bytes, "no more is taken soon after that"
        clock[0] += 20
        memory.adapt()
        assert memory.capacity_bytes == memory.all_bytes
        memory.need(0, [0, 1])
        assert made.is_there(0, 1)


def test_free_memory_is_watched_while_nothing_is_computed(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a look failed, for example because too many files were open."""
    monkeypatch.setattr(module, "_WATCH_S", 0.01)
    free, failed, fails = [1 << 30], threading.Event(), [False]

    def available() -> int:
        if fails[0]:
            failed.set()
            raise OSError(errno.EMFILE, "Too many open files", "/proc/meminfo")
        return free[0]

    limits = MemoryLimits(1 << 30, free_bytes=1 << 20, available=available)
    with opened(file, 0, limits=limits) as made:
        made.memory.need(0, range(N_EXPERTS))
        made.memory.need(1, [0])
        fails[0] = True
        assert failed.wait(30)
        free[0], fails[0] = -(1 << 40), False
        deadline = time.monotonic() + 30
        while made.memory.capacity_bytes > made.memory.least_bytes:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert made.is_there(1, 0)


def test_the_last_matrix_may_end_in_the_files_last_page(file: Path) -> None:
    with opened(file, 2 * N_EXPERTS) as made:
        made.memory.need(N_LAYERS - 1, [N_EXPERTS - 1])
        assert made.is_there(N_LAYERS - 1, N_EXPERTS - 1)


def test_a_layer_fails_if_others_left_no_memory_and_the_next_one_is_served(file: Path) -> None:
    """Otherwise the kernel would end this process."""
    free = [1 << 30]
    limits = MemoryLimits(1 << 30, free_bytes=1 << 20, available=lambda: free[0])
    with opened(file, 0, limits=limits) as made:
        free[0] = 1000
        with pytest.raises(DeviceFailed, match=r"layer 0 needs 0\.1 MiB .* left 0\.0 MiB of mem"):
            made.memory.need(0, [1])
        free[0] = 1 << 30
        made.memory.need(0, [1])
        assert made.is_there(0, 1)


def test_reads_ahead_are_cancelled_if_others_take_the_memory(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, goes_on = [1 << 30], threading.Event()
    limits = MemoryLimits(1 << 30, free_bytes=1 << 20, available=lambda: free[0])
    real = os.preadv

    def preadv(*arguments: object) -> int:
        goes_on.wait(30)
        return real(*arguments)  # type: ignore[arg-type]

    with opened(file, 0, limits=limits, n_readers=1) as made:
        memory = made.memory
        memory.need(1, [0])
        monkeypatch.setattr(os, "preadv", preadv)
        memory.read_ahead(2, [0])
        memory.read_ahead(2, range(4, 8))
        assert memory.counters.n_read_ahead == 5
        free[0] = 0
        memory.adapt()
        assert memory.counters.n_read_ahead <= 1, "one read has begun"
        goes_on.set()
        free[0] = 1 << 30
        memory.need(2, range(8))
        assert all(made.is_there(2, expert) for expert in range(8))


@pytest.mark.parametrize("leave", [poison, HostRange.give_back])
def test_needed_experts_have_the_files_bytes_whatever_fails_meanwhile(
    file: Path, monkeypatch: pytest.MonkeyPatch, leave: Callable[[HostRange], None]
) -> None:
    """Reads fail after they wrote garbage, or are short, and free memory changes all the time."""
    chance, faults, real = random.Random(1), random.Random(2), os.preadv
    free = [1 << 30]

    def preadv(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        kind = faults.random()
        if kind < 0.02:
            for part in parts:
                part[:] = b"\xee" * len(part)
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, [parts[0][:PAGE_BYTES]] if kind < 0.1 else parts, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(module, "_WATCH_S", 0.0005)
    most_bytes = 11 * 3 * (MATRIX_BYTES + 2 * PAGE_BYTES)
    limits = MemoryLimits(most_bytes, free_bytes=1 << 18, available=lambda: free[0])
    n_served = n_failed = 0
    with opened(file, 0, limits=limits, leave=leave) as made:
        memory = made.memory
        for step in range(300):
            if chance.random() < 0.1:
                free[0] = chance.choice([1 << 30, 1 << 30, 500_000, 200_000, 1000])
            layer = step % N_LAYERS
            experts = chance.sample(range(N_EXPERTS), chance.choice([1, 2, 5, N_EXPERTS]))
            memory.expect(*chance.choice([(1, 1), (100, 1), (8, 8), (30, 1)]))
            try:
                groups = memory.begin(layer, experts)
                memory.read_ahead((layer + 1) % N_LAYERS, chance.sample(range(N_EXPERTS), 3))
                for group in groups:
                    memory.wait(layer, group)
                memory.read_ahead((layer + 2) % N_LAYERS, chance.sample(range(N_EXPERTS), 3))
            except DeviceFailed:
                n_failed += 1
                continue
            n_served += 1
            assert all(made.is_there(layer, expert) for expert in experts)
    assert n_served > 100
    assert n_failed > 5
