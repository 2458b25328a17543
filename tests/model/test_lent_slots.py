"""Experts cached in the compute buffer between prompts change no logits, on `sim`.

Batches of all sizes alternate in several sequences, so that prompts take the buffer's memory again
and again. Weights are f32, because k-quants round differently in passes (test_shared_slots.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from splits import all_host, at_random

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.schedule.slots import StreamCounters
from offload.split.switch import Splitter, all_on_device, stay
from offload.streaming.options import StreamingOptions

N_SEQUENCES = 3
PRESETS = {"plain": "deepseek-v3", "recurrent": "qwen3.5-35b-a3b"}
SPLITS: dict[str, Callable[[], Splitter | None]] = {
    "none": lambda: None,
    "stay": lambda: stay,
    "random": lambda: at_random(1),
    "device": lambda: all_on_device,
    "host": lambda: all_host,
}
SIZES = (1, 1, 1, 1, 2, 3, 5, 17, 64, 70, 200, 256, 300, 600)


@pytest.fixture(scope="module", params=PRESETS)
def path(request: pytest.FixtureRequest, models: Path) -> Path:
    path = models / f"lending-{request.param}.gguf"
    preset = PRESETS[request.param]
    return path if path.exists() else write_preset(preset, path, seed=3, n_embd=256, n_ff_exp=256)


def options(path: Path, share: float = 0.3, **changes: object) -> EngineOptions:
    """Options with slots for this share of the experts."""
    plan = make_plan(read_facts(path))
    vram = plan.resident_bytes + int(share * plan.slot_bytes)
    streaming = StreamingOptions(n_gpu_layers=99, passes="on", vram_bytes=vram)
    return EngineOptions(
        device="sim", streaming=replace(streaming, **changes),  # type: ignore[arg-type]
        min_batch=MinBatch(1, 1), n_ctx=8192, n_ubatch=256, n_batch=1024, n_outputs=64,
        n_sequences=N_SEQUENCES, n_threads=1, n_threads_batch=1,
    )  # fmt: skip


def logits(engine: Engine, seed: int, n_batches: int = 30) -> NDArray[np.float32]:
    rng, rows = random.Random(seed), []
    for _ in range(n_batches):
        sequence, n = rng.randrange(N_SEQUENCES), rng.choice(SIZES)
        tokens = [rng.randrange(engine.n_vocab) for _ in range(n)]
        rows.append(engine.sequences.extend(sequence, tokens, 1 if n > 64 else n))
    return np.concatenate(rows)


def of(opened: EngineOptions, path: Path, seed: int) -> tuple[NDArray[np.float32], StreamCounters]:
    with Engine(path, opened) as engine:
        return logits(engine, seed), engine.counters()


@pytest.mark.parametrize("split", SPLITS)
def test_lent_slots_change_no_logits(path: Path, split: str) -> None:
    made = SPLITS[split]
    found = []
    for lend in (False, True):
        changes = {} if split == "none" else {"hybrid": True, "splitter": made()}
        found.append(of(options(path, lend=lend, **changes), path, seed=5))
    (plain, without), (lent, counters) = found
    assert np.array_equal(lent, plain)
    assert without.n_lent_copies == without.n_small_plans == 0
    assert counters.n_small_plans > 2
    assert counters.n_lent_copies > counters.n_lent_dropped > 0
    if split == "none":
        assert counters.hits > without.hits


def test_prompts_whose_experts_the_cpu_computes_take_the_buffer_too(path: Path) -> None:
    """The device may compute such a prompt's graphs unseen by the executor."""
    found = []
    for lend in (False, True):
        with Engine(path, options(path, share=0.15, lend=lend)) as engine:
            assert engine.device is not None
            engine.device.passes = False
            found.append(logits(engine, seed=7))
            assert engine.device.declined
            assert (engine.counters().n_lent_dropped > 0) == lend
    assert np.array_equal(*found)


def test_the_start_says_how_many_slots_the_buffer_has(path: Path) -> None:
    with Engine(path, options(path)) as engine:
        device = engine.device
        assert device is not None
        assert device.n_lent > 0
        assert any(f"{device.n_lent} more slots in the" in note for note in engine.notes)


@pytest.mark.parametrize(
    ("why", "device", "changes"),
    [
        ("it is turned off", "sim", {"lend": False}),
        ("several devices compute a graph", "sim,sim", {}),
        ("each streamed expert has a slot of its own", "sim", {"vram_bytes": None}),
    ],
)
def test_the_start_says_why_it_lends_nothing(
    path: Path, why: str, device: str, changes: dict[str, object]
) -> None:
    opened = replace(options(path, share=1.0, **changes), device=device, n_ctx=512)
    with Engine(path, opened) as engine:
        assert engine.devices[0].compute_buffer is None
        said = f"no experts in the compute buffer: {why}"
        assert any(note.endswith(said) for note in engine.notes)
        engine.sequences.extend(0, [1, 2, 3])
        assert engine.counters().n_lent_copies == 0
