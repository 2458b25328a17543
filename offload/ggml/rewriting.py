"""Helpers for code that replaces nodes of ggml's graphs."""

from __future__ import annotations

from collections.abc import Sequence

from offload.ggml.backend import Device
from offload.ggml.tensor import Buffer, Tensor

ALIGNMENT_BYTES = 256  # alignment of tensors that we place; devices ask for at most this
VIEWS = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE")  # operations that compute nothing


def aligned(size_bytes: int) -> int:
    """Round bytes up, so that a tensor after them is aligned."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


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
