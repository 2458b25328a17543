"""A tiny product computed with AMX, to see whether the library was compiled right."""

from __future__ import annotations

import ctypes as C
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from offload.errors import DeviceFailed
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.library.selftest import Functions

_N = 64  # rows and columns: two tiles of each, two blocks of Q8_0
_N_TOKENS = 17  # a full tile of rows and one more
_CONTEXT_BYTES = 1 << 20
_N_GRAPH = 8
_BLOCK = np.dtype([("scale", "<f2"), ("values", "i1", 32)])  # Q8_0


def amx_buffer_type() -> int | None:
    """ggml's buffer type for weights repacked for AMX; None if build or processor lacks AMX."""
    lib = library()
    device = lib.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    registry = lib.ggml_backend_dev_backend_reg(device)
    entry = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not entry:
        return None
    # Ended by NULL, as llama.cpp's loader reads it.
    found = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(entry)(device)
    i = 0
    while found and found[i]:
        if lib.ggml_backend_buft_name(found[i]) == b"AMX":
            return int(found[i])
        i += 1
    return None


def amx_product_is_right() -> bool:
    """Compute a product of 17 tokens with AMX; True if the numbers, which are exact, are right.

    Call it in a child process: a miscompiled library ends the process with SIGSEGV. Raises
    DeviceFailed without AMX.
    """
    buft = amx_buffer_type()
    if buft is None:
        raise DeviceFailed("the library or this processor has no AMX")
    call = Functions(library().structs._lib)
    random = np.random.default_rng(1)
    weights = random.integers(-127, 127, (_N, _N)).astype(np.float32)
    inputs = random.integers(-127, 127, (_N_TOKENS, _N)).astype(np.float32)
    inputs[:, ::32] = 127  # so that quantising a block of them to 8 bits changes nothing
    blocks = np.zeros((_N, _N // 32), _BLOCK)
    blocks["scale"], blocks["values"] = 1, weights.reshape(_N, -1, 32)
    out = np.zeros((_N_TOKENS, _N), np.float32)
    with _context(call) as repacked, _context(call) as context, _cpu_backend(call) as backend:
        w = call.ggml_new_tensor_2d(repacked, abi.GGML_TYPE_Q8_0, _N, _N)
        x = call.ggml_new_tensor_2d(context, abi.GGML_TYPE_F32, _N, _N_TOKENS)
        product = call.ggml_mul_mat(context, w, x)
        cpu = library().ggml_backend_cpu_buffer_type()
        with _allocated(call, repacked, buft), _allocated(call, context, cpu):
            call.ggml_backend_tensor_set(w, blocks.ctypes.data, 0, blocks.nbytes)
            call.ggml_backend_tensor_set(x, inputs.ctypes.data, 0, inputs.nbytes)
            library().ggml_backend_cpu_set_n_threads(backend, 1)
            _compute(call, context, backend, product)
            call.ggml_backend_tensor_get(product, out.ctypes.data, 0, out.nbytes)
    return bool(np.array_equal(out, inputs @ weights.T))


@contextmanager
def _context(call: Functions) -> Iterator[int]:
    """Memory for a graph and a few tensors, without their data."""
    arena = C.create_string_buffer(_CONTEXT_BYTES)
    params = abi.ggml_init_params()
    params.mem_size, params.mem_buffer = _CONTEXT_BYTES, C.addressof(arena)
    params.no_alloc = True
    context = call.ggml_init(params)
    if not context:
        raise DeviceFailed("ggml_init gave no context for a tiny product")
    try:
        yield context
    finally:
        call.ggml_free(context)


@contextmanager
def _cpu_backend(call: Functions) -> Iterator[int]:
    device = call.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    backend = call.ggml_backend_dev_init(device, None)
    try:
        yield backend
    finally:
        call.ggml_backend_free(backend)


@contextmanager
def _allocated(call: Functions, context: int, buft: int) -> Iterator[None]:
    buffer = call.ggml_backend_alloc_ctx_tensors_from_buft(context, buft)
    if not buffer:
        raise DeviceFailed("no buffer for a tiny product could be allocated")
    try:
        yield
    finally:
        call.ggml_backend_buffer_free(buffer)


def _compute(call: Functions, context: int, backend: int, product: int) -> None:
    graph = call.ggml_new_graph_custom(context, _N_GRAPH, False)
    call.ggml_build_forward_expand(graph, product)
    status = call.ggml_backend_graph_compute(backend, graph)
    if status != abi.GGML_STATUS_SUCCESS:
        raise DeviceFailed(f"computing a tiny product failed with ggml status {status}")
