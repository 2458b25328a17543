"""A pinned ring in virtual time: filling it and copying from it take as long as the slower one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from offload.backends import CUDA
from offload.ggml.memory import AnonymousMemory, HostRange
from offload.ggml.tensor import host_bytes
from offload.stream import copying
from offload.stream.copying import BounceCopier, Transfer

PART = 64
N_PIECES = 60


@dataclass
class Clock:
    """The time of the thread that hands parts to the device."""

    now_s: float = 0.0

    def wait_until(self, time_s: float) -> None:
        self.now_s = max(self.now_s, time_s)


class TimedEvent:
    def __init__(self, clock: Clock) -> None:
        self._clock, self.time_s = clock, 0.0

    def synchronize(self) -> None:
        self._clock.wait_until(self.time_s)

    def close(self) -> None: ...


@dataclass
class TimedDevice:
    """A device whose streams take `copy_s` for each part of the ring."""

    clock: Clock
    copy_s: float
    backend = CUDA
    streams: list[TimedStream] = field(default_factory=list)

    def open(self) -> TimedStream:
        self.streams.append(TimedStream(self))
        return self.streams[-1]

    def event(self) -> TimedEvent:
        return TimedEvent(self.clock)


class TimedStream:
    def __init__(self, device: TimedDevice) -> None:
        self.device, self.free_s, self.n_copied = device, 0.0, 0

    def copy(self, *_: object) -> None:
        self.free_s = max(self.free_s, self.device.clock.now_s) + self.device.copy_s
        self.n_copied += 1

    def record(self, event: TimedEvent) -> None:
        event.time_s = self.free_s

    def wait(self, event: TimedEvent) -> None:
        self.free_s = max(self.free_s, event.time_s)

    def synchronize(self) -> None:
        self.device.clock.wait_until(self.free_s)

    def close(self) -> None: ...


class TimedFilling:
    """The result of a thread that fills a part of the ring until `end_s`."""

    def __init__(self, clock: Clock, end_s: float) -> None:
        self._clock, self._end_s = clock, end_s

    def done(self) -> bool:
        return self._clock.now_s >= self._end_s

    def result(self) -> None:
        self._clock.wait_until(self._end_s)


class TimedFillers:
    """Threads that take `fill_s` for a part of the ring, in place of a pool of threads."""

    def __init__(self, clock: Clock, n_threads: int, fill_s: float) -> None:
        self._clock, self._fill_s, self._free_s = clock, fill_s, [0.0] * n_threads

    def submit(self, _: Callable[[], None]) -> TimedFilling:
        first = min(range(len(self._free_s)), key=lambda i: self._free_s[i])
        self._free_s[first] = max(self._free_s[first], self._clock.now_s) + self._fill_s
        return TimedFilling(self._clock, self._free_s[first])

    def shutdown(self) -> None: ...


class PlainRing:
    """A ring of `n_parts` parts in plain memory."""

    def __init__(self, n_parts: int) -> None:
        self._memory = AnonymousMemory()
        self.host_range = self._memory.allocate(4096).part(0, n_parts * PART)

    def close(self) -> None: ...


def copied_s(
    n_parts: int, fillers: int, fill_s: float, copy_s: float, monkeypatch: pytest.MonkeyPatch
) -> float:
    """Return the virtual seconds of `N_PIECES` parts, all of which are asked for at once."""
    clock = Clock()
    device = TimedDevice(clock, copy_s)
    compute: Any = device.open()
    ring: Any = PlainRing(n_parts)
    weights = np.zeros(N_PIECES * PART, np.uint8)
    source = host_bytes(HostRange(weights.ctypes.data, weights.size))

    def fill(*_: object) -> None:
        clock.now_s += fill_s

    monkeypatch.setattr(copying, "fill_from", fill)
    copier = BounceCopier(compute, ring, part_bytes=PART, fillers=fillers)
    pool: Any = TimedFillers(clock, fillers, fill_s)
    copier._fillers = pool if fillers > 1 else None
    all_asked = threading.Event()
    copier._enqueue(lambda: all_asked.wait(300) or None)
    slots: Any = None
    copier.copy([Transfer(slots, 0, source, 0, N_PIECES * PART)], None)
    all_asked.set()
    copier.drain()
    copier.close()
    assert sum(stream.n_copied for stream in device.streams) == N_PIECES
    return clock.now_s


@pytest.mark.parametrize("n_parts", [2, 8])
@pytest.mark.parametrize("fillers", [1, 3])
@pytest.mark.parametrize("fill_s", [0.1, 0.5, 1.0, 2.0, 6.0])
def test_a_ring_takes_as_long_as_its_slower_side(
    fill_s: float, fillers: int, n_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One side after the other would take the sum of both."""
    copy_s = 1.0
    found_s = copied_s(n_parts, fillers, fill_s, copy_s, monkeypatch)
    n_at_once = min(fillers, n_parts)
    bound_s = N_PIECES * max(copy_s, fill_s / n_at_once)
    first_and_last_s = fill_s + copy_s
    if n_parts < 2 * fillers:  # a part is filled and copied in turn, so few parts limit both
        bound_s = max(bound_s, N_PIECES * (fill_s + copy_s) / n_parts)
    assert bound_s <= found_s <= 1.02 * bound_s + first_and_last_s
