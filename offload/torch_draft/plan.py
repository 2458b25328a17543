"""Reads a draft's sizes from its file (llama, qwen2 or qwen3), and lays out its memory. Pure.

Names and defaults of metadata are llama.cpp's (src/llama-model.cpp). Query, key and value matrices
are joined for a single product, and so are gate and up. The KV cache has one position more than
the context; padding is written there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log, pi, prod, sqrt
from typing import Literal, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from offload.alignment import power_of_two
from offload.errors import BadModel
from offload.model import ModelFacts

DType = Literal["bf16", "f32"]  # f32 is exact, for comparisons
SIZES = {"bf16": 2, "f16": 2, "f32": 4, "c64": 8, "i64": 8, "f64": 8}
ALIGNMENT = 256  # bytes, as cudaMalloc aligns
MAX_FED = 8  # most new tokens per sequence in one step; longer inputs are fed in chunks first
_LEAST_KV = 256  # positions of the smallest bucket
_SCRATCH_SHARE = 0.05  # share of weights and KV for the activations of a chunk
_LEAST_SCRATCH = 16 << 20
_CHUNKS = (512, 256, 128, 64, 32, 16)
_CUBLAS_WORKSPACE = 32 << 20  # bytes for one stream on Hopper; less elsewhere
# False: llama.cpp rotates pairs of neighbours; True: pairs of values half a head apart.
_HALVES = {"llama": False, "qwen2": True, "qwen3": True}
_ELSEWHERE = frozenset({"rope_freqs.weight"})  # tensors that are no piece of the block


@dataclass(frozen=True)
class TorchDraftOptions:
    """Options for opening a draft. `device` is torch's name of the device."""

    device: str = "cpu"
    n_ctx: int = 4096
    n_sequences: int = 1
    n_vocab: int = 0  # tokens that may be drafted; 0: all of the file
    dtype: DType = "bf16"
    kept: tuple[int, ...] = ()  # ascending ids of a pruned vocabulary; (): all tokens
    samples: bool = False  # True: drafts may be drawn, and return distributions
    graphs: bool = True  # False: steps on CUDA run kernel by kernel
    n_threads: int = 1  # torch's threads on the CPU

    @property
    def n_steps(self) -> int:
        """Most steps at once: fewer with draws, which keep a whole distribution for each step."""
        return 16 if self.samples else 64

    def n_out(self, shape: DraftShape) -> int:
        """Return the number of rows of the output matrix."""
        return len(self.kept) or min(self.n_vocab or shape.n_vocab, shape.n_vocab)


# -- sizes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a dense decoder. `attention_scale` multiplies q·k."""

    architecture: str
    n_layers: int
    n_embd: int
    n_ff: int
    n_head: int
    n_head_kv: int
    head_size: int
    n_vocab: int
    n_ctx_train: int
    norm_eps: float
    attention_scale: float
    rope: Rope
    tied: bool  # the output matrix is the embedding
    qkv_bias: bool
    qk_norm: bool

    @property
    def n_qkv(self) -> int:
        """Number of rows of the joined query, key and value matrix."""
        return (self.n_head + 2 * self.n_head_kv) * self.head_size


def read_shape(facts: ModelFacts) -> DraftShape:
    """Read the shape from the file's header. Raises BadModel, which names what is unsupported."""
    name = facts.path.name
    architecture = facts.architecture
    if architecture not in _HALVES:
        raise BadModel(f"{name}: the torch draft knows {', '.join(_HALVES)}, not {architecture}")
    if facts.n_experts:
        raise BadModel(f"{name}: the torch draft knows dense models, not {facts.n_experts} experts")
    n_head = facts.number("attention.head_count")
    n_embd = facts.number("embedding_length")
    if n_head < 1 or n_embd < 1 or facts.n_layers < 1:
        raise BadModel(f"{name}: has no head count, embedding length or block count")
    head_size = facts.number("attention.key_length", n_embd // n_head)
    if facts.number("attention.value_length", head_size) != head_size:
        raise BadModel(f"{name}: keys and values of different sizes are not supported in torch")
    weights = facts.weights
    embedding = weights.get("token_embd.weight")
    if embedding is None or len(embedding.entry.shape) != 2:
        raise BadModel(f"{name}: has no matrix token_embd.weight")
    shape = DraftShape(
        architecture=architecture,
        n_layers=facts.n_layers,
        n_embd=n_embd,
        n_ff=facts.number("feed_forward_length"),
        n_head=n_head,
        n_head_kv=facts.number("attention.head_count_kv", n_head),
        head_size=head_size,
        n_vocab=embedding.entry.shape[1],
        n_ctx_train=facts.number("context_length", 4096),
        norm_eps=_float(facts, "attention.layer_norm_rms_epsilon", 1e-5),
        attention_scale=_float(facts, "attention.scale", 0.0) or 1.0 / sqrt(head_size),
        rope=_read_rope(facts, head_size),
        tied="output.weight" not in weights,
        qkv_bias="blk.0.attn_q.bias" in weights,
        qk_norm="blk.0.attn_q_norm.weight" in weights,
    )
    _check_weights(facts, shape)
    return shape


def _check_weights(facts: ModelFacts, shape: DraftShape) -> None:
    """Raise BadModel unless the file's tensors are those of the graph, and can be read."""
    name = facts.path.name
    pieces = weight_pieces(shape, TorchDraftOptions())
    wanted = {source.name: source.shape for piece in pieces for source in piece.sources}
    for tensor, place in facts.weights.items():
        if tensor not in wanted and tensor not in _ELSEWHERE:
            raise BadModel(f"{name}: tensor {tensor} has no place in the torch draft's graph")
        has_shape = place.entry.shape
        if has_shape != wanted.get(tensor, has_shape):
            raise BadModel(f"{name}: tensor {tensor} is {has_shape}, expected {wanted[tensor]}")
        if not _can_dequantize(place.entry.type):
            raise BadModel(
                f"{name}: tensor {tensor} is {place.entry.type}, which gguf cannot dequantise"
            )
    missing = next((tensor for tensor in wanted if tensor not in facts.weights), None)
    if missing is not None:
        raise BadModel(f"{name}: has no tensor {missing}")


def _can_dequantize(ggml_name: str) -> bool:
    kind = GGMLQuantizationType.__members__.get(ggml_name.upper())
    if kind is None:
        return False
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _read_rope(facts: ModelFacts, head_size: int) -> Rope:
    name = facts.path.name
    kind = str(facts.header.metadata.get(f"{facts.architecture}.rope.scaling.type", "linear"))
    factor = _float(facts, "rope.scaling.factor", 0.0) or _float(facts, "rope.scale_linear", 0.0)
    if kind not in ("none", "linear", "yarn"):
        raise BadModel(f"{name}: rope scaling {kind!r} is not supported in torch")
    if kind == "yarn" and _float(facts, "rope.scaling.yarn_log_multiplier", 0.0):
        raise BadModel(f"{name}: YaRN with a log multiplier is not supported in torch")
    n_rot = facts.number("rope.dimension_count", head_size)
    if n_rot != head_size or head_size % 2:
        # libllama aborts on such a file of these architectures.
        raise BadModel(f"{name}: {n_rot} rotated of {head_size} values in a head")
    return Rope(
        head_size,
        base=_float(facts, "rope.freq_base", 10000.0),
        halves=_HALVES[facts.architecture],
        kind=kind,
        factor=factor if factor and kind != "none" else 1.0,
        attention_factor=_float(facts, "rope.scaling.attn_factor", 1.0),
        n_ctx_original=facts.number(
            "rope.scaling.original_context_length", facts.number("context_length", 4096)
        ),
        beta_fast=_float(facts, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_float(facts, "rope.scaling.yarn_beta_slow", 1.0),
    )


def _float(facts: ModelFacts, key: str, default: float) -> float:
    value = facts.header.metadata.get(f"{facts.architecture}.{key}", default)
    return float(value) if isinstance(value, int | float) else default


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding, with llama.cpp's `rope.scaling.*`.

    `halves`: llama.cpp rotates pairs (0, n/2), (1, n/2 + 1), ... (NEOX) instead of (0, 1), (2, 3),
    ... (NORM). Reordering the values of queries and keys alike does not change their products, so
    NEOX rows are reordered at loading. `factor` stretches positions; YaRN (arXiv 2309.00071)
    stretches only those of slow frequencies.
    """

    head_size: int
    base: float
    halves: bool
    kind: str = "linear"
    factor: float = 1.0
    attention_factor: float = 1.0
    n_ctx_original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def order(self) -> NDArray[np.int64]:
        """Return the file's index of each value of a head, in the order used here [head_size]."""
        order = np.arange(self.head_size)
        return order.reshape(2, -1).T.flatten() if self.halves else order

    def turns(
        self, n_positions: int, divisors: NDArray[np.float32] | None = None
    ) -> NDArray[np.complex64]:
        """Return each pair's complex factor [n_positions, head_size / 2].

        `divisors` [head_size / 2] are the file's rope_freqs.
        """
        frequency, magnitude = self._frequencies(divisors)
        angle = np.arange(n_positions, dtype=np.float64)[:, None] * frequency[None, :]
        turns: NDArray[np.complex64] = (magnitude * np.exp(1j * angle)).astype(np.complex64)
        return turns

    def _frequencies(
        self, divisors: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float64], float]:
        """Return each pair's angle per position, and the factor on the length of all pairs."""
        half = self.head_size // 2
        plain = self.base ** (-np.arange(half) / half)
        if divisors is not None:
            plain = plain / divisors.astype(np.float64)
        if self.kind != "yarn":
            return plain / self.factor, self.attention_factor
        # YaRN goes from trained to slower rotation between these two pairs.
        low = max(0.0, floor(self._pair(self.beta_fast)))
        high = min(self.head_size - 1.0, ceil(self._pair(self.beta_slow)))
        ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
        mixed = plain / self.factor * ramp + plain * (1.0 - ramp)
        grown = 1.0 + 0.1 * log(self.factor) if self.factor > 1 else 1.0
        return mixed, grown * self.attention_factor

    def _pair(self, n_turns: float) -> float:
        """Return the index of the pair that makes `n_turns` turns in the original context."""
        return self.head_size * log(self.n_ctx_original / (n_turns * 2 * pi)) / (2 * log(self.base))


# -- memory ----------------------------------------------------------------------------------------


class TensorSource(NamedTuple):
    """A tensor of the file, with its shape in ggml's order."""

    name: str
    shape: tuple[int, ...]
    is_rotated: bool = False  # True: its rows are reordered by Rope.order
    times: int = 1  # number of its copies in the piece


class BlockPiece(NamedTuple):
    """A tensor in the block, which joins its sources in the file one after the other."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[TensorSource, ...] = ()

    @property
    def size_bytes(self) -> int:
        return SIZES[self.dtype] * prod(self.shape)

    @property
    def aligned_bytes(self) -> int:
        """Number of bytes up to the next piece."""
        return -(-self.size_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class DraftLayout:
    """The block's pieces by name, and its bytes by purpose."""

    pieces: dict[str, BlockPiece]
    weight_bytes: int
    kv_bytes: int
    scratch_bytes: int  # most bytes of activations, outside the block
    chunk: int  # tokens of a prompt evaluated at once, at full context

    @property
    def block_bytes(self) -> int:
        return sum(piece.aligned_bytes for piece in self.pieces.values())

    @property
    def total_bytes(self) -> int:
        return self.block_bytes + self.scratch_bytes


def lay_out(shape: DraftShape, options: TorchDraftOptions) -> DraftLayout:
    """Lay out weights, KV cache, and the inputs and results of replayed graphs in one block."""
    n_seq, n_ctx, head_size = options.n_sequences, options.n_ctx, shape.head_size
    n_out, n_steps = options.n_out(shape), options.n_steps
    weights = list(weight_pieces(shape, options))
    # f16 as in libllama, or f32 if the weights are f32
    kv_shape = shape.n_layers, 2, n_seq, shape.n_head_kv, n_ctx + 1, head_size
    kv = BlockPiece("kv", kv_shape, "f32" if options.dtype == "f32" else "f16")
    others = [
        BlockPiece("turns", (n_ctx + 1, head_size // 2), "c64"),
        BlockPiece("inputs", (1 + n_seq * (MAX_FED + 2),), "i64"),
        BlockPiece("out", (n_steps, n_seq, 3), "f32"),
    ]
    if options.kept:
        others.append(BlockPiece("kept", (n_out,), "i64"))
    if options.samples:
        others.append(BlockPiece("draws", (n_seq * (1 + n_steps),), "f64"))
        others.append(BlockPiece("rows", (n_steps, n_seq, n_out), "f32"))
    pieces = {piece.name: piece for piece in (*weights, kv, *others)}
    block_bytes = sum(piece.aligned_bytes for piece in pieces.values())
    scratch = max(_LEAST_SCRATCH, int(_SCRATCH_SHARE * block_bytes))
    # Logits, the results of softmax, argmax and draws, and cuBLAS's workspace
    head_bytes = n_out * n_seq * (3 * 4 + 2 * 8) + _CUBLAS_WORKSPACE
    return DraftLayout(
        pieces,
        weight_bytes=sum(piece.aligned_bytes for piece in weights),
        kv_bytes=kv.aligned_bytes,
        scratch_bytes=scratch + head_bytes,
        chunk=chunk_length(shape, n_ctx, scratch),
    )


def weight_pieces(shape: DraftShape, options: TorchDraftOptions) -> Iterator[BlockPiece]:
    dtype, e, ff = options.dtype, shape.n_embd, shape.n_ff
    embedding = TensorSource("token_embd.weight", (e, shape.n_vocab))
    yield BlockPiece("token_embd", (shape.n_vocab, e), dtype, (embedding,))
    # A tied output matrix is the embedding's first rows, unless it needs rows of its own.
    if not shape.tied or options.kept:
        source = embedding if shape.tied else TensorSource("output.weight", (e, shape.n_vocab))
        yield BlockPiece("output", (options.n_out(shape), e), dtype, (source,))
    yield BlockPiece("output_norm", (e,), "f32", (TensorSource("output_norm.weight", (e,)),))
    head, n_q, n_kv = shape.head_size, shape.n_head, shape.n_head_kv
    sizes = {"q": n_q * head, "k": n_kv * head, "v": n_kv * head}
    for i in range(shape.n_layers):
        of, at = f"blk.{i}.", f"{i}."
        for norm in ("attn_norm", "ffn_norm"):
            yield BlockPiece(at + norm, (e,), "f32", (TensorSource(f"{of}{norm}.weight", (e,)),))
        qkv = [TensorSource(f"{of}attn_{n}.weight", (e, m), n != "v") for n, m in sizes.items()]
        yield BlockPiece(f"{at}qkv", (shape.n_qkv, e), dtype, tuple(qkv))
        if shape.qkv_bias:
            biases = [TensorSource(f"{of}attn_{n}.bias", (m,), n != "v") for n, m in sizes.items()]
            yield BlockPiece(f"{at}qkv_bias", (shape.n_qkv,), "f32", tuple(biases))
        if shape.qk_norm:
            norms = (
                TensorSource(f"{of}attn_q_norm.weight", (head,), True, n_q),
                TensorSource(f"{of}attn_k_norm.weight", (head,), True, n_kv),
            )
            yield BlockPiece(f"{at}qk_norm", (n_q + n_kv, head), "f32", norms)
        output = TensorSource(f"{of}attn_output.weight", (n_q * head, e))
        yield BlockPiece(f"{at}attn_output", (e, n_q * head), dtype, (output,))
        gate_up = [TensorSource(f"{of}ffn_{n}.weight", (e, ff)) for n in ("gate", "up")]
        yield BlockPiece(f"{at}gate_up", (2 * ff, e), dtype, tuple(gate_up))
        down = TensorSource(f"{of}ffn_down.weight", (ff, e))
        yield BlockPiece(f"{at}ffn_down", (e, ff), dtype, (down,))


def chunk_length(shape: DraftShape, n_kv: int, scratch_bytes: int) -> int:
    """Return the tokens of a prompt whose activations fit `scratch_bytes`, attending to `n_kv`."""
    scores = shape.n_head * n_kv * 12  # bytes: scores and softmax in f32, rounded softmax, mask
    rows = 4 * (6 * shape.n_embd + 2 * shape.n_qkv + 3 * shape.n_ff)
    return next((n for n in _CHUNKS if n * (scores + rows) <= scratch_bytes), _CHUNKS[-1])


def bucket(n_positions: int, n_ctx: int) -> int:
    """Return how many positions attention reads for `n_positions`. Few sizes need few graphs."""
    return min(max(_LEAST_KV, power_of_two(n_positions)), n_ctx)


def fed_length(n_new: int) -> int:
    """Return the width of a step that is fed `n_new` tokens: 1, 2, 4 or 8."""
    return power_of_two(n_new)
