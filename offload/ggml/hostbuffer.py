"""Our own host buffer type: where streamed weights live, in memory that somebody else provides.

ggml's scheduler leaves tensors of a buffer type alone when the device says it supports it, and the
CPU backend computes on it in place because it says it is host memory. So the same bytes serve the
copy engine and the CPU.
"""

from __future__ import annotations

import ctypes as C
from typing import Any, Protocol

from offload.ggml import abi
from offload.ggml.callback import Pending, guard
from offload.ggml.lib import library


class HostMemory(Protocol):
    """Provides and takes back host memory; addresses are page aligned."""

    def allocate(self, size_bytes: int) -> int: ...

    def free(self, address: int) -> None: ...


class HostBufferType:
    """A buffer type named `name` whose buffers are allocated by `memory`.

    Outlives every model loaded with it: C keeps its address.
    """

    def __init__(self, name: str, memory: HostMemory, pending: Pending) -> None:
        self._lib = lib = library()
        self._memory, self._pending = memory, pending
        self._name = C.create_string_buffer(name.encode())
        self._keep: list[Any] = []
        cpu = lib.ggml_backend_cpu_buffer_type()
        self.struct = abi.ggml_backend_buffer_type.from_buffer_copy(
            abi.ggml_backend_buffer_type.from_address(cpu)
        )
        self.address = C.addressof(self.struct)
        self.buffers: dict[int, tuple[int, int]] = {}  # buffer -> (base address, size)
        name_address = C.addressof(self._name)
        iface = self.struct.iface
        iface.get_name = self._thunk("get_name", None, lambda _: name_address)
        iface.alloc_buffer = self._thunk("alloc_buffer", None, self._on_alloc)
        self._free = self._buffer_thunk("free_buffer", None, self._on_free)

    def _thunk(self, field: str, on_error: Any, function: Any) -> int:
        entry = abi.PROTOTYPES[f"ggml_backend_buffer_type_i.{field}"]
        thunk, address = guard(entry, self._pending, on_error, function)
        self._keep.append(thunk)
        return address

    def _buffer_thunk(self, field: str, on_error: Any, function: Any) -> int:
        entry = abi.PROTOTYPES[f"ggml_backend_buffer_i.{field}"]
        thunk, address = guard(entry, self._pending, on_error, function)
        self._keep.append(thunk)
        return address

    def _on_alloc(self, _: int, size: int) -> int:
        # Kernels and copies may read a little past a tensor's end (CUDA's quantised matrix kernels
        # up to 512 elements); the last tensor of the buffer needs that room too.
        base = self._memory.allocate(size + 4096)
        buffer: int = self._lib.ggml_backend_cpu_buffer_from_ptr(base, size)
        view = abi.ggml_backend_buffer.from_address(buffer)
        view.buft = self.address
        view.iface.free_buffer = self._free
        self.buffers[buffer] = base, size
        return buffer

    def _on_free(self, buffer: int) -> None:
        base, _ = self.buffers.pop(buffer)
        self._memory.free(base)

    def holds(self, tensor: int) -> bool:
        """Whether the tensor at address `tensor` lies in one of our buffers."""
        return _buffer_at(tensor + _BUFFER).value in self.buffers


_BUFFER = abi.ggml_tensor.buffer.offset
_buffer_at = C.c_void_p.from_address
