"""Holds the device memory of a pool's slots: a buffer for each kind, with views as tensors."""

from __future__ import annotations

import numpy as np

from offload.ggml.backend import Device
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.rewriting import host_copy, of_array
from offload.ggml.tensor import Buffer, Dims, Tensor, new_tensor
from offload.plan.lending import SlotTail
from offload.plan.slot_layout import SlotPool

_JOINED = "all kinds"


class SlotMemory:
    """The memory of one pool's slots. Each buffer is allocated when it is first used.

    If the kinds of a slot lie one after another, there is one buffer for all of them. It may have
    room for a scheduler's compute buffer behind the slots. The slots are then continued in that
    room, and these *lent* slots may be used while the scheduler does not use their bytes.
    """

    def __init__(
        self, device: Device, pool: SlotPool, compute: ComputeBuffer | None = None
    ) -> None:
        """`compute` is moved behind the slots when they are allocated."""
        self.pool = pool
        self.device = device
        self._compute = compute if compute and compute.size_bytes and pool.joined_bytes else None
        self._kinds = {kind.name: kind for kind in pool.kinds}
        self._offsets = pool.offsets() if pool.joined_bytes else dict.fromkeys(self._kinds, 0)
        size_bytes = 0 if self._compute is None else self._compute.size_bytes
        self._tail = SlotTail(pool, size_bytes)
        self.n_slots = pool.n_slots + (self._tail.n_lent if size_bytes else 0)
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
        return self.pool.joined_bytes or self._kinds[kind].stride_bytes

    def n_touched(self, compute_bytes: int) -> int:
        """Return the number of lent slots that have one of the compute buffer's first bytes."""
        return self._tail.n_touched(compute_bytes)

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
        views = self._views.get(key)
        if views is None:
            views = self._views[key] = SlotViews(self, kind, weight, axis)
        return views

    def buffer(self, kind: str) -> Buffer:
        """Return the memory of one kind. The first call may raise DoesNotFit."""
        name = _JOINED if self.pool.joined_bytes else kind
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = self._allocate(kind)
        if kind not in self._bytes:
            at = self._offsets[kind]
            size_bytes = self.n_slots * self.stride_bytes(kind) - at
            self._bytes[kind] = new_tensor("i8", (size_bytes, 1, 1, 1), (buffer, at))
        return buffer

    def _allocate(self, kind: str) -> Buffer:
        pool, compute = self.pool, self._compute
        what = "of experts" if pool.joined_bytes else f"of {kind} weights"
        size_bytes = pool.n_slots * self.stride_bytes(kind)
        if compute is None:
            return self.device.allocate(size_bytes, f"{pool.n_slots} slots {what}")
        compute.leave()
        try:
            size_bytes = self._tail.own_bytes + compute.size_bytes
            buffer = self.device.allocate(size_bytes, f"{pool.n_slots} slots {what}")
        except BaseException:
            compute.stay()
            raise
        compute.enter(buffer, self._tail.own_bytes)
        return buffer

    def position(self, kind: str, slot: int) -> tuple[Buffer, int]:
        """Return the buffer and the byte at which a slot's matrix lies. Raises DoesNotFit."""
        return self.buffer(kind), self._offsets[kind] + slot * self.stride_bytes(kind)

    def close(self) -> None:
        """Free the memory. A compute buffer in it gets memory of its own. Raises DoesNotFit."""
        for buffer in self._buffers.values():
            buffer.close()
        if self._buffers and self._compute is not None:
            self._compute.stay()
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
        tensor = self._make(0, memory.n_slots)
        return tensor, tensor.position, memory.stride_bytes(self._kind), self._axis

    def _make(self, first: int, n: int) -> Tensor:
        memory, weight = self._memory, self._weight
        stride = memory.stride_bytes(self._kind)
        at = memory.position(self._kind, first)
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
