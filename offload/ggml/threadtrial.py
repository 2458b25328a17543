"""One tiny product computed by a thread pool, so that its threads exist and have bound themselves.

Whether a decode starts the threads depends on the model and on what the device computes; this does
it always, so that reading affinities back afterwards proves something.
"""

from __future__ import annotations

import ctypes as C

from offload.errors import DeviceFailed
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.library.selftest_functions import Functions
from offload.ggml.threadpool import ThreadPool

_F32 = 0
_N = 64
_ARENA_BYTES = 1 << 20
_N_GRAPH = 8


def run_once(pool: ThreadPool) -> None:
    """Compute a product of 64 rows with all threads of the pool, from the calling thread.

    Takes about 50 us once the threads run. Raises DeviceFailed.
    """
    lib = library()
    call = Functions(lib.structs._lib)
    arena = C.create_string_buffer(_ARENA_BYTES)
    params = abi.ggml_init_params()
    params.mem_size, params.mem_buffer = _ARENA_BYTES, C.addressof(arena)
    context = call.ggml_init(params)
    if not context:
        raise DeviceFailed("ggml_init gave no context to try the threads with")
    device = lib.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    backend = lib.ggml_backend_dev_init(device, None)
    try:
        weights = call.ggml_new_tensor_2d(context, _F32, _N, _N)
        vectors = call.ggml_new_tensor_2d(context, _F32, _N, 1)
        graph = call.ggml_new_graph_custom(context, _N_GRAPH, False)
        call.ggml_build_forward_expand(graph, call.ggml_mul_mat(context, weights, vectors))
        lib.ggml_backend_cpu_set_n_threads(backend, pool.team.n_threads)
        lib.ggml_backend_cpu_set_threadpool(backend, pool.address)
        status = lib.ggml_backend_graph_compute_async(backend, graph)
        if status != abi.GGML_STATUS_SUCCESS:
            raise DeviceFailed(f"trying the threads failed with ggml status {status}")
    finally:
        lib.ggml_backend_free(backend)
        call.ggml_free(context)
