"""Writes the part of a GGUF file before the weights: metadata, tokenizer, tensor table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf import GGUFValueType, GGUFWriter

from lab.synth.parts import Value
from lab.synth.pool import Tensor
from lab.synth.shape import Shape
from lab.synth.vocabulary import Entry

ALIGNMENT = 32  # bytes; GGUF's default, to which every tensor is padded


def _kind(value: Value) -> GGUFValueType:
    if isinstance(value, bool):
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    if isinstance(value, float):
        return GGUFValueType.FLOAT32
    if isinstance(value, str):
        return GGUFValueType.STRING
    return GGUFValueType.ARRAY


def write_header(
    path: Path, shape: Shape, tokenizer: Iterable[Entry], tensors: Sequence[Tensor]
) -> int:
    """Write `path` up to where the first tensor's data begins; returns that offset in bytes."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name(shape.name)
    writer.add_description("random weights, for tests and measurements")
    for key, value in shape.metadata.items():
        writer.add_key_value(f"{shape.architecture}.{key}", value, _kind(value))
    writer.add_key_value(f"{shape.architecture}.vocab_size", shape.n_vocab, GGUFValueType.UINT32)
    for entry in tokenizer:
        writer.add_key_value(entry.key, entry.value, entry.kind, entry.element)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in tensors:
        # The writer takes numpy's order, the longest stride first.
        dimensions = tensor.shape[::-1]
        dtype = np.dtype(np.float32)  # ignored beside raw_dtype
        writer.add_tensor_info(tensor.name, dimensions, dtype, tensor.n_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % ALIGNMENT))
        return file.tell()


def padded(n_bytes: int) -> int:
    return n_bytes + -n_bytes % ALIGNMENT
