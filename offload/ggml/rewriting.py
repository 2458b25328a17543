"""Helpers for code that replaces nodes of ggml's graphs, and for graphs of our own.

The library reads shapes and sources when a graph is submitted. One graph of our own therefore
serves any number of rows and any layer: code writes shapes and places into it before each
submission.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Device
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.ggml.tensor import TENSOR, Buffer, Tensor, new_tensor

VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE")  # operations that compute nothing


def is_any(node: Tensor, ops: Sequence[str]) -> bool:
    """True if the node computes one of these operations."""
    return any(node.is_op(op) for op in ops)


class Scratch:
    """Device memory for results of rewritten nodes. All graphs use the same bytes in turn.

    Prepared graphs keep the addresses, so a buffer that became too small stays until `close`.
    """

    def __init__(self, device: Device, what: str, least_bytes: int = 0) -> None:
        """`what` names the memory in errors. `least_bytes`: the smallest size of a buffer."""
        self._device, self._what, self._least_bytes = device, what, least_bytes
        self._buffers: list[Buffer] = []  # the last is the largest

    @property
    def device_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self._buffers)

    def reserve(self, size_bytes: int) -> Buffer:
        """Return a buffer of at least that size. Raises DoesNotFit."""
        largest = self._buffers[-1].size_bytes if self._buffers else 0
        if size_bytes > largest or not self._buffers:
            size_bytes = max(size_bytes, 2 * largest, self._least_bytes)
            self._buffers.append(self._device.allocate(size_bytes, self._what))
        return self._buffers[-1]

    def close(self) -> None:
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


class SharedDim:
    """One dimension of several tensors, which change together."""

    def __init__(self) -> None:
        self._cells: list[C.c_int64] = []
        self._kept: list[Tensor] = []

    def follows(self, tensor: Tensor, dim: int) -> Tensor:
        """Add that dimension of the tensor. Returns the tensor."""
        self._cells.append(C.c_int64.from_address(tensor.address + TENSOR.ne.offset + 8 * dim))
        self._kept.append(tensor)
        return tensor

    def set(self, n: int) -> None:
        """Set the dimension of all tensors."""
        for cell in self._cells:
            cell.value = n

    @property
    def addresses(self) -> list[int]:
        """The addresses of the dimensions. The player sets them."""
        return [C.addressof(cell) for cell in self._cells]


class HostRows:
    """Host memory with one row of numbers per pair, shared by numpy and ggml."""

    def __init__(self, buffer: Buffer, offset_bytes: int, n_rows: int, n: int, of: str) -> None:
        """`of`: type, f32 or i32. `n`: numbers per row; 0: one number, in a tensor [1, n_rows]."""
        size_bytes = 4 * max(1, n) * n_rows
        self.memory = buffer.host_range.part(offset_bytes, size_bytes)
        self.array: NDArray[Any] = self.memory.array().view(np.float32 if of == "f32" else np.int32)
        if n:
            self.array = self.array.reshape(-1, n)
        shape = (n, 1, n_rows, 1) if n else (1, n_rows, 1, 1)
        self.tensor = new_tensor(of, shape, (buffer, offset_bytes))

    def first(self, n_rows: int) -> HostRange:
        return self.memory.part(0, self.memory.size_bytes // len(self.array) * n_rows)


def host_copy(tensor: Tensor) -> NDArray[np.float32]:
    """Return the values of a contiguous f32 tensor, read from host or device memory."""
    values = np.zeros(tensor.size_bytes // 4, np.float32)
    library().ggml_backend_tensor_get(tensor.address, values.ctypes.data, 0, values.nbytes)
    return values


def fill_from_host(tensor: Tensor, values: NDArray[np.float32]) -> None:
    """Write the values to the tensor's memory on the host or a device, and wait for it."""
    whole = np.ascontiguousarray(values)
    library().ggml_backend_tensor_set(tensor.address, whole.ctypes.data, 0, whole.nbytes)


def read_rows(tensor: Tensor) -> NDArray[np.float32] | None:
    """Return the rows of a computed tensor [n, 1, n_rows], or None if it has another form."""
    n, n_others, n_rows, n_matrices = tensor.shape
    if tensor.type != "f32" or not tensor.is_contiguous or n_others * n_matrices != 1 or not n_rows:
        return None
    return host_copy(tensor).reshape(n_rows, n)


def of_array(values: NDArray[np.float32], like: Tensor) -> Tensor:
    """Return a tensor like `like` over the array's memory. The caller keeps the array."""
    made = like.alike()
    made.lie_at(HostRange(values.ctypes.data, values.nbytes, values))
    return made
