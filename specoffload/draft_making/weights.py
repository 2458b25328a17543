"""Reads the weights of a GGUF file as arrays, and writes a copy of the file with other weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from offload.model import ModelFacts
from specdec.whole_file import named_file

DraftWeights = dict[str, NDArray[np.float32]]
_OTHERWISE = Type.Q8_0  # in place of types that gguf can only read, such as Q4_K
_ALIGNMENT = "general.alignment"


def read_weights(facts: ModelFacts) -> DraftWeights:
    """All tensors of a model by name, dequantised. Matrices are [n_out, n_in]."""
    weights = {}
    for name, place in facts.weights.items():
        entry = place.entry
        file = np.memmap(place.file, np.uint8, "r", entry.offset_bytes, (entry.size_bytes,))
        rows = np.ascontiguousarray(file).reshape(*reversed(entry.shape[1:]), -1)
        values = dequantize(rows, Type[entry.type.upper()])
        weights[name] = np.require(values.reshape(*reversed(entry.shape)), np.float32, "W")
    return weights


def can_write(kind: Type) -> bool:
    """True if gguf can quantise to this type."""
    n = gguf.GGML_QUANT_SIZES[kind][0]
    try:
        quantize(np.zeros((1, n), np.float32), kind)
    except NotImplementedError:
        return False
    return True


def written_types(facts: ModelFacts) -> dict[str, Type]:
    """The type of each tensor in a copy of the file: its own, or Q8_0 if gguf cannot write it."""
    types = {name: Type[place.entry.type.upper()] for name, place in facts.weights.items()}
    known = {kind: can_write(kind) for kind in set(types.values())}
    return {name: kind if known[kind] else _OTHERWISE for name, kind in types.items()}


def write_copy(
    source: Path,
    path: Path,
    weights: Mapping[str, NDArray[np.float32]],
    types: Mapping[str, Type],
    metadata: Mapping[str, Any] | None = None,
) -> int:
    """Write a file with the metadata of `source` and these weights, whole or not at all.

    `metadata` replaces values of `source`, by key. Returns the bytes of the weights. Raises
    OSError.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    n_bytes = 0
    with named_file(path) as file:
        writer = gguf.GGUFWriter(file.name, architecture)
        for name, field in reader.fields.items():
            if name == _ALIGNMENT:
                writer.add_custom_alignment(field.contents())
            elif not name.startswith(("GGUF.", "general.architecture", "split.")):
                element = field.types[1] if len(field.types) > 1 else None
                value = (metadata or {}).get(name, field.contents())
                writer.add_key_value(name, value, field.types[0], element)
        for name, values in weights.items():
            data = quantize(np.ascontiguousarray(values, np.float32), types[name])
            n_bytes += data.nbytes
            writer.add_tensor(name, data, raw_dtype=types[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return n_bytes
