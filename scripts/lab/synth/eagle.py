"""Tiny f32 targets and EAGLE-3 files of matching shapes, with random weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType as Type

from lab.synth.shape import Shape, find_preset, resolve
from lab.synth.tensors import Fill, Tensor
from lab.synth.write import plan_shape, write
from offload.model_file import read_facts

# Presets of targets, by architecture.
TARGETS = {
    "qwen3moe": "qwen3-30b-a3b",
    "gpt-oss": "gpt-oss-20b",
    "qwen35moe": "qwen3.5-35b-a3b",
    "llama": "llama-3.3-70b",
}
N_MAPPED = 128  # tokens of a draft with a map, which are every fourth of the target's


def write_target(folder: Path, architecture: str) -> Path:
    """Write a tiny target with five layers, all of whose experts are used. Returns its path."""
    path = folder / f"target-{architecture}.gguf"
    if not path.exists():
        preset = find_preset(TARGETS[architecture])
        n_used = (
            {"n_expert_used": int(str(preset.tiny["expert_count"]))}
            if "expert_count" in preset.tiny
            else {}
        )
        write(plan_shape(resolve(preset.name, "tiny", quant="f32", n_layer=5, **n_used)), path, 3)
    return path


def header_of_layers(width: int, n_layers: int) -> dict[str, Any]:
    """The header of a file that drafts from rows of `width` values of three layers."""
    return {
        "block_count": n_layers,
        "context_length": 4096,
        "embedding_length": width,
        "feed_forward_length": 2 * width,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 32,
        "rope.freq_base": 1e4,
        "target_layers": (1, 2, 4),
    }


def with_map(tensors: Iterable[Tensor], width: int, n_tokens: int) -> list[Tensor]:
    """The tensors of a file that drafts `N_MAPPED` of the target's tokens only, with the map."""
    cut = [replace(t, shape=(width, N_MAPPED)) if t.name == "output.weight" else t for t in tensors]
    step = n_tokens // N_MAPPED
    return [*cut, Tensor("d2t", (N_MAPPED,), Type.I64, Fill("steps", float(step)))]


def eagle_shape(width: int, n_tokens: int, **metadata: Any) -> Shape:
    """The shape of a file for targets with rows of `width` values, with keys of its header."""
    header = header_of_layers(width, 1) | {"target_hidden_size": width}
    return Shape("eagle3", "eagle3", header | metadata, n_tokens, quant="f32", unchecked=True)


def write_eagle(
    folder: Path,
    target: Path,
    *,
    mapped: bool = False,
    own_embeddings: bool = False,
    without: str = "",
    name: str = "",
    **metadata: Any,
) -> Path:
    """Write an EAGLE-3 file for `target`. Returns its path.

    `mapped`: it drafts some of the target's tokens only. `without` is a pattern of tensors to leave
    out, and `metadata` replaces keys of the header; such files need their own `name`.
    """
    kind = f"{'-mapped' * mapped}{'-embeds' * own_embeddings}{name}"
    path = folder / f"eagle3-{target.stem}{kind}.gguf"
    if path.exists():
        return path
    width, n_tokens = read_facts(target).number("embedding_length"), 512
    shape = replace(eagle_shape(width, n_tokens, **metadata), without=(without,) if without else ())
    plan = plan_shape(shape)
    tensors = list(plan.tensors)
    if mapped:
        tensors = with_map(tensors, width, n_tokens)
    if own_embeddings:
        tensors.append(Tensor("token_embd.weight", (width, n_tokens), Type.F32, Fill("normal")))
    return write(replace(plan, tensors=tuple(tensors)), path, 5)
