"""The buffer in which libllama's scheduler computes graphs, in memory that it shares with others.

A scheduler asks for one buffer that its largest graph, a prompt's, fits. It places the tensors of a
small graph at the front, if the graph was planned alone. So between prompts the other bytes are
free. `ComputeBuffer` reports how far graphs reach, before the inputs of a graph are written. It can
also move the buffer into a larger allocation, so that other data continues the buffer's addresses.

Ownership: the scheduler frees ggml's struct of the buffer. Its memory is the backend's own, which
the struct frees, or a part of an allocation of ours, which it does not free.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from typing import Any

from offload.errors import DoesNotFit
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.ggml.native import SchedulerBuffer, native
from offload.ggml.tensor import Buffer

_BUFFER = abi.ggml_backend_buffer


class ComputeBuffer:
    """The compute buffer of one scheduler on one device. Outlives the scheduler."""

    def __init__(self, buffer_type: int, pending: Pending) -> None:
        """`buffer_type`: address of the device's own buffer type."""
        self._lib = lib = library()
        self._theirs, self._pending = buffer_type, pending
        self._keep: list[Any] = []
        self.before_graph: Callable[[], None] = lambda: None
        self.is_planned_small = False  # True if the scheduler planned a small graph last
        self.has_moved = False  # True if graphs with addresses of an earlier place may be kept
        # The face that the scheduler sees: the device's own type, but for this function.
        self._face = abi.ggml_backend_buffer_type.from_buffer_copy(
            abi.ggml_backend_buffer_type.from_address(buffer_type)
        )
        entry = "ggml_backend_buffer_type_i.alloc_buffer"
        self._face.iface.alloc_buffer = self._thunk(entry, None, self._on_alloc)
        self._free = self._thunk("ggml_backend_buffer_i.free_buffer", None, self._on_free)
        self._native = native()
        self._record = SchedulerBuffer(
            alloc_size=C.cast(lib.ggml_backend_buffer_get_alloc_size, C.c_void_p).value,
            before=self._thunk("ggml_backend_buffer_i.reset", None, lambda _: self.before_graph()),
        )
        self._own: abi.ggml_backend_buffer | None = None  # struct as the backend made it
        self._room: tuple[Buffer, int] | None = None  # our memory for it, and the first byte
        self.size_bytes = 0  # 0: the scheduler has no buffer
        self._room_bytes = 0

    @property
    def face(self) -> int:
        """Address of the buffer type that the scheduler has to use."""
        return C.addressof(self._face)

    @property
    def is_ours(self) -> bool:
        """True if the buffer lies in memory of ours."""
        return self._room is not None and self.size_bytes > 0 and self._own is None

    def _thunk(self, entry: str, on_error: Any, function: Callable[..., Any]) -> int:
        thunk, address = guard(abi.PROTOTYPES[entry], self._pending, on_error, function)
        self._keep.append(thunk)
        return address

    # -- how far graphs reach ----------------------------------------------------------------------

    def touched_bytes(self) -> int:
        """Return how many of the first bytes graphs may have written to since the last call.

        These include the bytes of the graph that was allocated last.
        """
        record = self._record
        touched: int = record.touched
        record.touched = record.end
        return touched

    def lend(self, *, on: bool) -> None:
        """Call `before_graph` from now on before a graph is allocated, if `on`."""
        self._record.is_lent = on

    def planned_small(self) -> None:
        """Note that the scheduler has planned a small graph and has none allocated."""
        self.is_planned_small, self.has_moved = True, False
        self._record.end = self._record.touched = 0

    # -- where the buffer lies ---------------------------------------------------------------------

    def _on_alloc(self, _: int, size: int) -> int | None:
        self.is_planned_small = False
        if self._room is not None and size <= self._room_bytes:
            address = int(self._lib.ggml_backend_cpu_buffer_from_ptr(4096, size))
            struct = _BUFFER.from_address(address)
            whole = _BUFFER.from_address(self._room[0].address)
            struct.iface, struct.buft, struct.context = whole.iface, whole.buft, whole.context
            self._watch(address, size)
            self._lie_in_room(struct)
            return address
        buffer: int | None = self._lib.ggml_backend_buft_alloc_buffer(self._theirs, size)
        if buffer:
            self._watch(buffer, size)
            self._own = _BUFFER.from_buffer_copy(_BUFFER.from_address(buffer))
        return buffer

    def _watch(self, address: int, size: int) -> None:
        self._native.unwatch(C.addressof(self._record))
        struct, record = _BUFFER.from_address(address), self._record
        self.size_bytes, record.buffer = size, address
        record.base = self._lib.ggml_backend_buffer_get_base(address)
        record.init_tensor, record.reset = struct.iface.init_tensor, struct.iface.reset
        record.end = record.touched = size
        struct.iface.init_tensor, struct.iface.reset = self._native.init_tensor, self._native.reset
        self._native.watch(C.addressof(self._record))

    def _lie_in_room(self, struct: Any) -> None:
        assert self._room is not None
        buffer, offset = self._room
        struct.context = _BUFFER.from_address(buffer.address).context
        struct.iface.get_base, struct.iface.free_buffer = self._native.base, self._free
        self._record.base = buffer.base + offset
        self._own = None

    def leave(self) -> None:
        """Free the buffer's memory. `enter` or `stay` must follow before the next decode."""
        own, self._own = self._own, None
        if own is not None:
            address = int(self._lib.ggml_backend_cpu_buffer_from_ptr(4096, 4096))
            struct = _BUFFER.from_address(address)
            struct.iface, struct.buft, struct.context = own.iface, own.buft, own.context
            struct.size = own.size
            self._lib.ggml_backend_buffer_free(address)

    def enter(self, buffer: Buffer, offset_bytes: int) -> None:
        """Lie in `buffer` from an offset on, with as many bytes as now. Call `leave` before.

        The scheduler has to plan a graph before the next decode.
        """
        self._room, self._room_bytes = (buffer, offset_bytes), self.size_bytes
        self._lie_in_room(_BUFFER.from_address(self._record.buffer))
        self.is_planned_small, self.has_moved = False, True

    def stay(self) -> None:
        """Lie in memory of the backend's own again. Call `leave` before. Raises DoesNotFit."""
        self._room, size = None, self.size_bytes
        if not size:
            return
        made = self._lib.ggml_backend_buft_alloc_buffer(self._theirs, size)
        if not made:
            raise DoesNotFit(
                f"{size / 2**20:.2f} MiB of device memory for a compute buffer were refused; "
                "lower --ubatch-size"
            )
        theirs = _BUFFER.from_address(made)
        self._own = _BUFFER.from_buffer_copy(theirs)
        struct = _BUFFER.from_address(self._record.buffer)
        struct.context = theirs.context
        struct.iface.get_base, struct.iface.free_buffer = (
            theirs.iface.get_base,
            theirs.iface.free_buffer,
        )
        self._record.base = self._lib.ggml_backend_buffer_get_base(made)
        # Free only the struct: the memory is the other struct's now.
        theirs.iface.free_buffer = None
        self._lib.ggml_backend_buffer_free(made)
        self.is_planned_small, self.has_moved = False, True

    def _on_free(self, _: int) -> None:
        if self.size_bytes:
            self.before_graph()
            self.forget()

    def forget(self) -> None:
        """Note that the scheduler uses the buffer no more. It may still free it."""
        self._native.unwatch(C.addressof(self._record))
        self.size_bytes, self._own = 0, None
