"""Plans and writes files: the header, then tensor by tensor from pools of random blocks.

Small tensors are drawn value by value. For a large one, a pool of blocks is quantised once and
repeated. ggml's blocks are independent, so any run of them is a valid row. The number of blocks is
prime, so that each row starts at another place of the pool until all places were used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGUFValueType, GGUFWriter
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from lab.synth.asking import failure_of
from lab.synth.library import quantize
from lab.synth.shape import ImpossibleShape, Shape, Value, resolve
from lab.synth.tensors import Fill, Tensor, tensors_of
from lab.synth.vocabulary import Entry, byte_level, copied, no_tokenizer, size_of
from offload.errors import BadRequest

ALIGNMENT = 32  # bytes; GGUF's default, to which every tensor is padded
_DIRECT_VALUES = 1 << 20  # tensors up to this many values are drawn whole
_PIECE_VALUES = 1 << 20  # values drawn and quantised at a time
_POOL_VALUES = 1 << 21
_PIECE_BYTES = 4 << 20
_KEPT_BYTES = 32 << 20  # most bytes of pools; the least recently used are dropped first

Bytes = NDArray[np.uint8]
OnProgress = Callable[[str, int], None]  # (tensor, bytes just written)


@dataclass(frozen=True)
class Plan:
    """The contents of a file before it is written: its header and every tensor."""

    shape: Shape
    tokenizer: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    size_bytes: int  # size of the whole file


def plan_preset(
    preset: str, *, size: str = "tiny", vocab: str | Path = "bytes", **overrides: Any
) -> Plan:
    """The plan of the file that write_preset would write."""
    return plan_shape(resolve(preset, size, **overrides), vocab, overrides.get("n_vocab"))


def plan_shape(shape: Shape, vocab: str | Path = "bytes", n_vocab: int | None = None) -> Plan:
    """The plan of `shape` with the tokenizer `vocab` ("bytes", "none" or a GGUF file).

    A copied tokenizer decides the number of tokens. Raises BadRequest when `n_vocab` differs.
    """
    if vocab == "none":
        tokenizer = no_tokenizer()
    elif vocab == "bytes":
        tokenizer = byte_level(shape.n_vocab)
    else:
        tokenizer = copied(Path(vocab))
        n_listed = size_of(tokenizer) or 0
        if n_vocab not in (None, n_listed):
            raise BadRequest(f"--vocab {vocab} has {n_listed} tokens, not {n_vocab} (--n-vocab)")
        shape = dataclasses.replace(shape, n_vocab=n_listed)
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder) / "header.gguf"
        _write_header(header, shape, no_tokenizer(), ())
        if shape.unchecked and (why := failure_of(header)):
            raise ImpossibleShape(f"the library cannot build this shape: {why}")
        tensors = tensors_of(shape, header)
        n_header = _write_header(header, shape, tokenizer, tensors)
    n_data = sum(t.n_bytes + -t.n_bytes % ALIGNMENT for t in tensors)
    return Plan(shape, tuple(tokenizer), tensors, n_header + n_data)


def write_preset(
    preset: str,
    path: Path | str,
    *,
    size: str = "tiny",
    seed: int = 0,
    vocab: str | Path = "bytes",
    on_progress: OnProgress | None = None,
    **overrides: Any,
) -> Path:
    """Write a random-weight GGUF of a named shape and return its path.

    `size` is "tiny", "tiny-vulkan" or "full"; overrides are those of shape.resolve. Equal arguments
    give equal bytes. Raises UnknownPreset, ImpossibleShape, BadRequest, or BadModel when the
    library refuses the shape.
    """
    planned = plan_preset(preset, size=size, vocab=vocab, **overrides)
    return write(planned, Path(path), seed, on_progress)


def write_header_only(planned: Plan, path: Path) -> Path:
    """Write the header of a planned file. Its data is a hole, which takes no room on the disk.

    The file is for programs that read only headers. Its weights are zeros. Raises BadRequest if the
    folder does not exist or its file system has no sparse files of that size.
    """
    _check_place(path)
    with _begun(planned, path) as partial:
        try:
            os.truncate(partial, planned.size_bytes)
        except OSError as e:
            size = f"{planned.size_bytes / 1e9:.0f} GB"
            raise BadRequest(f"{path}: no sparse file of {size} can be made there ({e})") from e
    return path


@contextlib.contextmanager
def _begun(planned: Plan, path: Path) -> Iterator[Path]:
    """Yields a new file with the header. It becomes `path` if the block succeeds, else it is
    removed."""
    partial = path.with_name(path.name + ".partial")
    try:
        _write_header(partial, planned.shape, planned.tokenizer, planned.tensors)
        yield partial
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise


def _check_place(path: Path) -> None:
    if not path.resolve().parent.is_dir() or path.is_dir():
        raise BadRequest(f"{path}: not a file in an existing folder")


def write(
    planned: Plan,
    path: Path,
    seed: int = 0,
    on_progress: OnProgress | None = None,
    *,
    holes: str = "",
) -> Path:
    """Write a planned file. It appears under its name only when it is whole.

    Data of tensors whose names have the text `holes` are zeros that take no room on the disk.
    Raises BadRequest when the folder does not exist or its disk has too little room.
    """
    _check_place(path)
    free = shutil.disk_usage(path.resolve().parent).free
    if planned.size_bytes > free:
        raise BadRequest(
            f"{path}: needs {planned.size_bytes / 1e9:.2f} GB but its disk has {free / 1e9:.2f} GB "
            "free; lower --layers, --experts or --scale"
        )
    with _begun(planned, path) as partial:
        _append_tensors(partial, planned, _Source(seed), on_progress, holes)
    return path


def _append_tensors(
    path: Path, planned: Plan, source: _Source, on_progress: OnProgress | None, holes: str
) -> None:
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        for tensor in planned.tensors:
            if holes and holes in tensor.name:
                file.seek(tensor.n_bytes + -tensor.n_bytes % ALIGNMENT, os.SEEK_CUR)
                continue
            for piece in source.pieces(tensor):
                file.write(piece.data)
                if on_progress is not None:
                    on_progress(tensor.name, len(piece))
            file.write(bytes(-tensor.n_bytes % ALIGNMENT))
        file.truncate()  # to here, in case the last tensor is a hole


# -- the header ------------------------------------------------------------------------------------


# Hashes of n-grams address tables of more than 2^32 rows, so the library reads them as uint64.
_UINT64_ARRAYS = {
    f"ple.{name}" for name in ("layer_multipliers", "head_offsets", "head_vocab_sizes")
}


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


def _write_header(
    path: Path, shape: Shape, tokenizer: Iterable[Entry], tensors: Sequence[Tensor]
) -> int:
    """Write `path` up to where the first tensor's data begins; returns that offset in bytes."""
    writer = GGUFWriter(path, shape.architecture)
    writer.add_name(shape.name)
    writer.add_description("random weights, for tests and measurements")
    for key, value in shape.metadata.items():
        element = GGUFValueType.UINT64 if key in _UINT64_ARRAYS else None
        writer.add_key_value(f"{shape.architecture}.{key}", value, _kind(value), element)
    writer.add_key_value(f"{shape.architecture}.vocab_size", shape.n_vocab, GGUFValueType.UINT32)
    for entry in tokenizer:
        writer.add_key_value(entry.key, entry.value, entry.kind, entry.element)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for tensor in tensors:
        # The writer takes shapes in numpy's order, the longest stride first.
        dimensions = tensor.shape[::-1]
        dtype = np.dtype(np.float32)  # ignored by the writer, which takes raw_dtype
        writer.add_tensor_info(tensor.name, dimensions, dtype, tensor.n_bytes, tensor.type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.write(bytes(-file.tell() % ALIGNMENT))
        return file.tell()


# -- random bytes of a ggml type -------------------------------------------------------------------


def _prime_from(n: int) -> int:
    def is_prime(k: int) -> bool:
        return k % 2 == 1 and all(k % d for d in range(3, int(k**0.5) + 1, 2))

    while not is_prime(n):
        n += 1
    return n


def _encode(values: NDArray[np.float32], type_: Type) -> Bytes:
    if type_ == Type.F32:
        return values.view(np.uint8).reshape(-1)
    if type_ == Type.I64:
        return values.astype(np.int64).view(np.uint8)
    block, size = GGML_QUANT_SIZES[type_]
    rows = values.reshape(1, -1) if block == 1 else values.reshape(-1, block)
    n_bytes = rows.shape[1] // block * size
    return quantize(rows, int(type_), n_bytes).reshape(-1)


def _draw(rng: np.random.Generator, n: int, fill: Fill) -> NDArray[np.float32]:
    if fill.kind == "constant":
        return np.full(n, fill.scale, np.float32)
    if fill.kind == "steps":
        return np.arange(n, dtype=np.float32) * np.float32(fill.scale)
    if fill.kind == "decay":
        return (-fill.scale * rng.uniform(0.5, 4.0, n)).astype(np.float32)
    values = rng.standard_normal(n, dtype=np.float32)
    values *= np.float32(fill.scale)
    return values


class _Source:
    """Bytes of random tensors; the same seed gives the same bytes."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._pools: dict[tuple[Type, Fill], Bytes] = {}  # in order of last use

    def _rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(what.encode())])

    def pieces(self, tensor: Tensor) -> Iterator[Bytes]:
        """The tensor's bytes in order, in pieces of a few megabytes."""
        # Pools round scales, but a router's values must keep their size relative to the first ones.
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
            yield from _with_first(
                rows, self._first_blocks(tensor), tensor.n_bytes // tensor.shape[1]
            )
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
        """The blocks of each row that hold its first values, [n rows, bytes]."""
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


def _with_first(pieces: Iterator[Bytes], first: Bytes, n_row_bytes: int) -> Iterator[Bytes]:
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
    """Distinct rows for a matrix with more rows than the pool has starting places.

    With equal rows of an output matrix, two tokens would always tie. So whenever all starting
    places have been used, the second half of the next rows comes from one block further on.
    """
    step = max(1, _PIECE_BYTES // (n_per_row * pool.shape[1]))
    within = np.arange(n_per_row)
    second_half = within >= n_per_row // 2
    for first in range(0, n_rows, step):
        row = np.arange(first, min(first + step, n_rows))[:, None]
        blocks = start + row * n_per_row + within + second_half * (row // len(pool))
        yield pool[blocks % len(pool)].reshape(-1)
