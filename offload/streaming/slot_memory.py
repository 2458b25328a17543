"""Device memory of a pool's slots: a buffer for each kind, seen as tensors of any fitting type."""

from __future__ import annotations

from offload.ggml.backend import Device
from offload.ggml.tensor import Buffer, Dims, Tensor, new_tensor
from offload.plan.slot_layout import SlotPool


class SlotMemory:
    """The slots of one pool. Buffers are made when something is first copied into them."""

    def __init__(self, device: Device, pool: SlotPool) -> None:
        self.pool = pool
        self._device = device
        self._kinds = {kind.name: kind for kind in pool.kinds}
        self._buffers: dict[str, Buffer] = {}
        self._bytes: dict[str, Tensor] = {}
        self._views: dict[tuple[str, str, Dims], SlotViews] = {}

    @property
    def buffers(self) -> tuple[Buffer, ...]:
        return tuple(self._buffers.values())

    def stride_bytes(self, kind: str) -> int:
        return self._kinds[kind].stride_bytes

    def allocate(self) -> None:
        """Make all buffers now. Raises DoesNotFit."""
        for kind in self._kinds:
            self.buffer(kind)

    def bytes(self, kind: str) -> Tensor:
        """All slots of a kind as one row of bytes, to copy into. Raises DoesNotFit."""
        self.buffer(kind)
        return self._bytes[kind]

    def views(self, kind: str, weight: Tensor) -> SlotViews:
        """Slots as weights like `weight`; the same for all of its kind, type and shape."""
        key = kind, weight.type, weight.shape
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = SlotViews(self, kind, weight)
        return found

    def buffer(self, kind: str) -> Buffer:
        """The memory of one kind. Raises DoesNotFit when it is first asked for."""
        buffer = self._buffers.get(kind)
        if buffer is None:
            size_bytes = self.pool.n_slots * self._kinds[kind].stride_bytes
            what = f"{self.pool.n_slots} slots of {kind} weights"
            buffer = self._device.allocate(size_bytes, what)
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
    """Neighbouring slots of one kind as weights of one type and shape."""

    def __init__(self, memory: SlotMemory, kind: str, weight: Tensor) -> None:
        self._memory, self._kind = memory, kind
        self._weight = weight.alike()  # a copy: models are freed, other graphs go on
        self._made: dict[tuple[int, int], Tensor] = {}

    def of(self, first: int, n: int) -> Tensor:
        """Slots [first, first + n). Raises DoesNotFit.

        Of experts it is [n_in, n_out, n], with the stride of the slots between matrices; a dense
        weight is as it is.
        """
        view = self._made.get((first, n))
        if view is None:
            view = self._made[first, n] = self._make(first, n)
        return view

    def _make(self, first: int, n: int) -> Tensor:
        memory, weight = self._memory, self._weight
        stride = memory.stride_bytes(self._kind)
        at = memory.buffer(self._kind), first * stride
        if not memory.pool.n_experts:
            return weight.alike(at=at)
        n_in, n_out, _, _ = weight.shape
        element, row, _, _ = weight.strides
        return weight.alike((n_in, n_out, n, 1), (element, row, stride, stride * n), at=at)
