"""Checks before the structures of abi.py are laid over the installed library's memory.

A stale mirror raises no error, but calls the wrong function. In 0.3.16, for example, the slot of
graph_compute held event_wait. The library is therefore checked at load. The order is: the version;
the size of a tensor; the types; the CPU device and its registry through mirrored vtables; a small
graph. Each step is safe if the steps before it passed. The graph's mirrored fields are compared
with the public accessors. The graph is then computed through the mirrored vtable, and its numbers
are compared with Python's. scripts/gen-abi has compared the layout with a C compiler's.
"""

from __future__ import annotations

import ctypes as C
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from offload.errors import LibraryMismatch
from offload.ggml.library import abi

# Types whose block [elements, bytes] is compared. gguf's Q8_1, which no file holds, differs.
_BLOCKS = ("F32", "F16", "BF16", "I32", "Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4")


def check_version(version: str) -> None:
    """Raise LibraryMismatch unless abi.py was generated from release `version`."""
    if version != abi.PACKAGE_VERSION:
        raise LibraryMismatch(
            f"llama-cpp-python {version} is installed, but this program is made for exactly"
            f" {abi.PACKAGE_VERSION}: run pip install llama-cpp-python=={abi.PACKAGE_VERSION}"
        )


def check(lib: Any) -> None:
    """Check the installed library (a Library) against abi.py; takes a few milliseconds.

    Initialises the device registry, so the environment variables that it reads must be set. Raises
    LibraryMismatch with one sentence on the first difference.
    """
    overhead = C.sizeof(abi.ggml_object) + C.sizeof(abi.ggml_tensor)
    same("ggml_tensor_overhead()", overhead, lib.ggml_tensor_overhead())
    for kind in GGMLQuantizationType:
        type_name = (lib.ggml_type_name(kind) or b"").decode().upper()
        same(f"type {int(kind)}", kind.name, type_name)
        if kind.name in _BLOCKS:
            block = lib.ggml_blck_size(kind), lib.ggml_type_size(kind)
            same(f"the block of {kind.name}", GGML_QUANT_SIZES[kind], block)
    threads = abi.ggml_threadpool_params()
    lib.ggml_threadpool_params_init(C.addressof(threads), 3)
    same("n_threads", threads.n_threads, 3)
    device = lib.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    if not device:
        raise misfit("it has no CPU device")
    _check_device(lib, device)
    with _allocated_graph(lib, device) as (graph, buffer):
        _check_nodes(lib, graph)
        _check_tensors(lib, graph)
        _check_buffer(lib, buffer, graph)
        _check_compute(lib, device, graph)


def _check_device(lib: Any, device: int) -> None:
    """Compare what mirror and C functions say of the CPU device, its registry and buffer type."""
    mirror = abi.ggml_backend_device.from_address(device)
    same("the device's registry", mirror.reg, lib.ggml_backend_dev_backend_reg(device))
    call = _entries("ggml_backend_device_i", mirror.iface)
    kind, buft = lib.ggml_backend_dev_type(device), lib.ggml_backend_dev_buffer_type(device)
    same("the device's type", call("get_type")(device), kind)
    same("the device's buffer type", call("get_buffer_type")(device), buft)
    same("supports_buft", call("supports_buft")(device, buft), True)
    props = abi.ggml_backend_dev_props()
    lib.ggml_backend_dev_get_props(device, C.addressof(props))
    names = props.name, props.description
    mirrored = call("get_name")(device), call("get_description")(device)
    same("the device's name and description", mirrored, names)
    name = lib.ggml_backend_dev_name(device)
    same("the name in props", C.string_at(props.name, len(name)), name)
    same("the type in props", props.type, kind)
    same("whether there are events", props.caps.events, bool(mirror.iface.event_new))
    host_ptr = bool(mirror.iface.buffer_from_host_ptr)
    same("caps.buffer_from_host_ptr", props.caps.buffer_from_host_ptr, host_ptr)

    registry = abi.ggml_backend_reg.from_address(mirror.reg)
    same("api_version", abi.GGML_BACKEND_API_VERSION, registry.api_version)
    call = _entries("ggml_backend_reg_i", registry.iface)
    same("the registry's devices", call("get_device_count")(mirror.reg), 1)
    same("the registry's device 0", call("get_device")(mirror.reg, 0), device)
    wanted = b"ggml_backend_set_n_threads"
    address = lib.ggml_backend_reg_get_proc_address(mirror.reg, wanted)
    same("get_proc_address", call("get_proc_address")(mirror.reg, wanted), address)

    call = _entries(
        "ggml_backend_buffer_type_i", abi.ggml_backend_buffer_type.from_address(buft).iface
    )
    same("the alignment", call("get_alignment")(buft), lib.ggml_backend_buft_get_alignment(buft))
    same("is_host", call("is_host")(buft), True)


# -- a small graph -----------------------------------------------------------------------------

_N_IN, _N_OUT, _N_EXPERTS, _N_TOKENS = 4, 3, 2, 2
_VIEW_OFFSET_BYTES = 8
_N_VIEW = _N_OUT * _N_TOKENS - _VIEW_OFFSET_BYTES // 4
_N_GRAPH = 16  # most nodes of the graph
_CONTEXT_BYTES = 1 << 16
_SCALE = 2.0
_IDS = (1, 0)  # the expert of each token
_WEIGHTS = tuple(float(i % 7 - 3) for i in range(_N_IN * _N_OUT * _N_EXPERTS))
_INPUT = tuple(float(i % 5 - 2) for i in range(_N_IN * _N_TOKENS))


class _TestGraph:
    """A graph in C of scale(view(mul_mat_id(experts, input, ids))) and mul_mat(dense, rows)."""

    def __init__(self, lib: Any, context: int) -> None:
        def tensor(kind: GGMLQuantizationType, *shape: int) -> Any:
            return lib.ggml_new_tensor_3d(context, kind, *shape)

        f32, i32 = GGMLQuantizationType.F32, GGMLQuantizationType.I32
        self.experts = tensor(f32, _N_IN, _N_OUT, _N_EXPERTS)
        self.input = tensor(f32, _N_IN, 1, _N_TOKENS)
        self.ids = tensor(i32, 1, _N_TOKENS, 1)
        self.dense = tensor(f32, _N_IN, _N_OUT, 1)
        self.rows = tensor(f32, _N_IN, _N_TOKENS, 1)
        self.routed = lib.ggml_mul_mat_id(context, self.experts, self.input, self.ids)
        self.view = lib.ggml_view_1d(context, self.routed, _N_VIEW, _VIEW_OFFSET_BYTES)
        self.scaled = lib.ggml_scale(context, self.view, _SCALE)
        self.product = lib.ggml_mul_mat(context, self.dense, self.rows)
        self.leaves = {self.experts, self.input, self.ids, self.dense, self.rows}
        self.nodes = [self.routed, self.view, self.scaled, self.product]
        lib.ggml_set_name(self.experts, b"experts")
        lib.ggml_set_input(self.input)
        self.address = lib.ggml_new_graph_custom(context, _N_GRAPH, False)
        lib.ggml_build_forward_expand(self.address, self.scaled)
        lib.ggml_build_forward_expand(self.address, self.product)


@contextmanager
def _allocated_graph(lib: Any, device: int) -> Iterator[tuple[_TestGraph, int]]:
    """Yield the graph, whose tensors lie in a buffer."""
    context = lib.ggml_init(abi.ggml_init_params(_CONTEXT_BYTES, None, True))
    try:
        graph = _TestGraph(lib, context)
        buft = lib.ggml_backend_dev_buffer_type(device)
        buffer = lib.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
        try:
            yield graph, buffer
        finally:
            lib.ggml_backend_buffer_free(buffer)
    finally:
        lib.ggml_free(context)


def _check_nodes(lib: Any, g: _TestGraph) -> None:
    """Compare ggml_cgraph with its accessors. Each pointer is checked before it is followed."""
    mirror = abi.ggml_cgraph.from_address(g.address)
    same("graph.size", mirror.size, lib.ggml_graph_size(g.address))
    same("graph.n_nodes", mirror.n_nodes, lib.ggml_graph_n_nodes(g.address))
    same("graph.nodes", mirror.nodes, lib.ggml_graph_nodes(g.address))
    same("the nodes", list((C.c_void_p * mirror.n_nodes).from_address(mirror.nodes)), g.nodes)
    same("graph.n_leafs", mirror.n_leafs, len(g.leaves))
    same("the leaves", set((C.c_void_p * mirror.n_leafs).from_address(mirror.leafs)), g.leaves)
    same("graph.uid", mirror.uid, 0)
    same("gradients", (mirror.grads, mirror.grad_accs), (None, None))
    seen = mirror.visited_hash_set
    keys = list((C.c_void_p * seen.size).from_address(seen.keys))
    bits = (C.c_uint32 * (-(-seen.size // 32))).from_address(seen.used)
    # A key whose bit is not set was never written. It may hold one of these addresses by chance.
    at = {keys[i]: i for i in range(len(keys)) if bits[i // 32] >> i % 32 & 1}
    same("the visited tensors", set(at), g.leaves | set(g.nodes))
    counts = (C.c_int32 * len(keys)).from_address(mirror.use_counts)
    same("the uses of two nodes", (counts[at[g.view]], counts[at[g.product]]), (1, 0))


def _check_tensors(lib: Any, g: _TestGraph) -> None:
    """Compare ggml_tensor, read through the mirror, with how the tensors were made."""
    experts, routed, view, scaled = map(_tensor, (g.experts, g.routed, g.view, g.scaled))
    for address, op in zip(g.nodes, ("MUL_MAT_ID", "VIEW", "SCALE", "MUL_MAT"), strict=True):
        number = _tensor(address).op
        if not 0 <= number < abi.GGML_OP_COUNT:
            same(f"the number of {op}", number, f"below {abi.GGML_OP_COUNT}")
        same("a node's operation", op, lib.ggml_op_name(number).decode())
        same("the compute flag", _tensor(address).flags, abi.GGML_TENSOR_FLAG_COMPUTE)
    f32, i32 = GGMLQuantizationType.F32, GGMLQuantizationType.I32
    same("type", (experts.type, _tensor(g.ids).type), (f32, i32))
    same("ne", list(experts.ne), [_N_IN, _N_OUT, _N_EXPERTS, 1])
    same("ne of a node", list(routed.ne), [_N_OUT, 1, _N_TOKENS, 1])
    same("nb", (experts.nb[0], experts.nb[3]), (4, lib.ggml_nbytes(g.experts)))
    same("src", list(routed.src)[:4], [g.experts, g.input, g.ids, None])
    same("view_src", (view.view_src, scaled.view_src), (g.routed, None))
    same("view_offs", view.view_offs, _VIEW_OFFSET_BYTES)
    same("op_params", bytes(scaled.op_params)[:4], struct.pack("=f", _SCALE))
    same("flags", _tensor(g.input).flags, abi.GGML_TENSOR_FLAG_INPUT)
    same("name", experts.name, b"experts")
    same("extra", experts.extra, None)


def _check_buffer(lib: Any, buffer: int, g: _TestGraph) -> None:
    mirror = abi.ggml_backend_buffer.from_address(buffer)
    same("the buffer's type", mirror.buft, lib.ggml_backend_buffer_get_type(buffer))
    same("the buffer's size", mirror.size, lib.ggml_backend_buffer_get_size(buffer))
    base = lib.ggml_backend_buffer_get_base(buffer)
    call = _entries("ggml_backend_buffer_i", mirror.iface)
    same("the buffer's base", call("get_base")(buffer), base)
    routed = _tensor(g.routed)
    same("tensor.buffer", routed.buffer, buffer)
    inside = routed.data is not None and 0 <= routed.data - base < mirror.size
    same("whether tensor.data is in the buffer", inside, True)
    same("data of a view", _tensor(g.view).data, routed.data + _VIEW_OFFSET_BYTES)


def _check_compute(lib: Any, device: int, g: _TestGraph) -> None:
    """Compute the graph through the mirrored vtable, and compare its numbers with Python's."""
    call = _entries("ggml_backend_device_i", abi.ggml_backend_device.from_address(device).iface)
    for node in g.nodes:
        same("supports_op", call("supports_op")(device, node), True)
    _write(g.experts, _WEIGHTS)
    _write(g.input, _INPUT)
    _write(g.dense, _WEIGHTS[: _N_IN * _N_OUT])
    _write(g.rows, _INPUT)
    C.memmove(_tensor(g.ids).data, struct.pack("=2i", *_IDS), 8)
    backend = lib.ggml_backend_dev_init(device, None)
    try:
        mirror = abi.ggml_backend.from_address(backend)
        same("the backend's device", mirror.device, device)
        same("the backend's guid", mirror.guid, lib.ggml_backend_guid(backend))
        lib.ggml_backend_cpu_set_n_threads(backend, 1)  # threads are not worth starting
        compute = _entries("ggml_backend_i", mirror.iface)("graph_compute")
        same("graph_compute", compute(backend, g.address), abi.GGML_STATUS_SUCCESS)
    finally:
        lib.ggml_backend_free(backend)
    routed = [x for token, expert in enumerate(_IDS) for x in _row(token, expert)]
    dense = [x for token in range(_N_TOKENS) for x in _row(token, 0)]
    same("mul_mat_id", _read(g.routed, len(routed)), routed)
    same("mul_mat", _read(g.product, len(dense)), dense)
    same("scale", _read(g.scaled, _N_VIEW), [x * _SCALE for x in routed[-_N_VIEW:]])


def _row(token: int, expert: int) -> list[float]:
    """Return the expert's weights times the token's input. Small whole numbers are exact in f32."""
    x = _INPUT[token * _N_IN :][:_N_IN]
    rows = (_WEIGHTS[(expert * _N_OUT + row) * _N_IN :][:_N_IN] for row in range(_N_OUT))
    return [sum(a * b for a, b in zip(w, x, strict=True)) for w in rows]


def _tensor(address: int) -> Any:
    return abi.ggml_tensor.from_address(address)


def _write(tensor: int, values: tuple[float, ...]) -> None:
    data = struct.pack(f"={len(values)}f", *values)
    C.memmove(_tensor(tensor).data, data, len(data))


def _read(tensor: int, n: int) -> list[float]:
    return list((C.c_float * n).from_address(_tensor(tensor).data))


# -- refusals ----------------------------------------------------------------------------------


def same(what: str, mirror: object, library: object) -> None:
    """Raise LibraryMismatch unless the mirror's value equals the library's."""
    if mirror != library:
        raise misfit(f"{what} is {mirror!r} by the mirror, {library!r} by the library")


def misfit(what: str) -> LibraryMismatch:
    return LibraryMismatch(
        f"offload/ggml/library/abi.py does not fit the installed llama-cpp-python"
        f" {abi.PACKAGE_VERSION}: {what}"
    )


def _entries(struct_name: str, iface: Any) -> Any:
    """Return a function that finds a function of a mirrored vtable by name."""

    def entry(name: str) -> Any:
        address = getattr(iface, name)
        if not address:
            raise misfit(f"{struct_name}.{name} of the CPU device is empty")
        return abi.PROTOTYPES[f"{struct_name}.{name}"](address)

    return entry
