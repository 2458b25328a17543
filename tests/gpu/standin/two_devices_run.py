"""Plain libllama on all devices: two_devices_run.py MODEL LOGITS. Prints the counters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np

sys.path += [str(Path(__file__).parents[1])]

import standin_calls

from offload.device import devices


def main(model: str, target: str) -> None:
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
