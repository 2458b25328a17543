"""Compares our device with plain libllama after a text was cut, for each kind of memory.

A memory that keeps a cell of each token is cut at any of them. Sliding windows and recurrent
states cannot be, and go back to a checkpoint, which the library may keep on the device. Drafts,
`tune`, `bench` and `profile` do both. The models are tiny, so the part has no speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from equality import half
from logits import divergences, judged
from numpy.typing import NDArray
from setting import Setting

from lab.options import engine_options
from lab.synth import plan_shape, write, write_preset
from lab.synth.shape import Shape
from offload.engine import Engine, open_engine
from offload.model_file import read_facts
from offload.times.min_batch import MinBatch

# A prompt, longer than a window; a draft that is rejected; what replaces it, and one token more.
_PROMPT, _REJECTED, _KEPT = 48, 4, (4, 1)
_TIMES = 3  # the text is cut this many times
# CUDA's scan needs states of 128 values, and heads whose size is a multiple of 16.
_MAMBA2: dict[str, Any] = {
    "block_count": 4, "embedding_length": 256, "feed_forward_length": 256, "context_length": 4096,
    "attention.layer_norm_rms_epsilon": 1e-5, "attention.layer_norm_epsilon": 1e-5,
    "ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 128, "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
}  # fmt: skip


def _preset(name: str, **changes: Any) -> Callable[[Path], Path]:
    return lambda path: write_preset(name, path, seed=5, quant="q8_0", **changes)


def _recurrent(path: Path) -> Path:
    shape = Shape("mamba2", "mamba2", _MAMBA2, 512, quant="q8_0", unchecked=True)
    return write(plan_shape(shape), path)


MEMORIES: Mapping[str, Callable[[Path], Path]] = MappingProxyType({
    "full": _preset("qwen3-30b-a3b", n_embd=256, n_ff_exp=256),
    "windows": _preset("gpt-oss-20b", n_embd=256, n_ff_exp=256),
    "recurrent": _recurrent,
    "hybrid": _preset("qwen3.5-35b-a3b", n_embd=256, n_ff_exp=256),
    "indexer": _preset("deepseek-v3.2", n_embd=256, n_ff_exp=256),
})  # fmt: skip


def measure(setting: Setting) -> bool:
    """Fill `memories` of the report with a row per kind of memory. True if all agree."""
    rows: list[dict[str, Any]] = setting.report["memories"]
    for memory, make in MEMORIES.items():
        path = setting.folder / f"memory-{memory}.gguf"
        if not path.exists():
            make(path)
        rows.append({"memory": memory, **row_of(setting, path)})
        if setting.args.model_dir is None:
            path.unlink()
        setting.save()
    setting.show("equal to plain libllama after cuts; kl = divergence of a row in nats", rows)
    return all(row["passed"] for row in rows)


def row_of(setting: Setting, path: Path) -> dict[str, Any]:
    """The verdict on one file. `goes_back_by` is what its memory needs to be cut.

    A recurrent model has no experts to stream, so our device only computes it.
    """
    resident: dict[str, Any] = {"stream_experts": False, "wrapped": False}
    has_experts = bool(read_facts(path).expert_weights)
    ours = {"streaming": half(path)} if has_experts else {}
    expected, _ = _followed(setting, path, resident)
    got, counted = _followed(setting, path, ours)
    row = {**counted, **judged(divergences(got, expected))}
    return row | {"passed": row["same"] and (counted["streamed_bytes"] > 0) == has_experts}


def _followed(
    setting: Setting, path: Path, changes: dict[str, Any]
) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """Returns the logits after each cut [n_rows, n_vocab], and how the text was cut."""
    options: dict[str, Any] = {
        "device": setting.choice.name, "n_ctx": 512, "n_ubatch": 32, "n_outputs": 32,
        "n_threads": 1, "n_threads_batch": 1, "repack": False, "mla": False,
        "flash_attn": "off" if setting.args.small else "auto",
        "min_batch": MinBatch(experts=1, dense=1),  # the device computes all batches
    }  # fmt: skip
    with open_engine(path, engine_options(**{**options, **changes})) as engine:
        rows = [row for turn in range(_TIMES) for row in _turn(engine, turn)]
        counters, sequences = engine.counters(), engine.sequences
        way = "checkpoint" if sequences.goes_back_by_checkpoints else "cut"
        return np.concatenate(rows), {
            "goes_back_by": way, "restores": sequences.rollbacks.restores,
            "streamed_bytes": counters.streamed_bytes,
        }  # fmt: skip


def _turn(engine: Engine, turn: int) -> list[NDArray[np.float32]]:
    """Append a prompt and a draft, take the draft back, and return the logits of what follows."""
    sequences, rng = engine.sequences, np.random.default_rng(turn)

    def drawn(n: int) -> list[int]:
        return [int(token) for token in rng.integers(engine.n_vocab, size=n)]

    sequences.extend(0, drawn(_PROMPT), 0)
    length = sequences.length(0)
    saved = sequences.checkpoint(0) if sequences.goes_back_by_checkpoints else None
    sequences.extend(0, drawn(_REJECTED))
    if saved is None:
        sequences.rewind(0, length)
    else:
        sequences.restore(0, saved)
    return [sequences.extend(0, drawn(n)) for n in _KEPT]
