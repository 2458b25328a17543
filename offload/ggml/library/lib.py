"""The installed libllama and libggml: one handle, one signature table, errors checked here.

Every symbol is resolved through libllama's own handle. Opening lib/libggml.so by path would map a
second copy with a device registry of its own, and a plain pip install has such copies twice.
"""

from __future__ import annotations

import ctypes as C
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from offload.errors import DeviceFailed, LibraryMismatch
from offload.ggml.library import abi

P = C.c_void_p
STR = C.c_char_p
SIZE = C.c_size_t
BOOL = C.c_bool
I32 = C.c_int32
U32 = C.c_uint32
I64 = C.c_int64
F32 = C.c_float
INT = C.c_int


def _not_null(name: str, result: Any) -> Any:
    if not result:
        raise DeviceFailed(f"{name} returned nothing")
    return result


Check = Callable[[str, Any], Any] | None
Signature = tuple[Any, tuple[Any, ...], Check]


def _sig(restype: Any, *argtypes: Any, check: Check = None) -> Signature:
    return restype, argtypes, check


# name -> (result, arguments, check). Result pointers that may be NULL by contract have no check.
SIGNATURES: dict[str, Signature] = {
    # devices and backends
    "ggml_backend_dev_count": _sig(SIZE),
    "ggml_backend_dev_get": _sig(P, SIZE, check=_not_null),
    "ggml_backend_dev_by_type": _sig(P, INT),
    "ggml_backend_dev_name": _sig(STR, P),
    "ggml_backend_dev_description": _sig(STR, P),
    "ggml_backend_dev_type": _sig(INT, P),
    "ggml_backend_dev_memory": _sig(None, P, C.POINTER(SIZE), C.POINTER(SIZE)),
    "ggml_backend_dev_get_props": _sig(None, P, P),
    "ggml_backend_dev_init": _sig(P, P, STR, check=_not_null),
    "ggml_backend_dev_buffer_type": _sig(P, P, check=_not_null),
    "ggml_backend_dev_host_buffer_type": _sig(P, P),
    "ggml_backend_dev_supports_op": _sig(BOOL, P, P),
    "ggml_backend_dev_supports_buft": _sig(BOOL, P, P),
    "ggml_backend_dev_backend_reg": _sig(P, P, check=_not_null),
    "ggml_backend_reg_get_proc_address": _sig(P, P, STR),
    "ggml_backend_free": _sig(None, P),
    "ggml_backend_synchronize": _sig(None, P),
    "ggml_backend_graph_compute_async": _sig(INT, P, P),
    "ggml_backend_tensor_set_async": _sig(None, P, P, P, SIZE, SIZE),
    "ggml_backend_tensor_get_async": _sig(None, P, P, P, SIZE, SIZE),
    "ggml_backend_tensor_set": _sig(None, P, P, SIZE, SIZE),
    "ggml_backend_tensor_get": _sig(None, P, P, SIZE, SIZE),
    "ggml_backend_event_new": _sig(P, P),
    "ggml_backend_event_free": _sig(None, P),
    "ggml_backend_event_record": _sig(None, P, P),
    "ggml_backend_event_wait": _sig(None, P, P),
    "ggml_backend_event_synchronize": _sig(None, P),
    "ggml_backend_buft_alloc_buffer": _sig(P, P, SIZE),
    "ggml_backend_buft_get_alignment": _sig(SIZE, P),
    "ggml_backend_buft_name": _sig(STR, P),
    "ggml_backend_buffer_get_base": _sig(P, P, check=_not_null),
    "ggml_backend_buffer_get_size": _sig(SIZE, P),
    "ggml_backend_buffer_get_type": _sig(P, P),
    "ggml_backend_buffer_free": _sig(None, P),
    "ggml_backend_buffer_clear": _sig(None, P, C.c_uint8),
    "ggml_backend_buffer_is_host": _sig(BOOL, P),
    "ggml_backend_cpu_buffer_type": _sig(P, check=_not_null),
    "ggml_backend_cpu_buffer_from_ptr": _sig(P, P, SIZE, check=_not_null),
    "ggml_backend_cpu_set_n_threads": _sig(None, P, INT),
    # threads and nodes
    "ggml_threadpool_params_init": _sig(None, P, INT),
    "ggml_threadpool_new": _sig(P, P, check=_not_null),
    "ggml_threadpool_free": _sig(None, P),
    "ggml_backend_cpu_set_threadpool": _sig(None, P, P),
    "ggml_numa_init": _sig(None, INT),
    "ggml_is_numa": _sig(BOOL),
    # tensors and graphs
    "ggml_set_abort_callback": _sig(P, P),
    "ggml_op_name": _sig(STR, INT),
    "ggml_type_name": _sig(STR, INT),
    "ggml_blck_size": _sig(I64, INT),
    "ggml_type_size": _sig(SIZE, INT),
    "ggml_row_size": _sig(SIZE, INT, I64),
    "ggml_nbytes": _sig(SIZE, P),
    "ggml_tensor_overhead": _sig(SIZE),
    "ggml_graph_n_nodes": _sig(INT, P),
    "ggml_graph_node": _sig(P, P, INT, check=_not_null),
    # model files
    "gguf_free": _sig(None, P),
    "gguf_get_n_kv": _sig(I64, P),
    "gguf_get_key": _sig(STR, P, I64),
    "gguf_find_key": _sig(I64, P, STR),
    "gguf_get_kv_type": _sig(INT, P, I64),
    "gguf_get_arr_type": _sig(INT, P, I64),
    "gguf_get_arr_n": _sig(SIZE, P, I64),
    "gguf_get_arr_data": _sig(P, P, I64),
    "gguf_get_arr_str": _sig(STR, P, I64, SIZE),
    "gguf_get_val_str": _sig(STR, P, I64),
    "gguf_get_val_data": _sig(P, P, I64),
    "gguf_get_n_tensors": _sig(I64, P),
    "gguf_get_data_offset": _sig(SIZE, P),
    "gguf_get_tensor_name": _sig(STR, P, I64),
    "gguf_get_tensor_offset": _sig(SIZE, P, I64),
    "gguf_get_tensor_ne": _sig(C.POINTER(I64), P, I64),
    "gguf_get_tensor_type": _sig(INT, P, I64),
    "gguf_get_tensor_size": _sig(SIZE, P, I64),
    # models
    "llama_backend_init": _sig(None),
    "llama_print_system_info": _sig(STR),
    "llama_model_free": _sig(None, P),
    "llama_model_get_vocab": _sig(P, P, check=_not_null),
    "llama_model_n_ctx_train": _sig(I32, P),
    "llama_model_n_embd_out": _sig(I32, P),
    "llama_model_n_params": _sig(C.c_uint64, P),
    "llama_model_size": _sig(C.c_uint64, P),
    "llama_model_chat_template": _sig(STR, P, STR),
    "llama_model_is_recurrent": _sig(BOOL, P),
    "llama_model_is_hybrid": _sig(BOOL, P),
    # vocabulary
    "llama_vocab_n_tokens": _sig(I32, P),
    "llama_vocab_type": _sig(INT, P),
    "llama_vocab_get_text": _sig(STR, P, I32),
    "llama_vocab_get_suppress_tokens": _sig(P, P, P),
    "llama_vocab_is_eog": _sig(BOOL, P, I32),
    "llama_vocab_get_attr": _sig(INT, P, I32),
    "llama_vocab_get_add_eos": _sig(BOOL, P),
    "llama_vocab_bos": _sig(I32, P),
    "llama_vocab_eos": _sig(I32, P),
    "llama_vocab_fim_pre": _sig(I32, P),
    "llama_vocab_fim_suf": _sig(I32, P),
    "llama_vocab_fim_mid": _sig(I32, P),
    "llama_vocab_fim_rep": _sig(I32, P),
    "llama_vocab_fim_sep": _sig(I32, P),
    "llama_tokenize": _sig(I32, P, STR, I32, P, I32, BOOL, BOOL),
    "llama_token_to_piece": _sig(I32, P, I32, P, I32, I32, BOOL),
    # contexts and memory
    "llama_free": _sig(None, P),
    "llama_n_ctx": _sig(U32, P),
    "llama_n_batch": _sig(U32, P),
    "llama_n_ubatch": _sig(U32, P),
    "llama_set_n_threads": _sig(None, P, I32, I32),
    "llama_attach_threadpool": _sig(None, P, P, P),
    "llama_detach_threadpool": _sig(None, P),
    "llama_set_abort_callback": _sig(None, P, P, P),
    "llama_get_memory": _sig(P, P, check=_not_null),
    "llama_memory_clear": _sig(None, P, BOOL),
    "llama_memory_seq_rm": _sig(BOOL, P, I32, I32, I32),
    "llama_memory_seq_pos_min": _sig(I32, P, I32),
    "llama_memory_seq_cp": _sig(None, P, I32, I32, I32, I32),
    "llama_get_logits_ith": _sig(P, P, I32),
    "llama_get_embeddings_ith": _sig(P, P, I32),
    "llama_get_embeddings_seq": _sig(P, P, I32),
    "llama_synchronize": _sig(None, P),
    "llama_n_rs_seq": _sig(U32, P),
    "llama_state_seq_get_size_ext": _sig(SIZE, P, I32, U32),
    "llama_state_seq_get_data_ext": _sig(SIZE, P, P, SIZE, I32, U32),
    "llama_state_seq_set_data_ext": _sig(SIZE, P, P, SIZE, I32, U32),
    # samplers
    "llama_sampler_free": _sig(None, P),
    "llama_sampler_reset": _sig(None, P),
    "llama_sampler_accept": _sig(None, P, I32),
    "llama_sampler_apply": _sig(None, P, P),
    "llama_sampler_chain_add": _sig(None, P, P),
    "llama_sampler_init_dist": _sig(P, U32, check=_not_null),
    "llama_sampler_init_top_k": _sig(P, I32, check=_not_null),
    "llama_sampler_init_top_p": _sig(P, F32, SIZE, check=_not_null),
    "llama_sampler_init_min_p": _sig(P, F32, SIZE, check=_not_null),
    "llama_sampler_init_temp_ext": _sig(P, F32, F32, F32, check=_not_null),
    "llama_sampler_init_penalties": _sig(P, I32, I32, F32, F32, F32, check=_not_null),
    "llama_sampler_init_typical": _sig(P, F32, SIZE, check=_not_null),
    "llama_sampler_init_top_n_sigma": _sig(P, F32, check=_not_null),
    "llama_sampler_init_xtc": _sig(P, F32, F32, SIZE, U32, check=_not_null),
    "llama_sampler_init_dry": _sig(P, P, F32, F32, I32, I32, P, SIZE, check=_not_null),
    "llama_sampler_init_mirostat": _sig(P, I32, U32, F32, F32, I32, check=_not_null),
    "llama_sampler_init_mirostat_v2": _sig(P, U32, F32, F32, check=_not_null),
    "llama_sampler_init_adaptive_p": _sig(P, F32, F32, U32, check=_not_null),
}


class Library:
    """Functions of the installed library as attributes, typed from SIGNATURES.

    `structs` is the llama_cpp module, for the parameter structures it keeps.
    """

    def __init__(self, structs: ModuleType) -> None:
        self.structs = structs
        self._handle = structs._lib
        self._declare_by_value(structs)
        for name, (restype, argtypes, check) in SIGNATURES.items():
            setattr(self, name, self._bind(name, restype, argtypes, check))

    def __getattr__(self, name: str) -> Any:  # only reached for what _bind did not set
        raise AttributeError(f"{name} is not in offload/ggml/library/lib.py's signature table")

    def _bind(self, name: str, restype: Any, argtypes: tuple[Any, ...], check: Check) -> Any:
        # A fresh prototype: llama_cpp has declared some of these symbols with other types, and
        # setting restype on the handle's shared function object would change it under llama_cpp.
        try:
            function = C.CFUNCTYPE(restype, *argtypes)((name, self._handle))
        except AttributeError as e:
            raise LibraryMismatch(f"the installed library has no function {name}") from e
        if check is not None:
            function.errcheck = functools.partial(_apply_check, name, check)
        return function

    def _declare_by_value(self, structs: ModuleType) -> None:
        """Functions that pass structures by value, whose types llama_cpp declares."""
        model_params = structs.llama_model_params
        context_params = structs.llama_context_params
        chain_params = structs.llama_sampler_chain_params
        for name, restype, argtypes in (
            ("llama_model_default_params", model_params, ()),
            ("llama_context_default_params", context_params, ()),
            ("llama_model_load_from_file", P, (STR, model_params)),
            ("llama_init_from_model", P, (P, context_params)),
            ("llama_batch_init", structs.llama_batch, (I32, I32, I32)),
            ("llama_batch_free", None, (structs.llama_batch,)),
            ("llama_decode", I32, (P, structs.llama_batch)),
            ("llama_sampler_chain_default_params", chain_params, ()),
            ("llama_sampler_chain_init", P, (chain_params,)),
            ("llama_log_set", None, (structs.llama_log_callback, P)),
        ):
            setattr(self, name, self._bind(name, restype, argtypes, None))


def _apply_check(name: str, check: Callable[[str, Any], Any], result: Any, *_: Any) -> Any:
    return check(name, result)


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
    """Load, self-test and return the installed library; once per process.

    Raises LibraryMismatch when llama-cpp-python is not the pinned release.
    """
    prepare()
    import llama_cpp
    import llama_cpp.llama_cpp as structs

    from offload.ggml.library import log, selftest

    selftest.check_version(llama_cpp.__version__)  # first: another release may lack functions
    loaded = Library(structs)
    log.capture(loaded)  # before the self-test, which brings the device registry up
    selftest.check(llama_cpp.__version__, loaded)
    log.stop_in_one_sentence(loaded)
    loaded.llama_backend_init()
    return loaded


@functools.cache
def op_number(name: str) -> int:
    """The number of a ggml operation by name, e.g. MUL_MAT_ID; numbers move between releases."""
    lib = library()
    for number in range(abi.GGML_OP_COUNT):  # ggml_op_name does not check its argument
        if lib.ggml_op_name(number) == name.encode():
            return number
    raise LibraryMismatch(f"the installed library knows no operation {name}")
