"""Tensors of our own with a row for each of some pairs (token, expert), as many as there are.

The library reads shapes and sources when a graph is submitted, so one graph serves any number of
pairs and any layer: what differs is written into it before.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.errors import DeviceFailed
from offload.ggml.backend import Device, Stream, all_devices
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.ggml.tensor import TENSOR, Buffer, Tensor, new_tensor
from offload.ggml.threadpool import ThreadPool

_DATA, _BUFFER = TENSOR.data.offset, TENSOR.buffer.offset


class Count:
    """One dimension of several tensors, changed together."""

    def __init__(self) -> None:
        self._cells: list[C.c_int64] = []
        self._kept: list[Tensor] = []

    def follows(self, tensor: Tensor, dim: int) -> Tensor:
        """Let that dimension of the tensor be the count from the next `set` on; the tensor."""
        self._cells.append(C.c_int64.from_address(tensor.address + TENSOR.ne.offset + 8 * dim))
        self._kept.append(tensor)
        return tensor

    def set(self, n: int) -> None:
        for cell in self._cells:
            cell.value = n


class Stamp:
    """A number in a node that no operation reads, to be changed before each use.

    CUDA's backend captures what it is given twice in a row. For one kernel that gains nothing, and
    the next number of rows would make the captured graph useless.
    """

    def __init__(self, node: Tensor) -> None:
        at = node.address + TENSOR.op_params.offset + TENSOR.op_params.size - 4
        self._cell, self._node = C.c_int32.from_address(at), node

    def change(self) -> None:
        self._cell.value ^= 1


class Place:
    """The place of a tensor of our own: that of another one, changed as often as needed."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._data = C.c_void_p.from_address(tensor.address + _DATA)
        self._buffer = C.c_void_p.from_address(tensor.address + _BUFFER)

    def of(self, other: Tensor) -> None:
        at = other.address
        self._data.value = C.c_void_p.from_address(at + _DATA).value
        self._buffer.value = C.c_void_p.from_address(at + _BUFFER).value


class HostRows:
    """Memory of the host as a row of numbers for each pair, seen by numpy and by ggml."""

    def __init__(self, buffer: Buffer, offset_bytes: int, n_rows: int, n: int, of: str) -> None:
        """`of`: f32, or i32 for single numbers, of which `n` is 0 and the tensor [1, n_rows]."""
        size_bytes = 4 * max(1, n) * n_rows
        self.memory = buffer.host_range.part(offset_bytes, size_bytes)
        self.array: NDArray[Any] = self.memory.array().view(np.float32 if of == "f32" else np.int32)
        if n:
            self.array = self.array.reshape(-1, n)
        shape = (n, 1, n_rows, 1) if n else (1, n_rows, 1, 1)
        self.tensor = new_tensor(of, shape, (buffer, offset_bytes))

    def first(self, n_rows: int) -> HostRange:
        """The memory of the first rows."""
        return self.memory.part(0, self.memory.size_bytes // len(self.array) * n_rows)


def host_copy(tensor: Tensor) -> NDArray[np.float32]:
    """The values of an f32 tensor of a few dimensions, contiguous, read from wherever it lies."""
    values = np.zeros(tensor.size_bytes // 4, np.float32)
    library().ggml_backend_tensor_get(tensor.address, values.ctypes.data, 0, values.nbytes)
    return values


def of_array(values: NDArray[np.float32], like: Tensor) -> Tensor:
    """A tensor like `like` whose values are the array's, which has to be kept."""
    made = like.alike()
    made.lie_at(HostRange(values.ctypes.data, values.nbytes, values))
    return made


class CpuTeam:
    """A stream of the CPU device that computes graphs of ours with an engine's threads."""

    def __init__(self) -> None:
        self._pools: Sequence[ThreadPool] = ()
        self._chosen = -1
        self._stream: Stream | None = None

    def use(self, pools: Sequence[ThreadPool]) -> None:
        """Compute one token with the first of these pools, and several tokens with the second.

        Call it before anything is computed. The owner of the pools closes them.
        """
        self._pools, self._chosen = pools, -1

    def open(self) -> None:
        """Make the stream now; nothing where it is open."""
        if self._stream is None:
            self._stream = cpu_device().open()
            self._chosen = -1

    def choose(self, n_tokens: int) -> None:
        """The threads of a batch of so many tokens."""
        self.open()
        team = 0 if n_tokens == 1 else 1
        if team == self._chosen or self._stream is None:
            return
        self._chosen = team
        lib, address = library(), self._stream.address
        pool = self._pools[team]
        lib.ggml_backend_cpu_set_n_threads(address, pool.n_threads)
        lib.ggml_backend_cpu_set_threadpool(address, pool.address)

    @property
    def stream(self) -> Stream:
        assert self._stream is not None, "choose() opens it"
        return self._stream

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


def cpu_device() -> Device:
    """The device that computes in host memory."""
    return next(device for device in all_devices() if device.kind == "cpu")


def check(status: int, what: str) -> int:
    """The ggml_status, if it is that of success or of a decode that a signal ended.

    Raises DeviceFailed for any other.
    """
    if status not in (abi.GGML_STATUS_SUCCESS, abi.GGML_STATUS_ABORTED):
        raise DeviceFailed(f"{what} failed with ggml status {status}")
    return status
