"""Our own host buffer type, which holds streamed weights in memory that a provider allocates.

ggml's scheduler leaves its tensors alone because our device supports the type, and the CPU backend
computes on them in place because the type is host memory. Copies and the CPU read the same bytes.
"""

from __future__ import annotations

import ctypes as C
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library, op_number
from offload.ggml.memory import HostMemory, HostRange
from offload.ggml.native import HostTypes
from offload.ggml.tensor import Tensor, buffer_at
from offload.routing.next_experts import NextExperts

if TYPE_CHECKING:
    from offload.store.expert_memory import ExpertMemory


class OnDemand(Protocol):
    """The parts that read experts when they are needed. Looked at in every decode."""

    @property
    def experts(self) -> ExpertMemory | None:
        """The memory for some of the experts, once they are loaded; None if all are in memory."""

    @property
    def next_experts(self) -> NextExperts | None:
        """Finds the experts that are read ahead, once there is a memory for some; else None."""


class TensorPlacer(Protocol):
    """Decides where tensors lie, and fills them itself."""

    def place(self, name: str, size_bytes: int) -> HostRange:
        """Return the memory for the tensor's data. Raises for an unknown tensor."""

    def is_filling(self) -> bool:
        """True while the model is being loaded: libllama's writes to tensors are then ignored."""

    @property
    def on_demand(self) -> OnDemand:
        """The parts that read experts while the model computes, complete once it is loaded."""


class MemoryTaker(Protocol):
    """A device that can say which memory it computes with (offload/ggml/backend.py)."""

    buffer_type: int  # address of its own buffer type

    def supports_memory(self, buffer_type: int) -> bool:
        """True if the device can compute with tensors in memory of this buffer type (address)."""


@dataclass(frozen=True)
class Face:
    """A buffer type, by its address in the library."""

    address: int
    kept: object = None  # the memory at `address`, if it is ours


class CpuBufferType:
    """ggml's own buffer type for the CPU, for weights that the CPU computes with."""

    @property
    def address(self) -> int:
        return int(library().ggml_backend_cpu_buffer_type())


@functools.cache
def plain_buffer_type() -> Face:
    """Return a copy of ggml's buffer type for the CPU, which keeps the file's layout.

    libllama may put weights of ggml's own buffer type into one that repacks them.
    """
    struct = abi.ggml_backend_buffer_type
    copy = struct.from_buffer_copy(struct.from_address(CpuBufferType().address))
    return Face(C.addressof(copy), copy)


class HostBufferType:
    """A buffer type named `name` whose buffers are allocated by `memory`.

    A `placer` decides where tensors lie, and fills them; the allocated range is then a placeholder.
    Must outlive every model loaded with it, because C keeps its address.
    """

    def __init__(
        self, name: str, memory: HostMemory, pending: Pending, placer: TensorPlacer | None = None
    ) -> None:
        self._lib = lib = library()
        self._memory, self.pending, self._placer = memory, pending, placer
        self._on_demand = None if placer is None else placer.on_demand
        self._name = C.create_string_buffer(name.encode())
        self._keep: list[Any] = []
        cpu = lib.ggml_backend_cpu_buffer_type()
        self.struct = abi.ggml_backend_buffer_type.from_buffer_copy(
            abi.ggml_backend_buffer_type.from_address(cpu)
        )
        self.address = C.addressof(self.struct)
        # A second buffer type for dense weights, so that a device can take them and refuse experts.
        self._dense_struct = abi.ggml_backend_buffer_type.from_buffer_copy(self.struct)
        self.dense = Face(C.addressof(self._dense_struct))
        self._structs = self.struct, self._dense_struct
        # Addresses and numbers by which native functions find products with weights in this memory.
        faces = (C.c_void_p * 2)(self.address, self.dense.address)
        self.types = HostTypes(faces, op_number("MUL_MAT"), op_number("MUL_MAT_ID"))
        self._native_name: int | None = None
        self.buffers: dict[int, HostRange] = {}  # ranges by the buffer's address
        self.weights: dict[str, Tensor] = {}  # tensors placed by the placer, by name
        self.n_left_out = 0  # writes of libllama that were ignored, as the placer fills tensors
        # libllama treats buffer types with equal names as one type.
        self._dense_name = C.create_string_buffer(f"{name}_DENSE".encode())
        names = C.addressof(self._name), C.addressof(self._dense_name)
        entry = "ggml_backend_buffer_type_i"
        self._own_names = [
            self._thunk(f"{entry}.get_name", None, lambda _, name=n: name) for n in names
        ]
        alloc_buffer = self._thunk(f"{entry}.alloc_buffer", None, self._on_alloc)
        for struct, own_name in zip(self._structs, self._own_names, strict=True):
            struct.iface.get_name, struct.iface.alloc_buffer = own_name, alloc_buffer
        entry, failed = "ggml_backend_buffer_i", abi.GGML_STATUS_ALLOC_FAILED
        self._free = self._thunk(f"{entry}.free_buffer", None, self._on_free)
        if placer is not None:
            self._init = self._thunk(f"{entry}.init_tensor", failed, self._on_init_tensor)
            self._set = self._thunk(f"{entry}.set_tensor", None, self._on_set_tensor)

    def _thunk(self, entry: str, on_error: Any, function: Any) -> int:
        thunk, address = guard(abi.PROTOTYPES[entry], self.pending, on_error, function)
        self._keep.append(thunk)
        return address

    @property
    def experts(self) -> ExpertMemory | None:
        """The memory for some of the experts, None if all are in memory."""
        return None if self._on_demand is None else self._on_demand.experts

    @property
    def next_experts(self) -> NextExperts | None:
        """Finds the experts that are read ahead, None if none are."""
        return None if self._on_demand is None else self._on_demand.next_experts

    def pass_for(self, device: MemoryTaker) -> bool:
        """Let the device's own native code answer whether it takes weights in this memory.

        A backend recognises its own memory by the name function of the buffer type. `offer` gives
        our type that function or takes it away, so no call of Python is needed. Call this after
        loading.
        Returns False, and changes nothing, if the backend decides in another way.
        """
        theirs = abi.ggml_backend_buffer_type.from_address(device.buffer_type)
        before = [(struct.device, struct.context) for struct in self._structs]
        self._native_name = theirs.iface.get_name
        for struct in self._structs:
            struct.device, struct.context = theirs.device, theirs.context
        answers = []
        for offered in (True, False):
            self.offer(experts=offered, dense=offered)
            faces = self.address, self.dense.address
            answers += [device.supports_memory(face) is offered for face in faces]
        if all(answers):
            return True
        for struct, (owner, context) in zip(self._structs, before, strict=True):
            struct.device, struct.context = owner, context
        self._native_name = None
        return False

    def offer(self, *, experts: bool, dense: bool) -> None:
        """Set whether the device takes products with these weights; call it after `pass_for`."""
        offers = zip(self._structs, self._own_names, (experts, dense), strict=True)
        for struct, own_name, is_offered in offers:
            struct.iface.get_name = self._native_name if is_offered else own_name

    def _on_alloc(self, address: int, size: int) -> int:
        # Kernels and copies may read a little past a tensor's end (CUDA's quantised matrix kernels
        # up to 512 elements); the last tensor of the buffer needs that room too.
        memory = self._memory.allocate(size + 4096)
        buffer: int = self._lib.ggml_backend_cpu_buffer_from_ptr(memory.address, size)
        view = abi.ggml_backend_buffer.from_address(buffer)
        view.buft = address
        view.iface.free_buffer = self._free
        if self._placer is not None:
            view.iface.init_tensor, view.iface.set_tensor = self._init, self._set
        self.buffers[buffer] = memory
        return buffer

    def _on_free(self, buffer: int) -> None:
        self._memory.free(self.buffers.pop(buffer))

    def _on_init_tensor(self, _: int, address: int) -> int:
        assert self._placer is not None
        tensor = Tensor(address)
        if not tensor.is_view:  # a view's data follows from its tensor's
            name = tensor.name
            tensor.lie_at(self._placer.place(name, tensor.size_bytes))
            self.weights[name] = tensor
        return int(abi.GGML_STATUS_SUCCESS)

    def _on_set_tensor(self, _: int, address: int, data: int, offset: int, size: int) -> None:
        assert self._placer is not None
        if self._placer.is_filling():
            self.n_left_out += 1
        else:
            C.memmove(Tensor(address).position + offset, data, size)

    def hold(self, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
        """Put tensors of our own into a new buffer, where the placer says.

        Returns the function that frees the buffer. A failure of the placer is kept in `pending`.
        """
        size = sum(tensor.size_bytes for tensor in tensors.values())
        buffer = self._lib.ggml_backend_buft_alloc_buffer(self.address, size)
        for tensor in tensors.values() if buffer else ():
            tensor.lie_in(buffer)
            self._lib.ggml_backend_buffer_init_tensor(buffer, tensor.address)
        return lambda: self._lib.ggml_backend_buffer_free(buffer)

    def holds(self, tensor: Tensor) -> bool:
        """True if the tensor lies in one of our buffers."""
        return self.holds_at(tensor.address)

    def holds_at(self, address: int) -> bool:
        """True if the tensor at this address lies in one of our buffers."""
        return buffer_at(address) in self.buffers


# In load mode `mmap`, libllama maps a file with MAP_POPULATE, which reads all of it into the page
# cache. It omits MAP_POPULATE if the CPU backend's registry says that the machine was set up for
# NUMA (llama_model_loader::init_mappings). While a model is loaded, our function answers yes.
_QUESTION = b"ggml_backend_cpu_is_numa"
_lock = threading.Lock()  # one loader at a time, because the process has one registry
_always = C.CFUNCTYPE(C.c_bool)(lambda: True)


class NumaQueries:
    """Counts how often libllama asked about NUMA.

    One question per file proves that no mapping was populated.
    """

    def __init__(self) -> None:
        self.times = 0


@contextmanager
def mapping_without_reading(pending: Pending) -> Iterator[NumaQueries]:
    """Let models loaded in this block be mapped without being read.

    Yields the count of libllama's questions. Restores the registry at the end of the block.
    """
    lib = library()
    asked = NumaQueries()
    prototype: Any = abi.PROTOTYPES["ggml_backend_reg_i.get_proc_address"]
    cpu = lib.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    registry = abi.ggml_backend_reg.from_address(lib.ggml_backend_dev_backend_reg(cpu))
    with _lock:
        original: int = registry.iface.get_proc_address
        inner = prototype(original)

        def proc_address(reg: int, name: bytes) -> int | None:
            if name == _QUESTION:
                asked.times += 1
                return C.cast(_always, C.c_void_p).value
            function_address: int | None = inner(reg, name)
            return function_address

        thunk, address = guard(prototype, pending, None, proc_address)
        registry.iface.get_proc_address = address
        try:
            yield asked
        finally:
            registry.iface.get_proc_address = original
            del thunk
