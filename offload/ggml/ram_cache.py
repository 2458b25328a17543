"""Places the memory of a context whose KV cache is in RAM (`ContextOptions.kv_offload`).

With `offload_kqv` off, libllama allocates the KV cache and the recurrent states from ggml's buffer
type for the CPU. While it makes a context, we replace the function by which that type allocates:

- Buffers of caches are pinned, so that copies of them to a device are fast.
- Recurrent states are put into device memory all the same. They are small, and every decode reads
  and writes all of them.

Ownership: the library frees the buffers of caches. `close_before` and `close_after` unpin them and
free the memory of states.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.ggml.memory import HasAddress, HostRange, Pinner
from offload.ggml.native import native
from offload.ggml.tensor import Buffer, Tensor
from offload.model import layer_of_cache, layer_of_state

_WHOLE = 1 << 62  # copies are of any part of a cache, so it must be pinned in one piece
_CHUNK_BYTES = 2 << 20  # device memory that is allocated at once for recurrent states
_lock = threading.Lock()  # one context at a time, because the process has one type for the CPU


class StateDevice(Protocol):
    """A device with memory for recurrent states."""

    @property
    def memory_type(self) -> int: ...


def written_rows(cache: Tensor) -> range | None:
    """Return the rows of a cache that this thread's CPU backends wrote last, None if unknown.

    Other rows may lie between the first and the last one.
    """
    return native().written_rows(cache.address)


class RamCache:
    """The memory of one context's KV cache in RAM, and of its recurrent states on devices."""

    def __init__(
        self,
        device_of: Callable[[int], StateDevice | None],
        pin_for: HasAddress | None,
        pending: Pending,
    ) -> None:
        """`device_of` returns the local device that computes a layer, None if a worker does.

        The states of a worker's layers stay in RAM. `pin_for`: a GPU to which caches are copied;
        None: nothing is pinned.
        """
        self._lib, self._device_of, self._pending = library(), device_of, pending
        self._pinner = None if pin_for is None else Pinner(pin_for, _WHOLE)
        self._inits: dict[int, int | None] = {}  # the own init_tensor of each watched buffer
        self._caches: list[int] = []  # buffers with keys or values
        self._keep: list[object] = []
        self._pinned: list[HostRange] = []
        self._states: list[Buffer] = []
        self._room: dict[int, tuple[Buffer, int]] = {}  # by type of memory: buffer, first free byte
        self._layer_bytes = Counter[int]()  # keys and values of each layer
        self.cache_bytes = 0  # all caches in RAM together
        self.state_bytes = 0  # all recurrent states on devices together
        self.not_pinned_reason = ""  # why copies of caches are slow; "": they are pinned

    @property
    def largest_layer_bytes(self) -> int:
        """Keys and values of the layer that has most of them."""
        return max(self._layer_bytes.values(), default=0)

    @property
    def is_pinned(self) -> bool:
        """True if all caches are pinned, so that copies to a GPU need not wait."""
        return bool(self._pinned) and not self.not_pinned_reason

    @contextmanager
    def placing(self) -> Iterator[None]:
        """Place the memory of the context that the block makes."""
        entry = abi.ggml_backend_buffer_type.from_address(self._lib.ggml_backend_cpu_buffer_type())
        field = "ggml_backend_buffer_type_i.alloc_buffer"
        with _lock:
            original: int = entry.iface.alloc_buffer
            allocate = abi.PROTOTYPES[field](original)
            init, init_tensor = guard(
                abi.PROTOTYPES["ggml_backend_buffer_i.init_tensor"], self._pending,
                abi.GGML_STATUS_ALLOC_FAILED, self._on_tensor,
            )  # fmt: skip
            self._keep.append(init)  # buffers of the scheduler are watched until their first tensor

            def allocated(kind: int, size: int) -> int | None:
                buffer: int | None = allocate(kind, size)
                if buffer:
                    struct = abi.ggml_backend_buffer.from_address(buffer)
                    self._inits[buffer] = struct.iface.init_tensor
                    struct.iface.init_tensor = init_tensor
                return buffer

            thunk, address = guard(abi.PROTOTYPES[field], self._pending, None, allocated)
            entry.iface.alloc_buffer = address
            try:
                yield
            finally:
                entry.iface.alloc_buffer = original
                del thunk
        self._pin()

    def _on_tensor(self, buffer: int, address: int) -> int:
        tensor = Tensor(address)
        name = tensor.name
        if not name.startswith("cache_"):  # of a graph
            struct = abi.ggml_backend_buffer.from_address(buffer)
            struct.iface.init_tensor = self._inits[buffer]
        elif (layer := layer_of_state(name)) is not None:
            if (device := self._device_of(layer)) is not None:
                self._put_on(device, tensor)
        elif not tensor.is_view:
            self._layer_bytes[layer_of_cache(name)] += tensor.size_bytes
            if buffer not in self._caches:
                self._caches.append(buffer)
        return int(abi.GGML_STATUS_SUCCESS)

    def _put_on(self, device: StateDevice, tensor: Tensor) -> None:
        """Give the tensor zeroed memory of the device. Raises DoesNotFit."""
        kind, size_bytes = device.memory_type, tensor.size_bytes
        step = max(1, int(self._lib.ggml_backend_buft_get_alignment(kind)))
        buffer, start = self._room.get(kind, (None, 0))
        if buffer is None or start + size_bytes > buffer.size_bytes:
            buffer = Buffer(kind, max(size_bytes, _CHUNK_BYTES), "recurrent states")
            self._states.append(buffer)
            start = 0
        tensor.lie_from(buffer, start)
        self.state_bytes += size_bytes
        self._room[kind] = buffer, -(-(start + size_bytes) // step) * step

    def _pin(self) -> None:
        for buffer in self._caches:
            base: int = self._lib.ggml_backend_buffer_get_base(buffer)
            memory = HostRange(base, int(self._lib.ggml_backend_buffer_get_size(buffer)))
            self.cache_bytes += memory.size_bytes
            if self._pinner is None:
                continue
            result = self._pinner.pin(memory)
            if result.ok:
                self._pinned.append(memory)
            else:
                self.not_pinned_reason = result.reason

    def close_before(self) -> None:
        """Unpin the caches. Call it before the context is freed."""
        pinned, self._pinned = self._pinned, []
        for memory in pinned:
            assert self._pinner is not None
            self._pinner.unpin(memory)

    def close_after(self) -> None:
        """Free the memory of states. Call it after the context is freed."""
        states, self._states = self._states, []
        for buffer in states:
            buffer.close()
