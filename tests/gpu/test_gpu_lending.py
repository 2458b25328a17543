"""Experts cached in the compute buffer between prompts change no logits on a GPU."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import Logits, assert_same, options, slots_for

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import EngineOptions, open_engine
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import all_on_device, stay

SIZES = (1, 1, 1, 2, 5, 17, 70, 200, 256, 400)
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {},
    "split": {"hybrid": True, "splitter": stay},
    "ahead": {"hybrid": True, "splitter": all_on_device},
}


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    made = models / "gpu-lending.gguf"
    return write_preset("deepseek-v3", made, seed=3, n_embd=256, n_ff_exp=256)


def opened(gpu: DeviceChoice, streaming: Streaming) -> EngineOptions:
    return options(gpu, streaming, n_ctx=4096, n_ubatch=256, n_batch=512, n_outputs=64)


def logits(path: Path, made: EngineOptions) -> tuple[Logits, StreamCounters]:
    rng, rows = random.Random(1), []
    with open_engine(path, made) as engine:
        assert engine.device is not None
        if made.wanted.lend and engine.device.compute_buffer is None:
            pytest.skip(engine.opened.notes[-1])
        for _ in range(24):
            n = rng.choice(SIZES)
            tokens = [rng.randrange(engine.n_vocab) for _ in range(n)]
            rows.append(engine.sequences.extend(0, tokens, 1 if n > 64 else n))
        return np.concatenate(rows), engine.counters()


@pytest.mark.parametrize("way", WAYS)
def test_lent_slots_change_no_logits(gpu: DeviceChoice, path: Path, way: str) -> None:
    streaming = slots_for(path, "half", passes="on", **WAYS[way])
    lent, counters = logits(path, opened(gpu, streaming))
    plain, without = logits(path, opened(gpu, streaming | Streaming(lend=False)))
    assert_same(gpu, lent, plain)
    assert counters.n_lent_copies > counters.n_lent_dropped > 0
    assert without.n_lent_copies == 0


def test_slots_sized_after_a_warm_up_continue_in_the_buffer(
    gpu: DeviceChoice, models: Path
) -> None:
    path = models / "gpu-lending-large.gguf"
    write_preset("deepseek-v3", path, seed=3, n_embd=256, n_ff_exp=512, n_layer=24)
    streaming = Streaming(bounce=False, passes="on", device_bytes=165 << 20)
    made = opened(gpu, streaming)
    lent, counters = logits(path, made)
    plain, _ = logits(path, engine_options(made, streaming=streaming | Streaming(lend=False)))
    assert_same(gpu, lent, plain)
    assert counters.n_lent_copies > counters.n_lent_dropped > 0
