"""Measures how fast a device computes, and how fast rows of activations reach it.

Layers are divided by time between devices of this machine and of others. Their speeds can differ
much more than those of two local GPUs, so none is assumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from offload.errors import DeviceFailed
from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.library.lib import library
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.plan.machine import Machine

_WIDTH = 8192  # rows and columns of the f16 matrix, which has more bytes than caches of GPUs hold
_MATRIX_BYTES, _COLUMN_BYTES = 2 * _WIDTH * _WIDTH, 4 * _WIDTH
_FEW, _MANY = 16, 256  # rows of activations, for a slow and for a fast device
_SENT_BYTES = 8 << 20
_LEAST_S = 0.02  # shortest time that is measured, if _MOST_REPEATS allow it
_MOST_REPEATS = 64


@dataclass(frozen=True)
class DeviceSpeed:
    """Measured rates of a device."""

    bytes_per_s: float  # of a matrix that it multiplies with one row
    flops: float
    round_trip_s: float  # of a small computation and its result
    sent_bytes_per_s: float

    def on(self, machine: Machine, *, is_remote: bool) -> Machine:
        """Return the machine with these rates. Only rows of activations go to a remote device."""
        found = replace(machine, vram_bytes_per_s=self.bytes_per_s, gpu_flops=self.flops)
        if not is_remote:
            return found
        return replace(
            found, link_bytes_per_s=self.sent_bytes_per_s, per_switch_s=self.round_trip_s
        )

    @property
    def words(self) -> str:
        return (
            f"{self.bytes_per_s / 1e9:.3g} GB/s, {self.flops / 1e12:.2g} TFLOPS, "
            f"{self.round_trip_s * 1e3:.2g} ms round trip"
        )


def measured_speed(device: Device) -> DeviceSpeed:
    """Return the rates of a device, in about a second or less. Raises DoesNotFit, DeviceFailed.

    Allocates 144 MiB of its memory, and frees them.
    """
    at_result = _MATRIX_BYTES + _MANY * _COLUMN_BYTES
    size_bytes = at_result + _MANY * _COLUMN_BYTES
    with (
        closing(device.allocate(size_bytes, "measuring the device's speed")) as buffer,
        closing(device.open()) as stream,
    ):
        tiny = _product(buffer, 32, 1, at_result)
        round_trip_s = min(_time_s(stream, [tiny]) for _ in range(5))
        row = _product(buffer, _WIDTH, 1, at_result)
        row_s = _repeated_s(stream, row, round_trip_s)
        n = _FEW if _time_s(stream, [_product(buffer, _WIDTH, _FEW, at_result)]) > 0.05 else _MANY
        rows_s = _repeated_s(stream, _product(buffer, _WIDTH, n, at_result), round_trip_s)
        sent_s = _send_s(stream, buffer, tiny) - round_trip_s
    return DeviceSpeed(
        _MATRIX_BYTES / row_s,
        2 * _WIDTH * _WIDTH * n / rows_s,
        round_trip_s,
        _SENT_BYTES / max(sent_s, 1e-6),
    )


def _product(buffer: Buffer, width: int, n: int, at_result: int) -> Tensor:
    matrix = new_tensor("f16", (width, width, 1, 1), (buffer, 0))
    rows = new_tensor("f32", (width, n, 1, 1), (buffer, _MATRIX_BYTES))
    return new_tensor("f32", (width, n, 1, 1), (buffer, at_result), "MUL_MAT", (matrix, rows))


def _repeated_s(stream: Stream, node: Tensor, round_trip_s: float) -> float:
    """Return the seconds of one node, measured in graphs that repeat it."""
    least_s, seconds = max(_LEAST_S, 5 * round_trip_s), 0.0
    for n in (2**i for i in range(int(math.log2(_MOST_REPEATS)) + 1)):
        seconds = min(_time_s(stream, [node] * n) for _ in range(2))
        if seconds > least_s:
            break
    return float(max(seconds - round_trip_s, 1e-9) / n)


def _time_s(stream: Stream, nodes: Sequence[Tensor]) -> float:
    """Return the seconds until the first value of the last node is here."""
    graph, value = Graph.of(nodes), np.zeros(1, np.float32)
    start_s = time.perf_counter()
    if status := stream.compute(graph):
        raise DeviceFailed(f"measuring the device's speed failed with ggml status {status}")
    stream.synchronize()
    library().ggml_backend_tensor_get(nodes[-1].address, value.ctypes.data, 0, value.nbytes)
    return time.perf_counter() - start_s


def _send_s(stream: Stream, buffer: Buffer, last: Tensor) -> float:
    """Return the seconds of sending bytes to the device, and of a small computation after them."""
    values = np.zeros(_SENT_BYTES, np.uint8)
    target = new_tensor("i8", (_SENT_BYTES, 1, 1, 1), (buffer, 0))
    start_s = time.perf_counter()
    library().ggml_backend_tensor_set(target.address, values.ctypes.data, 0, values.nbytes)
    _time_s(stream, [last])
    return time.perf_counter() - start_s
