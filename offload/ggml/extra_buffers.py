"""ggml's extra buffer types of the CPU, which store weights in another layout (repacked, AMX).

A tiny product with AMX checks that the library was compiled correctly.
"""

from __future__ import annotations

import ctypes as C
import itertools

import numpy as np

from offload.errors import DeviceFailed
from offload.ggml.graph import Graph
from offload.ggml.library.lib import library
from offload.ggml.tensor import Buffer, new_tensor
from offload.ggml.threads import check, cpu_device

# The product has one row more than a tile, and two tiles of columns.
_N_TOKENS, _N = 17, 64
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


def extra_buffer_types() -> dict[str, int]:
    """Return the addresses of the extra buffer types by name, in libllama's order of preference."""
    lib = library()
    device = cpu_device().address
    registry = lib.ggml_backend_dev_backend_reg(device)
    entry = lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
    if not entry:
        return {}
    types = C.CFUNCTYPE(C.POINTER(C.c_void_p), C.c_void_p)(entry)(device)  # ends with NULL
    addresses = itertools.takewhile(bool, (types[i] for i in itertools.count())) if types else ()
    return {lib.ggml_backend_buft_name(address).decode(): address for address in addresses}


def amx_buffer_type() -> int | None:
    """Return the address of ggml's buffer type for AMX; None if build or processor lacks AMX."""
    return extra_buffer_types().get("AMX")


def amx_product_is_right(buffer_type: int | None = None) -> bool:
    """Compute a product of 17 tokens with AMX. Returns True if every number is exactly right.

    Call it in a child process: a miscompiled library ends the process with SIGSEGV. `buffer_type`
    is the address of a buffer type to use instead of AMX's. Raises DeviceFailed if there is no AMX.
    """
    buffer_type = buffer_type or amx_buffer_type()
    if buffer_type is None:
        raise DeviceFailed("the library or this processor has no AMX")
    lib, device = library(), cpu_device()
    random = np.random.default_rng(1)
    weights = random.integers(-127, 127, (_N, _N)).astype(np.float32)
    inputs = random.integers(-127, 127, (_N_TOKENS, _N)).astype(np.float32)
    inputs[:, ::32] = 127  # so that quantising a block to 8 bits changes no value
    blocks = np.zeros((_N, _N // 32), _Q8_0)
    blocks["scale"], blocks["values"] = 1, weights.reshape(_N, -1, 32)
    out = np.zeros((_N_TOKENS, _N), np.float32)
    repacked = Buffer(buffer_type, 1 << 16, "a tiny product")
    plain = device.allocate(1 << 16, "a tiny product")
    stream = device.open()
    try:
        w = new_tensor("q8_0", (_N, _N, 1, 1), (repacked, 0))
        x = new_tensor("f32", (_N, _N_TOKENS, 1, 1), (plain, 0))
        at = plain, 1 << 15
        product = new_tensor("f32", (_N, _N_TOKENS, 1, 1), at, "MUL_MAT", [w, x])
        check(lib.ggml_backend_buffer_init_tensor(repacked.address, w.address), "a tiny product")
        lib.ggml_backend_tensor_set(w.address, blocks.ctypes.data, 0, blocks.nbytes)
        lib.ggml_backend_tensor_set(x.address, inputs.ctypes.data, 0, inputs.nbytes)
        lib.ggml_backend_cpu_set_n_threads(stream.address, 1)
        check(stream.compute(Graph.of([product])), "a tiny product")
        stream.synchronize()
        lib.ggml_backend_tensor_get(product.address, out.ctypes.data, 0, out.nbytes)
    finally:
        stream.close()
        plain.close()
        repacked.close()
    return bool(np.array_equal(out, inputs @ weights.T))
