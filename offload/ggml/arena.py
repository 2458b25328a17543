"""Device memory of equal slots for weights of one shape and type, seen as a tensor [in, out, n]."""

from __future__ import annotations

from typing import Any

from offload.errors import DoesNotFit
from offload.ggml import tensor
from offload.ggml.library.lib import library


class DeviceMemory:
    """A buffer of the device, freed by `close`."""

    def __init__(self, buft: int, size_bytes: int, what: str) -> None:
        self._lib = library()
        self.size_bytes = size_bytes
        self.buffer: int | None = self._lib.ggml_backend_buft_alloc_buffer(buft, size_bytes)
        if not self.buffer:
            raise DoesNotFit(
                f"{size_bytes / 2**20:.0f} MiB of device memory for {what} could not be had; "
                "lower --vram"
            )
        self.base: int = self._lib.ggml_backend_buffer_get_base(self.buffer)
        self._lib.ggml_backend_buffer_clear(self.buffer, 0)

    def close(self) -> None:
        buffer, self.buffer = self.buffer, None
        if buffer:
            self._lib.ggml_backend_buffer_free(buffer)


class Arena:
    """`n_slots` slots, each one expert (or one dense weight) of the shape of `weight`."""

    def __init__(self, buft: int, weight: int, n_slots: int, slot_bytes: int | None = None) -> None:
        """`slot_bytes` defaults to one matrix of the weight; dense 3-d weights take them all."""
        lib = library()
        self._weight = tensor.at(weight)
        self.slot_bytes = slot_bytes or int(self._weight.nb[2])
        self._matrices = self.slot_bytes // int(self._weight.nb[2])
        self.n_slots = n_slots
        self._views: dict[tuple[int, int], Any] = {}
        # Kernels read past the last row: ask the buffer type for the whole arena's size, with its
        # own padding, and clear it once so that what they read there is never NaN.
        whole = self._tensor(n_slots, 0, 0)
        size_bytes = lib.ggml_backend_buft_get_alloc_size(buft, tensor.address_of(whole))
        self.memory = DeviceMemory(buft, size_bytes + 4096, f"{n_slots} slots")
        self.size_bytes = self.memory.size_bytes
        self.whole = self.slots(0, n_slots)  # all slots as one tensor, for nodes with remapped ids

    def _tensor(self, n: int, buffer: int, data: int) -> Any:
        made = tensor.copy_of(tensor.address_of(self._weight))
        made.ne[2], made.ne[3] = n * self._matrices, 1
        made.nb[3] = self.slot_bytes * n
        made.buffer, made.data = buffer, data
        made.view_src, made.view_offs, made.extra = None, 0, None
        return made

    def slots(self, first: int, n: int) -> Any:
        """Slots [first, first + n) as a tensor, which lives as long as the arena."""
        view = self._views.get((first, n))
        if view is None:
            assert self.memory.buffer is not None, "the arena is closed"
            at = self.memory.base + first * self.slot_bytes
            view = self._views[first, n] = self._tensor(n, self.memory.buffer, at)
        return view

    def close(self) -> None:
        self.memory.close()
