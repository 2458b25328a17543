"""Prompts of several ubatches keep one allocation of their graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.synth import write_preset
from offload.device import DeviceChoice, devices

_PROMPTS = """
import sys
from lab.options import Streaming, engine_options
from offload.engine import Engine, EngineOptions, open_engine
from offload.times.min_batch import MinBatch
path, device, streams = sys.argv[1:]
options = engine_options(
    device=device, n_ctx=2048, n_batch=2048, n_ubatch=256, n_outputs=8, min_batch=MinBatch(1, 1),
    stream_experts=bool(streams), streaming=Streaming(warmup=False),
)
with open_engine(path, options) as engine:
    for n_logits in (1, 0, 3):
        engine.sequences.extend(0, [7] * 1024, n_logits=n_logits)
        engine.sequences.rewind(0, 0)
print("done")
"""


@pytest.mark.timeout(1200)  # Debian's software driver takes minutes
@pytest.mark.parametrize("n_devices", [1, 2])
@pytest.mark.parametrize("streams", ["", "1"])
def test_a_prompt_of_several_ubatches_is_allocated_once(
    gpu: DeviceChoice, models: Path, n_devices: int, streams: str
) -> None:
    """libllama's scheduler aborts here if it allocates a graph anew, for which devices wait."""
    names = [device.name for device in devices() if device.on_gpu][:n_devices]
    if len(names) < n_devices:
        pytest.skip(f"{gpu.name} is the only GPU")
    path = write_preset("qwen3moe", models / "reserved.gguf", size="tiny", seed=4, n_layer=4)
    run = subprocess.run(
        [sys.executable, "-c", _PROMPTS, str(path), ",".join(names), streams],
        env=os.environ | {"GGML_SCHED_DEBUG_REALLOC": "2"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.stdout == "done\n", run.stderr
