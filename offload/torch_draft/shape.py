"""Reads a draft's sizes and rotary embedding from its file (llama, qwen2 or qwen3). Pure.

Names and defaults of metadata are llama.cpp's (src/llama-model.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, floor, log, pi, sqrt

import numpy as np
from numpy.typing import NDArray

from offload.errors import BadModel
from offload.model import ModelFacts

# False: llama.cpp rotates pairs of neighbours; True: pairs of values half a head apart.
_HALVES = {"llama": False, "qwen2": True, "qwen3": True}
ARCHITECTURES = tuple(_HALVES)
_INERT = frozenset({"rope_freqs.weight"})  # tensors outside the graph, read elsewhere


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
        """Rows of the joined query, key and value matrix."""
        return (self.n_head + 2 * self.n_head_kv) * self.head_size

    def weights(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Every tensor the file must hold, with its shape in ggml's order."""
        e, q, kv = self.n_embd, self.n_head * self.head_size, self.n_head_kv * self.head_size
        yield "token_embd.weight", (e, self.n_vocab)
        yield "output_norm.weight", (e,)
        if not self.tied:
            yield "output.weight", (e, self.n_vocab)
        for i in range(self.n_layers):
            at = f"blk.{i}."
            yield f"{at}attn_norm.weight", (e,)
            for name, n_out in (("q", q), ("k", kv), ("v", kv)):
                yield f"{at}attn_{name}.weight", (e, n_out)
                if self.qkv_bias:
                    yield f"{at}attn_{name}.bias", (n_out,)
            if self.qk_norm:
                yield f"{at}attn_q_norm.weight", (self.head_size,)
                yield f"{at}attn_k_norm.weight", (self.head_size,)
            yield f"{at}attn_output.weight", (q, e)
            yield f"{at}ffn_norm.weight", (e,)
            yield f"{at}ffn_gate.weight", (e, self.n_ff)
            yield f"{at}ffn_up.weight", (e, self.n_ff)
            yield f"{at}ffn_down.weight", (self.n_ff, e)


def read_shape(facts: ModelFacts) -> DraftShape:
    """Read the shape from the file's header. Raises BadModel, which names what is unsupported."""
    name = facts.path.name
    architecture = facts.architecture
    if architecture not in _HALVES:
        raise BadModel(
            f"{name}: the torch draft knows {', '.join(ARCHITECTURES)}, not {architecture}"
        )
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
    scale = _float(facts, "attention.scale", 0.0)
    shape = DraftShape(
        architecture=architecture,
        n_layers=facts.n_layers,
        n_embd=n_embd,
        n_ff=facts.number("feed_forward_length"),
        n_head=n_head,
        n_head_kv=facts.number("attention.head_count_kv", n_head),
        head_size=head_size,
        n_vocab=_rows(facts, "token_embd.weight"),
        n_ctx_train=facts.number("context_length", 4096),
        norm_eps=_float(facts, "attention.layer_norm_rms_epsilon", 1e-5),
        attention_scale=scale or 1.0 / sqrt(head_size),
        rope=_read_rope(facts, head_size),
        tied="output.weight" not in weights,
        qkv_bias="blk.0.attn_q.bias" in weights,
        qk_norm="blk.0.attn_q_norm.weight" in weights,
    )
    _check_weights(facts, shape)
    return shape


def _check_weights(facts: ModelFacts, shape: DraftShape) -> None:
    """Raise BadModel unless the file's tensors are those of the graph, with the same shapes."""
    name = facts.path.name
    wanted = dict(shape.weights())
    for tensor, place in facts.weights.items():
        if tensor not in wanted and tensor not in _INERT:
            raise BadModel(f"{name}: tensor {tensor} has no place in the torch draft's graph")
        if tensor in wanted and place.entry.shape != wanted[tensor]:
            raise BadModel(
                f"{name}: tensor {tensor} is {place.entry.shape}, expected {wanted[tensor]}"
            )
    missing = next((tensor for tensor in wanted if tensor not in facts.weights), None)
    if missing is not None:
        raise BadModel(f"{name}: has no tensor {missing}")


def _read_rope(facts: ModelFacts, head_size: int) -> Rope:
    kind = str(facts.header.metadata.get(f"{facts.architecture}.rope.scaling.type", "linear"))
    factor = _float(facts, "rope.scaling.factor", 0.0) or _float(facts, "rope.scale_linear", 0.0)
    if kind not in ("none", "linear", "yarn"):
        raise BadModel(f"{facts.path.name}: rope scaling {kind!r} is not supported in torch")
    if kind == "yarn" and _float(facts, "rope.scaling.yarn_log_multiplier", 0.0):
        raise BadModel(f"{facts.path.name}: YaRN with a log multiplier is not supported in torch")
    scaling = Scaling(
        kind=kind,
        factor=factor if factor and kind != "none" else 1.0,
        attention_factor=_float(facts, "rope.scaling.attn_factor", 1.0),
        n_ctx_original=facts.number(
            "rope.scaling.original_context_length", facts.number("context_length", 4096)
        ),
        beta_fast=_float(facts, "rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=_float(facts, "rope.scaling.yarn_beta_slow", 1.0),
    )
    n_rot = facts.number("rope.dimension_count", head_size)
    if n_rot != head_size or head_size % 2:
        # libllama aborts on such a file of these architectures.
        raise BadModel(f"{facts.path.name}: {n_rot} rotated of {head_size} values in a head")
    base = _float(facts, "rope.freq_base", 10000.0)
    return Rope(head_size, base, _HALVES[facts.architecture], scaling)


def _rows(facts: ModelFacts, tensor: str) -> int:
    place = facts.weights.get(tensor)
    if place is None or len(place.entry.shape) != 2:
        raise BadModel(f"{facts.path.name}: has no matrix {tensor}")
    return place.entry.shape[1]


def _float(facts: ModelFacts, key: str, default: float) -> float:
    value = facts.header.metadata.get(f"{facts.architecture}.{key}", default)
    return float(value) if isinstance(value, int | float) else default


# Rotary position embedding. llama.cpp rotates pairs (0, 1), (2, 3), ... in llama files (NORM), and
# (0, n/2), (1, n/2 + 1), ... in qwen's (NEOX). Reordering the values of queries and keys alike does
# not change their products, so NEOX rows are reordered at loading.


@dataclass(frozen=True)
class Scaling:
    """llama.cpp's `rope.scaling.*`. `factor` stretches positions.

    YaRN (arXiv 2309.00071) stretches only those of slow frequencies.
    """

    kind: str = "linear"
    factor: float = 1.0
    attention_factor: float = 1.0
    n_ctx_original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. `halves`: pairs are half a head apart (NEOX), not neighbours."""

    head_size: int
    base: float
    halves: bool
    scaling: Scaling

    def order(self) -> NDArray[np.int64]:
        """Return the file's index of each value of a head, in the order used here [head_size]."""
        order = np.arange(self.head_size)
        if self.halves:
            half = self.head_size // 2
            order = np.stack((order[:half], order[half:]), 1).flatten()
        return order

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
        half, s = self.head_size // 2, self.scaling
        plain = self.base ** (-np.arange(half) / half)
        if divisors is not None:
            plain = plain / divisors.astype(np.float64)
        if s.kind != "yarn":
            return plain / s.factor, s.attention_factor
        low, high = self._correction()
        ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
        mixed = plain / s.factor * ramp + plain * (1.0 - ramp)
        grown = 1.0 + 0.1 * log(s.factor) if s.factor > 1 else 1.0
        return mixed, grown * s.attention_factor

    def _correction(self) -> tuple[float, float]:
        """Return the two pairs between which YaRN goes from trained to slower rotation."""
        s = self.scaling

        def pair(n_turns: float) -> float:
            of_circle = s.n_ctx_original / (n_turns * 2 * pi)
            return self.head_size * log(of_circle) / (2 * log(self.base))

        low, high = floor(pair(s.beta_fast)), ceil(pair(s.beta_slow))
        return max(0.0, low), min(self.head_size - 1.0, high)
