"""A tiny model of each kind of memory and type of experts, and the files that draft for it.

All other weights of a mixture are f32, and so are those of drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from lab.synth import plan_preset, plan_shape, write, write_header_only, write_preset
from lab.synth.block import write_block
from lab.synth.eagle import write_eagle
from lab.synth.mtp import write_mtp
from lab.synth.projector import write_projector
from lab.synth.shape import Shape
from lab.synth.tables import table_shape
from offload.model_file import read_facts
from specoffload.config.resolution import demo_file

_MAMBA2 = {
    "block_count": 4, "embedding_length": 128, "feed_forward_length": 256, "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
    "ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 16, "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
}  # fmt: skip


# Blocks of these types have 256 values, so their rows need as many.
_WIDE = {"embedding_length": 256, "expert_feed_forward_length": 256}
_WIDE_TYPES = ("q4_K", "q2_K", "iq4_xs")


def _own(weights: str) -> dict[str, int]:
    """Metadata of a mixture whose experts have this type."""
    return _WIDE if weights in _WIDE_TYPES else {}


def _recurrent(path: Path, weights: str, seed: int) -> Path:
    shape = Shape("mamba2", "mamba2", dict(_MAMBA2), 512, quant=weights, unchecked=True)
    return write(plan_shape(shape), path, seed)


def _sinks(path: Path, weights: str, seed: int) -> Path:
    sizes = {"n_embd": 256, "n_ff_exp": 256} if _own(weights) else {}
    quant = f"f32,experts={weights}"
    return write_preset("gpt-oss-20b", path, seed=seed, quant=quant, n_layer=5, **sizes)


def _tables(path: Path, weights: str, seed: int) -> Path:
    shape = replace(table_shape("gemma3n", weights), n_vocab=512)
    return write(plan_shape(shape), path, seed)


def _dense(path: Path, weights: str, seed: int) -> Path:
    sizes = {"n_embd": 256} if _own(weights) else {}
    # EAGLE-3 files and block drafts read the rows before layer 4.
    return write_preset("mistral-large", path, seed=seed, quant=weights, n_layer=5, **sizes)


def _with_layers_that_draft(architecture: str, path: Path, weights: str, seed: int) -> Path:
    return write_mtp(
        path.parent, architecture, seed=seed, name=f"-{weights}", own=_own(weights),
        quant=f"f32,experts={weights}",
    )  # fmt: skip


_WRITERS: dict[str, Callable[[Path, str, int], Path]] = {
    "full": partial(_with_layers_that_draft, "glm4moe"),
    "windows": partial(_with_layers_that_draft, "step35"),
    "sinks": _sinks,
    "recurrent": _recurrent,
    "hybrid": partial(_with_layers_that_draft, "qwen35moe"),
    "mla": partial(_with_layers_that_draft, "deepseek2"),
    "indexer": partial(_with_layers_that_draft, "deepseek32"),
    "tables": _tables,
    "dense": _dense,
}


@lru_cache
def model_of(memory: str, folder: Path, weights: str = "f32", seed: int = 5) -> Path:
    """Write the model of this kind of memory and type of experts, once. Returns its path."""
    return _WRITERS[memory](folder / f"{memory}-{weights}-{seed}.gguf", weights, seed)


@lru_cache
def draft_of(drafter: str, model: Path, folder: Path) -> Path | None:
    """The file that drafts: a model with other weights, an EAGLE-3 file or a block draft.

    None: none does.
    """
    if drafter == "draft":
        return model_of("dense", folder, seed=6)
    if drafter == "eagle3":
        return write_eagle(folder, model)
    if drafter in ("dflash2", "dspark"):
        return write_block(folder, model, drafter)
    return None


@lru_cache
def embedded_projector(folder: Path) -> Path:
    """A projector with which the embedded model reads images, as noise."""
    n_embd = read_facts(demo_file("target.gguf")).number("embedding_length")
    return write_projector(folder / "embedded-mmproj.gguf", "gemma3", n_embd)


# A published model of each kind of memory, for plans of its header.
_LARGE = {
    "full": "glm-4.5-air", "windows": "llama-4-scout", "sinks": "gpt-oss-120b",
    "hybrid": "qwen3.5-35b-a3b", "mla": "deepseek-v2", "indexer": "deepseek-v3.2",
    "tables": "gemma-3n-e4b", "dense": "mistral-large",
}  # fmt: skip
_ON_GPU_BYTES = 14e9  # of the layers whose experts stay on the GPU of a large model


@lru_cache
def large_model_of(memory: str, folder: Path) -> Path:
    """Write the header of a published model of this kind, once. Small if none is published."""
    name = _LARGE.get(memory)
    if name is None:
        return model_of(memory, folder)
    return write_header_only(plan_preset(name, size="full"), folder / f"{name}.gguf")


@lru_cache
def n_layers_in_ram(memory: str, *, is_large: bool) -> int:
    """Layers whose experts stay in RAM, if as many as are useful lie on the GPU."""
    name = _LARGE.get(memory)
    if name is None or not is_large:
        return 2
    planned = plan_preset(name, size="full")
    n_layers = planned.shape.number("block_count")
    return n_layers - int(_ON_GPU_BYTES / (planned.size_bytes / n_layers))
