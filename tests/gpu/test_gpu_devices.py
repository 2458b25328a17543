"""A target on two GPUs gives the same bits as on one. One GPU poses as two for that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from on_gpu import assert_same, logits, options

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.device import DeviceChoice, devices
from offload.engine import open_engine


def poses_of(gpu: DeviceChoice) -> tuple[str, str, str]:
    """Return a variable, and its values with which the GPU poses as one and as two."""
    poses = {
        "Vulkan": ("GGML_VK_VISIBLE_DEVICES", "0", "0,0"),
        "CUDA": ("GGML_CUDA_DEVICES", "1", "2"),
    }
    backend = gpu.name.rstrip("0123456789")
    if backend not in poses:
        pytest.skip("only GPUs of CUDA and Vulkan can pose as two")
    return poses[backend]


def test_doctor_tells_both_gpus_and_their_links(gpu: DeviceChoice, tmp_path: Path) -> None:
    variable, _, two = poses_of(gpu)
    own = {variable: two, "SPECOFFLOAD_PROFILE_DIR": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-m", "specoffload", "doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **own},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for name in (f"{gpu.name[:-1]}0", f"{gpu.name[:-1]}1"):
        assert f"device {name}: {gpu.description}" in done.stdout
        assert re.search(
            rf"link to {name}: [0-9.]+ GB/s from RAM, [0-9.]+ GB/s while the other copies, too",
            done.stdout,
        )


def test_a_gpu_that_poses_as_two_computes_what_it_does_alone(
    gpu: DeviceChoice, models: Path, tmp_path: Path
) -> None:
    variable, *values = poses_of(gpu)
    model = write_preset("qwen3moe", models / "gpu_devices.gguf", seed=3, n_layer=4)
    found = []
    for value in values:
        target = tmp_path / f"{value}.npy"
        done = subprocess.run(
            [sys.executable, __file__, model, target],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                variable: value,
            },
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr
        found.append((np.load(target), json.loads(done.stdout.splitlines()[-1])))
    (alone, _), (both, (cuts, n_deferred)) = found
    assert_same(gpu, both, alone)
    assert len(cuts) == 2
    assert all(cuts), "each device computes its own layers' experts"
    assert n_deferred == [0, 1], "both devices compute a prompt at the same time"


def main(model: str, target: str) -> None:
    gpus = [choice for choice in devices() if choice.on_gpu]
    shares = (1.0,) * len(gpus) if len(gpus) > 1 else ()
    streaming = Streaming(bounce=False, vram_bytes=1 << 30, n_cpu_moe=99)
    opened = options(gpus[0], streaming, tensor_split=shares, n_ctx=512, n_ubatch=72)
    names = ",".join(choice.name for choice in gpus)
    with open_engine(model, engine_options(opened, device=names)) as engine:
        np.save(target, logits(engine, (5, 1, 200, 3)))
        counters = engine.counters_by_device().values()
        print(json.dumps(([c.cuts for c in counters], [c.n_deferred for c in counters])))


if __name__ == "__main__":
    main(*sys.argv[1:])
