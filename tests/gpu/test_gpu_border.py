"""A prompt of several ubatches. An ubatch's copies begin while the one before it is computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from on_gpu import Logits, assert_same, options, slots_for

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import Engine, open_engine

N_UBATCH = 80  # more than the player's batches


@pytest.fixture(scope="module")
def path(models: Path) -> Path:
    return write_preset("qwen3moe", models / "gpu_border.gguf", n_layer=6, n_expert=8, seed=2)


def prompts(engine: Engine) -> Logits:
    tokens = [(13 * i + 5) % engine.n_vocab for i in range(4 * N_UBATCH)]
    rows = []
    for _ in range(2):
        engine.sequences.rewind(0, 0)
        rows.append(engine.sequences.extend(0, tokens, 3))
        rows.append(engine.sequences.extend(0, tokens[:3]))
    return np.concatenate(rows)


@pytest.mark.timeout(1200)  # Debian's software driver takes five minutes
def test_copies_for_the_next_ubatch_change_no_logit(gpu: DeviceChoice, path: Path) -> None:
    sizes = {"n_ubatch": N_UBATCH, "n_batch": 512, "n_ctx": 512}
    with open_engine(path, options(gpu, **sizes)) as engine:
        expected = prompts(engine)
    with open_engine(path, options(gpu, slots_for(path, "half"), **sizes)) as engine:
        got = prompts(engine)
        assert engine.counters().n_early >= 2 * 2
    assert_same(gpu, got, expected)
