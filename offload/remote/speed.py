"""Measures how fast a device computes, and how fast rows of activations reach it.

The plan divides layers by time between devices of this machine and of others. Their speeds can
differ much more than those of two local GPUs, so they are measured and not assumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from offload.errors import DeviceFailed
from offload.ggml.backend import Device, Stream, copy_now
from offload.ggml.graph import Graph
from offload.ggml.memory import AnonymousMemory
from offload.ggml.rewriting import host_copy
from offload.ggml.tensor import Buffer, Tensor, host_bytes, new_tensor
from offload.times.machine import Machine

_WIDTH = 8192  # rows and columns of the f16 matrix, which has more bytes than caches of GPUs hold
_MATRIX_BYTES, _COLUMN_BYTES = 2 * _WIDTH * _WIDTH, 4 * _WIDTH
_FEW, _MANY = 16, 256  # rows of activations, for a slow and for a fast device
_MANY_LEAST_S = 0.05  # a device that takes longer for _FEW rows is not measured with _MANY
_AT_RESULT = _MATRIX_BYTES + _MANY * _COLUMN_BYTES
_SENT_BYTES = 8 << 20
_LEAST_S = 0.02  # shortest time of a repeated product, unless _MOST_REPEATS are too few for it
_MOST_REPEATS = 64


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured rates of a device."""

    bytes_per_s: float  # matrix bytes per second in products with one row
    flops: float
    round_trip_s: float  # seconds of a small computation until its result is here
    sent_bytes_per_s: float

    def on(self, machine: Machine, *, is_remote: bool) -> Machine:
        """Return the machine with these rates. A remote device's link is its network."""
        rates = replace(machine, vram_bytes_per_s=self.bytes_per_s, gpu_flops=self.flops)
        if not is_remote:
            return rates
        return replace(
            rates, link_bytes_per_s=self.sent_bytes_per_s, per_switch_s=self.round_trip_s
        )

    @property
    def words(self) -> str:
        return (
            f"{self.bytes_per_s / 1e9:.3g} GB/s, {self.flops / 1e12:.2g} TFLOPS, "
            f"{self.round_trip_s * 1e3:.2g} ms round trip"
        )


def measured_speed(device: Device) -> DeviceSpeed:
    """Return the rates of a device, in about a second or less. Raises DoesNotFit, DeviceFailed.

    Allocates 144 MiB of device memory, and frees it.
    """
    size_bytes = _AT_RESULT + _MANY * _COLUMN_BYTES
    with (
        closing(device.allocate(size_bytes, "measuring the device's speed")) as buffer,
        closing(device.open()) as stream,
    ):
        tiny = _product(buffer, 32, 1)
        round_trip_s = min(_time_s(stream, buffer, [tiny]) for _ in range(5))
        row = _product(buffer, _WIDTH, 1)
        row_s = _repeated_s(stream, buffer, row, round_trip_s)
        few_s = _time_s(stream, buffer, [_product(buffer, _WIDTH, _FEW)])
        n = _FEW if few_s > _MANY_LEAST_S else _MANY
        rows_s = _repeated_s(stream, buffer, _product(buffer, _WIDTH, n), round_trip_s)
        sent_s = _send_s(stream, buffer, tiny) - round_trip_s
    return DeviceSpeed(
        _MATRIX_BYTES / row_s,
        2 * _WIDTH * _WIDTH * n / rows_s,
        round_trip_s,
        _SENT_BYTES / max(sent_s, 1e-6),
    )


def _product(buffer: Buffer, width: int, n: int) -> Tensor:
    matrix = new_tensor("f16", (width, width, 1, 1), (buffer, 0))
    rows = new_tensor("f32", (width, n, 1, 1), (buffer, _MATRIX_BYTES))
    return new_tensor("f32", (width, n, 1, 1), (buffer, _AT_RESULT), "MUL_MAT", (matrix, rows))


def _repeated_s(stream: Stream, buffer: Buffer, node: Tensor, round_trip_s: float) -> float:
    """Return the seconds of one node, measured in graphs that repeat it."""
    least_s, seconds = max(_LEAST_S, 5 * round_trip_s), 0.0
    for n in (2**i for i in range(int(math.log2(_MOST_REPEATS)) + 1)):
        seconds = min(_time_s(stream, buffer, [node] * n) for _ in range(2))
        if seconds > least_s:
            break
    return float(max(seconds - round_trip_s, 1e-9) / n)


def _time_s(stream: Stream, buffer: Buffer, nodes: Sequence[Tensor]) -> float:
    """Return the seconds of computing the nodes and reading one value of their result."""
    graph, first = Graph.of(nodes), new_tensor("f32", (1, 1, 1, 1), (buffer, _AT_RESULT))
    start_s = time.perf_counter()
    if status := stream.compute(graph):
        raise DeviceFailed(f"measuring the device's speed failed with ggml status {status}")
    stream.synchronize()
    host_copy(first)
    return time.perf_counter() - start_s


def _send_s(stream: Stream, buffer: Buffer, last: Tensor) -> float:
    """Return the seconds of sending _SENT_BYTES to the device and then computing `last`."""
    memory = AnonymousMemory().allocate(_SENT_BYTES)
    target = new_tensor("i8", (_SENT_BYTES, 1, 1, 1), (buffer, 0))
    start_s = time.perf_counter()
    copy_now(target, 0, host_bytes(memory), 0, _SENT_BYTES)
    _time_s(stream, buffer, [last])
    return time.perf_counter() - start_s
