"""The stand-in poses as several GPUs: memory by device, the current device, copies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import standin_calls

from lab.synth import write_preset
from offload.device import devices


def run(n_devices: int, model: Path, target: Path) -> dict[str, Any]:
    """Run `main` on `n_devices` devices; write logits to `target`, return the printed counters."""
    done = subprocess.run(
        [sys.executable, __file__, model, target],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "STANDIN_DEVICES": str(n_devices),
            "STANDIN_JITTER": "500",
        },
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == found["bad_addresses"] == found["stale_uids"] == 0, done.stderr
    return found


def test_plain_libllama_computes_the_same_on_two_devices(models: Path, tmp_path: Path) -> None:
    model = write_preset("mistral-large", models / "two_devices.gguf", size="tiny", seed=2)
    alone = run(1, model, tmp_path / "1.npy")
    both = run(2, model, tmp_path / "2.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "1.npy"), np.load(tmp_path / "2.npy"))
    assert alone["peer_copies"] == 0
    assert both["peer_copies"] > 0
    assert min(both["taken"]) > 0, "each device holds some of the model"


def main(model: str, target: str) -> None:
    """Decode with plain libllama on all devices, and print the counters."""
    import llama_cpp

    gpus = [found for found in devices() if found.on_gpu]
    free_before = [gpu.device.memory_bytes()[0] for gpu in gpus]
    llama = llama_cpp.Llama(
        model, n_gpu_layers=99, n_ctx=128, n_threads=1, n_threads_batch=1, flash_attn=False,
        logits_all=True, verbose=False,
    )  # fmt: skip
    taken = [
        before - gpu.device.memory_bytes()[0] for before, gpu in zip(free_before, gpus, strict=True)
    ]
    for n in (5, 1, 1, 1):
        llama.eval([(11 * llama.n_tokens + i) % llama.n_vocab() for i in range(n)])
    np.save(target, np.array(llama.scores[: llama.n_tokens]))
    print(json.dumps({"taken": taken, **standin_calls.counters()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
