"""Holds the device memory of a pool's slots: a buffer for each kind, with views as tensors."""

from __future__ import annotations

import numpy as np

from offload.ggml.backend import Device
from offload.ggml.rewriting import host_copy, of_array
from offload.ggml.tensor import Buffer, Dims, Tensor, new_tensor
from offload.plan.slot_layout import SlotPool


class SlotMemory:
    """The memory of one pool's slots. Each buffer is allocated when it is first used."""

    def __init__(self, device: Device, pool: SlotPool) -> None:
        self.pool = pool
        self.device = device
        self._kinds = {kind.name: kind for kind in pool.kinds}
        self._buffers: dict[str, Buffer] = {}
        self._bytes: dict[str, Tensor] = {}
        self._views: dict[tuple[str, str, Dims], SlotViews] = {}

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(self._buffers.values())

    def has(self, kind: str) -> bool:
        """True if the slots have room for weights of this kind."""
        return kind in self._kinds

    def stride_bytes(self, kind: str) -> int:
        return self._kinds[kind].stride_bytes

    def allocate(self) -> None:
        """Allocate all buffers now. Raises DoesNotFit."""
        for kind in self._kinds:
            self.buffer(kind)

    def bytes(self, kind: str) -> Tensor:
        """Return all slots of a kind as one row of bytes, to copy into. Raises DoesNotFit."""
        self.buffer(kind)
        return self._bytes[kind]

    def views(self, kind: str, weight: Tensor, axis: int = 2) -> SlotViews:
        """Return views of slots as tensors like `weight`.

        The object is the same for equal kinds, types and shapes. `axis`: the dimension of `weight`
        that counts experts.
        """
        key = kind, weight.type, weight.shape
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = SlotViews(self, kind, weight, axis)
        return found

    def buffer(self, kind: str) -> Buffer:
        """Return the memory of one kind. The first call may raise DoesNotFit."""
        buffer = self._buffers.get(kind)
        if buffer is None:
            size_bytes = self.pool.n_slots * self._kinds[kind].stride_bytes
            what = f"{self.pool.n_slots} slots of {kind} weights"
            buffer = self.device.allocate(size_bytes, what)
            self._bytes[kind] = new_tensor("i8", (size_bytes, 1, 1, 1), (buffer, 0))
            self._buffers[kind] = buffer
        return buffer

    def close(self) -> None:
        for buffer in self._buffers.values():
            buffer.close()
        self._buffers.clear()
        self._bytes.clear()
        self._views.clear()


class SlotViews:
    """Views of neighbouring slots of one kind, as tensors of one weight's type and shape."""

    def __init__(self, memory: SlotMemory, kind: str, weight: Tensor, axis: int) -> None:
        self._memory, self._kind, self._axis = memory, kind, axis
        self._weight = weight.alike()  # a copy, which outlives the model
        self._made: dict[tuple[int, int], Tensor] = {}

    def of(self, first: int, n: int) -> Tensor:
        """Return slots [first, first + n) as one tensor. Raises DoesNotFit.

        Experts' tensors are [n_in, n_out, n] and their biases' [n_out, n], with the slots' stride
        in the last dimension. A dense weight keeps its own shape.
        """
        view = self._made.get((first, n))
        if view is None:
            view = self._made[first, n] = self._make(first, n)
        return view

    def shifting(self) -> tuple[Tensor, int, int, int]:
        """Return a tensor of all slots of its own, which the player shifts to ranges of slots.

        Also returns the address of the first slot, the slots' stride in bytes, and the dimension
        that counts slots. Raises DoesNotFit.
        """
        memory = self._memory
        tensor = self._make(0, memory.pool.n_slots)
        return tensor, tensor.position, memory.stride_bytes(self._kind), self._axis

    def _make(self, first: int, n: int) -> Tensor:
        memory, weight = self._memory, self._weight
        stride = memory.stride_bytes(self._kind)
        at = memory.buffer(self._kind), first * stride
        if not memory.pool.n_experts:
            return weight.alike(at=at)
        whole = stride * n
        a, b, c, d = (*weight.shape[: self._axis], n, 1, 1)[:4]
        p, q, r, s = (*weight.strides[: self._axis], stride, whole, whole)[:4]
        return weight.alike((a, b, c, d), (p, q, r, s), at=at)


class HostBias:
    """A copy in host memory of a layer's biases of one kind, from which slots are filled."""

    def __init__(self, bias: Tensor, device: Device) -> None:
        """Read `bias` [n_out, n_experts] back. The memory is pinned for `device`, if possible."""
        values = host_copy(bias)
        self._pinned = device.pinned_memory(values.nbytes)
        if self._pinned is not None:
            there = self._pinned.host_range.part(0, values.nbytes).array().view(np.float32)
            there[:] = values
            values = there
        self.tensor = of_array(values, bias)
        self.row_bytes = bias.strides[1]
        self._kept = values

    def close(self) -> None:
        if self._pinned is not None:
            self._pinned.close()
