"""Reads GGUF headers with the library's parser: metadata values and the tensor table.

Weights are not read. A file that the parser refuses raises BadModel with the parser's reason.
"""

from __future__ import annotations

import ctypes as C
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.errors import BadModel, TruncatedModel
from offload.ggml.library import log
from offload.ggml.library.lib import Library, library
from offload.model import Header, HeaderValue, TensorEntry
from offload.regular_file import check_regular

_SCALARS: dict[int, Any] = {
    0: C.c_uint8,
    1: C.c_int8,
    2: C.c_uint16,
    3: C.c_int16,
    4: C.c_uint32,
    5: C.c_int32,
    6: C.c_float,
    7: C.c_bool,
    10: C.c_uint64,
    11: C.c_int64,
    12: C.c_double,
}
_STRING, _ARRAY = 8, 9
_TOKENS = b"tokenizer.ggml.tokens"
_MAX_ARRAY = 4096  # most entries of an array that is read; longer ones are vocabularies


class _InitParams(C.Structure):
    _fields_ = [("no_alloc", C.c_bool), ("ctx", C.c_void_p)]


_INIT = C.CFUNCTYPE(C.c_void_p, C.c_char_p, _InitParams)


@contextmanager
def opened_header(lib: Library, path: Path) -> Iterator[int]:
    """Open a file in the library's parser for the block. Raises BadModel with its reason."""
    try:
        check_regular(path)
    except OSError as e:
        raise BadModel(f"{path}: cannot be read ({e.strerror})") from e
    init = _INIT(("gguf_init_from_file", lib._handle))
    log.take_errors()
    context = init(os.fsencode(path), _InitParams(True, None))
    if not context:
        reason = "; ".join(log.take_errors()) or "not a GGUF file"
        raise BadModel(f"{path}: cannot be read as GGUF ({reason})")
    try:
        yield context
    finally:
        lib.gguf_free(context)


def read_header(path: Path, size_bytes: int | None = None) -> Header:
    """Parse `path` and check that every tensor lies inside the file.

    `size_bytes` is the size of the whole file if `path` has only its beginning. Raises BadModel for
    anything that is not a whole GGUF file.
    """
    lib = library()
    with opened_header(lib, path) as context:
        size_bytes = path.stat().st_size if size_bytes is None else size_bytes
        metadata, lengths = {}, {}
        for i in range(lib.gguf_get_n_kv(context)):
            key = lib.gguf_get_key(context, i).decode("utf-8", "replace")
            if lib.gguf_get_kv_type(context, i) == _ARRAY:
                lengths[key] = lib.gguf_get_arr_n(context, i)
            if (value := _value(lib, context, i)) is not None:
                metadata[key] = value
        has_byte_tokens = _has_byte_tokens(lib, context, metadata)
        tensors = tuple(_tensors(lib, context))
    for tensor in tensors:
        end = tensor.offset_bytes + tensor.size_bytes
        if end > size_bytes:
            raise TruncatedModel(
                f"{path}: the file ends at byte {size_bytes} but tensor {tensor.name} needs bytes "
                f"up to {end}; it is damaged or was not downloaded completely"
            )
    return Header(metadata, tensors, lengths, has_byte_tokens)


def read_tokens(path: Path) -> list[bytes]:
    """Read the spelling of each token of the vocabulary; [] if the file has none."""
    lib = library()
    with opened_header(lib, path) as context:
        key = lib.gguf_find_key(context, _TOKENS)
        if key < 0 or lib.gguf_get_kv_type(context, key) != _ARRAY:
            return []
        if lib.gguf_get_arr_type(context, key) != _STRING:
            return []
        read = lib.gguf_get_arr_str
        return [read(context, key, i) for i in range(lib.gguf_get_arr_n(context, key))]


def _has_byte_tokens(lib: Library, context: int, metadata: Mapping[str, object]) -> bool:
    """Return False for a SentencePiece vocabulary that lacks a token for some byte.

    The library looks these tokens up for unknown characters, and ends the process if one is
    missing.
    """
    if metadata.get("tokenizer.ggml.model") != "llama":
        return True
    key = lib.gguf_find_key(context, _TOKENS)
    if key < 0 or lib.gguf_get_kv_type(context, key) != _ARRAY:
        return True
    if lib.gguf_get_arr_type(context, key) != _STRING:
        return False
    wanted = {f"<0x{byte:02X}>".encode() for byte in range(256)}
    for i in range(lib.gguf_get_arr_n(context, key)):
        wanted.discard(lib.gguf_get_arr_str(context, key, i))
        if not wanted:
            return True
    return False


def _value(lib: Library, context: int, i: int) -> HeaderValue | tuple[HeaderValue, ...] | None:
    kind = lib.gguf_get_kv_type(context, i)
    if kind == _STRING:
        text: bytes = lib.gguf_get_val_str(context, i)
        return text.decode("utf-8", "replace")
    if kind == _ARRAY:
        n, element = lib.gguf_get_arr_n(context, i), lib.gguf_get_arr_type(context, i)
        if element not in _SCALARS or n > _MAX_ARRAY:
            return None
        if n == 0:
            return ()  # an empty array's data is a null pointer
        return tuple((_SCALARS[element] * n).from_address(lib.gguf_get_arr_data(context, i)))
    scalar: HeaderValue = _SCALARS[kind].from_address(lib.gguf_get_val_data(context, i)).value
    return scalar


def _tensors(lib: Library, context: int) -> Iterator[TensorEntry]:
    start = lib.gguf_get_data_offset(context)
    for i in range(lib.gguf_get_n_tensors(context)):
        ne = lib.gguf_get_tensor_ne(context, i)
        shape = [ne[k] for k in range(4)]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        yield TensorEntry(
            name=lib.gguf_get_tensor_name(context, i).decode("utf-8", "replace"),
            type=lib.ggml_type_name(lib.gguf_get_tensor_type(context, i)).decode(),
            shape=tuple(shape),
            offset_bytes=start + lib.gguf_get_tensor_offset(context, i),
            size_bytes=lib.gguf_get_tensor_size(context, i),
        )
