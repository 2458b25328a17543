"""Loads the installed libllama and libggml, declares their functions, and checks errors.

Every symbol is resolved through libllama's own handle. Opening lib/libggml.so by path would map a
second copy with a device registry of its own, and a plain pip install has such copies twice.
"""

from __future__ import annotations

import ctypes as C
import functools
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from offload.errors import DeviceFailed, LibraryMismatch
from offload.ggml.library import abi
from offload.ggml.library.abi import BOOL, I32, I64, INT, SIZE, STR, U32, P

F32 = C.c_float
HANDLE = object()  # a pointer that is never NULL: NULL raises DeviceFailed


# Results and arguments by name of the function.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    # devices and backends
    "ggml_backend_dev_count": (SIZE,),
    "ggml_backend_dev_get": (HANDLE, SIZE),
    "ggml_backend_dev_by_type": (P, INT),
    "ggml_backend_load_all_from_path": (None, STR),
    "ggml_backend_dev_name": (STR, P),
    "ggml_backend_dev_description": (STR, P),
    "ggml_backend_dev_type": (INT, P),
    "ggml_backend_dev_memory": (None, P, C.POINTER(SIZE), C.POINTER(SIZE)),
    "ggml_backend_dev_get_props": (None, P, P),
    "ggml_backend_dev_init": (HANDLE, P, STR),
    "ggml_backend_dev_buffer_type": (HANDLE, P),
    "ggml_backend_dev_host_buffer_type": (P, P),
    "ggml_backend_dev_supports_op": (BOOL, P, P),
    "ggml_backend_dev_supports_buft": (BOOL, P, P),
    "ggml_backend_dev_backend_reg": (HANDLE, P),
    "ggml_backend_reg_by_name": (P, STR),
    "ggml_backend_reg_dev_count": (SIZE, P),
    "ggml_backend_reg_dev_get": (HANDLE, P, SIZE),
    "ggml_backend_reg_get_proc_address": (P, P, STR),
    "ggml_backend_free": (None, P),
    "ggml_backend_synchronize": (None, P),
    "ggml_backend_graph_compute_async": (INT, P, P),
    "ggml_backend_tensor_set_async": (None, P, P, P, SIZE, SIZE),
    "ggml_backend_tensor_get_async": (None, P, P, P, SIZE, SIZE),
    "ggml_backend_tensor_set": (None, P, P, SIZE, SIZE),
    "ggml_backend_tensor_get": (None, P, P, SIZE, SIZE),
    "ggml_backend_event_new": (P, P),
    "ggml_backend_event_free": (None, P),
    "ggml_backend_event_record": (None, P, P),
    "ggml_backend_event_wait": (None, P, P),
    "ggml_backend_event_synchronize": (None, P),
    "ggml_backend_buft_alloc_buffer": (P, P, SIZE),
    "ggml_backend_buft_get_alignment": (SIZE, P),
    "ggml_backend_buft_name": (STR, P),
    "ggml_backend_buffer_init_tensor": (INT, P, P),
    "ggml_backend_buffer_get_base": (HANDLE, P),
    "ggml_backend_buffer_get_size": (SIZE, P),
    "ggml_backend_buffer_get_alloc_size": (SIZE, P, P),
    "ggml_backend_buffer_get_type": (P, P),
    "ggml_backend_buffer_get_usage": (INT, P),
    "ggml_backend_buffer_free": (None, P),
    "ggml_backend_buffer_clear": (None, P, C.c_uint8),
    "ggml_backend_buffer_is_host": (BOOL, P),
    "ggml_backend_cpu_buffer_type": (HANDLE,),
    "ggml_backend_cpu_buffer_from_ptr": (HANDLE, P, SIZE),
    "ggml_backend_cpu_set_n_threads": (None, P, INT),
    # threads and nodes
    "ggml_threadpool_params_init": (None, P, INT),
    "ggml_threadpool_new": (HANDLE, P),
    "ggml_threadpool_free": (None, P),
    "ggml_backend_cpu_set_threadpool": (None, P, P),
    "ggml_numa_init": (None, INT),
    "ggml_is_numa": (BOOL,),
    # tensors and graphs
    "ggml_set_abort_callback": (P, P),
    "ggml_op_name": (STR, INT),
    "ggml_type_name": (STR, INT),
    "ggml_blck_size": (I64, INT),
    "ggml_type_size": (SIZE, INT),
    "ggml_row_size": (SIZE, INT, I64),
    "ggml_nbytes": (SIZE, P),
    "ggml_tensor_overhead": (SIZE,),
    "ggml_graph_size": (INT, P),
    "ggml_graph_nodes": (P, P),
    "ggml_graph_n_nodes": (INT, P),
    # ggml's own tensors and graphs, for the self-test
    "ggml_init": (HANDLE, abi.ggml_init_params),
    "ggml_free": (None, P),
    "ggml_new_tensor_3d": (P, P, INT, I64, I64, I64),
    "ggml_mul_mat": (P, P, P, P),
    "ggml_mul_mat_id": (P, P, P, P, P),
    "ggml_view_1d": (P, P, P, I64, SIZE),
    "ggml_scale": (P, P, P, F32),
    "ggml_set_name": (P, P, STR),
    "ggml_set_input": (None, P),
    "ggml_new_graph_custom": (P, P, SIZE, BOOL),
    "ggml_build_forward_expand": (None, P, P),
    "ggml_backend_alloc_ctx_tensors_from_buft": (HANDLE, P, P),
    "ggml_backend_guid": (P, P),
    # model files
    "gguf_free": (None, P),
    "gguf_get_n_kv": (I64, P),
    "gguf_get_key": (STR, P, I64),
    "gguf_find_key": (I64, P, STR),
    "gguf_get_kv_type": (INT, P, I64),
    "gguf_get_arr_type": (INT, P, I64),
    "gguf_get_arr_n": (SIZE, P, I64),
    "gguf_get_arr_data": (P, P, I64),
    "gguf_get_arr_str": (STR, P, I64, SIZE),
    "gguf_get_val_str": (STR, P, I64),
    "gguf_get_val_data": (P, P, I64),
    "gguf_get_n_tensors": (I64, P),
    "gguf_get_data_offset": (SIZE, P),
    "gguf_get_tensor_name": (STR, P, I64),
    "gguf_get_tensor_offset": (SIZE, P, I64),
    "gguf_get_tensor_ne": (C.POINTER(I64), P, I64),
    "gguf_get_tensor_type": (INT, P, I64),
    "gguf_get_tensor_size": (SIZE, P, I64),
    # models
    "llama_backend_init": (None,),
    "llama_max_devices": (SIZE,),
    "llama_print_system_info": (STR,),
    "llama_model_free": (None, P),
    "llama_model_get_vocab": (HANDLE, P),
    "llama_model_n_ctx_train": (I32, P),
    "llama_model_rope_type": (INT, P),
    "llama_model_n_embd": (I32, P),
    "llama_model_n_embd_out": (I32, P),
    "llama_model_n_layer": (I32, P),
    "llama_model_n_params": (C.c_uint64, P),
    "llama_model_size": (C.c_uint64, P),
    "llama_model_chat_template": (STR, P, STR),
    "llama_model_is_recurrent": (BOOL, P),
    "llama_model_is_hybrid": (BOOL, P),
    "llama_model_n_layer_nextn": (I32, P),
    # vocabulary
    "llama_vocab_n_tokens": (I32, P),
    "llama_vocab_type": (INT, P),
    "llama_vocab_get_text": (STR, P, I32),
    "llama_vocab_get_suppress_tokens": (P, P, P),
    "llama_vocab_is_eog": (BOOL, P, I32),
    "llama_vocab_get_attr": (INT, P, I32),
    "llama_vocab_get_add_eos": (BOOL, P),
    "llama_vocab_bos": (I32, P),
    "llama_vocab_eos": (I32, P),
    "llama_vocab_eot": (I32, P),
    "llama_vocab_fim_pre": (I32, P),
    "llama_vocab_fim_suf": (I32, P),
    "llama_vocab_fim_mid": (I32, P),
    "llama_vocab_fim_rep": (I32, P),
    "llama_vocab_fim_sep": (I32, P),
    "llama_tokenize": (I32, P, STR, I32, P, I32, BOOL, BOOL),
    "llama_token_to_piece": (I32, P, I32, P, I32, I32, BOOL),
    # contexts and memory
    "llama_free": (None, P),
    "llama_n_ctx": (U32, P),
    "llama_n_batch": (U32, P),
    "llama_n_ubatch": (U32, P),
    "llama_set_n_threads": (None, P, I32, I32),
    "llama_set_causal_attn": (None, P, BOOL),
    "llama_attach_threadpool": (None, P, P, P),
    "llama_detach_threadpool": (None, P),
    "llama_set_abort_callback": (None, P, P, P),
    "llama_get_memory": (HANDLE, P),
    "llama_memory_clear": (None, P, BOOL),
    "llama_memory_seq_rm": (BOOL, P, I32, I32, I32),
    "llama_memory_seq_pos_max": (I32, P, I32),
    "llama_memory_seq_pos_min": (I32, P, I32),
    "llama_memory_seq_cp": (None, P, I32, I32, I32, I32),
    "llama_get_logits_ith": (P, P, I32),
    "llama_get_embeddings_ith": (P, P, I32),
    "llama_get_embeddings_seq": (P, P, I32),
    "llama_set_adapter_cvec": (I32, P, P, SIZE, I32, I32, I32),
    "llama_synchronize": (None, P),
    "llama_n_rs_seq": (U32, P),
    "llama_state_seq_get_size_ext": (SIZE, P, I32, U32),
    "llama_state_seq_get_data_ext": (SIZE, P, P, SIZE, I32, U32),
    "llama_state_seq_set_data_ext": (SIZE, P, P, SIZE, I32, U32),
    # samplers
    "llama_sampler_free": (None, P),
    "llama_sampler_accept": (None, P, I32),
    "llama_sampler_apply": (None, P, P),
    "llama_sampler_chain_add": (None, P, P),
    "llama_sampler_init_dist": (HANDLE, U32),
    "llama_sampler_init_top_k": (HANDLE, I32),
    "llama_sampler_init_top_p": (HANDLE, F32, SIZE),
    "llama_sampler_init_min_p": (HANDLE, F32, SIZE),
    "llama_sampler_init_temp_ext": (HANDLE, F32, F32, F32),
    "llama_sampler_init_penalties": (HANDLE, I32, I32, F32, F32, F32),
    "llama_sampler_init_typical": (HANDLE, F32, SIZE),
    "llama_sampler_init_top_n_sigma": (HANDLE, F32),
    "llama_sampler_init_xtc": (HANDLE, F32, F32, SIZE, U32),
    "llama_sampler_init_dry": (HANDLE, P, F32, F32, I32, I32, P, SIZE),
    "llama_sampler_init_mirostat": (HANDLE, I32, U32, F32, F32, I32),
    "llama_sampler_init_mirostat_v2": (HANDLE, U32, F32, F32),
    "llama_sampler_init_adaptive_p": (HANDLE, F32, F32, U32),
}

# Functions that libllama exports under C++ names only: those for hidden rows behind the last layer,
# as multi-token prediction needs them, and those for rows before any layer, as EAGLE-3 needs them.
NEXTN_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_set_embeddings_nextn": (
        "_Z26llama_set_embeddings_nextnP13llama_contextbb",
        *(None, P, BOOL, BOOL),
    ),
    "llama_get_embeddings_nextn": ("_Z26llama_get_embeddings_nextnP13llama_context", P, P),
    "llama_set_nextn_layer_offset": (
        "_Z28llama_set_nextn_layer_offsetP13llama_contexti",
        *(None, P, I32),
    ),
}
LAYER_INPUT_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_set_embeddings_layer_inp": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        *(None, P, U32, BOOL),
    ),
    "llama_get_embeddings_layer_inp": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        *(P, P, U32),
    ),
}
RESERVE_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_graph_reserve": (
        "_Z19llama_graph_reserveP13llama_contextjjj",
        *(P, P, U32, U32, U32),
    ),
}


# Functions of the CPU backend, by their names in its registry. A build with a CPU backend for each
# kind of processor (GGML_BACKEND_DL) does not export them.
_OF_CPU_BACKEND = {
    "ggml_backend_cpu_set_n_threads": b"ggml_backend_set_n_threads",
    "ggml_backend_cpu_set_threadpool": b"ggml_backend_cpu_set_threadpool",
    "ggml_threadpool_new": b"ggml_threadpool_new",
    "ggml_threadpool_free": b"ggml_threadpool_free",
    "ggml_numa_init": b"ggml_backend_cpu_numa_init",
    "ggml_is_numa": b"ggml_backend_cpu_is_numa",
}


class Library:
    """Functions of the installed library as attributes, typed from SIGNATURES.

    `structs` is the llama_cpp module, which declares the parameter structures.
    """

    def __init__(self, structs: ModuleType) -> None:
        self.structs = structs
        self._handle = structs._lib
        has_cpu = hasattr(self._handle, next(iter(_OF_CPU_BACKEND)))
        self._missing = () if has_cpu else tuple(_OF_CPU_BACKEND)
        for name, types in (SIGNATURES | _by_value(structs)).items():
            if name not in self._missing:
                setattr(self, name, self._bind(name, *types))
        # False: this build lacks some of these functions.
        self.has_nextn = self._bind_all(NEXTN_SIGNATURES)
        self.has_layer_inputs = self._bind_all(LAYER_INPUT_SIGNATURES)
        self.has_graph_reserve = self._bind_all(RESERVE_SIGNATURES)

    def load_backends(self, folder: Path) -> None:
        """Load the CPU backend in `folder` that suits this processor, if there are several.

        Does nothing if the library contains its backends. Raises LibraryMismatch if none suits.
        """
        if not self._missing:
            return
        self.ggml_backend_load_all_from_path(str(folder).encode())
        device = self.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
        if not device:
            raise LibraryMismatch(
                f"none of the CPU backends in {folder} suits this processor: compile libllama for "
                "it with scripts/setup"
            )
        registry = self.ggml_backend_dev_backend_reg(device)
        for name in self._missing:
            address = self.ggml_backend_reg_get_proc_address(registry, _OF_CPU_BACKEND[name])
            if not address:
                raise LibraryMismatch(f"the installed library's CPU backend has no {name}")
            setattr(self, name, _typed(name, address, *SIGNATURES[name]))

    def __getattr__(self, name: str) -> Any:  # called only for names that _bind did not set
        raise AttributeError(f"{name} is not in offload/ggml/library/lib.py's signature table")

    def _bind_all(self, signatures: dict[str, tuple[Any, ...]]) -> bool:
        """Bind functions with C++ names. Returns False, and binds none, if one is missing."""
        has_all = all(hasattr(self._handle, symbol) for symbol, *_ in signatures.values())
        for name, types in signatures.items() if has_all else ():
            setattr(self, name, self._bind(*types))
        return has_all

    def _bind(self, name: str, result: Any, *arguments: Any) -> Any:
        try:
            return _typed(name, (name, self._handle), result, *arguments)
        except AttributeError as e:
            raise LibraryMismatch(f"the installed library has no function {name}") from e


def _typed(name: str, place: Any, result: Any, *arguments: Any) -> Any:
    """Return the function at `place`, an address, or a pair of a name and a handle."""
    # A fresh prototype: llama_cpp has declared some of these symbols with other types, and
    # setting restype on the handle's shared function object would change it under llama_cpp.
    function = C.CFUNCTYPE(P if result is HANDLE else result, *arguments)(place)
    if result is HANDLE:
        function.errcheck = functools.partial(_never_null, name)
    return function


def _never_null(name: str, result: Any, *_: Any) -> Any:
    if not result:
        raise DeviceFailed(f"{name} returned nothing")
    return result


def _by_value(structs: ModuleType) -> dict[str, tuple[Any, ...]]:
    """Return signatures of functions that pass structures of llama_cpp by value."""
    model_params, context_params = structs.llama_model_params, structs.llama_context_params
    chain_params = structs.llama_sampler_chain_params
    return {
        "llama_model_default_params": (model_params,),
        "llama_context_default_params": (context_params,),
        "llama_model_load_from_file": (P, STR, model_params),
        "llama_init_from_model": (P, P, context_params),
        "llama_decode": (I32, P, structs.llama_batch),
        "llama_encode": (I32, P, structs.llama_batch),
        "llama_sampler_chain_default_params": (chain_params,),
        "llama_sampler_chain_init": (P, chain_params),
        "llama_log_set": (None, structs.llama_log_callback, P),
    }


# Without the first variable ggml refuses to pin our memory. Without the second a failed assertion
# starts a debugger. Values that the user has set stay.
_SET = (b"GGML_CUDA_REGISTER_HOST", b"GGML_NO_BACKTRACE")
# With this variable CUDA runs branches of a graph on several streams, and expects ggml's own nodes.
_CLEARED = b"GGML_CUDA_GRAPH_OPT"


@functools.cache
def prepare() -> tuple[str, ...]:
    """Set ggml's environment variables; call it before the first load.

    Returns a sentence for each of the user's variables that is ignored.
    """
    libc = C.CDLL(None)
    libc.getenv.restype = C.c_char_p
    libc.getenv.argtypes = [C.c_char_p]
    for name in _SET:
        libc.setenv(name, b"1", 0)
    if libc.getenv(_CLEARED) in (None, b"0"):
        return ()
    libc.unsetenv(_CLEARED)
    return (
        f"{_CLEARED.decode()} is ignored: with it CUDA reorders graphs, and weights that stream "
        "are put into graphs behind its back",
    )


@functools.cache
def library() -> Library:
    """Return the installed library. The first call loads it and runs the self-test.

    Raises LibraryMismatch when llama-cpp-python is not the pinned release.
    """
    prepare()
    import llama_cpp
    import llama_cpp.llama_cpp as structs

    from offload.ggml.library import log, selftest

    selftest.check_version(llama_cpp.__version__)  # another release may lack functions
    loaded = Library(structs)
    log.capture(loaded)  # before the device registry is made
    loaded.load_backends(Path(structs.__file__).parent / "lib")
    selftest.check(loaded)
    log.stop_in_one_sentence(loaded)
    loaded.llama_backend_init()
    return loaded


@functools.cache
def mtmd_binding(folder: Path) -> ModuleType:
    """Return llama_cpp's binding of the libmtmd in `folder`. Raises LibraryMismatch.

    A process has one libmtmd, so all calls must name the same folder.
    """
    library()  # libmtmd uses the libllama that is loaded
    os.environ["MTMD_CPP_LIB"] = str(folder)  # llama_cpp reads it when the module is imported
    try:
        from llama_cpp import mtmd_cpp
    except (OSError, RuntimeError, AttributeError) as e:
        raise LibraryMismatch(
            f"libmtmd cannot be loaded ({e}); delete {folder}, and it is compiled again"
        ) from e
    from offload.ggml.library import log

    log.route(mtmd_cpp.mtmd_helper_log_set)
    binding: ModuleType = mtmd_cpp
    return binding


@functools.cache
def op_number(name: str) -> int:
    """Return the number of a ggml operation, e.g. MUL_MAT_ID. Numbers differ between releases."""
    lib = library()
    for number in range(abi.GGML_OP_COUNT):  # ggml_op_name does not check its argument
        if lib.ggml_op_name(number) == name.encode():
            return number
    raise LibraryMismatch(f"the installed library knows no operation {name}")
