"""Tensors of our own with a row for each of some pairs (token, expert), as many as there are.

The library reads shapes and sources when a graph is submitted, so one graph serves any number of
pairs and any layer: what differs is written into it before.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.ggml.tensor import TENSOR, Buffer, Tensor, new_tensor

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
