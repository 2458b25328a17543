"""Experts cached in the compute buffer between prompts change no logits, on `sim`.

Batches of all sizes alternate in several sequences, so that prompts take the buffer's memory again
and again. Weights are f32, because k-quants round differently in passes (test_shared_slots.py).
"""

from __future__ import annotations

import ctypes as C
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as native
import numpy as np
import pytest
from gguf import GGUFWriter
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


def write_lora(path: Path, n_embd: int) -> Path:
    """A LoRA adapter of the first layer's router, so that it changes which experts are used."""
    rng, rank, n_experts = np.random.default_rng(0), 4, read_facts(path).n_experts
    adapter = path.with_suffix(".lora")
    writer = GGUFWriter(adapter, read_facts(path).architecture)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    name = next(n for n in read_facts(path).weights if n.endswith("ffn_gate_inp.weight"))
    for part, shape in (("a", (rank, n_embd)), ("b", (n_experts, rank))):
        writer.add_tensor(f"{name}.lora_{part}", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return adapter


def set_lora(engine: Engine, adapter: Any, scale: float) -> None:
    """Set the adapter, so that the scheduler frees its buffer and takes another one."""
    adapters = (native.llama_adapter_lora_p_ctypes * 1)(adapter)
    scales = (C.c_float * 1)(scale)
    assert (
        native.llama_set_adapters_lora(engine._context.handle, adapters, int(scale > 0), scales)
        == 0
    )


@pytest.mark.parametrize("split", ["none", "random"])
def test_a_buffer_that_is_taken_anew_while_slots_are_lent_changes_no_logits(
    path: Path, split: str
) -> None:
    """Adapters and attention without a mask make the scheduler free its buffer."""
    adapter_path, made, found = write_lora(path, 256), SPLITS[split], []
    for lend in (False, True):
        changes = {} if split == "none" else {"hybrid": True, "splitter": made()}
        with Engine(path, options(path, lend=lend, **changes)) as engine:
            handle = engine._context.handle
            adapter = native.llama_adapter_lora_init(
                engine._model.handle, str(adapter_path).encode()
            )
            assert adapter
            rows, sizes, dropped = [logits(engine, 1, 8)], [], []
            for i, scale in enumerate((1.0, 0.5, 0.0)):
                set_lora(engine, adapter, scale)
                rows.append(logits(engine, 2 + i, 8))
                native.llama_set_causal_attn(handle, False)
                native.llama_set_causal_attn(handle, True)
                rows.append(logits(engine, 12 + i, 8))
                assert engine.device is not None
                dropped.append(engine.counters().n_lent_dropped)
                if engine.device.compute_buffer is not None:
                    sizes.append(engine.device.compute_buffer.size_bytes)
                    assert engine.device.n_lent_open > 0 or engine.counters().n_lent_copies
            counters = engine.counters()
            found.append(np.concatenate(rows))
    assert np.array_equal(*found)
    assert counters.n_lent_copies > counters.n_lent_dropped > dropped[0] > 0
    assert len(sizes) == 3


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


@pytest.mark.parametrize("share", [0.2, 0.3, 0.6])
def test_the_plan_counts_the_slots_that_are_open_between_prompts(path: Path, share: float) -> None:
    opened = replace(options(path, share), n_ctx=512, n_ubatch=512, n_sequences=1)
    with Engine(path, opened) as engine:
        device, planned = engine.device, engine.layout.plan
        assert device is not None
        assert planned is not None
        for n in (300, 1, 1):
            engine.sequences.extend(0, list(range(n)), 1)
        (pool,) = planned.layout.pools
        useful = min(device.n_lent_open, pool.n_pieces - pool.n_slots)
        assert useful > 10
        # Formulas for the buffers of such small models are less exact than for published ones.
        assert planned.n_lent == pytest.approx(useful, rel=0.2)
        assert device.compute_buffer is not None
        assert planned.buffer is not None
        real = replace(planned.buffer, size_bytes=device.compute_buffer.size_bytes)
        assert replace(planned, buffer=real).n_lent == pytest.approx(useful, abs=2)


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
        assert engine.layout.plan is not None
        assert all(its.plan is None or its.plan.n_lent == 0 for its in engine.layout.devices)
