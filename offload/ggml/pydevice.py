"""A ggml device that is another one with some entries of its vtable replaced by Python.

libllama takes any device in `llama_model_params.devices`. `PyDevice` copies a real device's vtable
and overrides what a device needs to have its own name, to answer which operations it takes, and to
see each graph before it is computed. Copying a backend keeps its `context` and `guid`, so every
native entry that is not replaced goes on working on our copy.

Ownership: C keeps addresses, never references. Thunks, names and structures live in fields of the
PyDevice, which must outlive every model and context that uses it. Inner backends are freed when
libllama frees our copies of them.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from typing import Any

from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library

GPU = abi.GGML_BACKEND_DEVICE_TYPE_GPU
FAILED = abi.GGML_STATUS_FAILED

# Entries of the inner registry that make sense on our device. Not among them: the extra buffer
# types (repacked weights cannot be streamed) and everything about NUMA and thread pools.
_FORWARDED = (b"ggml_backend_set_n_threads", b"ggml_backend_set_abort_callback")


class Backend:
    """One stream of the device: ours for libllama, and the inner one that computes."""

    def __init__(self, inner: int, device: int) -> None:
        self.inner = inner
        self.struct = abi.ggml_backend.from_buffer_copy(abi.ggml_backend.from_address(inner))
        self.struct.device = device
        self.address = C.addressof(self.struct)


class PyDevice:
    """Wraps the device at address `inner`. Subclasses override the underscore methods.

    Whatever those methods raise is kept in `pending`, and C gets the declared failure: "no" from
    supports_op and supports_buft, GGML_STATUS_FAILED from a computation, NULL from init_backend.
    """

    def __init__(self, inner: int, name: str, pending: Pending) -> None:
        self._lib = library()
        self.inner, self.name, self.pending = inner, name, pending
        self.inner_buft: int = self._lib.ggml_backend_dev_buffer_type(inner)
        self.backends: dict[int, Backend] = {}
        self._keep: list[Any] = []
        self._name = C.create_string_buffer(name.encode())
        self._inner_struct = abi.ggml_backend_device.from_address(inner)
        self.struct = abi.ggml_backend_device.from_buffer_copy(self._inner_struct)
        self.address = C.addressof(self.struct)
        self._fill_device()
        self._fill_registry()

    # -- what subclasses may override --------------------------------------------------------

    def _supports_op(self, node: int) -> bool:
        """True if this device computes the graph node at address `node`."""
        return bool(self._inner_supports_op(self.inner, node))

    def _supports_buft(self, buft: int) -> bool:
        """True if nodes may read tensors that lie in buffers of this type."""
        return bool(self._inner_supports_buft(self.inner, buft))

    def _graph_compute(self, backend: Backend, graph: int) -> int:
        """Compute the graph; a ggml_status, 0 for success."""
        return int(self._inner_compute(backend.inner, graph))

    def _memory(self) -> tuple[int, int]:
        """Free and total bytes of the device."""
        free, total = C.c_size_t(), C.c_size_t()
        self._lib.ggml_backend_dev_memory(self.inner, C.byref(free), C.byref(total))
        return free.value, total.value

    def _opened(self, backend: Backend) -> None:
        """A stream of this device was opened by libllama."""

    def _closed(self, backend: Backend) -> None:
        """A stream is about to be freed by libllama."""

    # -- the vtables ---------------------------------------------------------------------------

    def _thunk(self, entry: str, on_error: Any, function: Callable[..., Any]) -> int:
        thunk, address = guard(abi.PROTOTYPES[entry], self.pending, on_error, function)
        self._keep.append(thunk)
        return address

    def _inner_entry(self, entry: str) -> Any:
        struct_name, field = entry.split(".")
        assert struct_name == "ggml_backend_device_i"
        return abi.PROTOTYPES[entry](getattr(self._inner_struct.iface, field))

    def _fill_device(self) -> None:
        self._inner_supports_op = self._inner_entry("ggml_backend_device_i.supports_op")
        self._inner_supports_buft = self._inner_entry("ggml_backend_device_i.supports_buft")
        self._inner_props = self._inner_entry("ggml_backend_device_i.get_props")
        self._inner_compute = self._lib.ggml_backend_graph_compute_async
        name = C.addressof(self._name)
        entries: dict[str, tuple[Any, Callable[..., Any]]] = {
            "get_name": (None, lambda _: name),
            "get_type": (GPU, lambda _: GPU),
            "get_props": (None, self._on_props),
            "get_memory": (None, self._on_memory),
            "supports_op": (False, lambda _, node: bool(self._supports_op(node))),
            "supports_buft": (False, lambda _, buft: bool(self._supports_buft(buft))),
            "offload_op": (False, lambda _, node: False),
            "init_backend": (None, self._on_init_backend),
        }
        for field, (on_error, function) in entries.items():
            address = self._thunk(f"ggml_backend_device_i.{field}", on_error, function)
            setattr(self.struct.iface, field, address)

    def _fill_registry(self) -> None:
        self._registry = abi.ggml_backend_reg()
        self._registry.api_version = abi.GGML_BACKEND_API_VERSION
        name, address = C.addressof(self._name), self.address
        inner_reg = self._lib.ggml_backend_dev_backend_reg(self.inner)

        def proc_address(_: int, wanted: bytes | None) -> int | None:
            if wanted not in _FORWARDED:
                return None
            found: int | None = self._lib.ggml_backend_reg_get_proc_address(inner_reg, wanted)
            return found

        entries: dict[str, tuple[Any, Callable[..., Any]]] = {
            "get_name": (None, lambda _: name),
            "get_device_count": (0, lambda _: 1),
            "get_device": (None, lambda _, i: address),
            "get_proc_address": (None, proc_address),
        }
        for field, (on_error, function) in entries.items():
            thunk = self._thunk(f"ggml_backend_reg_i.{field}", on_error, function)
            setattr(self._registry.iface, field, thunk)
        self.struct.reg = C.addressof(self._registry)

    def _on_props(self, _: int, props: int) -> None:
        self._inner_props(self.inner, props)
        view = abi.ggml_backend_dev_props.from_address(props)
        view.name, view.type, view.device_id = C.addressof(self._name), GPU, None
        view.memory_free, view.memory_total = self._memory()

    def _on_memory(self, _: int, free: int, total: int) -> None:
        values = self._memory()
        C.c_size_t.from_address(free).value = values[0]
        C.c_size_t.from_address(total).value = values[1]

    def _on_init_backend(self, _: int, params: object) -> int:
        backend = Backend(self._lib.ggml_backend_dev_init(self.inner, None), self.address)
        # Kept before anything can fail: from here on C may call the entries below.
        self.backends[backend.address] = backend
        backend.struct.iface.graph_compute = self._thunk(
            "ggml_backend_i.graph_compute",
            FAILED,
            lambda _, graph: int(self._graph_compute(backend, graph)),
        )
        backend.struct.iface.free = self._thunk("ggml_backend_i.free", None, self._on_free)
        self._opened(backend)
        return backend.address

    def _on_free(self, address: int) -> None:
        backend = self.backends.pop(address)
        try:
            self._closed(backend)
        finally:
            self._lib.ggml_backend_free(backend.inner)
