"""Tiny f32 block drafts (DFlash, DFlash2, DSpark), random weights, for the targets of `eagle.py`.

One with hyper-connections is for targets of the architecture `deepseek4`.

The tensors that every variant has come from the library. It asks for those of a variant only if the
file has them, so they are listed here (`src/models/dflash.cpp` of llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType

from lab.synth.eagle import N_MAPPED, header_of_layers, with_map
from lab.synth.shape import Shape
from lab.synth.tensors import Fill, Tensor
from lab.synth.vocabulary import Entry
from lab.synth.write import plan_shape, write
from offload.model_file import read_facts

VARIANTS = ("dflash", "dflash2", "dspark", "dspark-conf", "dspark-bonus")
BLOCK = 6  # tokens of a block
N_LAYERS, N_TOKENS = 2, 512
MASK_TOKEN = 300  # an ordinary token of the tiny vocabulary
_RANK, _TOP_K, _KERNEL, _GROUP = 16, 4, 3, 32
_SINKS = r"attn_sinks"
_OPTIONAL = (
    r"attn_post_norm|post_attention_norm|post_ffw_norm|ffn_post_norm|layer_output_scale|out_scale",
    r"rope_freqs",
)
# A draft for DeepSeek-V4 has layers like its target's: several streams, experts, joint keys. Each
# token uses all experts, so that no router has to choose between scores that nearly tie.
_STREAMS = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 32,
    "attention.output_group_count": 4,
    "attention.output_lora_rank": 32,
    "attention.sliding_window": 64,
    "attention.compress_ratios": (0,) * N_LAYERS,
    "rope.dimension_count": 16,
    "expert_count": 4,
    "expert_used_count": 4,
    "expert_feed_forward_length": 64,
    "expert_shared_count": 1,
    "expert_weights_scale": 1.0,
    "expert_weights_norm": True,
    "expert_gating_func": 4,
    "swiglu_clamp_exp": 10.0,
}


def block_shape(width: int, variant: str, *, streams: bool = False, **metadata: Any) -> Shape:
    """The shape of a draft for targets with rows of `width` values, with keys of its header.

    `streams`: it has hyper-connections, like its target.
    """
    header = header_of_layers(width, N_LAYERS) | {"block_size": BLOCK}
    if streams:
        header |= _STREAMS
    if variant == "dflash2":
        header |= {
            "conv_kernel_size": _KERNEL,
            "conv_group_size": _GROUP,
            "selector_rank": _RANK,
            "selector_top_k": _TOP_K,
        }
    if variant.startswith("dspark"):
        header |= {
            "sample_from_anchor": variant != "dspark-bonus",
            "has_confidence_head": variant != "dspark",
        }
    return Shape("dflash", "dflash", header | metadata, N_TOKENS, quant="f32", unchecked=True)


def write_block(
    folder: Path,
    target: Path,
    variant: str = "dflash",
    *,
    mapped: bool = False,
    own_tables: bool = False,
    streams: bool = False,
    without: str = "",
    name: str = "",
    mask: int | None = MASK_TOKEN,
    **metadata: Any,
) -> Path:
    """Write a draft of one of `VARIANTS` for `target`. Returns its path.

    `mapped`: it drafts some of the target's tokens only. `own_tables`: it has its own embedding and
    output matrix. `streams`: it has hyper-connections. `without` is a pattern of tensors to leave
    out, and `metadata` replaces keys of the header; such files need their own `name`.
    """
    kind = f"{'-mapped' * mapped}{'-own' * own_tables}{'-streams' * streams}{name}"
    path = folder / f"{variant}-{target.stem}{kind}.gguf"
    if path.exists():
        return path
    width = read_facts(target).number("embedding_length")
    shape = block_shape(width, variant, streams=streams, **metadata)
    left_out = [*_OPTIONAL, *([] if own_tables else [r"^token_embd\."])]
    if not streams:
        left_out.append(_SINKS)
    if not (own_tables or mapped):
        left_out.append(r"^output\.weight")
    plan = plan_shape(replace(shape, without=(*left_out, *([without] if without else []))))
    tensors = [*plan.tensors, *_of_variant(variant, width, N_MAPPED if mapped else N_TOKENS)]
    if mapped:
        tensors = with_map(tensors, width, N_TOKENS)
    tokenizer = plan.tokenizer
    if mask is not None:
        tokenizer += (Entry("tokenizer.ggml.mask_token_id", mask, GGUFValueType.UINT32),)
    return write(replace(plan, tensors=tuple(tensors), tokenizer=tokenizer), path, 5)


def _of_variant(variant: str, width: int, n_drafted: int) -> Iterator[Tensor]:
    """The tensors that only this variant has. `n_drafted` tokens can be drafted."""

    def drawn(name: str, *shape: int, scale: float = 1.0) -> Tensor:
        return Tensor(name, shape, Type.F32, Fill("normal", scale))

    if variant.startswith("dspark"):
        yield drawn("markov_w1.weight", _RANK, N_TOKENS)
        yield drawn("markov_w2.weight", _RANK, n_drafted, scale=0.5)
        if variant != "dspark":
            yield drawn("conf_proj.weight", width + _RANK, 1, scale=0.2)
            yield drawn("conf_proj.bias", 1, scale=0.2)
    if variant == "dflash2":
        yield drawn("selector_predecessor.weight", _RANK, N_TOKENS)
        yield drawn("selector_successor.weight", _RANK, N_TOKENS)
        yield drawn("selector_hidden.weight", width, _RANK, scale=0.1)
        n_groups = width // _GROUP
        for layer in range(N_LAYERS):
            for part in ("attn", "ffn"):
                yield drawn(f"blk.{layer}.{part}_conv_base", width, _KERNEL, 2, scale=0.3)
                yield drawn(
                    f"blk.{layer}.{part}_conv_proj.weight", width, 2 * _KERNEL * n_groups,
                    scale=0.05,
                )  # fmt: skip
