"""Measures how fast a device's kernels read pinned host memory, beside copies of the same bytes.

The kernel is that of the product: SET_ROWS, whose rows and places lie in pinned memory
(offload/stream/passes.py). It takes milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from statistics import median

import numpy as np

from offload.device import DeviceChoice
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.tensor import Buffer, host_bytes, new_tensor
from offload.times.mapped_reads import MappedReads, ReadTimings

MeasureReads = Callable[[DeviceChoice], MappedReads]  # raises DoesNotFit and DeviceFailed

_ROW_NUMBERS = 2048  # numbers of a row, in f32
_ROW_BYTES = 4 * _ROW_NUMBERS
_FEW, _MANY = 2, 256  # rows of one read: 16 KiB and 2 MiB
_MANY_BYTES = _MANY * _ROW_BYTES
_PLACES_BYTES = 4 * _MANY
_N_BESIDE = 4  # copies of `_MANY` rows that run beside a read. They outlast it at half of the link
_N_WARM, _N_TIMED = 3, 5  # backends load and capture kernels in the first rounds


def measure_reads(choice: DeviceChoice) -> MappedReads:
    """Return how fast a device's kernels read pinned memory. It must map this memory.

    The shortest times of several rounds count, because other programs can only make them longer.
    Beside copies the median counts: if the host is held up before the read, the copies are already
    done, and the read is too fast. Raises DoesNotFit or DeviceFailed.
    """
    with ExitStack() as closing:
        probe = _ReadProbe(choice.device, closing)
        device_s, pinned_s, copied_s = (
            (min(_timed(partial(way, _FEW))), min(_timed(partial(way, _MANY))))
            for way in (probe.from_device_s, probe.from_pinned_s, probe.copied_s)
        )
        beside_s = median(_timed(probe.beside_s))
    sizes_bytes = _FEW * _ROW_BYTES, _MANY_BYTES
    return ReadTimings(sizes_bytes, device_s, pinned_s, copied_s, beside_s).reads()


def _timed(once_s: Callable[[], float]) -> list[float]:
    """Return the seconds of each round that counts."""
    return [once_s() for _ in range(_N_WARM + _N_TIMED)][_N_WARM:]


class _ReadProbe:
    """Rows in pinned and in device memory, graphs that place them, and a second stream."""

    def __init__(self, device: Device, closing: ExitStack) -> None:
        """`closing` frees what is made. Raises DoesNotFit."""
        pinned = device.pinned_memory(_MANY_BYTES + _PLACES_BYTES)
        if pinned is None:
            raise DoesNotFit("the driver pins no memory")
        closing.callback(pinned.close)
        places = pinned.host_range.array()[_MANY_BYTES:].view(np.int32)
        places[:_MANY] = np.arange(_MANY)
        self._stream, self._other = device.open(), device.open()
        closing.callback(self._stream.close)
        closing.callback(self._other.close)
        there = self._allocated(device, closing)
        self._into = self._allocated(device, closing)
        self._source = host_bytes(pinned.host_range)
        self._rows = new_tensor("i8", (_MANY_BYTES + _PLACES_BYTES, 1, 1, 1), (there, 0))
        experts = self._allocated(device, closing)
        self._experts = new_tensor("i8", (_MANY_BYTES, 1, 1, 1), (experts, 0))
        self._stream.copy(self._rows, 0, self._source, 0, _MANY_BYTES + _PLACES_BYTES)
        self._stream.synchronize()
        self._from_device = {n: self._placing(there, n) for n in (_FEW, _MANY)}
        self._from_pinned = {n: self._placing(pinned, n) for n in (_FEW, _MANY)}

    @staticmethod
    def _allocated(device: Device, closing: ExitStack) -> Buffer:
        buffer = device.allocate(_MANY_BYTES + _PLACES_BYTES, "measuring reads of pinned memory")
        closing.callback(buffer.close)
        return buffer

    def _placing(self, memory: Buffer, n: int) -> Graph:
        """Return a graph that places `n` rows, which lie in `memory`."""
        rows = new_tensor("f32", (_ROW_NUMBERS, n, 1, 1), (memory, 0))
        places = new_tensor("i32", (n, 1, 1, 1), (memory, _MANY_BYTES))
        into = new_tensor("f32", (_ROW_NUMBERS, _MANY, 1, 1), (self._into, 0))
        return Graph.of([into.computing("SET_ROWS", [rows, places, into])])

    def from_device_s(self, n: int) -> float:
        """Return the seconds in which a kernel places `n` rows of device memory."""
        return self._seconds(self._from_device[n])

    def from_pinned_s(self, n: int) -> float:
        """Return the seconds in which a kernel reads `n` rows of pinned memory and places them."""
        return self._seconds(self._from_pinned[n])

    def copied_s(self, n: int) -> float:
        """Return the seconds in which `n` rows are copied to device memory and placed."""
        return self._seconds(self._from_device[n], n * _ROW_BYTES)

    def beside_s(self) -> float:
        """Return the seconds of `from_pinned_s(_MANY)` while the other stream copies."""
        for _ in range(_N_BESIDE):
            self._other.copy(self._experts, 0, self._source, 0, _MANY_BYTES)
        taken_s = self.from_pinned_s(_MANY)
        self._other.synchronize()
        return taken_s

    def _seconds(self, graph: Graph, copied_bytes: int = 0) -> float:
        """Copy rows to the device if there are `copied_bytes`, compute the graph, and wait.

        Raises DeviceFailed.
        """
        start_s = time.perf_counter()
        if copied_bytes:
            self._stream.copy(self._rows, 0, self._source, 0, copied_bytes)
        status = self._stream.compute(graph)
        self._stream.synchronize()
        if status:
            raise DeviceFailed(
                f"placing rows from pinned memory failed with ggml's status {status}"
            )
        return time.perf_counter() - start_s
