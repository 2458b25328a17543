"""Writes copies of model files with other metadata or tensors, and splits files into parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.gguf_reader import ReaderField, ReaderTensor

REMOVED = None  # in place of a key's value
_OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture")


def changed(
    model: Path | GGUFReader,
    out: Path,
    values: Mapping[str, Any] | None = None,
    keep: Callable[[str], bool] = lambda name: True,
    more: Mapping[str, Sequence[int]] | None = None,
) -> Path:
    """Copy a model file with other values of keys, fewer tensors and more tensors of zeros.

    Keys have no architecture in front. `more` has shapes of f32 tensors in ggml's order, which may
    replace tensors of the file.
    """
    more = more or {}
    reader = model if isinstance(model, GGUFReader) else GGUFReader(model)
    architecture = _text(reader.fields["general.architecture"])
    new = {f"{architecture}.{key}": value for key, value in (values or {}).items()}
    writer = GGUFWriter(out, architecture)
    for field in reader.fields.values():
        if field.name not in new:
            _copy(writer, field)
    for key, value in new.items():
        if value is not REMOVED:
            _add(writer, key, value)
    for tensor in reader.tensors:
        if keep(tensor.name) and tensor.name not in more:
            _tensor(writer, tensor)
    for name, shape in more.items():
        writer.add_tensor(name, np.zeros(tuple(reversed(shape)), np.float32))
    _finish(writer)
    return out


def split(path: Path, folder: Path, n_parts: int = 2) -> list[Path]:
    """Write a model as parts, as llama-gguf-split does; the first one has all metadata."""
    reader = GGUFReader(path)
    architecture = _text(reader.fields["general.architecture"])
    size = -(-len(reader.tensors) // n_parts)
    paths = []
    for number in range(n_parts):
        out = folder / f"{path.stem}-{number + 1:05d}-of-{n_parts:05d}.gguf"
        writer = GGUFWriter(out, architecture)
        if number == 0:
            for field in reader.fields.values():
                _copy(writer, field)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n_parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number * size : (number + 1) * size]:
            _tensor(writer, tensor)
        _finish(writer)
        paths.append(out)
    return paths


def _text(field: ReaderField) -> str:
    return bytes(field.parts[field.data[0]]).decode()


def _copy(writer: GGUFWriter, field: ReaderField) -> None:
    if field.name not in _OWN:
        kinds = field.types
        writer.add_key_value(
            field.name, field.contents(), kinds[0], kinds[-1] if kinds[1:] else None
        )


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value >= 0 else writer.add_int32)(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value and isinstance(value[0], int):
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, GGUFValueType.INT32)
    else:
        writer.add_array(key, list(value))


def _tensor(writer: GGUFWriter, tensor: ReaderTensor) -> None:
    writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
