"""The planned host memory for a GPU's inputs is what libllama takes for them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from on_gpu import options

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.model_file import read_facts
from offload.times.context_memory import ContextOptions, host_input_bytes


@pytest.mark.parametrize("preset", ["qwen3-30b-a3b", "gpt-oss-20b"])
@pytest.mark.parametrize(("n_ctx", "n_ubatch"), [(4096, 512), (8192, 256)])
def test_inputs_take_the_planned_host_memory(
    gpu: DeviceChoice, models: Path, preset: str, n_ctx: int, n_ubatch: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = models / f"inputs-{preset}.gguf"
    if not path.exists():
        write_preset(preset, path, seed=1)
    chosen = options(gpu, stream_experts=False, n_ctx=n_ctx, n_ubatch=n_ubatch)
    with caplog.at_level(logging.INFO), open_engine(path, chosen):
        pass
    taken = re.findall(r"_Host compute buffer size = +([\d.]+) MiB", caplog.text)
    if not taken:
        pytest.skip("this device has no pinned buffer for inputs")
    planned_bytes = host_input_bytes(
        read_facts(path), ContextOptions(n_ctx=n_ctx, n_ubatch=n_ubatch, flash_attn="off")
    )
    taken_bytes = max(map(float, taken)) * 2**20
    assert 0.99 * taken_bytes <= planned_bytes <= 1.1 * taken_bytes
