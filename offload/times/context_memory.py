"""Computes the device memory that a context takes: caches, states and buffers. Pure.

The sizes follow from the file's header. For `llama_kv_cache` and the library's other caches, the
formulas below are exact. ggml's graph allocator sizes compute buffers for one layer's activations.
The formula for their width per token was fitted to the allocator's sizes for published models.
`tests/model/test_plan_memory.py` compares it with the library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from offload.errors import BadRequest
from offload.model import ModelFacts

CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")  # -ctk, -ctv
POOLINGS = ("none", "mean", "cls", "last")  # in the order of llama.cpp's numbers
OWN = "own"  # the file's pooling; no embeddings if it names none
OWN_REQUIRED = "own-required"  # the file's pooling; a model that names none is refused
DEFAULT_UBATCH = 512
_F32 = 4
_MASK = 2  # bytes of an attention mask's cell
_NOTES_BYTES = 64  # most bytes of a saved cell besides its values, such as position and sequences
MTP_UBATCH = 512  # most tokens that layers for multi-token prediction compute at once
_PAD = 256  # libllama pads contexts and windows to this many cells
_Q8_1 = 36 / 32  # bytes a value takes when a device quantises activations for a product
# Values of n by architecture, for headers without a pattern. The library's default is that every
# n-th layer attends to all tokens, and the others to a window.
_WINDOW_PERIOD: Mapping[str, int] = {
    **{"gemma2": 2, "gpt-oss": 2, "gemma3n": 5, "gemma3": 6, "plamo3": 8},
    **{name: 4 for name in ("afmoe", "cohere2", "exaone-moe", "exaone4", "llama4", "mellum")},
    **{name: 4 for name in ("muse-glimmer", "olmo2", "cohere2moe", "smallthinker", "laguna")},
}
_FIRST_IS_FULL = frozenset({"cohere2moe", "smallthinker", "laguna"})
_WINDOW: Mapping[str, int] = {
    **{"gemma2": 4096, "exaone4": 4096, "smallthinker": 4096, "exaone-moe": 128, "llama4": 8192}
}
# Architectures whose attention the library computes without flash attention, whatever is asked.
WITHOUT_FLASH_ATTENTION = frozenset({"grok"})
_FIXED_WINDOW = frozenset({"llama4", "smallthinker"})
# Rows of the residual stream that are alive during a dense feed-forward part, if not 4. Either
# attention runs in parallel with that part, or there are several streams.
_STREAMS = {"cohere2": 5, "gemma3n": 14}
# Architectures whose attention goes through a lightning indexer, which caches keys of its own.
_SPARSE = frozenset(
    {"deepseek32", "dots3note", "glm-dsa", "glm5-next", "hy_v4", "minimax-m3", "qwen4exp"}
)
# Architectures whose graph masks the tokens that the indexer did not choose. So a decode attends to
# all tokens, and averages the indexer's keys over blocks of four tokens anew. That moves this many
# f32 values for each value of a key: 1 to gather it, 2 to copy it, 2.25 to add it, and 1.75 for a
# block's scaling, norm, rotation and product. They were counted in the graph of llama.cpp
# (`build_qsa_top_k` and `build_attn_qsa` of src/models/qwen4exp.cpp).
_MASKING = {"qwen4exp": 7.0}
# Rows of the context's length, in f32, that an indexer takes for each token at once.
_SCORE_ROWS = {"dots3note": 3.0, "hy_v4": 3.0, "qwen4exp": 2.8}
# Rows of the model's width that hyper-connections keep for each token, beside all others.
_CONNECTION_ROWS = {"qwen4exp": 10, "deepseek4": 4, "hy_v4": 10}
_POOL_BYTES = 10  # of one sequence's pool of keys for each token, while glm5-next scores them
_COMPRESSED = "deepseek4"  # keeps a window of keys, and compressed ones of the tokens before it
_INDEXED_RATIO = 4  # tokens of a compressed key that the indexer chooses from; others are all read
_SCORED_BYTES = 7  # bytes for each such key and token, besides its mask, while the indexer chooses


ROPE_SCALINGS = ("none", "linear", "yarn")  # by llama.cpp's numbers


_INPUT_ROWS = 4  # rows of activations for each token; libllama's allocator takes 3 or 4
_INPUT_NUMBERS = 16  # most other inputs of a token: positions, rows to write, outputs


@dataclass(frozen=True)
class RopeOptions:
    """How positions are turned into rotations, under llama.cpp's names. None: as the file says.

    `scale` is the factor by which the context grows, and `freq_scale` is its inverse. YaRN is
    described by Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models"
    (arXiv:2309.00071).
    """

    scaling: str | None = None  # one of ROPE_SCALINGS
    freq_base: float | None = None
    freq_scale: float | None = None
    yarn_orig_ctx: int | None = None  # tokens that the model was trained for before YaRN
    yarn_ext_factor: float | None = None
    yarn_attn_factor: float | None = None
    yarn_beta_slow: float | None = None
    yarn_beta_fast: float | None = None


@dataclass(frozen=True)
class ContextOptions:
    """The sizes and threads of a context. Names of types are llama.cpp's."""

    n_ctx: int = 4096  # 0: as many tokens as the model was trained for
    n_ubatch: int = DEFAULT_UBATCH
    n_batch: int = 2048
    n_sequences: int = 1
    n_outputs: int = 64  # rows of one decode whose logits may be asked for
    n_tree_leaves: int = 0  # temporary sequences for the leaves of a drafted tree
    n_rs_seq: int = 0  # most tokens that a recurrent memory rolls back by snapshots
    n_threads: int = 1
    n_threads_batch: int = 1
    flash_attn: str = "auto"
    type_k: str = "f16"  # type of the KV cache's keys
    type_v: str = "f16"
    rope: RopeOptions = RopeOptions()
    swa_full: bool = False  # keep keys that sliding windows have passed
    device_checkpoints: bool = True  # a recurrent state's checkpoint stays on the device
    kv_offload: bool = True  # False: the KV cache is in RAM; recurrent states are on the device
    kv_unified: bool = True  # False: each sequence has cells of its own, an equal part of them
    most_each: int = 0  # most tokens of one sequence; 0: as many as its cells hold

    @property
    def n_streams(self) -> int:
        """Number of separate parts of the KV cache. Each holds one sequence, or one holds all."""
        return 1 if self.kv_unified else self.n_sequences

    @property
    def n_ctx_each(self) -> int:
        """Cells that one sequence may use, before the library rounds them up to 256."""
        return self.n_ctx // self.n_streams

    @property
    def of_one(self) -> ContextOptions:
        """The context as one sequence attends to it: its own cells, or all that are shared."""
        if self.n_streams == 1:
            return self
        return replace(self, n_ctx=self.n_ctx_each, n_sequences=1)


@dataclass(frozen=True)
class ContextMemory:
    """Device memory of one context, by purpose."""

    kv_bytes: int
    recurrent_bytes: int
    compute_bytes: int  # buffers that ggml's scheduler reserves for a ubatch's graph
    pool_bytes: int  # temporary memory of the device's kernels
    host_kv_bytes: int = 0  # the KV cache in RAM, which is no device memory
    host_compute_bytes: int = 0  # buffers in RAM for attention that only the CPU computes

    @property
    def host_bytes(self) -> int:
        """The host memory of a KV cache in RAM, and of its attention."""
        return self.host_kv_bytes + self.host_compute_bytes

    @property
    def total_bytes(self) -> int:
        """The device memory of all purposes."""
        return self.kv_bytes + self.recurrent_bytes + self.compute_bytes + self.pool_bytes


def trained_context(facts: ModelFacts, rope: RopeOptions) -> int:
    """Return the tokens of context that the model was trained for, or those that `rope` permits.

    The file's own context may be the longer one, because it may include an extension already.
    """
    own = facts.n_ctx_train
    if not rope.freq_scale or rope.scaling == "none":
        return own
    before = rope.yarn_orig_ctx or facts.number("rope.scaling.original_context_length", own)
    return max(own, round(before / rope.freq_scale))


def context_memory(facts: ModelFacts, spec: ContextOptions) -> ContextMemory:
    """Return the device memory that a context of this model takes."""
    shape = _Shape(facts)
    if not spec.n_ctx:
        spec = replace(spec, n_ctx=trained_context(facts, spec.rope))
    kv_bytes = sum(_kv_bytes_by_layer(shape, spec).values())
    on_cpu = not spec.kv_offload and cpu_attention(facts, spec)
    return ContextMemory(
        kv_bytes if spec.kv_offload else 0,
        _recurrent_bytes(shape, spec),
        _compute_bytes(shape, spec, attends=not on_cpu) + _cache_copy_bytes(shape, spec),
        _pool_bytes(shape, spec),
        0 if spec.kv_offload else kv_bytes,
        _compute_bytes(shape, spec) + _cast_bytes(shape, spec) if on_cpu else 0,
    )


def host_input_bytes(facts: ModelFacts, spec: ContextOptions) -> int:
    """Return the pinned host memory in which libllama gives a GPU the inputs of a ubatch.

    These are the masks, rows of activations such as the embedding's, and a few numbers. Masks are
    counted as f32; with flash attention they are f16, so that the library takes less.
    """
    shape = _Shape(facts)
    spec = replace(spec, n_ctx=spec.n_ctx or trained_context(facts, spec.rope)).of_one
    n_ctx = _padded(spec.n_ctx)
    cells = n_ctx + (_window_cells(shape, spec) if shape.windowed else 0)
    return min(spec.n_ubatch, n_ctx) * _F32 * (cells + _INPUT_ROWS * shape.n_embd + _INPUT_NUMBERS)


def layer_context_bytes(facts: ModelFacts, spec: ContextOptions) -> list[int]:
    """Return the device memory of each layer's caches and states."""
    shape = _Shape(facts)
    recurrent_bytes = _recurrent_bytes(shape, spec) // max(1, len(shape.recurrent))
    kv_bytes = _kv_bytes_by_layer(shape, spec) if spec.kv_offload else {}
    return [
        kv_bytes.get(i, 0) + (recurrent_bytes if i in shape.recurrent else 0)
        for i in range(facts.n_layers)
    ]


def attention_work(facts: ModelFacts, spec: ContextOptions) -> tuple[int, int]:
    """Return bytes of the caches that a token attends to, and the multiplications of doing so.

    The context has `spec.n_ctx` tokens. A layer with a lightning indexer attends to its best ones,
    unless the graph masks the others. Then the bytes contain those of pooling the indexer's keys.
    """
    each = layer_attention_work(facts, spec)
    return sum(n_bytes for n_bytes, _ in each), sum(n for _, n in each)


def layer_attention_work(facts: ModelFacts, spec: ContextOptions) -> list[tuple[int, int]]:
    """Return `attention_work` of each layer of the model, 0 if a part does not have the layer."""
    shape = _Shape(facts)
    n_best, indexed = 0, frozenset(shape.caching)
    pooled_bytes = _pooled_bytes(shape, spec)
    if facts.architecture in _SPARSE and not pooled_bytes:
        # An indexer with a block size chooses blocks of tokens, and others choose single tokens.
        block = max(1, facts.number("attention.indexer.block_size"))
        n_best = facts.number("attention.indexer.top_k") * block
        if facts.architecture == "minimax-m3":  # its dense layers attend to all tokens
            indexed = frozenset(_indexer_widths(shape, spec))
    found = [(0, 0)] * facts.n_layers
    for layer, size_bytes in _kv_bytes_by_layer(shape, spec).items():
        cells = spec.n_ctx
        if layer in shape.windowed and not spec.swa_full:
            cells = min(cells, shape.window)
        read = min(cells, n_best) if n_best and layer in indexed else cells
        n_multiplications = read * shape.n_head[layer] * (shape.head_k + shape.head_v)
        size_bytes = size_bytes * read // max(1, cells) + pooled_bytes.get(layer, 0) * cells
        found[layer] = size_bytes, n_multiplications
    return found


def _pooled_bytes(shape: _Shape, spec: ContextOptions) -> dict[int, int]:
    """Return the bytes that pooling the indexer's keys moves for each token of the context.

    By layer; empty if the architecture does not pool them anew in each decode.
    """
    n_values = _MASKING.get(shape.facts.architecture, 0.0)
    if not n_values:
        return {}
    key_bytes = 4 * shape.facts.number("attention.indexer.key_length")
    return dict.fromkeys(_indexer_widths(shape, spec), int(n_values * key_bytes))


def indexer_work(facts: ModelFacts, spec: ContextOptions) -> tuple[int, int]:
    """Return the bytes and multiplications of scoring all tokens' keys by an indexer, for a token.

    `attention_work` leaves them out, because they take a GPU little time. Both are 0 for a model
    without an indexer.
    """
    shape = _Shape(facts)
    heads = facts.number("attention.indexer.head_count")
    n_values = heads * facts.number("attention.indexer.key_length")
    if facts.architecture in _SPARSE:
        widths = _indexer_widths(shape, spec)
        cells = spec.n_ctx
    elif shape.indexes_compressed:
        ratios = facts.per_layer("attention.compress_ratios")
        width = row_bytes(spec.type_k, facts.number("attention.indexer.key_length"))
        widths = {i: width for i in facts.layers if ratios[i] == _INDEXED_RATIO}
        cells = spec.n_ctx // _INDEXED_RATIO
    else:
        return 0, 0
    return cells * sum(widths.values()), cells * len(widths) * n_values


def mtp_context_bytes(facts: ModelFacts, spec: ContextOptions) -> int:
    """Return the device memory that a context of the layers for multi-token prediction takes.

    `spec` is the target's context. Each layer caches every token, even if it attends to a window.
    """
    shape = _Shape(facts)
    cache = _mtp_cache_bytes(shape, spec)
    spec = replace(spec, n_outputs=spec.n_sequences, n_ubatch=min(spec.n_ubatch, MTP_UBATCH))
    return cache + _compute_bytes(shape, spec) + _pool_bytes(shape, spec)


def _mtp_cache_bytes(shape: _Shape, spec: ContextOptions) -> int:
    facts = shape.facts
    heads_kv = max(1, *facts.per_layer("attention.head_count_kv", max(1, *shape.n_head, 1)))
    row = row_bytes(spec.type_k, shape.head_k * heads_kv)
    if not shape.is_mla:
        row += row_bytes(spec.type_v, shape.head_v * heads_kv)
    return facts.n_mtp_layers * _padded(spec.n_ctx or facts.n_ctx_train) * row


def most_state_bytes(facts: ModelFacts, spec: ContextOptions) -> int:
    """Return an upper bound on the bytes of one saved sequence.

    The bound is twice the caches and states of the whole context, plus the library's data on each
    cell. It is generous because the plan's formulas are not exact. Layers for multi-token
    prediction count even if they are not loaded, because a file may have their cache.
    """
    memory, shape = context_memory(facts, spec), _Shape(facts)
    cells = memory.kv_bytes + memory.host_kv_bytes + memory.recurrent_bytes
    notes = _cells(spec) * _NOTES_BYTES
    if facts.n_mtp_layers:
        cells += _mtp_cache_bytes(shape, spec) + 4 * shape.n_embd  # with one of two hidden rows
        notes *= 2
    return 2 * cells + notes


def forgetting_window(facts: ModelFacts) -> int:
    """Return the number of tokens that layers with a window keep, or 0 if all layers keep all."""
    shape = _Shape(facts)
    return shape.window if shape.windowed else 0


def type_of_values(facts: ModelFacts, type_k: str) -> str:
    """Return the type of the V cache if only the K cache's type was chosen.

    This is `type_k` for MLA, which keeps one cache for both, and otherwise f16.
    """
    return type_k if _Shape(facts).is_mla else "f16"


def check_cache_types(facts: ModelFacts, type_k: str, type_v: str, flash_attn: str) -> str:
    """Return the value of `flash_attn` to use with these cache types.

    This is "off" for an architecture that has no flash attention, "on" if V is quantised, and
    otherwise `flash_attn`. The rules are those of `llama_init_from_model`. Raises BadRequest for
    types that it refuses, and for "on" with an architecture that has none.
    """
    for flag, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind not in CACHE_TYPES:
            raise BadRequest(f"{flag} {kind}: must be one of {', '.join(CACHE_TYPES)}")
    shape = _Shape(facts)
    if shape.is_mla and type_k != type_v:
        raise BadRequest(
            f"-ctk {type_k} -ctv {type_v}: {facts.architecture} keeps one latent cache for keys "
            f"and values, so both must be the same"
        )
    if facts.architecture in WITHOUT_FLASH_ATTENTION:
        without = f"the library computes {facts.architecture} without flash attention"
        if flash_attn == "on":
            raise BadRequest(f"-fa on: {without}; use -fa auto")
        if _is_quantised(type_v):
            raise BadRequest(
                f"-ctv {type_v}: {without}, and a quantised V cache needs it; use -ctv f16"
            )
        flash_attn = "off"
    if _is_quantised(type_v):
        if flash_attn == "off":
            raise BadRequest(f"-ctv {type_v}: a quantised V cache needs flash attention (-fa on)")
        flash_attn = "on"
    for flag, kind, head in (("-ctk", type_k, shape.head_k), ("-ctv", type_v, shape.head_v)):
        block = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][0]
        if flash_attn != "off" and _is_quantised(kind) and head % block:
            raise BadRequest(
                f"{flag} {kind}: its blocks of {block} values do not divide the head size of {head}"
            )
    return flash_attn


def with_cache_in_ram(facts: ModelFacts, spec: ContextOptions) -> ContextOptions:
    """Return the context with its KV cache in RAM, and with flash attention unless it is off."""
    without = spec.flash_attn == "off" or facts.architecture in WITHOUT_FLASH_ATTENTION
    return replace(spec, kv_offload=False, flash_attn="off" if without else "on")


def cpu_attention(facts: ModelFacts, spec: ContextOptions) -> str:
    """Return why only the CPU attends to a KV cache in RAM, as a clause; "" if the GPU may, too.

    A GPU gets copies of a layer's keys and values. Where it would need more than these, everything
    that reads the cache is left to the CPU. `spec` has been checked by `check_cache_types`.
    """
    name = facts.architecture
    if name in _SPARSE or name == _COMPRESSED:
        return f"{name} chooses keys by an indexer"
    if spec.flash_attn == "off" or name in WITHOUT_FLASH_ATTENTION:
        return "flash attention is off"
    if "f32" in (spec.type_k, spec.type_v):
        return "flash attention casts the whole f32 cache for each batch"
    return ""


def caching_layers(facts: ModelFacts) -> list[int]:
    """Return for each layer of the model 1 if it has a KV cache, otherwise 0."""
    caching = frozenset(_Shape(facts).caching)
    return [int(layer in caching) for layer in range(facts.n_layers)]


def cache_reads(facts: ModelFacts) -> int:
    """Return how often a graph's inputs hold a layer's cache in RAM.

    MLA reads its one cache as keys and as values, and the library copies both.
    """
    return 2 if _Shape(facts).is_mla else 1


def pooling_of(facts: ModelFacts, wanted: str | None) -> str | None:
    """Return the pooling to use, one of POOLINGS, or None if no embeddings are computed.

    `wanted`: one of POOLINGS, OWN, OWN_REQUIRED or None. Raises BadRequest for OWN_REQUIRED if the
    file names no pooling.
    """
    if wanted not in (OWN, OWN_REQUIRED):
        return wanted
    number = facts.number("pooling_type")
    if 0 < number < len(POOLINGS):
        return POOLINGS[number]
    if wanted == OWN_REQUIRED:
        raise BadRequest(
            f"--embeddings: {facts.path.name} names no pooling, so it was not trained to make "
            "embeddings; --pooling mean or last makes one vector of a text all the same, and "
            "--pooling none makes one of each token"
        )
    return None


def _is_quantised(kind: str) -> bool:
    return bool(GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][0] > 1)


def row_bytes(kind: str, n_values: int) -> int:
    """Return the bytes of `n_values` values of a ggml type; they must fill whole blocks."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return int(n_values // block * size)


class _Shape:
    """The parts of a header that memory sizes depend on."""

    def __init__(self, facts: ModelFacts) -> None:
        self.facts = facts
        self.n_layers = facts.n_layers
        self.n_embd = facts.number("embedding_length")
        self.n_head = facts.per_layer("attention.head_count", 1)
        most_heads = max(1, *self.n_head) if self.n_head else 1
        self.head_k = facts.number("attention.key_length", self.n_embd // most_heads)
        self.head_v = facts.number("attention.value_length", self.n_embd // most_heads)
        self.is_mla = bool(
            facts.number("attention.key_length_mla") and facts.number("attention.value_length_mla")
        )
        self.recurrent, self.attending = facts.recurrent_layers, facts.attending_layers

    @cached_property
    def n_vocab(self) -> int:
        rows = [e.shape[-1] for e in self.facts.loaded if e.name == "token_embd.weight"]
        return max(rows, default=0)

    @cached_property
    def window(self) -> int:
        """Tokens that a layer with a window attends to; 0: no layer has a window."""
        architecture = self.facts.architecture
        default = _WINDOW.get(architecture, 0)
        asked = self.facts.number("attention.sliding_window", default)
        return default if asked and architecture in _FIXED_WINDOW else asked

    @cached_property
    def windowed(self) -> frozenset[int]:
        """Layers that attend only to a window of the last tokens."""
        facts = self.facts
        if not self.window:
            return frozenset()
        key = f"{facts.architecture}.attention.sliding_window_pattern"
        pattern = facts.header.metadata.get(key)
        if isinstance(pattern, tuple):
            return frozenset(i for i, on in enumerate(pattern[: self.n_layers]) if on)
        period = int(pattern) if isinstance(pattern, int) else 0
        period = period or _WINDOW_PERIOD.get(facts.architecture, 0)
        if not period:
            return frozenset()
        if facts.architecture in _FIRST_IS_FULL:
            return frozenset(i for i in range(self.n_layers) if i % period)
        return frozenset(i for i in range(self.n_layers) if i % period < period - 1)

    @cached_property
    def indexes_compressed(self) -> bool:
        """True if an indexer chooses from compressed keys."""
        ratios = self.facts.per_layer("attention.compress_ratios")
        return self.facts.architecture == _COMPRESSED and _INDEXED_RATIO in ratios

    @cached_property
    def caching(self) -> tuple[int, ...]:
        """Layers with keys and values of their own. The last layers may use those of others."""
        default = 20 if self.facts.architecture == "gemma3n" else self.n_layers
        shared = self.facts.number("attention.shared_kv_layers", self.n_layers - default)
        return tuple(i for i in sorted(self.attending) if i < self.n_layers - shared)


def _padded(n: int) -> int:
    return -(-n // _PAD) * _PAD


def _window_cells(shape: _Shape, spec: ContextOptions) -> int:
    """Return the cells of a layer with a window, for one stream of the cache."""
    n_ctx, n_sequences = _padded(spec.n_ctx_each), spec.n_sequences // spec.n_streams
    if spec.swa_full:
        return n_ctx
    return _padded(min(n_ctx, shape.window * n_sequences + spec.n_ubatch))


def _cells(spec: ContextOptions) -> int:
    """Return the cells of a layer that keeps all tokens, for all streams of the cache."""
    return spec.n_streams * _padded(spec.n_ctx_each)


def _kv_bytes_by_layer(shape: _Shape, spec: ContextOptions) -> dict[int, int]:
    """Return the bytes of each layer's keys and values. MLA has only latent keys, stored once."""
    facts = shape.facts
    if facts.architecture == _COMPRESSED:
        return _compressed_bytes_by_layer(shape, spec)
    heads_kv = facts.per_layer("attention.head_count_kv", max(1, *shape.n_head, 1))
    kv_bytes: dict[int, int] = {}
    for layer in shape.caching:
        is_windowed = layer in shape.windowed
        cells = spec.n_streams * _window_cells(shape, spec) if is_windowed else _cells(spec)
        k, v = shape.head_k, shape.head_v
        if is_windowed:
            k = facts.number("attention.key_length_swa", k)
            v = facts.number("attention.value_length_swa", v)
        kv_bytes[layer] = cells * row_bytes(spec.type_k, k * heads_kv[layer])
        if not shape.is_mla:
            kv_bytes[layer] += cells * row_bytes(spec.type_v, v * heads_kv[layer])
    if facts.architecture in _SPARSE:
        for layer, width in _indexer_widths(shape, spec).items():
            kv_bytes[layer] += _cells(spec) * width
    return kv_bytes


def _indexer_widths(shape: _Shape, spec: ContextOptions) -> dict[int, int]:
    """Return the bytes of a token's keys for the indexer, by layers that have one."""
    facts = shape.facts
    n_keys = facts.number("attention.indexer.key_length")
    if facts.architecture == "glm5-next" and facts.number("attention.indexer.kpool"):
        n_keys *= 3  # beside the keys their pooled ones, and gates
    width = row_bytes(spec.type_k, n_keys)
    indexed = facts.per_layer("attention.indexer.types", 1)
    if facts.architecture == "minimax-m3":  # its cache has values too, and no dense layer has one
        width += row_bytes(spec.type_v, shape.head_v)
        n_dense = facts.number("leading_dense_block_count")
        indexed = tuple(int(layer >= n_dense) for layer in range(facts.n_layers))
    layers = (i for i in shape.caching if indexed[i] and i not in shape.recurrent)
    return dict.fromkeys(layers, width)


def _compressed_bytes_by_layer(shape: _Shape, spec: ContextOptions) -> dict[int, int]:
    """Return the bytes of each layer's caches: a window of keys, compressed keys, the indexer's.

    Every sequence has a cache of its own, for the whole context. There are no values: keys are
    multiplied twice.
    """
    facts = shape.facts
    ratios = facts.per_layer("attention.compress_ratios")
    window = _padded(min(spec.n_ctx_each, shape.window + spec.n_ubatch))
    row = row_bytes(spec.type_k, shape.head_k)
    indexer_row = row_bytes(spec.type_k, facts.number("attention.indexer.key_length"))
    cache_bytes = {}
    for layer in facts.layers:
        cells, ratio = window, ratios[layer]
        size_bytes = cells * row
        if ratio:
            compressed = _padded(-(-spec.n_ctx_each // ratio))
            size_bytes += compressed * (row + indexer_row * (ratio == _INDEXED_RATIO))
        cache_bytes[layer] = spec.n_sequences * size_bytes
    return cache_bytes


def _recurrent_bytes(shape: _Shape, spec: ContextOptions) -> int:
    """Return the bytes of recurrent states in f32: sequences, snapshots, and one checkpoint."""
    if not shape.recurrent:
        return 0
    facts = shape.facts
    heads = max(1, *shape.n_head, 1)
    if size := facts.number("wkv.head_size"):
        width = shape.n_embd * (size + facts.number("token_shift_count", 2))
    elif n := facts.number("shortconv.l_cache"):
        width = shape.n_embd * max(0, n - 1)
    elif facts.architecture == "minimax-01":
        width = heads * shape.head_k**2
    elif size := facts.number("kda.head_dim"):
        conv = max(1, facts.number("ssm.conv_kernel", 4)) - 1
        width = heads * size * (3 * conv + size)
    else:
        state, inner = facts.number("ssm.state_size"), facts.number("ssm.inner_size")
        convolved = inner + 2 * facts.number("ssm.group_count") * state
        width = state * inner + max(0, facts.number("ssm.conv_kernel") - 1) * convolved
    n_states = spec.n_sequences * (1 + spec.n_rs_seq) + int(spec.device_checkpoints)
    return n_states * (len(shape.recurrent) * width + _ngram_width(shape)) * _F32


def _ngram_width(shape: _Shape) -> int:
    """Return the number of values that convolutions over embeddings of n-grams keep."""
    facts = shape.facts
    if facts.architecture != "qwen4exp" or not facts.number("ple.heads_per_ngram"):
        return 0
    n_kept = max(0, facts.number("ple.conv_kernel") - 1) * facts.number("ple.ngram_size")
    return n_kept * facts.number("hyper_connection.count") * shape.n_embd


def _compute_bytes(shape: _Shape, spec: ContextOptions, *, attends: bool = True) -> int:
    """Return the bytes of the graph allocator's buffer.

    The buffer holds masks and the activations of a layer's widest part, or the logits if those are
    larger. Without `attends`, everything that reads the KV cache is computed elsewhere.
    """
    n_tokens = min(spec.n_ubatch, _cells(spec))
    n_ctx = _padded(spec.n_ctx_each) if attends else 0  # a token attends to one stream
    width = _F32 * max(_attention_width(shape), _ffn_width(shape))
    width = max(width, _selecting_bytes(shape, n_ctx, spec.n_sequences))
    # A mask over compressed keys is shorter. It is needed twice.
    width += _MASK * n_ctx // (2 if shape.facts.architecture == _COMPRESSED else 1)
    if shape.windowed and attends:
        width += _MASK * _window_cells(shape, spec)
    if spec.flash_attn == "off" or shape.facts.architecture in WITHOUT_FLASH_ATTENTION:
        width += _F32 * (1 + max(shape.n_head, default=1)) * n_ctx
    architecture = shape.facts.architecture
    if attends and architecture in ("deepseek32", "glm-dsa"):
        # The indexer's scores, and a mask of the chosen tokens.
        width += 3 * _MASK * n_ctx
        width += _F32 * 64 * shape.facts.number("attention.indexer.top_k")
    width += int(_F32 * _SCORE_ROWS.get(architecture, 0) * n_ctx)
    width += _F32 * _CONNECTION_ROWS.get(architecture, 0) * shape.n_embd
    logits = min(spec.n_outputs, spec.n_ubatch) * shape.n_vocab * _F32
    size_bytes = n_tokens * width
    if shape.indexes_compressed:  # one layer's compressed keys are copied, too
        size_bytes += n_ctx // _INDEXED_RATIO * row_bytes("f16", shape.head_k)
    return max(size_bytes, logits)


def _cache_copy_bytes(shape: _Shape, spec: ContextOptions) -> int:
    """Return the bytes to which a cache in RAM is copied, for batches that the device attends to.

    The scheduler has room for one layer's keys and values. Those of two layers are beside it, so
    that one is copied while the other is read (offload/stream/cache_ahead.py).
    """
    if spec.kv_offload or cpu_attention(shape.facts, spec):
        return 0
    largest = max(_kv_bytes_by_layer(shape, spec).values(), default=0)
    # MLA's cache has two copies, and the second does not fit where the layer before had one.
    n_copies = 3 if shape.is_mla else 1
    return largest * (n_copies + 2)


def _cast_bytes(shape: _Shape, spec: ContextOptions) -> int:
    """Return the bytes of one layer's f32 keys and values, which flash attention casts to f16."""
    if spec.flash_attn == "off" or "f32" not in (spec.type_k, spec.type_v):
        return 0
    largest = max(_kv_bytes_by_layer(shape, spec).values(), default=0)
    return largest * cache_reads(shape.facts)


def _selecting_bytes(shape: _Shape, n_ctx: int, n_sequences: int) -> int:
    """Return the bytes of one token that are alive while an indexer chooses keys, blocks or pools.

    These architectures keep scores for each cell of the context, but not while a feed-forward part
    runs.
    """
    facts, heads = shape.facts, max(shape.n_head, default=1)
    if shape.indexes_compressed:
        n_queries = facts.number("attention.indexer.head_count") * facts.number(
            "attention.indexer.key_length"
        )
        width = 4 * shape.n_embd + heads * shape.head_k + n_queries
        return _F32 * width + _SCORED_BYTES * n_ctx // _INDEXED_RATIO
    if facts.architecture == "minimax-m3":
        return _F32 * (_attention_width(shape) + 9 * n_ctx)
    if facts.architecture != "glm5-next":
        return 0
    # Absorbed keys are not there yet, and hyper-connections keep four streams.
    width = max(0, _attention_width(shape) - heads * shape.head_k) + 4 * shape.n_embd
    n_chosen = min(n_ctx, facts.number("attention.indexer.top_k"))
    # Pools of each sequence are scored, too, which takes more if there are more than two.
    n_pooled = facts.number("attention.indexer.kpool")
    scored = _POOL_BYTES * n_sequences * n_ctx // n_pooled if n_pooled else 0
    return _F32 * width + max(_F32 * n_ctx + 14 * n_chosen, scored)


def _attention_width(shape: _Shape) -> int:
    """Return the values of one token that are alive at once in a layer's attention."""
    facts = shape.facts
    heads = max(shape.n_head, default=1)
    residual = 4 * shape.n_embd
    if not shape.is_mla:
        return residual + heads * (2 * shape.head_k + shape.head_v)
    mla = facts.number("attention.key_length_mla") + facts.number("attention.value_length_mla")
    return residual + heads * (mla + shape.head_k + facts.number("attention.kv_lora_rank"))


def _ffn_width(shape: _Shape) -> int:
    """Return the values of one token that are alive at once in a layer's feed-forward part."""
    facts, n_embd = shape.facts, shape.n_embd
    streams = _STREAMS.get(facts.architecture, 4)
    dense = 3 * max(facts.per_layer("feed_forward_length"), default=0) + streams * n_embd
    used = facts.n_experts_used
    if not used:
        return dense
    wide = max(facts.per_layer("expert_feed_forward_length", facts.number("feed_forward_length")))
    shared = facts.number(
        "expert_shared_feed_forward_length", facts.number("expert_shared_count") * wide
    )
    if facts.architecture == "llama4":
        shared = wide
    biased = any(name.endswith("ffn_down_exps.bias") for name in facts.weights)
    routed = 2 * used * n_embd + (3 * n_embd + 2 * used * wide) // 2 + biased * used * n_embd
    has_dense = any(re.match(r"blk\.\d+\.ffn_up\.weight", e.name) for e in facts.loaded)
    return max(dense if has_dense else 0, 3 * (used * wide + shared) + n_embd, routed)


def _pool_bytes(shape: _Shape, spec: ContextOptions) -> int:
    """Return the bytes of the kernels' temporary memory.

    This memory holds quantised activations for the widest product. If the cache is quantised, it
    also holds f16 copies of one layer's cache.
    """
    facts = shape.facts
    ffn = max(facts.per_layer("feed_forward_length"), default=0)
    routed = facts.n_experts_used * shape.n_embd
    pools = int(spec.n_ubatch * max(ffn, routed, shape.n_embd) * _Q8_1)
    heads_kv = max(facts.per_layer("attention.head_count_kv", 1), default=1)
    for kind, head in ((spec.type_k, shape.head_k), (spec.type_v, shape.head_v)):
        if _is_quantised(kind):
            pools += _cells(spec) * head * heads_kv * 2
    return pools
