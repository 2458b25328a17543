"""A tiny model of each kind of memory, and the files that draft for it. All weights are f32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from lab.synth import plan_shape, write, write_preset
from lab.synth.eagle import write_eagle
from lab.synth.mtp import write_mtp
from lab.synth.shape import Shape
from lab.synth.tables import table_shape

_MAMBA2 = {
    "block_count": 4, "embedding_length": 128, "feed_forward_length": 256, "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
    "ssm.conv_kernel": 4, "ssm.inner_size": 256, "ssm.state_size": 16, "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
}  # fmt: skip


def _recurrent(folder: Path, seed: int) -> Path:
    shape = Shape("mamba2", "mamba2", dict(_MAMBA2), 512, quant="f32", unchecked=True)
    return write(plan_shape(shape), folder / f"recurrent-{seed}.gguf", seed)


def _sinks(folder: Path, seed: int) -> Path:
    path = folder / f"sinks-{seed}.gguf"
    return write_preset("gpt-oss-20b", path, seed=seed, quant="f32", n_layer=5)


def _tables(folder: Path, seed: int) -> Path:
    shape = replace(table_shape("gemma3n", "f32"), n_vocab=512)
    return write(plan_shape(shape), folder / f"tables-{seed}.gguf", seed)


def _dense(folder: Path, seed: int) -> Path:
    path = folder / f"dense-{seed}.gguf"
    return write_preset("mistral-large", path, seed=seed, quant="f32")


def _with_layers_that_draft(architecture: str, folder: Path, seed: int) -> Path:
    return write_mtp(folder, architecture, seed=seed)


_WRITERS: dict[str, Callable[[Path, int], Path]] = {
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
def model_of(memory: str, folder: Path, seed: int = 5) -> Path:
    """Write the model of this kind of memory, once. Returns its path."""
    return _WRITERS[memory](folder, seed)


@lru_cache
def draft_of(drafter: str, memory: str, folder: Path) -> Path | None:
    """The file that drafts: a model with other weights, or an EAGLE-3 file. None: none does."""
    if drafter == "draft":
        return model_of("dense", folder, 6)
    if drafter == "eagle3":
        return write_eagle(folder, model_of(memory, folder))
    return None
