"""A worker's GPU computes layers for a client that has none."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from on_gpu import assert_close, assert_same, is_standin, logits, logits_of, options
from our_worker import working
from worker import has_rpc

from lab.options import engine_options
from lab.synth import write_preset
from offload.backends import CUDA
from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.remote.address import RemoteOptions

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not has_rpc(), reason="libllama is compiled without ggml's RPC"),
]


@pytest.mark.parametrize("preset", ["deepseek-v3", "gpt-oss"])
@pytest.mark.parametrize("hybrid", ["off", "on"])
def test_streamed_on_a_worker_is_resident_here(
    preset: str, hybrid: str, gpu: DeviceChoice, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Vulkan reorders nodes to fuse more of them. A worker's nodes are not reordered, because ggml's
    # RPC does not ask for it. So the resident model must not be reordered either.
    monkeypatch.setenv("GGML_VK_DISABLE_GRAPH_OPTIMIZE", "1")
    path = write_preset(preset, models / f"gpu-worker-{preset}.gguf", size="tiny", seed=5)
    resident = options(gpu, stream_experts=False)
    with ProcessPoolExecutor(1, get_context("spawn")) as another_process:
        expected = another_process.submit(logits_of, path, resident).result()
    flags = ("--device", gpu.name, "--n-cpu-moe", "99", "--hybrid", hybrid)
    with working(path, *flags) as running:
        remote = RemoteOptions((running.address,), order="only")
        for _ in range(2):  # a second client
            with open_engine(
                path, engine_options(options(gpu), device="cpu", remote=remote)
            ) as engine:
                got = logits(engine)
        if is_standin(gpu) or hybrid == "off":
            assert_same(gpu, got, expected)
        else:  # the CPU rounds differently, so routers of gpt-oss may decide near-ties otherwise
            assert_close(got, expected, 0.08 if preset == "deepseek-v3" else np.inf)
        counters = running.counters()
    assert counters["streamed_experts"] > 0
    assert (counters["split_layers"] > 0) is (hybrid == "on")


def test_a_node_that_the_gpu_cannot_compute_is_one_sentence(
    gpu: DeviceChoice, models: Path
) -> None:
    if gpu.device.backend is not CUDA:
        pytest.skip("other backends have flash attention for these heads")
    path = write_preset("deepseek-v3", models / "gpu-worker-flash.gguf", size="tiny", seed=5)
    with working(path, "--device", gpu.name) as running:
        command = [
            *(sys.executable, "-m", "specoffload", "run", str(path), "-no-cnv", "-p", "hello"),
            *("--device", "RPC0", "--rpc", str(running.address), "-fa", "on", "-t", "1"),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert ended.returncode != 0
        assert "Traceback" not in ended.stderr
        assert running.says("start the client with --flash-attn off"), running.text
