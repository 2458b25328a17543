"""A ggml device that wraps another and replaces some entries of its vtable by Python.

libllama takes any device in `llama_model_params.devices`. `PyDevice` copies a real device's vtable
and overrides entries: for its own name, for the operations that it takes, and to see each graph
before it is computed. A copied backend keeps its `context` and `guid`, so every native entry that
is not replaced works on our copy.

Ownership: C keeps addresses, never references. Thunks, names and structures live in fields of the
PyDevice, which must outlive every model and context that uses it. Inner streams are freed when
libllama frees our copies of them.
"""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable
from typing import Any

from offload.ggml.backend import Device, Stream
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.graph import Graph, Product, as_product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.interrupt import aborting_bytes
from offload.ggml.library.lib import library, op_number
from offload.ggml.native import Answers, StreamEntry, native
from offload.ggml.tensor import Tensor

GPU = abi.GGML_BACKEND_DEVICE_TYPE_GPU
FAILED = abi.GGML_STATUS_FAILED

# Entries of the inner registry that our device offers too. It does not offer the extra buffer types
# (repacked weights cannot be streamed) or any entry about NUMA and thread pools.
_FORWARDED = (b"ggml_backend_set_n_threads", b"ggml_backend_set_abort_callback")


class _StreamStruct(C.Structure):
    """Our copy of a stream's struct, and what the native functions know about the stream."""

    _fields_ = [("stream", abi.ggml_backend), ("entry", StreamEntry)]  # noqa: RUF012


class WrappedStream:
    """A stream that libllama opened on our device: our copy of its struct, and the inner stream."""

    def __init__(self, inner: Stream, device: int) -> None:
        self.inner = inner
        struct = abi.ggml_backend.from_address(inner.address)
        self._whole = _StreamStruct(struct, StreamEntry(struct.iface.graph_compute, inner.address))
        self.struct, self.entry = self._whole.stream, self._whole.entry
        self.struct.device = device
        self.address = C.addressof(self.struct)

    def copy_caches_by(self, python: int) -> None:
        """Let `python` copy caches in RAM to this stream, before graphs that read them."""
        self.entry.copy, self.entry.copy_cache = self.struct.iface.cpy_tensor_async, python
        self.struct.iface.cpy_tensor_async = native().copy

    def compute_by(self, python: int, answers: Answers) -> None:
        """Let native code compute graphs that need nothing of Python, and `python` all others."""
        self.entry.python, self.entry.answers = python, C.addressof(answers)
        self.struct.iface.graph_compute = native().compute


class _DeviceStruct(C.Structure):
    """Our copy of a device's struct, and what the native functions know about the device."""

    _fields_ = [("device", abi.ggml_backend_device), ("answers", Answers)]  # noqa: RUF012


class PyDevice:
    """Wraps `inner`, whose nodes may also read weights that lie in the memory of `host`.

    ggml asks thousands of times per graph what the device supports. Native functions (graphs.c)
    answer. They call `takes` only for products with weights in `host`.

    Subclasses override takes, compute, memory_bytes, opened and closed. Exceptions of these methods
    are kept in `pending`, and C gets a failure: "no" from supports_op and supports_buft,
    GGML_STATUS_FAILED from a computation, NULL from init_backend.
    """

    def __init__(
        self, inner: Device, name: str, pending: Pending, host: HostBufferType | None = None
    ) -> None:
        self._lib = library()
        self.inner, self.name, self.pending, self.host = inner, name, pending, host
        self.streams: dict[int, WrappedStream] = {}
        self._n_direct = 0  # graphs of streams that are closed
        self._keep: list[Any] = []
        self._name = C.create_string_buffer(name.encode())
        self._inner_struct = abi.ggml_backend_device.from_address(inner.address)
        self._whole = _DeviceStruct(self._inner_struct)
        self.struct, self._answers = self._whole.device, self._whole.answers
        self.address = C.addressof(self.struct)
        self._memory: Any = None  # the type of device memory that `keep_apart` made, or None
        self.compute_buffer: ComputeBuffer | None = None  # that of the first stream; `share_buffer`
        self._cpu_streams: set[int] = set()  # CPU backends from which caches were copied
        self._asked: Any = None  # the device's struct of which a scheduler asks the buffer type
        self._fill_device()
        self._fill_registry()

    # -- what subclasses may override --------------------------------------------------------

    def takes(self, product: Product) -> bool:
        """True if this device computes this product with a weight in `host`.

        Called while a graph is built. The inner device decides about all other nodes.
        """
        return self.inner.supports(product.node)

    @property
    def n_asked(self) -> int:
        """Number of calls of `takes` by ggml."""
        return int(self._answers.n_asked)

    def remember_answers(self, *, on: bool) -> None:
        """If `on`, answer ggml for equal products as in earlier calls of `takes`.

        `forget_answers` drops them. Call it when `takes` might answer otherwise than before.
        """
        if on and not self._answers.n_table:
            self._answers.remember()
        self._answers.remembers = on

    def forget_answers(self) -> None:
        self._answers.forget()

    def compute_directly(self, *, on: bool) -> None:
        """Let native code compute graphs without weights in `host` as ggml built them, if `on`.

        Otherwise `compute` is called for all graphs.
        """
        answers = self._answers
        answers.is_direct = on and self.host is not None
        if on and not answers.interrupt:
            answers.interrupt, answers.heeds = aborting_bytes()

    @property
    def n_direct(self) -> int:
        """Number of graphs that native code computed without a call of `compute`."""
        return self._n_direct + sum(int(s.entry.n_direct) for s in self.streams.values())

    def compute(self, stream: WrappedStream, graph: Graph) -> int:
        """Compute the graph. Returns a ggml_status, 0 for success."""
        return stream.inner.compute(graph)

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory, as libllama sees them."""
        return self.inner.memory_bytes()

    def opened(self, stream: WrappedStream) -> None:
        """Called when libllama has opened a stream of this device."""

    def closed(self, stream: WrappedStream) -> None:
        """Called before libllama frees a stream of this device."""

    def answer_natively(self) -> bool:
        """Let the inner device's native code decide which nodes the open streams take.

        The scheduler asks thousands of times per graph. From now on it asks `inner` instead of
        Python. `host.offer` sets the answer for weights in host memory. Returns False if `inner`
        cannot do that.
        """
        if self.host is None or not self.host.pass_for(self.inner):
            return False
        for stream in self.streams.values():
            stream.struct.device = self.inner.address
        return True

    def keep_apart(self) -> None:
        """Give the device a type of memory of its own. Call it before a model is loaded.

        ggml gives a node to the first device that accepts the memory of the node's weight. Devices
        that wrap one real device accept the same memory, so the first would get all nodes.
        """
        inner = abi.ggml_backend_buffer_type.from_address(self.inner.buffer_type)
        self._memory = abi.ggml_backend_buffer_type.from_buffer_copy(inner)
        self._memory.device, name = self.address, C.addressof(self._name)
        self._answers.memory = C.addressof(self._memory)
        self._memory.iface.get_name = self._thunk(
            "ggml_backend_buffer_type_i.get_name", None, lambda _: name
        )
        address, from_host = C.addressof(self._memory), self._inner_entry("buffer_from_host_ptr")

        def mapped(_: int, position: int, size: int, most: int) -> int:
            buffer: int = from_host(self.inner.address, position, size, most)
            abi.ggml_backend_buffer.from_address(buffer).buft = address
            return buffer

        entries: dict[str, Callable[..., Any]] = {
            "get_buffer_type": lambda _: address, "buffer_from_host_ptr": mapped,
        }  # fmt: skip
        for field, function in entries.items():
            entry = self._thunk(f"ggml_backend_device_i.{field}", None, function)
            setattr(self.struct.iface, field, entry)

    @property
    def memory_type(self) -> int:
        """Address of the type of the device's own memory."""
        return self.inner.buffer_type if self._memory is None else C.addressof(self._memory)

    def attend_from(self, n_tokens: int, *, only_cpu: bool) -> None:
        """Leave attention of batches with fewer tokens to the CPU if the KV cache is in RAM.

        With `only_cpu`, everything that reads the cache is left to the CPU. Call it before a
        context is opened.
        """
        answers = self._answers
        answers.only_cpu = only_cpu
        answers.attention, answers.attention_batch = op_number("FLASH_ATTN_EXT"), n_tokens
        answers.cache_type = int(self._lib.ggml_backend_cpu_buffer_type())

    def copy_caches(self, stream: WrappedStream, copy: Callable[[Tensor, Tensor], bool]) -> None:
        """Let `copy(source, target)` copy caches in RAM to `stream`.

        It enqueues the copy and returns True, or leaves it to ggml. Call it before a decode.
        """

        def copied(cpu: int, _: int, source: int, target: int) -> bool:
            self._cpu_streams.add(cpu)
            return copy(Tensor(source), Tensor(target))

        stream.copy_caches_by(self._thunk("ggml_backend_i.cpy_tensor_async", False, copied))

    def share_buffer(self) -> None:
        """Make `compute_buffer` the buffer of the stream that is opened first.

        Call it before a context is opened.
        """
        self.compute_buffer = ComputeBuffer(self.inner.buffer_type, self.pending)

    def _let_scheduler_share(self, stream: WrappedStream, shared: ComputeBuffer) -> None:
        """Let the scheduler of this stream allocate `shared`.

        libllama asks the device for its buffer type twice: for caches, and then through the stream
        for its scheduler. So until the second question the stream has another copy of the device.
        """
        self._asked = copy = _DeviceStruct(self.struct, self._answers)

        def buffer_type(_: int) -> int:
            stream.struct.device = self.address
            return shared.face

        entry = self._thunk("ggml_backend_device_i.get_buffer_type", None, buffer_type)
        copy.device.iface.get_buffer_type = entry
        stream.struct.device = C.addressof(copy.device)

    # -- the vtables ---------------------------------------------------------------------------

    def _thunk(self, entry: str, on_error: Any, function: Callable[..., Any]) -> int:
        thunk, address = guard(abi.PROTOTYPES[entry], self.pending, on_error, function)
        self._keep.append(thunk)
        return address

    def _inner_entry(self, field: str) -> Any:
        prototype = abi.PROTOTYPES[f"ggml_backend_device_i.{field}"]
        return prototype(getattr(self._inner_struct.iface, field))

    def _fill_device(self) -> None:
        self._inner_props = self._inner_entry("get_props")
        name = C.addressof(self._name)
        entries: dict[str, tuple[Any, Callable[..., Any]]] = {
            "get_name": (None, lambda _: name),
            "get_type": (GPU, lambda _: GPU),
            "get_props": (None, self._on_props),
            "get_memory": (None, self._on_memory),
            "offload_op": (False, lambda _, node: False),
            "init_backend": (None, self._on_init_backend),
        }
        for field, (on_error, function) in entries.items():
            address = self._thunk(f"ggml_backend_device_i.{field}", on_error, function)
            setattr(self.struct.iface, field, address)
        self._fill_answers()

    def _fill_answers(self) -> None:
        answers, theirs, ours = self._answers, self._inner_struct.iface, self.struct.iface
        answers.supports_op, answers.supports_buft = theirs.supports_op, theirs.supports_buft
        answers.inner = self.inner.address
        answers.ask = self._thunk("ggml_backend_device_i.supports_op", False, self._on_product)
        if self.host is not None:
            answers.host = C.addressof(self.host.types)
        ours.supports_op, ours.supports_buft = native().supports_op, native().supports_buft

    def _fill_registry(self) -> None:
        self._registry = abi.ggml_backend_reg()
        self._registry.api_version = abi.GGML_BACKEND_API_VERSION
        name, address = C.addressof(self._name), self.address
        inner_reg = self._lib.ggml_backend_dev_backend_reg(self.inner.address)

        def proc_address(_: int, wanted: bytes | None) -> int | None:
            if wanted not in _FORWARDED:
                return None
            entry: int | None = self._lib.ggml_backend_reg_get_proc_address(inner_reg, wanted)
            return entry

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

    def _on_product(self, _: int, node: int) -> bool:
        taken = bool(self.takes(as_product(node)))
        self._answers.is_sure = 1  # not reached if `takes` raised
        return taken

    def _on_props(self, _: int, props: int) -> None:
        self._inner_props(self.inner.address, props)
        view = abi.ggml_backend_dev_props.from_address(props)
        view.name, view.type, view.device_id = C.addressof(self._name), GPU, None
        view.memory_free, view.memory_total = self.memory_bytes()

    def _on_memory(self, _: int, free: int, total: int) -> None:
        values = self.memory_bytes()
        C.c_size_t.from_address(free).value = values[0]
        C.c_size_t.from_address(total).value = values[1]

    def _on_init_backend(self, _: int, params: object) -> int:
        stream = WrappedStream(self.inner.open(), self.address)
        # Keep the stream before anything can fail: from now on C may call the entries below.
        self.streams[stream.address] = stream
        compute = self._thunk(
            "ggml_backend_i.graph_compute",
            FAILED,
            lambda _, graph: int(self.compute(stream, Graph(graph))),
        )
        stream.compute_by(compute, self._answers)
        stream.struct.iface.free = self._thunk("ggml_backend_i.free", None, self._on_free)
        self.opened(stream)
        if self.compute_buffer is not None and self._asked is None:
            self._let_scheduler_share(stream, self.compute_buffer)
        return stream.address

    def _on_free(self, address: int) -> None:
        stream = self.streams.pop(address)
        if stream.entry.copy_cache:
            for cpu in self._cpu_streams:
                native().unwatch_rows(cpu)
            self._cpu_streams.clear()
        self._n_direct += stream.entry.n_direct
        try:
            self.closed(stream)
        finally:
            stream.inner.close()
