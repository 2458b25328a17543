"""Split layers of all architectures give the bits of the same model, resident on the GPU.

All experts are computed by the GPU, because the CPU rounds differently.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_gpu import Logits, assert_same, options, slots_for

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions, open_engine
from offload.schedule.splitter import all_on_device
from offload.times.min_batch import NEVER, MinBatch

PRESETS = (
    "deepseek-v2-lite",
    "qwen3-30b-a3b",
    "glm-4.5-air",
    "gpt-oss-20b",
    "llama-4-scout",
    "qwen3.5-35b-a3b",
    "minimax-m2",
)


def decoded(path: Path, opened: EngineOptions) -> tuple[Logits, int]:
    """Return the logits of decodes of one and of two sequences, and the number of split layers."""

    def rows(engine: Engine) -> Iterator[Logits]:
        for n in (1, 64, 1, 5):
            yield engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for i in range(3):
            parts = [(0, [7 * i + 1], 1), (1, [5 * i + 2, 3 * i + 4], 2)]
            yield from engine.sequences.extend_batch(parts)

    with open_engine(path, opened) as engine:
        return np.concatenate([*rows(engine)]), engine.counters().split_layers


@pytest.mark.parametrize("preset", PRESETS)
def test_layers_split_on_the_device_have_the_resident_models_bits(
    gpu: DeviceChoice, models: Path, preset: str
) -> None:
    path = write_preset(preset, models / f"gpu_{preset}.gguf", size="tiny", seed=1)
    sizes: dict[str, Any] = {"n_ubatch": 64, "n_ctx": 256, "n_sequences": 2, "n_outputs": 256}
    expected, _ = decoded(path, options(gpu, wrapped=False, **sizes))
    streaming = slots_for(path, "half", hybrid=True, splitter=all_on_device)
    never = MinBatch(NEVER, NEVER)
    found, n_split = decoded(path, options(gpu, streaming, min_batch=never, **sizes))
    assert n_split > 0
    assert_same(gpu, found, expected)
