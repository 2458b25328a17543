"""The parts of presets: groups of metadata that belong together, at any size.

Keys are GGUF's, without the architecture prefix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

Value = int | float | bool | str | tuple[int, ...]
Metadata = Mapping[str, Value]

SOFTMAX, SIGMOID = 1, 2
QKV_BIAS = r"\.attn_[qkv]\.bias$"
TIED = r"^output\.weight$"
# Layers for multi-token prediction may bring an embedding and a head; published files share them.
NO_OWN_VOCABULARY = (r"\.nextn\.(embed_tokens|shared_head_head)\.weight$",)


@dataclass(frozen=True)
class Preset:
    """One model's shape. `without` are patterns of optional tensors that its files do not have."""

    name: str
    architecture: str
    about: str
    full: Metadata
    n_vocab: int
    tiny: Metadata
    without: tuple[str, ...] = ()
    quant: str = "Q4_K_M"
    tiny_quant: str = "q8_0"
    square_attention: bool = False  # the head size is n_embd / n_head, by the graph's construction


def metadata(*parts: Metadata, **more: Value) -> Metadata:
    merged: dict[str, Value] = {}
    for part in parts:
        merged.update(part)
    merged.update(more)
    return MappingProxyType(merged)


def yarn(factor: float, n_ctx_original: int, **more: Value) -> dict[str, Value]:
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": n_ctx_original,
        **{f"rope.scaling.{key}": value for key, value in more.items()},
    }


def body(n_layer: int, n_embd: int, n_ff: int, n_ctx: int, eps: float) -> dict[str, Value]:
    return {
        "block_count": n_layer,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "context_length": n_ctx,
        "attention.layer_norm_rms_epsilon": eps,
    }


def heads(n_head: int, n_head_kv: int, size: int, n_rot: int, base: float) -> dict[str, Value]:
    return {
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": n_rot,
        "rope.freq_base": base,
    }


def mla(
    n_head: int, q_lora: int, kv_lora: int, nope: int, rope: int, v: int, base: float = 10000.0
) -> dict[str, Value]:
    return {
        "attention.head_count": n_head,
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": q_lora,
        "attention.kv_lora_rank": kv_lora,
        "attention.key_length": kv_lora + rope,
        "attention.value_length": kv_lora,
        "attention.key_length_mla": nope + rope,
        "attention.value_length_mla": v,
        "rope.dimension_count": rope,
        "rope.freq_base": base,
    }


def experts(n: int, used: int, n_ff: int, **more: Value) -> dict[str, Value]:
    named = {f"expert_{key}": value for key, value in more.items()}
    sizes = {"expert_count": n, "expert_used_count": used, "expert_feed_forward_length": n_ff}
    return {**sizes, **named}


def nextn(n: int = 1) -> dict[str, Value]:
    """Layers for multi-token prediction, counted in block_count and behind all others."""
    return {"nextn_predict_layers": n}


def indexer(n_head: int, size: int, top_k: int) -> dict[str, Value]:
    """The lightning indexer of DeepSeek's sparse attention."""
    return {
        "attention.indexer.head_count": n_head,
        "attention.indexer.key_length": size,
        "attention.indexer.top_k": top_k,
    }


def delta_net(n_v_head: int, n_k_head: int, state: int) -> dict[str, Value]:
    return {
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.inner_size": n_v_head * state,
        "ssm.state_size": state,
        "ssm.time_step_rank": n_v_head,
        "ssm.group_count": n_k_head,
    }


TINY_BODY: dict[str, Value] = {
    "block_count": 4,
    "embedding_length": 128,
    "feed_forward_length": 256,
    "context_length": 4096,
}
TINY_HEADS = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
}
TINY_MLA = {**mla(4, 64, 64, 32, 32, 32)}
TINY_EXPERTS = experts(16, 4, 64)
TINY_DENSE = metadata(TINY_BODY, TINY_HEADS)
TINY_DEEPSEEK = metadata(TINY_BODY, TINY_MLA, TINY_EXPERTS, {"leading_dense_block_count": 1})
# The indexer's keys are turned by a Hadamard matrix of 64 or a power of two above.
TINY_SPARSE = metadata(TINY_DEEPSEEK, indexer(4, 64, 32), nextn(), block_count=5)
TINY_MOE = metadata(TINY_BODY, TINY_HEADS, TINY_EXPERTS)
TINY_HYBRID = metadata(TINY_MOE, delta_net(4, 2, 32), expert_shared_feed_forward_length=64)

# Head and row sizes that a software Vulkan driver computes in seconds.
TINY_VULKAN_DEEPSEEK = metadata(
    body(3, 256, 256, 4096, 1e-6),
    mla(2, 256, 256, 32, 32, 128),
    experts(8, 2, 256),
    leading_dense_block_count=1,
)
