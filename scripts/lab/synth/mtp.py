"""Tiny f32 models with layers for multi-token prediction (MTP), with random weights.

Every expert is used, so that no router has to choose between scores that nearly tie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from lab.synth.mixtures import mixture_shape
from lab.synth.shape import Shape, find_preset, resolve
from lab.synth.tensors import Fill, Tensor
from lab.synth.write import Plan, plan_shape, write

PRESETS = {
    "deepseek2": "deepseek-v3",
    "glm4moe": "glm-4.6",
    "qwen35moe": "qwen3.5-35b-a3b",
    "qwen3next": "qwen3-next-80b-a3b",
}
SEVERAL = "step35"  # three layers, one for each drafted token
# Mixtures without a preset that has such layers, made from their tiny shapes.
MIXTURES = (
    *("bailingmoe3", "cohere2moe", "deepseek32", "deepseek4", "glm-dsa", "hy_v3", "mimo2"),
    "nemotron_h_moe",
)
DENSE = "qwen35"  # which has no experts
OTHERS = (*MIXTURES, DENSE)
ARCHITECTURES = (*PRESETS, SEVERAL, *OTHERS)
HEADS: dict[str, Any] = {  # attention of a tiny model of 128 numbers
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "rope.dimension_count": 32,
    "rope.freq_base": 1e4,
}
_STEP35: dict[str, Any] = {
    **HEADS,
    "block_count": 7,
    "embedding_length": 128,
    "feed_forward_length": 256,
    "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base_swa": 1e4,
    "leading_dense_block_count": 1,
    "expert_count": 8,
    "expert_used_count": 8,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 64,
    "attention.sliding_window": 512,
    "attention.sliding_window_pattern": (0, 1, 1, 0, 1, 1, 1),
    "nextn_predict_layers": 3,
    "expert_gating_func": 2,
}
_STEP35_WITHOUT = (
    r"^blk\.0\..*exp",
    r"^blk\.0\.ffn_gate_inp",
    r"^blk\.[1-6]\.ffn_(gate|up|down)\.weight",
    r"\.nextn\.(embed_tokens|shared_head_head)\.weight$",
)


def write_mtp(
    folder: Path,
    architecture: str,
    *,
    seed: int = 5,
    without: str = "",
    name: str = "",
    own: Mapping[str, int] = {},
    quant: str = "f32",
) -> Path:
    """Write a tiny model with one MTP layer, or with three for step35. Returns its path.

    `architecture` is one of `ARCHITECTURES`.

    `without` is a pattern of tensors to leave out, of those with a preset. `own` is metadata that
    differs, and `quant` are the types of weights as in `Shape`. Such a file needs its own `name`.
    """
    path = folder / f"mtp-{architecture}-{seed}{name}.gguf"
    if path.exists():
        return path
    if architecture == SEVERAL:
        shape = Shape(
            SEVERAL, SEVERAL, _STEP35 | dict(own), 512, without=_STEP35_WITHOUT, quant=quant,
            unchecked=True,
        )  # fmt: skip
        return write(plan_shape(shape, "bytes"), path, seed)
    if architecture in OTHERS:
        return write(_other(architecture, own, quant), path, seed)
    preset = find_preset(PRESETS[architecture])
    counted = int("nextn_predict_layers" in preset.metadata)
    metadata: dict[str, Any] = {"nextn_predict_layers": 1}
    if "expert_group_count" in preset.metadata:
        metadata |= {"expert_group_count": 0, "expert_group_used_count": 0}
    metadata |= own
    shape = resolve(
        preset.name,
        "tiny",
        quant=quant,
        n_layer=int(str(preset.tiny["block_count"])) + 1 - counted,
        n_expert_used=int(str(preset.tiny["expert_count"])),
        metadata=metadata,
    )
    if without:
        shape = replace(shape, without=(*shape.without, without))
    return write(plan_shape(shape, "bytes"), path, seed)


def _other(architecture: str, own: Mapping[str, int], quant: str) -> Plan:
    """Return the plan of a file of one of `OTHERS`, with some metadata replaced by `own`."""
    if architecture == DENSE:
        preset = find_preset(PRESETS["qwen35moe"])
        values = {**preset.metadata, **preset.tiny}
        metadata = {key: value for key, value in values.items() if "expert" not in key}
        without: tuple[str, ...] = preset.without
    else:
        shape = mixture_shape(architecture)
        metadata, without = dict(shape.metadata), shape.without
        metadata["expert_used_count"] = metadata["expert_count"]
        if architecture == "deepseek4":  # unlike the heads of keys, as in published files
            metadata["attention.indexer.key_length"] = 128
    n = int(metadata["block_count"])  # type: ignore[arg-type]
    # A value for each layer goes on with that of the first, which attends in all of these.
    metadata |= {
        key: (*value, value[0])
        for key, value in metadata.items()
        if isinstance(value, tuple) and len(value) == n and not key.endswith("sections")
    }
    metadata |= {"block_count": n + 1, "nextn_predict_layers": 1, **own}
    without += (r"\.nextn\.(embed_tokens|shared_head_head)\.weight$",)
    shape = Shape(
        architecture, architecture, metadata, 512, without=without, quant=quant, unchecked=True
    )
    return _completed(plan_shape(shape, "bytes"), n)


def _completed(plan: Plan, layer: int) -> Plan:
    """Return the plan with tensors of the MTP layer that the library does not list.

    It lists tensors without a file. For deepseek4 it asks the file whether it has such a layer, and
    for mimo2 it prefers separate matrices to the joint one that the layer's graph needs.
    """
    architecture, tensors = plan.shape.architecture, list(plan.tensors)
    n_embd = plan.shape.number("embedding_length")
    name, normal = f"blk.{layer}.", Fill("normal", 0.05)
    if architecture == "deepseek4":
        shapes = {"eh_proj": (2 * n_embd, n_embd), "enorm": (n_embd,), "hnorm": (n_embd,)}
        tensors += [
            Tensor(
                f"{name}nextn.{kind}.weight", its, Type.F32,
                normal if len(its) > 1 else Fill("constant"),
            )
            for kind, its in shapes.items()
        ]  # fmt: skip
    elif architecture == "mimo2":
        parts = [t for t in tensors if re.fullmatch(rf"blk\.{layer}\.attn_[qkv]\.weight", t.name)]
        joint = (n_embd, sum(t.shape[1] for t in parts))
        dropped = re.compile(rf"blk\.{layer}\.(attn_[qkv]\.|ffn_.*_exps|ffn_gate_inp|exp_probs_b)")
        tensors = [t for t in tensors if not dropped.match(t.name)]
        tensors.append(Tensor(f"{name}attn_qkv.weight", joint, Type.F32, normal))
    return replace(plan, tensors=tuple(tensors))
