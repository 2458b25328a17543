"""The bounce buffers on a fake device whose thread does queued copies late, in order."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offload.backends import CUDA
from offload.errors import DeviceFailed
from offload.ggml.memory import AnonymousMemory, HostRange
from offload.ggml.tensor import host_bytes
from offload.stream import copying
from offload.stream.copying import BounceCopier, Transfer

PART = 64


class LateEvent:
    def __init__(self) -> None:
        self.passed = threading.Event()

    def synchronize(self) -> None:
        assert self.passed.wait(10), "nobody recorded it"

    def close(self) -> None:
        pass


class LateStream:
    """An in-order queue whose work is done some time later."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            time.sleep(self.device.delay_s)
            work()

    def copy(self, target: Any, target_bytes: int, source: Any, source_bytes: int, n: int) -> None:
        self.device.asked.append(n)

        def late() -> None:
            taken = HostRange(source.position + source_bytes, n).array()
            target[target_bytes : target_bytes + n] = taken

        self._queue.put(late)

    def record(self, event: LateEvent) -> None:
        event.passed.clear()
        self._queue.put(event.passed.set)

    def wait(self, event: LateEvent) -> None:
        self._queue.put(event.synchronize)

    def synchronize(self) -> None:
        done = threading.Event()
        self._queue.put(done.set)
        assert done.wait(10)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()


class LateDevice:
    backend = CUDA

    def __init__(self, delay_s: float) -> None:
        self.delay_s = delay_s
        self.asked: list[int] = []

    def open(self) -> LateStream:
        return LateStream(self)

    def event(self) -> LateEvent:
        return LateEvent()


class Ring:
    """A ring in plain memory, in place of pinned memory."""

    def __init__(self, n_parts: int) -> None:
        self._memory = AnonymousMemory()
        self.host_range = self._memory.allocate(4096).part(0, n_parts * PART)
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Setup:
    def __init__(
        self, n_parts: int = 2, delay_s: float = 0.0005, fillers: int | None = None
    ) -> None:
        self.device = LateDevice(delay_s)
        self.compute = LateStream(self.device)
        self.ring = Ring(n_parts)
        compute: Any = self.compute
        ring: Any = self.ring
        self.copier = BounceCopier(compute, ring, part_bytes=PART, fillers=fillers)
        self.weights = np.random.default_rng(1).integers(0, 256, 4000).astype(np.uint8)
        self.source = host_bytes(HostRange(self.weights.ctypes.data, self.weights.size))
        self.slots: NDArray[np.uint8] = np.zeros(4000, np.uint8)

    def transfer(self, target: int, source: int, n: int) -> Transfer:
        slots: Any = self.slots
        return Transfer(slots, target, self.source, source, n)

    def close(self) -> None:
        self.copier.close()
        self.compute.close()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(1, 3),
)
def test_what_is_waited_for_is_there_whatever_the_ring(
    copies: list[tuple[int, int]], n_parts: int, fillers: int
) -> None:
    s = Setup(n_parts, delay_s=0.0002, fillers=fillers)
    for i, (start, n) in enumerate(copies):
        s.copier.copy([s.transfer(400 * i, start, n)], None)
    s.copier.wait([s.copier.mark()])
    s.compute.synchronize()
    for i, (start, n) in enumerate(copies):
        assert np.array_equal(s.slots[400 * i :][:n], s.weights[start:][:n])
    assert s.copier.bounced_bytes == sum(n for _, n in copies)
    assert all(n <= PART for n in s.device.asked)
    s.close()
    assert s.ring.is_closed


def test_a_copy_starts_behind_its_fence() -> None:
    s = Setup()
    gate = threading.Event()
    s.compute._queue.put(lambda: gate.wait(10))  # the computation that still reads the slot
    fence = s.copier.fence()
    s.copier.copy([s.transfer(0, 0, 3 * PART)], fence)
    ticket = s.copier.mark()
    time.sleep(0.01)
    assert not s.slots.any()
    gate.set()
    s.copier.wait([ticket])
    s.compute.synchronize()
    assert np.array_equal(s.slots[: 3 * PART], s.weights[: 3 * PART])
    s.close()


def test_graphs_follow_each_other_on_the_same_events() -> None:
    s = Setup()
    for graph in range(5):
        s.copier.begin()
        s.copier.copy([s.transfer(0, 100 * graph, 5 * PART)], s.copier.fence())
        s.copier.wait([s.copier.mark()])
        s.compute.synchronize()
        assert np.array_equal(s.slots[: 5 * PART], s.weights[100 * graph :][: 5 * PART])
    s.close()


def test_parts_are_filled_at_once_and_handed_over_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first part is filled alone. Four threads then fill the others, the last one first."""
    s = Setup(n_parts=5, fillers=4)
    done, enqueued = [threading.Event() for _ in range(6)], threading.Event()
    done[5].set()
    order: list[int] = []
    real = copying.fill_from

    def fill(memory: HostRange, source: Any, source_bytes: int, n: int) -> None:
        nth = source_bytes // PART
        assert (done[nth + 1] if nth else enqueued).wait(10)
        real(memory, source, source_bytes, n)
        order.append(nth)
        done[nth].set()

    monkeypatch.setattr(copying, "fill_from", fill)
    s.copier.copy([s.transfer(0, 0, 5 * PART)], None)
    ticket = s.copier.mark()
    enqueued.set()
    s.copier.wait([ticket])
    s.compute.synchronize()
    assert order == [0, 4, 3, 2, 1]
    assert np.array_equal(s.slots[: 5 * PART], s.weights[: 5 * PART])
    s.close()


@pytest.mark.parametrize("fillers", [1, 3])
def test_a_failure_on_the_thread_is_raised_once_and_the_next_graph_goes_on(
    fillers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    s = Setup(fillers=fillers)

    def fail(*_: object) -> None:
        raise OSError("the page could not be read")

    with monkeypatch.context() as patch:
        patch.setattr(copying, "fill_from", fail)
        s.copier.copy([s.transfer(0, 0, PART)], None)
        ticket = s.copier.mark()
        with pytest.raises(DeviceFailed, match="the page could not be read"):
            s.copier.wait([ticket])
    s.copier.abandon()
    s.copier.begin()
    s.copier.copy([s.transfer(0, 0, PART)], None)
    s.copier.wait([s.copier.mark()])
    s.compute.synchronize()
    assert np.array_equal(s.slots[:PART], s.weights[:PART])
    s.close()


@pytest.mark.parametrize(
    ("n_cpus", "n_threads"), [(1, 1), (2, 1), (7, 1), (8, 2), (16, 4), (24, 6), (64, 6)]
)
def test_a_thread_for_every_four_cpus_fills_the_ring_and_one_below_eight(
    n_cpus: int, n_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = set(range(n_cpus))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed, raising=False)
    assert copying.n_fillers() == n_threads
