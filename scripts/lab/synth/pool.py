"""Random bytes of a ggml type, cheap enough that a file is written as fast as the disk takes it.

Small tensors are drawn value by value. For a large one, a pool of blocks is quantised once and
repeated: ggml's blocks are independent, so any run of them is a valid row. The number of blocks is
prime, so that row after row starts at another place of the pool until all were used.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from lab.synth.values import Fill
from offload.ggml.quantize import quantize

_DIRECT_VALUES = 1 << 20  # tensors up to this many values are drawn whole
_PIECE_VALUES = 1 << 20  # values drawn and quantised at a time
_POOL_VALUES = 1 << 21
_PIECE_BYTES = 4 << 20
_KEPT_BYTES = 32 << 20  # of pools; the least recently used go first

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file to be. `shape` is in ggml's order: the row length first."""

    name: str
    shape: tuple[int, ...]
    type: Type
    fill: Fill

    @property
    def n_values(self) -> int:
        n = 1
        for dimension in self.shape:
            n *= dimension
        return n

    @property
    def n_bytes(self) -> int:
        block, size = GGML_QUANT_SIZES[self.type]
        return int(self.n_values // block * size)


def _prime_from(n: int) -> int:
    def is_prime(k: int) -> bool:
        return k % 2 == 1 and all(k % d for d in range(3, int(k**0.5) + 1, 2))

    while not is_prime(n):
        n += 1
    return n


def _encode(values: NDArray[np.float32], type_: Type) -> Bytes:
    if type_ == Type.F32:
        return values.view(np.uint8).reshape(-1)
    block, size = GGML_QUANT_SIZES[type_]
    rows = values.reshape(1, -1) if block == 1 else values.reshape(-1, block)
    n_bytes = rows.shape[1] // block * size
    return quantize(rows, int(type_), n_bytes).reshape(-1)


def _draw(rng: np.random.Generator, n: int, fill: Fill) -> NDArray[np.float32]:
    if fill.kind == "constant":
        return np.full(n, fill.scale, np.float32)
    if fill.kind == "decay":
        return (-fill.scale * rng.uniform(0.5, 4.0, n)).astype(np.float32)
    values = rng.standard_normal(n, dtype=np.float32)
    values *= np.float32(fill.scale)
    return values


class Source:
    """Bytes of random tensors; the same seed gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[Type, Fill], Bytes] = {}  # in order of last use

    def _rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(what.encode())])

    def pieces(self, tensor: Tensor) -> Iterator[Bytes]:
        """The tensor's bytes in order, in pieces of a few megabytes."""
        # A router's other values must keep their size beside the first: a pool would round it.
        exact = tensor.fill.first and tensor.type == Type.F32
        if tensor.n_values <= _DIRECT_VALUES or exact:
            values = _draw(self._rng(tensor.name), tensor.n_values, tensor.fill)
            if tensor.fill.first:
                first = self._first(tensor)
                values.reshape(len(first), -1)[:, : first.shape[1]] = first
            yield _encode(values, tensor.type)
            return
        pool = self._pool(tensor)  # [n blocks, bytes of a block]
        start = int(self._rng(tensor.name).integers(len(pool)))
        n_per_row = tensor.shape[0] // GGML_QUANT_SIZES[tensor.type][0]
        if tensor.fill.first:
            rows = _distinct_rows(pool, start, tensor.shape[1], n_per_row)
            yield from _begun(rows, self._first_blocks(tensor), tensor.n_bytes // tensor.shape[1])
        elif len(tensor.shape) == 2 and tensor.shape[1] > len(pool):
            yield from _distinct_rows(pool, start, tensor.shape[1], n_per_row)
        else:
            yield from _repeated(pool.reshape(-1), start * pool.shape[1], tensor.n_bytes)

    def _first(self, tensor: Tensor) -> NDArray[np.float32]:
        """The first values of each row, [n rows, n columns]."""
        n_rows = tensor.n_values // tensor.shape[0]
        rng = self._rng(f"{tensor.name} first")
        parts = []
        for part in tensor.fill.first:
            n_drawn = min(part.period or n_rows, n_rows)
            drawn = _draw(rng, n_drawn * part.n_columns, Fill(part.kind, part.scale))
            parts.append(drawn.reshape(n_drawn, -1)[np.arange(n_rows) % n_drawn])
        return np.concatenate(parts, axis=1)

    def _first_blocks(self, tensor: Tensor) -> Bytes:
        """The blocks of each row that hold those values, [n rows, bytes]."""
        first = self._first(tensor)
        n_rows, n_columns = first.shape
        block, size = GGML_QUANT_SIZES[tensor.type]
        n_blocks = -(-n_columns // block)
        rng = self._rng(f"{tensor.name} beside")
        values = _draw(rng, n_rows * n_blocks * block, tensor.fill).reshape(n_rows, -1)
        values[:, :n_columns] = first
        return _encode(values.reshape(-1), tensor.type).reshape(n_rows, n_blocks * size)

    def _pool(self, tensor: Tensor) -> Bytes:
        # Scales are rounded to powers of two, so that few pools serve all tensors of a model.
        fill = Fill(tensor.fill.kind, 2.0 ** round(math.log2(tensor.fill.scale)))
        key = tensor.type, fill
        pool = self._pools.pop(key, None)
        if pool is None:
            pool = self._make(*key)
        self._pools[key] = pool
        while len(self._pools) > 1 and sum(p.nbytes for p in self._pools.values()) > _KEPT_BYTES:
            del self._pools[next(iter(self._pools))]
        return pool

    def _make(self, type_: Type, fill: Fill) -> Bytes:
        block, size = GGML_QUANT_SIZES[type_]
        n_blocks = _prime_from(_POOL_VALUES // block)
        rng = self._rng(f"pool {type_.name} {fill.kind} {fill.scale:.9g}")
        pool = np.empty((n_blocks, size), np.uint8)
        step = _PIECE_VALUES // block
        for first in range(0, n_blocks, step):
            n = min(step, n_blocks - first)
            pool[first : first + n] = _encode(_draw(rng, n * block, fill), type_).reshape(n, size)
        return pool


def _begun(pieces: Iterator[Bytes], first: Bytes, n_row_bytes: int) -> Iterator[Bytes]:
    """Pieces of whole rows, each row with these bytes first."""
    n_done = 0
    for piece in pieces:
        rows = piece.reshape(-1, n_row_bytes)
        rows[:, : first.shape[1]] = first[n_done : n_done + len(rows)]
        n_done += len(rows)
        yield piece


def _repeated(pool: Bytes, at: int, n_bytes: int) -> Iterator[Bytes]:
    while n_bytes:
        piece = pool[at : at + n_bytes]
        yield piece
        n_bytes -= len(piece)
        at = 0


def _distinct_rows(pool: Bytes, start: int, n_rows: int, n_per_row: int) -> Iterator[Bytes]:
    """Rows for matrices of more rows than the pool has places to start at.

    Equal rows of an output matrix would be tokens that always tie, so each time the places are used
    up, the second half of a row comes from one block further on.
    """
    step = max(1, _PIECE_BYTES // (n_per_row * pool.shape[1]))
    within = np.arange(n_per_row)
    second_half = within >= n_per_row // 2
    for first in range(0, n_rows, step):
        row = np.arange(first, min(first + step, n_rows))[:, None]
        blocks = start + row * n_per_row + within + second_half * (row // len(pool))
        yield pool[blocks % len(pool)].reshape(-1)
