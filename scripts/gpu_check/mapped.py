"""Measures how fast ggml's kernels read and write pinned host memory, beside copies of as much.

CUDA maps pinned memory into a device's address space, so the kernels get its host address. The
kernels are those of the product's prompts: SET_ROWS reads rows from pinned memory, and GET_ROWS
writes them to it. docs/gpu.md says where the virtual clock has such times from.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import numpy as np

from offload.device import DeviceChoice
from offload.errors import DeviceFailed
from offload.ggml.backend import Stream
from offload.ggml.cuda_driver import maps_pinned
from offload.ggml.graph import Graph
from offload.ggml.memory import HostRange
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.stream.read_speed import measure_reads
from offload.times.mapped_reads import reads_pay

SIZES_BYTES = tuple(4096 << (2 * n) for n in range(8))  # 4 KB to 64 MB
TO_DEVICE, TO_HOST = "to the device", "to the host"
_ROW_NUMBERS = 1024  # of f32, so that a row has the least size
_ROW_BYTES = 4 * _ROW_NUMBERS
_PIECE_BYTES = 16 << 20  # size of each copy that runs beside a kernel
_LEAST_BESIDE_BYTES = 64 << 20  # copied beside a kernel at least, so that copies outlast its launch
_N_WARM, _N_TIMED = 3, 9  # the backend loads and captures kernels in the first repetitions


class NoMapped(Exception):
    """Kernels of the device do not read pinned memory, or none is pinned."""


def measure_mapped(choice: DeviceChoice, most_bytes: int) -> dict[str, Any]:
    """Rows by direction and size, up to `most_bytes`, and what a start would measure and decide.

    Raises NoMapped.
    """
    if not maps_pinned(choice.device):
        raise NoMapped(f"kernels of {choice.name} do not reach pinned memory by its host address")
    sizes = [n for n in SIZES_BYTES if n <= most_bytes]
    with ExitStack() as stack:
        probe = Mapped(stack, choice, sizes[-1])
        rows = [probe.row(direction, n) for direction in (TO_DEVICE, TO_HOST) for n in sizes]
    reads = measure_reads(choice)
    start: dict[str, Any] = {f"read_{name}": value for name, value in asdict(reads).items()}
    return {"rows": rows, "start": start | {"kernels_read": reads_pay(reads)}}


class Mapped:
    """Rows in pinned and in device memory, and two streams. `stack` closes them."""

    def __init__(self, stack: ExitStack, choice: DeviceChoice, most_bytes: int) -> None:
        """Raises NoMapped."""
        device, n_rows = choice.device, most_bytes // _ROW_BYTES
        self._most_rows, numbers_bytes = n_rows, 4 * n_rows
        beside_bytes = min(_PIECE_BYTES, max(most_bytes, _ROW_BYTES))
        pinned = device.pinned_memory(most_bytes + numbers_bytes + beside_bytes)
        if pinned is None:
            raise NoMapped("the driver pins no memory")
        stack.callback(pinned.close)
        self._pinned = pinned
        self._numbers_at, self._beside_at = most_bytes, most_bytes + numbers_bytes
        numbers = pinned.host_range.array()[most_bytes : most_bytes + numbers_bytes]
        numbers.view(np.int32)[:] = np.arange(n_rows)
        self._stream, self._other = (self._opened(stack, choice) for _ in range(2))
        self._device = device.allocate(most_bytes + numbers_bytes, "the link's measurement")
        stack.callback(self._device.close)
        self._into = device.allocate(most_bytes, "the link's measurement")
        stack.callback(self._into.close)
        experts = device.allocate(beside_bytes, "the link's measurement")
        stack.callback(experts.close)
        self._beside = new_tensor("i8", (beside_bytes, 1, 1, 1), (experts, 0))
        self._beside_bytes = beside_bytes
        there = new_tensor("i8", (most_bytes + numbers_bytes, 1, 1, 1), (self._device, 0))
        self._stream.put(there, self._range(0, most_bytes + numbers_bytes))
        self._stream.synchronize()

    @staticmethod
    def _opened(stack: ExitStack, choice: DeviceChoice) -> Stream:
        stream = choice.device.open()
        stack.callback(stream.close)
        return stream

    def _range(self, offset: int, size_bytes: int) -> HostRange:
        return HostRange(self._pinned.base + offset, size_bytes, self._pinned)

    def row(self, direction: str, size_bytes: int) -> dict[str, Any]:
        """Median times in which this many bytes go one way: by a kernel, by a copy, and beside.

        A kernel's own time, from device memory to device memory, is not in them.
        """
        kernel, own = self._graphs(direction, size_bytes // _ROW_BYTES)
        rows = new_tensor("i8", (size_bytes, 1, 1, 1), (self._into, 0))
        memory = self._range(0, size_bytes)
        move = self._stream.put if direction == TO_DEVICE else self._stream.fetch
        own_s = self._median(lambda: self._compute(own))
        kernel_s = self._median(lambda: self._compute(kernel)) - own_s
        copy_s = self._median(lambda: move(rows, memory)) - self._median(lambda: None)
        beside_s = self._median(
            lambda: self._compute(kernel), lambda: self._copy_beside(direction, size_bytes)
        ) - own_s  # fmt: skip
        times = {"kernel": kernel_s, "copy": copy_s, "beside": beside_s}
        row: dict[str, Any] = {"direction": direction, "moved_bytes": size_bytes}
        for way, taken_s in times.items():
            rate = size_bytes / taken_s if taken_s > 0.0 else None  # lost in the kernel's own time
            row |= {f"{way}_s": taken_s, f"{way}_bytes_per_s": rate}
        return row

    def _graphs(self, direction: str, n: int) -> tuple[Graph, Graph]:
        """Graphs that move `n` rows over the link, and inside the device."""
        if direction == TO_DEVICE:
            return self._placing(self._pinned, n), self._placing(self._device, n)
        return self._gathering(self._pinned, n), self._gathering(self._into, n)

    def _placing(self, memory: Buffer, n: int) -> Graph:
        into = self._rows(self._into, self._most_rows)
        sources = [self._rows(memory, n), self._numbers(memory, n), into]
        return Graph.of([into.computing("SET_ROWS", sources)])

    def _gathering(self, memory: Buffer, n: int) -> Graph:
        rows = self._rows(self._device, self._most_rows)
        return Graph.of([
            new_tensor("f32", (_ROW_NUMBERS, n, 1, 1), (memory, 0), "GET_ROWS",
                       [rows, self._numbers(self._device, n)]),
        ])  # fmt: skip

    def _rows(self, memory: Buffer, n: int) -> Tensor:
        return new_tensor("f32", (_ROW_NUMBERS, n, 1, 1), (memory, 0))

    def _numbers(self, memory: Buffer, n: int) -> Tensor:
        return new_tensor("i32", (n, 1, 1, 1), (memory, self._numbers_at))

    def _compute(self, graph: Graph) -> None:
        if status := self._stream.compute(graph):
            raise DeviceFailed(f"moving rows failed with ggml's status {status}")

    def _copy_beside(self, direction: str, size_bytes: int) -> None:
        """Let the other stream copy four times as much, at least 64 MB, in the same direction."""
        memory = self._range(self._beside_at, self._beside_bytes)
        move = self._other.put if direction == TO_DEVICE else self._other.fetch
        total_bytes = max(4 * size_bytes, min(_LEAST_BESIDE_BYTES, 4 * self._beside_bytes))
        for _ in range(-(-total_bytes // self._beside_bytes)):
            move(self._beside, memory)

    def _median(self, work: Callable[[], None], before: Callable[[], None] | None = None) -> float:
        """Return the median seconds until the stream has done the work, after `before`."""
        times = []
        for _ in range(_N_WARM + _N_TIMED):
            if before is not None:
                before()
            start_s = time.perf_counter()
            work()
            self._stream.synchronize()
            times.append(time.perf_counter() - start_s)
            self._other.synchronize()
        return statistics.median(times[_N_WARM:])
