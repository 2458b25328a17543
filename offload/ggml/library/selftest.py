"""Checks before the structures of abi.py are laid over the installed library's memory.

A stale mirror does not fail: it calls another function. In 0.3.16, for example, the slot of
graph_compute was event_wait's. So the library is checked at load, in this order. Each step is safe
if the steps before it passed:
the version; ctypes' layout against the compiler's; ggml_tensor_overhead(); the type table by name
and block; the CPU device, its registry, buffer type and buffer through mirrored vtables; then a
small graph, whose mirrored fields are compared with the public accessors before it is computed
through the mirrored vtable and its numbers compared with Python's.

The device registry is initialised here, so the environment variables that it reads must be set.
"""

from __future__ import annotations

import ctypes as C
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Protocol

from offload.errors import LibraryMismatch
from offload.ggml.library import abi

P = C.c_void_p
STR = C.c_char_p
SIZE = C.c_size_t
INT = C.c_int
I64 = C.c_int64

# name -> result, *arguments. Names of devices and the like are compared by address, because a
# wrong vtable entry may return no string.
_GRAPH_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ggml_tensor_overhead": (SIZE,),
    "ggml_graph_overhead_custom": (SIZE, SIZE, C.c_bool),
    "ggml_type_name": (STR, INT),
    "ggml_type_size": (SIZE, INT),
    "ggml_blck_size": (I64, INT),
    "ggml_op_name": (STR, INT),
    "ggml_init": (P, abi.ggml_init_params),
    "ggml_free": (None, P),
    "ggml_new_tensor_2d": (P, P, INT, I64, I64),
    "ggml_new_tensor_3d": (P, P, INT, I64, I64, I64),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_view_1d": (P, P, P, I64, SIZE),
    "ggml_scale": (P, P, P, C.c_float),
    "ggml_set_name": (P, P, STR),
    "ggml_set_input": (None, P),
    "ggml_get_data": (P, P),
    "ggml_nbytes": (SIZE, P),
    "ggml_element_size": (SIZE, P),
    "ggml_new_graph_custom": (P, P, SIZE, C.c_bool),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_graph_size": (INT, P),
    "ggml_graph_nodes": (P, P),
    "ggml_graph_node": (P, P, INT),
    "ggml_graph_n_nodes": (INT, P),
    "ggml_threadpool_params_default": (abi.ggml_threadpool_params, INT),
    "ggml_backend_dev_by_type": (P, INT),
    "ggml_backend_dev_name": (P, P),
    "ggml_backend_dev_description": (P, P),
    "ggml_backend_dev_type": (INT, P),
    "ggml_backend_dev_get_props": (None, P, P),
    "ggml_backend_dev_backend_reg": (P, P),
    "ggml_backend_dev_buffer_type": (P, P),
    "ggml_backend_dev_init": (P, P, STR),
    "ggml_backend_reg_name": (P, P),
    "ggml_backend_reg_dev_count": (SIZE, P),
    "ggml_backend_reg_get_proc_address": (P, P, STR),
    "ggml_backend_buft_name": (P, P),
    "ggml_backend_buft_get_alignment": (SIZE, P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (P, P, P),
    "ggml_backend_tensor_set": (None, P, P, SIZE, SIZE),
    "ggml_backend_tensor_get": (None, P, P, SIZE, SIZE),
    "ggml_backend_buffer_get_type": (P, P),
    "ggml_backend_buffer_get_base": (P, P),
    "ggml_backend_buffer_get_size": (SIZE, P),
    "ggml_backend_buffer_get_usage": (INT, P),
    "ggml_backend_buffer_set_usage": (None, P, INT),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_name": (P, P),
    "ggml_backend_guid": (P, P),
    "ggml_backend_graph_compute": (INT, P, P),
    "ggml_backend_free": (None, P),
}


class Functions:
    """The functions of _GRAPH_FUNCTIONS as attributes, for the self-test and single products.

    Handles and names stay addresses, because a wrong vtable entry may return no string.
    """

    def __init__(self, handle: Any) -> None:
        for name, (result, *arguments) in _GRAPH_FUNCTIONS.items():
            try:
                # A prototype of our own: the handle's function objects are shared with llama_cpp.
                function = C.CFUNCTYPE(result, *arguments)((name, handle))
            except AttributeError as e:
                raise LibraryMismatch(f"the installed library has no function {name}") from e
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name} is not in _GRAPH_FUNCTIONS of offload/ggml/library/selftest.py"
        )


# (type, elements per block, bytes per block), as gguf's files have them
_BLOCKS = (
    (abi.GGML_TYPE_F32, 1, 4),
    (abi.GGML_TYPE_F16, 1, 2),
    (abi.GGML_TYPE_BF16, 1, 2),
    (abi.GGML_TYPE_I32, 1, 4),
    (abi.GGML_TYPE_Q4_0, 32, 18),
    (abi.GGML_TYPE_Q8_0, 32, 34),
    (abi.GGML_TYPE_Q4_K, 256, 144),
    (abi.GGML_TYPE_Q6_K, 256, 210),
    (abi.GGML_TYPE_MXFP4, 32, 17),
)


class Loaded(Protocol):
    """The checked part of the loaded library: `structs` is the module llama_cpp.llama_cpp."""

    @property
    def structs(self) -> ModuleType: ...


def check_version(version: str) -> None:
    """Raise LibraryMismatch unless `version` is the release abi.py was generated from."""
    if version != abi.PACKAGE_VERSION:
        raise LibraryMismatch(
            f"llama-cpp-python {version} is installed, but this program is made for exactly"
            f" {abi.PACKAGE_VERSION}: run pip install llama-cpp-python=={abi.PACKAGE_VERSION}"
        )


def check(version: str, lib: Loaded) -> None:
    """Check the installed library against abi.py; takes a few milliseconds.

    Raises LibraryMismatch with one sentence on the first difference.
    """
    check_version(version)
    _check_layout()
    call = Functions(lib.structs._lib)
    overhead = C.sizeof(abi.ggml_object) + C.sizeof(abi.ggml_tensor)
    same("ggml_tensor_overhead()", overhead, call.ggml_tensor_overhead())
    _check_types(call)
    same("default n_threads", 3, call.ggml_threadpool_params_default(3).n_threads)
    device = call.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    if not device:
        raise misfit("it has no CPU device")
    _check_device(call, device)
    with _graph(call) as graph:
        _check_graph(call, device, graph)


def _check_layout() -> None:
    """ctypes lays the structures out as the C compiler did when abi.py was generated."""
    for name, size_bytes in abi.SIZES.items():
        same(f"sizeof({name})", C.sizeof(getattr(abi, name)), size_bytes)
    for key, offset_bytes in abi.OFFSETS.items():
        name, field = key.split(".")
        same(f"offsetof({name}, {field})", getattr(getattr(abi, name), field).offset, offset_bytes)


def _check_types(call: Functions) -> None:
    for name, number in vars(abi).items():
        if name.startswith("GGML_TYPE_") and name != "GGML_TYPE_COUNT":
            found = (call.ggml_type_name(number) or b"").decode().upper()
            same(f"type {number}", name.removeprefix("GGML_TYPE_"), found)
    for number, elements, size_bytes in _BLOCKS:
        block = call.ggml_blck_size(number), call.ggml_type_size(number)
        same(f"the block of type {number}", (elements, size_bytes), block)


def _check_device(call: Functions, device: int) -> None:
    """The CPU device, its registry and its buffer type, seen through the mirror and asked in C."""
    mirror = abi.ggml_backend_device.from_address(device)
    same("the device's registry", mirror.reg, call.ggml_backend_dev_backend_reg(device))
    registry = abi.ggml_backend_reg.from_address(mirror.reg)
    same("api_version", abi.GGML_BACKEND_API_VERSION, registry.api_version)

    def of(name: str) -> Any:
        return entry("ggml_backend_device_i", mirror.iface, name)

    same("the device's name", of("get_name")(device), call.ggml_backend_dev_name(device))
    description = call.ggml_backend_dev_description(device)
    same("the description", of("get_description")(device), description)
    same("the device's type", of("get_type")(device), call.ggml_backend_dev_type(device))
    buft = call.ggml_backend_dev_buffer_type(device)
    same("the device's buffer type", of("get_buffer_type")(device), buft)
    same("supports_buft", of("supports_buft")(device, buft), True)

    props = abi.ggml_backend_dev_props()
    call.ggml_backend_dev_get_props(device, C.addressof(props))
    same("the name in props", props.name, call.ggml_backend_dev_name(device))
    same("the type in props", props.type, abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    same("whether there are events", props.caps.events, bool(mirror.iface.event_new))
    host_ptr = bool(mirror.iface.buffer_from_host_ptr)
    same("caps.buffer_from_host_ptr", props.caps.buffer_from_host_ptr, host_ptr)
    _check_registry(call, device, mirror.reg, registry.iface)
    _check_buffer_type(call, buft)


def _check_registry(call: Functions, device: int, registry: int, iface: Any) -> None:
    def of(name: str) -> Any:
        return entry("ggml_backend_reg_i", iface, name)

    same("the registry", of("get_name")(registry), call.ggml_backend_reg_name(registry))
    n_devices = call.ggml_backend_reg_dev_count(registry)
    same("the registry's devices", of("get_device_count")(registry), n_devices)
    same("the registry's device 0", of("get_device")(registry, 0), device)
    name = b"ggml_backend_set_n_threads"
    found = call.ggml_backend_reg_get_proc_address(registry, name)
    same("get_proc_address", of("get_proc_address")(registry, name), found)


def _check_buffer_type(call: Functions, buft: int) -> None:
    iface = abi.ggml_backend_buffer_type.from_address(buft).iface

    def of(name: str) -> Any:
        return entry("ggml_backend_buffer_type_i", iface, name)

    same("the buffer type", of("get_name")(buft), call.ggml_backend_buft_name(buft))
    alignment = call.ggml_backend_buft_get_alignment(buft)
    same("the alignment", of("get_alignment")(buft), alignment)
    same("is_host", of("is_host")(buft), True)


# -- a small graph -----------------------------------------------------------------------------

_N_IN, _N_OUT, _N_EXPERTS, _N_TOKENS = 4, 3, 2, 2
_VIEW_OFFSET_BYTES = 8
_N_VIEW = _N_OUT * _N_TOKENS - _VIEW_OFFSET_BYTES // 4
_N_GRAPH = 16
_SCALE = 2.0
_IDS = (1, 0)  # the expert of each token
_WEIGHTS = tuple(float(i % 7 - 3) for i in range(_N_IN * _N_OUT * _N_EXPERTS))
_INPUT = tuple(float(i % 5 - 2) for i in range(_N_IN * _N_TOKENS))


class _Graph:
    """scale(view(mul_mat_id(experts, input, ids))) and mul_mat(dense, rows); addresses in C."""

    def __init__(self, call: Functions, context: int) -> None:
        f32 = abi.GGML_TYPE_F32
        self.experts = call.ggml_new_tensor_3d(context, f32, _N_IN, _N_OUT, _N_EXPERTS)
        self.input = call.ggml_new_tensor_3d(context, f32, _N_IN, 1, _N_TOKENS)
        self.ids = call.ggml_new_tensor_2d(context, abi.GGML_TYPE_I32, 1, _N_TOKENS)
        self.dense = call.ggml_new_tensor_2d(context, f32, _N_IN, _N_OUT)
        self.rows = call.ggml_new_tensor_2d(context, f32, _N_IN, _N_TOKENS)
        self.routed = call.ggml_mul_mat_id(context, self.experts, self.input, self.ids)
        self.view = call.ggml_view_1d(context, self.routed, _N_VIEW, _VIEW_OFFSET_BYTES)
        self.scaled = call.ggml_scale(context, self.view, _SCALE)
        self.product = call.ggml_mul_mat(context, self.dense, self.rows)
        self.leaves = {self.experts, self.input, self.ids, self.dense, self.rows}
        self.nodes = [self.routed, self.view, self.scaled, self.product]
        call.ggml_set_name(self.experts, b"experts")
        call.ggml_set_input(self.input)
        self.address = call.ggml_new_graph_custom(context, _N_GRAPH, False)
        call.ggml_build_forward_expand(self.address, self.scaled)
        call.ggml_build_forward_expand(self.address, self.product)


@contextmanager
def _graph(call: Functions) -> Iterator[tuple[int, _Graph]]:
    """The context that holds the graph, and the graph."""
    graph_bytes = call.ggml_graph_overhead_custom(_N_GRAPH, False)
    params = abi.ggml_init_params()
    params.mem_size = _N_GRAPH * call.ggml_tensor_overhead() + graph_bytes
    params.no_alloc = True
    context = call.ggml_init(params)
    if not context:
        raise misfit("ggml_init gave no context")
    try:
        yield context, _Graph(call, context)
    finally:
        call.ggml_free(context)


def _check_graph(call: Functions, device: int, held: tuple[int, _Graph]) -> None:
    context, g = held
    _check_nodes(call, g)
    _check_tensors(call, g)
    buft = call.ggml_backend_dev_buffer_type(device)
    buffer = call.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
    if not buffer:
        raise misfit("it allocates no buffer for a graph of 9 tensors")
    try:
        _check_buffer(call, buffer, g)
        _check_compute(call, device, g)
    finally:
        call.ggml_backend_buffer_free(buffer)


def _check_nodes(call: Functions, g: _Graph) -> None:
    """Compare ggml_cgraph by mirror and by accessors; each pointer before its target."""
    mirror = abi.ggml_cgraph.from_address(g.address)
    same("graph.size", mirror.size, call.ggml_graph_size(g.address))
    same("graph.n_nodes", mirror.n_nodes, call.ggml_graph_n_nodes(g.address))
    same("graph.nodes", mirror.nodes, call.ggml_graph_nodes(g.address))
    nodes = list((C.c_void_p * mirror.n_nodes).from_address(mirror.nodes))
    same("the nodes", nodes, [call.ggml_graph_node(g.address, i) for i in range(len(nodes))])
    same("the nodes built", nodes, g.nodes)
    same("graph.n_leafs", mirror.n_leafs, len(g.leaves))
    same("the leaves", set((C.c_void_p * mirror.n_leafs).from_address(mirror.leafs)), g.leaves)
    same("graph.uid", mirror.uid, 0)
    same("gradients", (mirror.grads, mirror.grad_accs), (None, None))
    seen = mirror.visited_hash_set
    slots = list((C.c_void_p * seen.size).from_address(seen.keys))
    bits = (C.c_uint32 * (-(-seen.size // 32))).from_address(seen.used)
    # A slot without its bit keeps whatever was in memory, which may be one of these addresses.
    at = {slots[i]: i for i in range(len(slots)) if bits[i // 32] >> i % 32 & 1}
    same("the visited tensors", set(at), g.leaves | set(g.nodes))
    counts = (C.c_int32 * len(slots)).from_address(mirror.use_counts)
    same("the uses of a node", counts[at[g.view]], 1)
    same("the uses of the last node", counts[at[g.product]], 0)


def _check_tensors(call: Functions, g: _Graph) -> None:
    """ggml_tensor through the mirror against how the tensors were made."""

    def at(address: int) -> Any:
        return abi.ggml_tensor.from_address(address)

    experts, routed, view, scaled = at(g.experts), at(g.routed), at(g.view), at(g.scaled)
    for address, op in zip(g.nodes, ("MUL_MAT_ID", "VIEW", "SCALE", "MUL_MAT"), strict=True):
        number = at(address).op
        if not 0 <= number < abi.GGML_OP_COUNT:
            same(f"the number of {op}", number, f"below {abi.GGML_OP_COUNT}")
        same("a node's operation", op, call.ggml_op_name(number).decode())
        same("the compute flag", at(address).flags, abi.GGML_TENSOR_FLAG_COMPUTE)
    same("type", (experts.type, at(g.ids).type), (abi.GGML_TYPE_F32, abi.GGML_TYPE_I32))
    same("ne", list(experts.ne), [_N_IN, _N_OUT, _N_EXPERTS, 1])
    same("ne of a node", list(routed.ne), [_N_OUT, 1, _N_TOKENS, 1])
    same("nb[0]", experts.nb[0], call.ggml_element_size(g.experts))
    same("nb[3]", experts.nb[3], call.ggml_nbytes(g.experts))
    same("src", list(routed.src)[:4], [g.experts, g.input, g.ids, None])
    same("view_src", (view.view_src, scaled.view_src), (g.routed, None))
    same("view_offs", view.view_offs, _VIEW_OFFSET_BYTES)
    same("op_params", bytes(scaled.op_params)[:4], struct.pack("=f", _SCALE))
    same("flags", at(g.input).flags, abi.GGML_TENSOR_FLAG_INPUT)
    same("name", experts.name, b"experts")
    same("extra and buffer", (experts.extra, experts.buffer), (None, None))


def _check_buffer(call: Functions, buffer: int, g: _Graph) -> None:
    mirror = abi.ggml_backend_buffer.from_address(buffer)
    same("the buffer's type", mirror.buft, call.ggml_backend_buffer_get_type(buffer))
    same("the buffer's size", mirror.size, call.ggml_backend_buffer_get_size(buffer))
    call.ggml_backend_buffer_set_usage(buffer, abi.GGML_BACKEND_BUFFER_USAGE_COMPUTE)
    same("the buffer's usage", mirror.usage, call.ggml_backend_buffer_get_usage(buffer))
    base = call.ggml_backend_buffer_get_base(buffer)
    get_base = entry("ggml_backend_buffer_i", mirror.iface, "get_base")
    same("the buffer's base", get_base(buffer), base)
    routed = abi.ggml_tensor.from_address(g.routed)
    same("tensor.buffer", routed.buffer, buffer)
    same("tensor.data", routed.data, call.ggml_get_data(g.routed))
    if not base <= routed.data <= base + mirror.size - call.ggml_nbytes(g.routed):
        same("tensor.data", routed.data, f"inside [{base}, {base + mirror.size})")
    view = abi.ggml_tensor.from_address(g.view)
    same("data of a view", view.data, routed.data + _VIEW_OFFSET_BYTES)


def _check_compute(call: Functions, device: int, g: _Graph) -> None:
    """The graph, computed through the mirrored vtable, gives Python's numbers."""
    iface = abi.ggml_backend_device.from_address(device).iface
    for node in g.nodes:
        supported = entry("ggml_backend_device_i", iface, "supports_op")(device, node)
        same("supports_op", supported, True)
    _write(g.experts, _WEIGHTS)
    _write(g.input, _INPUT)
    _write(g.dense, _WEIGHTS[: _N_IN * _N_OUT])
    _write(g.rows, _INPUT)
    C.memmove(abi.ggml_tensor.from_address(g.ids).data, struct.pack("=2i", *_IDS), 8)
    backend = call.ggml_backend_dev_init(device, None)
    if not backend:
        raise misfit("the CPU device opens no backend")
    try:
        mirror = abi.ggml_backend.from_address(backend)
        same("the backend's device", mirror.device, device)
        same("the backend's guid", mirror.guid, call.ggml_backend_guid(backend))
        name = entry("ggml_backend_i", mirror.iface, "get_name")(backend)
        same("the backend's name", name, call.ggml_backend_name(backend))
        registry = call.ggml_backend_dev_backend_reg(device)
        address = call.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        C.CFUNCTYPE(None, C.c_void_p, C.c_int)(address)(
            backend, 1
        )  # a pool of threads is not worth starting
        compute = entry("ggml_backend_i", mirror.iface, "graph_compute")
        same("graph_compute", compute(backend, g.address), abi.GGML_STATUS_SUCCESS)
    finally:
        call.ggml_backend_free(backend)
    routed = [x for token, expert in enumerate(_IDS) for x in _row(token, expert)]
    dense = [x for token in range(_N_TOKENS) for x in _row(token, 0)]
    same("mul_mat_id", _read(g.routed, len(routed)), routed)
    same("mul_mat", _read(g.product, len(dense)), dense)
    same("scale", _read(g.scaled, _N_VIEW), [x * _SCALE for x in routed[-_N_VIEW:]])


def _row(token: int, expert: int) -> list[float]:
    """The expert's weights times the token's input; small whole numbers, so exact in f32."""
    x = _INPUT[token * _N_IN :][:_N_IN]
    rows = (_WEIGHTS[(expert * _N_OUT + row) * _N_IN :][:_N_IN] for row in range(_N_OUT))
    return [sum(a * b for a, b in zip(w, x, strict=True)) for w in rows]


def _write(tensor: int, values: tuple[float, ...]) -> None:
    data = struct.pack(f"={len(values)}f", *values)
    C.memmove(abi.ggml_tensor.from_address(tensor).data, data, len(data))


def _read(tensor: int, n: int) -> list[float]:
    return list((C.c_float * n).from_address(abi.ggml_tensor.from_address(tensor).data))


# -- saying no ---------------------------------------------------------------------------------


def same(what: str, mirror: object, library: object) -> None:
    """Raise LibraryMismatch unless the mirror's value equals the library's."""
    if mirror != library:
        raise misfit(f"{what} is {mirror!r} by the mirror, {library!r} by the library")


def misfit(what: str) -> LibraryMismatch:
    return LibraryMismatch(
        f"offload/ggml/library/abi.py does not fit the installed llama-cpp-python"
        f" {abi.PACKAGE_VERSION}: {what}"
    )


def entry(struct_name: str, iface: Any, name: str) -> Any:
    """Function at an entry of a mirrored vtable."""
    address = getattr(iface, name)
    if not address:
        raise misfit(f"{struct_name}.{name} of the CPU device is empty")
    return abi.PROTOTYPES[f"{struct_name}.{name}"](address)
