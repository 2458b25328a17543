"""Which of ggml's CPU kernels round by batch size, and by how much (docs/speculation.md).

Rows are computed alone and together with others, by graphs of one node.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.ggml.library.lib import library
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.ggml.threads import check, cpu_device

Rows = NDArray[np.float32]
HEAD, N_HEADS = 64, 4
SCALE = HEAD**-0.5
LAST_BITS = 1e-6  # difference that another order of sums makes, relative to the largest number
IN_F16 = 1e-4  # difference that sums in f16 make at least, relative to the largest number


class Cpu:
    """Computes single nodes on the CPU device."""

    def __init__(self, stream: Stream, buffer: Buffer) -> None:
        self._stream, self._buffer, self._end = stream, buffer, 0

    def threads(self, n: int) -> None:
        library().ggml_backend_cpu_set_n_threads(self._stream.address, n)

    def tensor(self, values: NDArray[np.float32] | NDArray[np.float16]) -> Tensor:
        """Copy numbers into a tensor. Its dimensions are in ggml's order, so reversed."""
        shape = (*values.shape[::-1], 1, 1, 1)[:4]
        made = self._empty("f16" if values.dtype == np.float16 else "f32", shape)
        raw = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
        self._bytes(made)[: raw.size] = raw
        return made

    def computed(
        self, op: str, shape: tuple[int, ...], sources: Sequence[Tensor], params: bytes = b""
    ) -> Rows:
        node = self._empty("f32", (*shape[::-1], 1, 1, 1)[:4], op, sources)
        node.with_parameters(struct.unpack(f"{len(params) // 4}i", params))
        check(self._stream.compute(Graph.of([node])), op)
        self._stream.synchronize()
        found = self._bytes(node).view(np.float32).reshape(shape).copy()
        self._end = 0
        return found

    def _empty(
        self, kind: str, shape: Sequence[int], op: str = "NONE", sources: Sequence[Tensor] = ()
    ) -> Tensor:
        n_0, n_1, n_2, n_3 = shape
        made = new_tensor(kind, (n_0, n_1, n_2, n_3), (self._buffer, self._end), op, sources)
        self._end += -(-made.size_bytes // 64) * 64
        return made

    def _bytes(self, tensor: Tensor) -> NDArray[np.uint8]:
        start = tensor.position - self._buffer.base
        return self._buffer.host_range.array()[start : start + tensor.size_bytes]


@pytest.fixture
def cpu() -> Iterator[Cpu]:
    device = cpu_device()
    stream, buffer = device.open(), device.allocate(1 << 24, "numbers")
    made = Cpu(stream, buffer)
    made.threads(1)
    yield made
    stream.close()
    buffer.close()


def product(cpu: Cpu, weights: Rows, rows: Rows) -> Rows:
    """Returns rows [n, n_out] of the product with weights [n_out, n_in]."""
    return cpu.computed(
        "MUL_MAT", (len(rows), len(weights)), [cpu.tensor(weights), cpu.tensor(rows)]
    )


def flash(cpu: Cpu, queries: Rows, keys: Rows, values: Rows) -> Rows:
    """Returns [n, head, HEAD] for queries [head, n, HEAD] over keys and values [head, cell, HEAD].

    Keys and values are cast to f16, as libllama does with caches in f32 (`build_attn_mha`).
    """
    n, cells = queries.shape[1], keys.shape[1]
    sources = [
        cpu.tensor(queries),
        cpu.tensor(keys.astype(np.float16)),
        cpu.tensor(values.astype(np.float16)),
        cpu.tensor(np.zeros((n, cells), np.float16)),
    ]
    params = struct.pack("fff", SCALE, 0, 0) + struct.pack("i", 10)  # GGML_PREC_F32
    return cpu.computed("FLASH_ATTN_EXT", (n, N_HEADS, HEAD), sources, params)


def plain(cpu: Cpu, queries: Rows, keys: Rows, values: Rows) -> Rows:
    """The same without flash attention and with caches in f32, by three nodes."""
    n, cells = queries.shape[1], keys.shape[1]
    scores = cpu.computed("MUL_MAT", (N_HEADS, n, cells), [cpu.tensor(keys), cpu.tensor(queries)])
    shares = cpu.computed(
        "SOFT_MAX", scores.shape, [cpu.tensor(scores)], struct.pack("ff", SCALE, 0)
    )
    turned = np.ascontiguousarray(values.transpose(0, 2, 1))
    out = cpu.computed("MUL_MAT", (N_HEADS, n, HEAD), [cpu.tensor(turned), cpu.tensor(shares)])
    return out.transpose(1, 0, 2)


def numbers(*shape: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attention_inputs(n: int, cells: int) -> tuple[Rows, Rows, Rows]:
    return (
        numbers(N_HEADS, n, HEAD, seed=1),
        numbers(N_HEADS, cells, HEAD, seed=2),
        numbers(N_HEADS, cells, HEAD, seed=3),
    )


def difference(a: Rows, b: Rows) -> float:
    """The largest difference, relative to the largest number."""
    return float(np.abs(a - b).max() / np.abs(b).max())


def test_a_row_of_an_f32_product_has_other_last_bits_alone_than_among_others(cpu: Cpu) -> None:
    """llamafile's kernels take products of two rows or more, and sum in another order."""
    weights, rows = numbers(96, 512), numbers(70, 512, seed=1)
    alone = np.concatenate([product(cpu, weights, row[None]) for row in rows])
    together = product(cpu, weights, rows)
    for n in (2, 3, 5, 64):
        assert np.array_equal(product(cpu, weights, rows[:n]), together[:n])
    assert difference(alone, together) < LAST_BITS
    if platform.machine() == "x86_64":
        assert not np.array_equal(alone, together)


def test_flash_attention_has_one_way_for_few_rows_and_another_for_64(cpu: Cpu) -> None:
    queries, keys, values = attention_inputs(64, 256)
    tiles = flash(cpu, queries, keys, values)
    few = flash(cpu, queries[:, :5], keys, values)
    for i in range(5):
        alone = flash(cpu, queries[:, i : i + 1], keys, values)
        assert np.array_equal(alone[0], few[i])
    assert difference(few, tiles[:5]) > IN_F16, "tiles sum in f32, single rows in f16"


def test_flash_attention_divides_one_row_over_512_cells_among_threads(cpu: Cpu) -> None:
    for n_cells, is_divided in ((256, False), (512, True)):
        queries, keys, values = attention_inputs(1, n_cells)
        found = []
        for n_threads in (1, 2):
            cpu.threads(n_threads)
            found.append(flash(cpu, queries, keys, values))
        assert np.array_equal(*found) != is_divided


@pytest.mark.parametrize("cells", [256, 1024])
def test_flash_attention_turns_last_bits_into_bits_of_f16_and_plain_attention_does_not(
    cpu: Cpu, cells: int
) -> None:
    """So the last bits of the products before it decide how single rows are rounded."""
    queries, keys, values = attention_inputs(4, cells)
    other = (queries * np.float32(1 + 2e-7)).astype(np.float32)
    assert 0 < difference(other, queries) < LAST_BITS
    few = [flash(cpu, each, keys, values) for each in (queries, other)]
    assert difference(*few) > IN_F16
    exact = [plain(cpu, each, keys, values) for each in (queries, other)]
    assert difference(*exact) < LAST_BITS
    assert difference(few[0], exact[0]) < 0.05, "both compute the same"


def test_plain_attention_in_f32_differs_by_batch_size_in_last_bits_alone(cpu: Cpu) -> None:
    queries, keys, values = attention_inputs(70, 1024)
    together = plain(cpu, queries, keys, values)
    for n in (1, 2, 8, 64):
        few = plain(cpu, np.ascontiguousarray(queries[:, :n]), keys, values)
        assert difference(few, together[:n]) < LAST_BITS
