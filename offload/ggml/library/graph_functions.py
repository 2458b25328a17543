"""Functions that build a graph by hand.

Only the self-test and product.py do that, so these are not in lib.py's table.
"""

from __future__ import annotations

import ctypes as C
from typing import Any

from offload.errors import LibraryMismatch
from offload.ggml.library import abi

P = C.c_void_p
STR = C.c_char_p
SIZE = C.c_size_t
INT = C.c_int
I64 = C.c_int64

# name -> result, *arguments. Names of devices and the like are compared by address: behind a
# wrong vtable entry there may be no string to read.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
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
    """The functions of _FUNCTIONS as attributes, resolved through libllama's own handle."""

    def __init__(self, handle: Any) -> None:
        for name, (result, *arguments) in _FUNCTIONS.items():
            try:
                # A prototype of our own: the handle's function objects are shared with llama_cpp.
                function = C.CFUNCTYPE(result, *arguments)((name, handle))
            except AttributeError as e:
                raise LibraryMismatch(f"the installed library has no function {name}") from e
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name} is not in the table of offload/ggml/library/graph_functions.py"
        )
