"""Reads weights of a GGUF file as f32 rows, in any type that the gguf package dequantises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from offload.errors import BadModel
from offload.model import ModelFacts

_CHUNK_BYTES = 32 << 20  # bytes of f32 rows in memory at once

Rows = NDArray[np.float32]


class WeightReader:
    """Reads the tensors of `facts` from mapped files, large matrices chunk by chunk."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._maps: dict[Path, np.memmap[tuple[int], np.dtype[np.uint8]]] = {}

    def has(self, name: str) -> bool:
        return name in self._facts.weights

    def whole(self, name: str) -> Rows:
        """Return a matrix [n_out, n_in], or a vector as [1, n]."""
        return np.concatenate([rows for _, rows in self.chunks(name)])

    def vector(self, name: str) -> Rows:
        values: Rows = self.whole(name)[0]
        return values

    def chunks(self, name: str) -> Iterator[tuple[int, Rows]]:
        """Yield (first row, rows [n, n_in]) of a matrix in order."""
        place = self._facts.weights[name]
        shape = place.entry.shape
        n_in, n_rows = shape[0], shape[1] if len(shape) > 1 else 1
        kind = _kind(place.entry.type)
        assert kind is not None, name  # check_weights comes first
        start = place.entry.offset_bytes
        data = self._map(place.file)[start : start + place.entry.size_bytes]
        data = data.reshape(n_rows, -1)
        step = max(1, _CHUNK_BYTES // (4 * n_in))
        for first in range(0, n_rows, step):
            rows = dequantize(np.ascontiguousarray(data[first : first + step]), kind)
            yield first, np.require(rows.reshape(-1, n_in), np.float32, "W")

    def _map(self, path: Path) -> np.memmap[tuple[int], np.dtype[np.uint8]]:
        if path not in self._maps:
            self._maps[path] = np.memmap(path, np.uint8, "r")
        return self._maps[path]


def check_weights(facts: ModelFacts) -> None:
    """Raises BadModel for the first tensor of a type that cannot be read."""
    for name, place in facts.weights.items():
        if not can_dequantize(place.entry.type):
            raise BadModel(
                f"{facts.path.name}: tensor {name} is {place.entry.type}, which gguf cannot "
                "dequantise"
            )


def can_dequantize(ggml_name: str) -> bool:
    """True if the gguf package dequantises this type, named as in ggml."""
    kind = _kind(ggml_name)
    if kind is None:
        return False
    block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def _kind(ggml_name: str) -> GGMLQuantizationType | None:
    return GGMLQuantizationType.__members__.get(ggml_name.upper())
