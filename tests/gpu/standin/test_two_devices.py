"""The stand-in poses as several GPUs: memory by device, the current device, copies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import standin_calls

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.device import devices
from offload.engine import open_engine
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.splitter import all_on_device
from offload.times.min_batch import NEVER, MinBatch


def run(n_devices: int, model: Path, target: Path, how: str = "plain") -> dict[str, Any]:
    """Decode on `n_devices` devices in a process: write logits, return the printed counters.

    `how` is "plain" for plain libllama, or one of `WAYS`.
    """
    done = subprocess.run(
        [sys.executable, __file__, model, target, how],
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
    assert (
        found["errors"] == found["bad_addresses"] == found["stale_uids"] == found["bad_ids"] == 0
    ), done.stderr
    return found


def test_plain_libllama_computes_the_same_on_two_devices(models: Path, tmp_path: Path) -> None:
    model = write_preset("mistral-large", models / "two_devices.gguf", size="tiny", seed=2)
    alone = run(1, model, tmp_path / "1.npy")
    both = run(2, model, tmp_path / "2.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "1.npy"), np.load(tmp_path / "2.npy"))
    assert alone["peer_copies"] == 0
    assert both["peer_copies"] > 0
    assert min(both["taken"]) > 0, "each device holds some of the model"


# Options of an engine whose weights stream. With "tight", slots hold a part of the experts.
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"min_batch": MinBatch(1, 1)},
    "tight": {"min_batch": MinBatch(1, 1), "tight": True},
    "ubatches": {"min_batch": MinBatch(1, 1), "tight": True, "n_ubatch": 96},
    "split": {"min_batch": MinBatch(NEVER, NEVER), "hybrid": True, "splitter": all_on_device},
}


@pytest.mark.parametrize("how", WAYS)
def test_a_target_over_two_devices_is_that_of_one(models: Path, tmp_path: Path, how: str) -> None:
    model = models / "two_gpus.gguf"
    if not model.exists():
        write_preset("qwen3moe", model, n_layer=6, seed=2)
    alone = run(1, model, tmp_path / "1.npy", how)
    both = run(2, model, tmp_path / "2.npy", how)
    np.testing.assert_array_equal(np.load(tmp_path / "1.npy"), np.load(tmp_path / "2.npy"))
    assert [*alone["copied"]] == ["CUDA0"]
    assert [*both["copied"]] == ["CUDA0", "CUDA1"]
    assert min(both["copied"].values()) > 0, "each device copies its own layers' experts"
    assert min(both["taken"]) > 0
    assert both["peer_copies"] > 0
    assert alone["deferred"] == [0]
    assert both["deferred"] == [0, 3 if how == "ubatches" else 0]


def stream(
    model: str, target: str, *, tight: bool = False, min_batch: MinBatch, n_ubatch: int = 16,
    **changes: Any,
) -> None:  # fmt: skip
    """Decode with an engine over all devices, and print the counters."""
    gpus = [found for found in devices() if found.on_gpu]
    free_before = [gpu.device.memory_bytes()[0] for gpu in gpus]
    streaming = Streaming(
        n_gpu_layers=99,
        passes="on",
        **{k: changes.pop(k) for k in ("hybrid", "splitter") if k in changes},
    )
    if tight:
        part = read_facts(model).part(3, 7)
        plan = make_plan(part, PlanRequest(n_gpu_layers=99))
        streaming = streaming | Streaming(vram_bytes=plan.resident_bytes + plan.slot_bytes // 2)
    opened = engine_options(
        device=",".join(gpu.name for gpu in gpus), streaming=streaming, n_ctx=512,
        n_ubatch=n_ubatch, n_outputs=128, n_threads=1, n_threads_batch=1, flash_attn="off",
        mla=False, min_batch=min_batch,
        tensor_split=(1,) * len(gpus) if len(gpus) > 1 else (),
    )  # fmt: skip
    with open_engine(model, opened) as engine:
        extend, batches = engine.sequences.extend, (5, 1, 1, 3 * n_ubatch + 40, 1, 3)
        found = [
            extend(0, [(11 * i + 3 * n) % engine.n_vocab for i in range(n)], min(n, 9))
            for n in batches
        ]
        taken = [
            before - gpu.device.memory_bytes()[0]
            for before, gpu in zip(free_before, gpus, strict=True)
        ]
        counters = engine.counters_by_device()
        copied = {name: c.streamed_bytes for name, c in counters.items()}
        deferred = [c.n_deferred for c in counters.values()]
    np.save(target, np.concatenate(found))
    found_here = {"taken": taken, "copied": copied, "deferred": deferred}
    print(json.dumps({**found_here, **standin_calls.counters()}))


def main(model: str, target: str, how: str) -> None:
    if how == "plain":
        plain(model, target)
    else:
        stream(model, target, **WAYS[how])


def plain(model: str, target: str) -> None:
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
