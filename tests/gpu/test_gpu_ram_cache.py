"""A KV cache in RAM on a GPU: attention on the CPU, or on the GPU with a copy of the cache."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import Logits, assert_close, assert_same, is_standin, options, slots_for

import offload.plan.devices
import offload.stream.cache_ahead
from lab.options import engine_options
from lab.synth import write_preset
from offload.backends import CUDA
from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions, open_engine
from offload.model_file import read_facts
from offload.schedule.splitter import all_on_device, stay
from offload.times.context_memory import context_memory

SIZES = (1, 1, 1, 2, 5, 17, 70, 130)
PRESETS = {"plain": "qwen3-30b-a3b", "latent": "deepseek-v3", "recurrent": "qwen3.5-35b-a3b"}
# Sizes of heads for which CUDA has kernels of flash attention. Others would run on the CPU.
_PLAIN = {
    "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 64,
}  # fmt: skip
HEADS: dict[str, dict[str, int]] = {
    "plain": _PLAIN,
    "latent": {
        "attention.head_count": 16, "attention.kv_lora_rank": 512, "attention.key_length": 576,
        "attention.value_length": 512, "attention.key_length_mla": 96,
        "attention.value_length_mla": 32, "rope.dimension_count": 64,
    },
    "recurrent": {**_PLAIN, "rope.dimension_count": 16},
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "split": {"hybrid": True, "splitter": stay},
    "ahead": {"hybrid": True, "splitter": all_on_device},
}


@pytest.fixture(autouse=True)
def _small_caches_are_copied_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload.stream.cache_ahead, "LEAST_BYTES", 0)


@pytest.fixture(scope="module", params=PRESETS)
def path(request: pytest.FixtureRequest, models: Path) -> Path:
    made = models / f"gpu-ram-cache-{request.param}.gguf"
    if made.exists():
        return made
    return write_preset(
        PRESETS[request.param], made, seed=3, n_embd=256, n_ff_exp=256,
        n_layer=8 if request.param == "recurrent" else None,  # two layers have caches
        metadata=HEADS[request.param],
    )  # fmt: skip


def opened(gpu: DeviceChoice, path: Path, way: str, *, kv_offload: bool) -> EngineOptions:
    streaming = slots_for(path, "half", passes="on", **WAYS[way])
    return options(
        gpu, streaming, n_ctx=2048, n_ubatch=64, n_batch=256, n_outputs=64, flash_attn="on",
        n_sequences=2, kv_offload=kv_offload,
    )  # fmt: skip


def check_copies(engine: Engine) -> None:
    """Check that the GPU computed layers while the caches of others were copied, if it could."""
    counters, plan = engine.counters(), engine.opened.plan
    assert plan is not None
    if (
        engine.opened.ram_cache is None
        or not engine.opened.ram_cache.is_pinned
        or plan.attention_batch is None
    ):
        assert counters.cache_bytes == 0
        return
    assert counters.cache_ahead_bytes > 0
    assert counters.cache_bytes < 2.5 * counters.cache_ahead_bytes  # the first layer's are not


def logits(path: Path, made: EngineOptions) -> Logits:
    rng, rows = random.Random(1), []
    with open_engine(path, made) as engine:
        if engine.opened.ram_cache is not None:
            # Vulkan cannot pin memory of ours, and copies from ordinary memory.
            is_pinned = not engine.opened.ram_cache.not_pinned_reason
            assert is_pinned == (engine.start.choice.device.backend is CUDA)
        for _ in range(20):
            n = rng.choice(SIZES)
            tokens = [rng.randrange(engine.n_vocab) for _ in range(n)]
            rows.append(engine.sequences.extend(rng.randrange(2), tokens, 1 if n > 64 else n))
        check_copies(engine)
    return np.concatenate(rows)


def assert_alike(gpu: DeviceChoice, got: Logits, expected: Logits, *, is_on_gpu: bool) -> None:
    """Check that logits are the same, or close if the CPU and not the GPU computes attention."""
    if is_on_gpu or is_standin(gpu):
        assert_same(gpu, got, expected)
    else:
        assert_close(got, expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("crossover", [1, 4, None])
def test_a_cache_in_ram_changes_no_logits(
    gpu: DeviceChoice, path: Path, way: str, crossover: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.plan.devices, "attention_crossover", lambda *_: crossover)
    in_ram = logits(path, opened(gpu, path, way, kv_offload=False))
    on_gpu = logits(path, opened(gpu, path, way, kv_offload=True))
    assert_alike(gpu, in_ram, on_gpu, is_on_gpu=crossover == 1)


def test_a_state_is_loaded_in_the_other_place(gpu: DeviceChoice, path: Path) -> None:
    text = [3, 1, 4, 1, 5] * 20
    rows = {}
    with open_engine(path, opened(gpu, path, "streamed", kv_offload=True)) as engine:
        engine.sequences.extend(0, text, n_logits=0)
        state = engine.sequences.save(0)
        rows[True] = engine.sequences.extend(0, [9, 2, 6])
    with open_engine(path, opened(gpu, path, "streamed", kv_offload=False)) as engine:
        engine.sequences.load(1, state, text)
        rows[False] = engine.sequences.extend(1, [9, 2, 6])
    assert_alike(gpu, rows[False], rows[True], is_on_gpu=False)


def test_a_cache_in_ram_takes_no_device_memory(gpu: DeviceChoice, path: Path) -> None:
    if gpu.device.backend is not CUDA:
        pytest.skip("software Vulkan's memory is RAM, which other programs take too")
    made = engine_options(opened(gpu, path, "streamed", kv_offload=False), n_ctx=1 << 16)
    before = gpu.device.memory_bytes()[0]
    free = {}
    for place in (True, False):
        with open_engine(path, engine_options(made, kv_offload=place)):
            free[place] = gpu.device.memory_bytes()[0]
    assert gpu.device.memory_bytes()[0] == before  # nothing is left behind
    there, here = (
        context_memory(read_facts(path), replace(made.wanted.context, kv_offload=place))
        for place in (True, False)
    )
    # One layer's cache is copied to the compute buffer, which may have room for it anyway.
    saved_bytes, slack_bytes = free[False] - free[True], 2 << 20
    assert saved_bytes >= there.total_bytes - here.total_bytes - slack_bytes
    assert saved_bytes <= here.host_kv_bytes + slack_bytes
