"""Tiny models with a table that is looked up and not multiplied, larger than the rest of the file.

The table has hundreds of pages, so that a test can tell which of them were read.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab.synth.mixtures import mixture_shape
from lab.synth.shape import Shape, Value
from lab.synth.write import plan_shape, write

ARCHITECTURES = ("gemma3n", "gemma4", "qwen4exp")
_N_VOCAB = 4096
_GEMMA3N: dict[str, Value] = {
    "block_count": 5, "context_length": 4096, "embedding_length": 128, "feed_forward_length": 128,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
    "attention.value_length": 32, "rope.dimension_count": 32, "rope.freq_base": 1e4,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.sliding_window": 64,
    "attention.sliding_window_pattern": 5,
}  # fmt: skip
_HEAD_SIZES = (65521, 65519, 65497, 65479)  # primes, as in published files


def table_shape(architecture: str, quant: str = "q8_0") -> Shape:
    """Return a shape of an architecture of `ARCHITECTURES`."""
    if architecture == "gemma3n":
        return Shape("gemma3n", "gemma3n", _GEMMA3N, _N_VOCAB, quant=quant, unchecked=True)
    shape = replace(mixture_shape(architecture, quant), n_vocab=_N_VOCAB)
    if architecture != "qwen4exp":
        return shape
    heads: dict[str, Value] = {
        "ple.head_vocab_sizes": _HEAD_SIZES,
        "ple.head_offsets": tuple(sum(_HEAD_SIZES[:i]) for i in range(len(_HEAD_SIZES))),
        "ple.layer_multipliers": (6364136223846793005, 1442695040888963407, 2862933555777941757),
    }
    return replace(shape, metadata=shape.metadata | heads)


def write_with_table(architecture: str, path: Path, quant: str = "q8_0", seed: int = 1) -> Path:
    """Write a tiny random model of an architecture of `ARCHITECTURES`. Returns `path`."""
    return write(plan_shape(table_shape(architecture, quant), "bytes"), path, seed)
