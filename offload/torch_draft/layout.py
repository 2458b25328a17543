"""Lays out a draft's block of memory, and computes its size. Pure.

Query, key and value matrices are joined for a single product, and so are gate and up. The KV cache
has one position more than the context; padding is written there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from offload.torch_draft.shape import DraftShape

DType = Literal["bf16", "f32"]  # f32 is exact, for comparisons
DTYPES: tuple[DType, ...] = ("bf16", "f32")
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "c64": 8, "i64": 8, "f64": 8}
ALIGNMENT = 256  # bytes, as cudaMalloc aligns
MAX_FED = 8  # most new tokens per sequence in one step; more are fed in chunks before
_LEAST_KV = 256  # positions of the smallest bucket
_SCRATCH_SHARE = 0.05  # share of weights and KV for the activations of a chunk
_LEAST_SCRATCH = 16 << 20
_CHUNKS = (512, 256, 128, 64, 32, 16)
_CUBLAS_WORKSPACE = 32 << 20  # bytes for one stream on Hopper; less elsewhere


@dataclass(frozen=True)
class BlockPiece:
    """A tensor in the block. `offset` in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def size_bytes(self) -> int:
        n = SIZES[self.dtype]
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class TorchDraftOptions:
    """The options of opening a draft. `device` is torch's name of one."""

    device: str = "cpu"
    n_ctx: int = 4096
    n_sequences: int = 1
    n_vocab: int = 0  # tokens that may be drafted; 0: all of the file
    dtype: DType = "bf16"
    kept: tuple[int, ...] = ()  # ascending ids of a pruned vocabulary; (): all tokens
    samples: bool = False  # drafts may be drawn, with their distributions
    graphs: bool = True  # off: steps on CUDA run kernel by kernel
    n_threads: int = 1  # torch's threads on the CPU

    @property
    def n_steps(self) -> int:
        """Most steps at once: fewer with draws, which keep a whole distribution for each step."""
        return 16 if self.samples else 64

    def n_out(self, shape: DraftShape) -> int:
        """Rows of the output matrix."""
        return len(self.kept) or min(self.n_vocab or shape.n_vocab, shape.n_vocab)


@dataclass(frozen=True)
class DraftLayout:
    """The block's pieces by name, and its bytes by purpose."""

    pieces: dict[str, BlockPiece] = field(default_factory=dict)
    weight_bytes: int = 0
    kv_bytes: int = 0
    scratch_bytes: int = 0  # activations at most, beside the block
    chunk: int = _CHUNKS[-1]  # tokens of a prompt evaluated at once, at full context

    @property
    def block_bytes(self) -> int:
        return max((p.offset + p.size_bytes for p in self.pieces.values()), default=0)

    @property
    def total_bytes(self) -> int:
        return self.block_bytes + self.scratch_bytes


def lay_out(shape: DraftShape, options: TorchDraftOptions) -> DraftLayout:
    """Lay out weights, KV cache, and the inputs and results of replayed graphs in one block."""
    block = _Block()
    _weights(block, shape, options)
    weights = block.end
    kv = (
        shape.n_layers,
        2,
        options.n_sequences,
        shape.n_head_kv,
        options.n_ctx + 1,
        shape.head_size,
    )
    block.add("kv", kv, cache_dtype(options.dtype))
    kv_bytes = block.end - weights
    n_out, n_seq = options.n_out(shape), options.n_sequences
    block.add("turns", (options.n_ctx + 1, shape.head_size // 2), "c64")
    block.add("inputs", (1 + n_seq * (MAX_FED + 2),), "i64")
    block.add("out", (options.n_steps, n_seq, 3), "f32")
    if options.samples:
        block.add("draws", (n_seq * (1 + options.n_steps),), "f64")
        block.add("rows", (options.n_steps, n_seq, n_out), "f32")
    scratch = max(_LEAST_SCRATCH, int(_SCRATCH_SHARE * block.end))
    chunk = chunk_length(shape, options.n_ctx, scratch)
    return DraftLayout(
        block.pieces,
        weights,
        kv_bytes,
        scratch + _head_scratch(n_out, n_seq),
        chunk,
    )


def cache_dtype(dtype: DType) -> str:
    """The KV cache's type: f16 as in libllama, or f32 if the weights are f32."""
    return "f32" if dtype == "f32" else "f16"


def chunk_length(shape: DraftShape, n_kv: int, scratch_bytes: int) -> int:
    """Tokens of a prompt whose activations fit `scratch_bytes`, if they attend to `n_kv`."""
    scores = shape.n_head * n_kv * 12  # in f32, their softmax in f32 and rounded, and the mask
    rows = 4 * (6 * shape.n_embd + 2 * shape.n_qkv + 3 * shape.n_ff)
    return next((n for n in _CHUNKS if n * (scores + rows) <= scratch_bytes), _CHUNKS[-1])


def bucket(n_positions: int, n_ctx: int) -> int:
    """Round positions up to the number that attention reads: few sizes need few graphs."""
    n = _LEAST_KV
    while n < n_positions:
        n *= 2
    return min(n, n_ctx)


def fed_length(n_new: int) -> int:
    """The width of a step that is fed `n_new` tokens: 1, 2, 4 or 8."""
    n = 1
    while n < n_new:
        n *= 2
    return n


def _weights(block: _Block, shape: DraftShape, options: TorchDraftOptions) -> None:
    plain, e = "f32" if options.dtype == "f32" else "bf16", shape.n_embd
    n_out = options.n_out(shape)
    block.add("token_embd", (shape.n_vocab, e), plain)
    # A tied output matrix is the embedding's first rows, unless it needs rows or a type of its own.
    if not shape.tied or options.kept:
        block.add("output", (n_out, e), options.dtype)
    if options.kept:
        block.add("kept", (n_out,), "i64")
    block.add("output_norm", (e,), "f32")
    n_heads = shape.n_head + shape.n_head_kv
    for i in range(shape.n_layers):
        block.add(f"{i}.attn_norm", (e,), "f32")
        block.add(f"{i}.qkv", (shape.n_qkv, e), options.dtype)
        if shape.qkv_bias:
            block.add(f"{i}.qkv_bias", (shape.n_qkv,), "f32")
        if shape.qk_norm:
            block.add(f"{i}.qk_norm", (n_heads, shape.head_size), "f32")
        block.add(f"{i}.attn_output", (e, shape.n_head * shape.head_size), options.dtype)
        block.add(f"{i}.ffn_norm", (e,), "f32")
        block.add(f"{i}.gate_up", (2 * shape.n_ff, e), options.dtype)
        block.add(f"{i}.ffn_down", (e, shape.n_ff), options.dtype)


def _head_scratch(n_out: int, n_sequences: int) -> int:
    """Bytes of logits, of the results of softmax, argmax and draws, and of cuBLAS's workspace."""
    return n_out * n_sequences * (3 * 4 + 2 * 8) + _CUBLAS_WORKSPACE


class _Block:
    def __init__(self) -> None:
        self.pieces: dict[str, BlockPiece] = {}
        self.end = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        piece = BlockPiece(name, shape, dtype, self.end)
        self.pieces[name] = piece
        self.end = -(-(self.end + piece.size_bytes) // ALIGNMENT) * ALIGNMENT
