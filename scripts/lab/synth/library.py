"""Quantises values with the library."""

from __future__ import annotations

import ctypes as C
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.errors import DeviceFailed
from offload.ggml.library.lib import library


def quantize(values: NDArray[np.float32], type_number: int, row_bytes: int) -> NDArray[np.uint8]:
    """Quantise f32 values [n rows, row length] to a ggml type; returns [n rows, row_bytes].

    The row length is a multiple of the type's block. Raises DeviceFailed if the library writes
    another number of bytes than expected.
    """
    n_rows, n_per_row = values.shape
    source = np.ascontiguousarray(values, np.float32)
    out = np.empty((n_rows, row_bytes), np.uint8)
    prototype = C.CFUNCTYPE(
        C.c_size_t, C.c_int, C.c_void_p, C.c_void_p, C.c_int64, C.c_int64, C.c_int64, C.c_void_p
    )
    function = prototype(("ggml_quantize_chunk", library()._handle))
    written = function(type_number, source.ctypes.data, out.ctypes.data, 0, n_rows, n_per_row, None)
    if written != out.nbytes:
        raise DeviceFailed(
            f"ggml_quantize_chunk wrote {written} bytes of type {type_number}, not {out.nbytes}"
        )
    return out


def write_f32(source: Path, path: Path) -> Path:
    """Write a model's weights in f32 to `path`, and return it. Raises DeviceFailed."""
    import llama_cpp.llama_cpp as native

    params = native.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = native.LLAMA_FTYPE_ALL_F32, True
    if native.llama_model_quantize(str(source).encode(), str(path).encode(), params) != 0:
        raise DeviceFailed(f"{source} cannot be written in f32")
    return path
