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
from own_layer_steps import steps_of
from splits import at_random

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import Engine, EngineOptions, open_engine
from offload.ggml.compute_buffer import ComputeBuffer
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.plan.row_draft import plan_mtp
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import Splitter, all_on_device, stay
from offload.stream.play import GraphPlayer
from offload.times.context_memory import ContextOptions
from offload.times.min_batch import MinBatch

N_SEQUENCES = 3
PRESETS = {"plain": "deepseek-v3", "recurrent": "qwen3.5-35b-a3b"}
SPLITS: dict[str, Callable[[], Splitter | None]] = {
    "none": lambda: None,
    "stay": lambda: stay,
    "random": lambda: at_random(1),
    "device": lambda: all_on_device,
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
    streaming = Streaming(n_gpu_layers=99, passes="on", vram_bytes=vram)
    return engine_options(
        device="sim", streaming=streaming | changes,
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
    with open_engine(path, opened) as engine:
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


@pytest.mark.parametrize("split", SPLITS)
def test_the_player_reads_lent_slots(
    path: Path, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token at a time after a prompt, which the native player goes through by itself."""
    runs, of_player = [], GraphPlayer.run

    def run(player: GraphPlayer, *arguments: Any, **named: Any) -> int:
        runs.append(of_player(player, *arguments, **named))
        return runs[-1]

    monkeypatch.setattr(GraphPlayer, "run", run)
    made, found, lent_hits = SPLITS[split], [], 0
    for lend in (False, True):
        changes = {} if split == "none" else {"hybrid": True, "splitter": made()}
        with open_engine(path, options(path, lend=lend, **changes)) as engine:
            rows = [engine.sequences.extend(0, list(range(1, 251)), 1)]
            runs.clear()
            for i in range(24):
                rows.append(engine.sequences.extend(0, [3 + i % 4], 1))
            found.append(np.concatenate(rows))
            assert len(runs) >= 24
            assert engine.device is not None
            (executor,) = engine.device.executors.values()
            pool = executor.schedule.pools[0]
            lent_hits = sum(slot >= pool.n_own for slot in pool.where.values())
            assert (lent_hits > 0) == lend
    assert np.array_equal(*found)


def mtp_options(path: Path, split: str, *, lend: bool) -> EngineOptions:
    opened = options(path, share=0.3, lend=lend)
    hybrid = Streaming(hybrid=True, splitter=at_random(2)) if split == "random" else Streaming()
    layers = plan_mtp(read_facts(path), ContextOptions(), None)
    vram = (opened.wanted.vram_bytes or 0) + layers.weight_bytes
    return engine_options(
        opened, vram_bytes=vram, streaming=hybrid,
        n_sequences=2, n_ctx=2048, mtp=True, flash_attn="off", type_k="f32", type_v="f32",
    )  # fmt: skip


@pytest.mark.parametrize("split", ["none", "random"])
def test_drafts_by_own_layers_are_the_same_beside_lent_slots(models: Path, split: str) -> None:
    """The layers that draft have a context and a buffer of their own."""
    path, found = models / "lending-mtp.gguf", []
    write_preset(
        "deepseek-v3", path, seed=3, n_embd=256, n_ff_exp=256, n_layer=5,
        metadata={"nextn_predict_layers": 1},
    )  # fmt: skip
    for lend in (False, True):
        with open_engine(path, mtp_options(path, split, lend=lend)) as engine:
            assert engine.opened.row_draft is not None
            steps: list[Any] = []
            for _ in range(3):
                steps += steps_of(engine)
                for sequence in range(2):
                    engine.sequences.rewind(sequence, 0)
            rows = engine.sequences.extend(0, list(range(4, 300)), 1)
            found.append((steps, rows))
            counters = engine.counters()
    (steps, rows), (lent_steps, lent_rows) = found
    assert lent_steps == steps
    assert np.array_equal(lent_rows, rows)
    assert counters.n_lent_copies > counters.n_lent_dropped > 0


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
        native.llama_set_adapters_lora(
            engine.opened.context.handle, adapters, int(scale > 0), scales
        )
        == 0
    )


def swap_samplers(engine: Engine) -> None:
    """Let the device draw for the last sequence, and take that back. The plan of graphs is void."""
    chain = native.llama_sampler_chain_init(native.llama_sampler_chain_default_params())
    native.llama_sampler_chain_add(chain, native.llama_sampler_init_greedy())
    for its in (chain, None):
        assert native.llama_set_sampler(engine.opened.context.handle, N_SEQUENCES - 1, its)
    native.llama_sampler_free(chain)


@pytest.mark.parametrize("split", ["none", "random"])
def test_a_buffer_that_is_taken_anew_while_slots_are_lent_changes_no_logits(
    path: Path, split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters and samplers of the device make the scheduler free its buffer."""
    sizes, of_buffer = [], ComputeBuffer._on_alloc

    def on_alloc(buffer: ComputeBuffer, buffer_type: int, size: int) -> int | None:
        sizes.append(size)
        return of_buffer(buffer, buffer_type, size)

    monkeypatch.setattr(ComputeBuffer, "_on_alloc", on_alloc)
    adapter_path, made, found = write_lora(path, 256), SPLITS[split], []
    for lend in (False, True):
        changes = {} if split == "none" else {"hybrid": True, "splitter": made()}
        with open_engine(path, options(path, lend=lend, **changes)) as engine:
            model = engine._model.handle
            adapter = native.llama_adapter_lora_init(model, str(adapter_path).encode())
            assert adapter
            n_before, rows = len(sizes), [logits(engine, 1, 8)]
            for i, scale in enumerate((1.0, 0.5, 0.0)):
                copies = engine.counters().n_lent_copies
                set_lora(engine, adapter, scale)
                rows.append(logits(engine, 2 + i, 8))
                swap_samplers(engine)
                rows.append(logits(engine, 12 + i, 8))
                assert (engine.counters().n_lent_copies > copies) == lend
            found.append(np.concatenate(rows))
            counters = engine.counters()
    assert np.array_equal(*found)
    assert counters.n_lent_copies > counters.n_lent_dropped > 0
    assert len(sizes) >= n_before + 4


def test_prompts_whose_experts_the_cpu_computes_take_the_buffer_too(path: Path) -> None:
    """The device may compute such a prompt's graphs unseen by the executor."""
    found = []
    for lend in (False, True):
        with open_engine(path, options(path, share=0.15, lend=lend)) as engine:
            assert engine.device is not None
            engine.device.passes = False
            found.append(logits(engine, seed=7))
            assert engine.device.declined
            assert (engine.counters().n_lent_dropped > 0) == lend
    assert np.array_equal(*found)


def test_the_start_says_how_many_slots_the_buffer_has(path: Path) -> None:
    with open_engine(path, options(path)) as engine:
        device = engine.device
        assert device is not None
        assert device.n_lent > 0
        assert any(f"{device.n_lent} more slots in the" in note for note in engine.opened.notes)


@pytest.mark.parametrize("share", [0.2, 0.3, 0.6])
def test_the_plan_counts_the_slots_that_are_open_between_prompts(path: Path, share: float) -> None:
    opened = engine_options(options(path, share), n_ctx=512, n_ubatch=512, n_sequences=1)
    with open_engine(path, opened) as engine:
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
    opened = engine_options(options(path, share=1.0, **changes), device=device, n_ctx=512)
    with open_engine(path, opened) as engine:
        assert engine.opened.devices[0].compute_buffer is None
        said = f"no experts in the compute buffer: {why}"
        assert any(note.endswith(said) for note in engine.opened.notes)
        engine.sequences.extend(0, [1, 2, 3])
        assert engine.counters().n_lent_copies == 0
        assert all(its.plan.n_lent == 0 for its in engine.layout.devices)
