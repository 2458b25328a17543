"""Measures Python's time per layer of streamed weights, in microseconds, and its share of a step.

The models are small and random, on `sim`, with a slot for every piece. They are decoded until
nothing is copied any more, so that only the time of decisions is left. The *promoting* cases decode
only a few times before, so that experts are still promoted. The time is the calling thread's CPU
time inside the device's callback, less the time in native code. Figures are medians over decodes.
Prints one JSON object.

Usage: scripts/lab/run layer-cost [REPETITIONS]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.ggml.graph import Graph
from offload.ggml.library.lib import library
from offload.ggml.pydevice import WrappedStream
from offload.plan.min_batch import MinBatch
from offload.split.division import HOST, Split, SplitCosts
from offload.split.switch import ByCosts, all_on_device
from offload.streaming.device import StreamingDevice
from offload.streaming.options import StreamingOptions

N_LAYERS = 40
LEAST_WARM, MOST_WARM = 5, 100  # decodes that fill the slots
_NATIVE = ("graph_compute_async", "synchronize", "tensor_get_async", "tensor_set_async")
_MOE = {"n_layer": N_LAYERS + 1, "n_expert": 64}  # the first layer is dense


def half(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    kinds = all_on_device(ids, resident)
    kinds[::2] = HOST
    return kinds


class HalfByCosts(ByCosts):
    """Splits by costs as if every second expert of a batch had no slot. A copy never pays."""

    def split(
        self,
        ids: NDArray[np.int32],
        resident: NDArray[np.bool_],
        rows: NDArray[np.intp] | None = None,
    ) -> Split:
        there = resident.copy()
        there[::2] = False
        return super().split(ids, there, rows)


SECONDS = np.array([0.0, 1.0, 1.5])
KINDS = (0.3, 0.3, 0.4)
COSTS = SplitCosts(SECONDS, SECONDS, 0.0, 0.0, 2e3, 1.5, 1.25, KINDS)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "1 of 64": ("kimi-k2", {**_MOE, "n_expert_used": 1}),
    "4 of 64": ("kimi-k2", {**_MOE, "n_expert_used": 4}),
    "dense": ("mistral-large", {"n_layer": N_LAYERS}),
}
HIT, HALF = {"splitter": all_on_device}, {"splitter": half}
BY_COSTS = {"splitter": HalfByCosts(COSTS)}
PROMOTING = {"splitter": HalfByCosts(replace(COSTS, copy_s=25.0))}
# (title, model, tokens per decode, streaming options). Cases with a `splitter` split layers.
CASES: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("experts, 1 of 64 per token", "1 of 64", 16, {}),
    ("experts, 4 of 64 per token", "4 of 64", 16, {}),
    ("experts, 4 of 64 per token", "4 of 64", 1, {}),
    ("split, 4 of 64, all hit", "4 of 64", 1, HIT),
    ("split, 4 of 64, all hit, recorded", "4 of 64", 1, HIT | {"record_routing": True}),
    ("split, 4 of 64, half on the CPU", "4 of 64", 1, HALF),
    ("split, 4 of 64, all hit", "4 of 64", 16, HIT),
    ("split by costs, half on the CPU", "4 of 64", 1, BY_COSTS),
    ("split by costs, half on the CPU", "4 of 64", 16, BY_COSTS),
    ("split, 4 of 64, half on the CPU", "4 of 64", 16, HALF),
    ("split by costs, half on the CPU, promoting", "4 of 64", 16, PROMOTING),
    ("split, half on the CPU, promoting", "4 of 64", 16, HALF),
    ("dense, 7 weights a layer", "dense", 1, {"n_gpu_layers": 0}),
    ("nothing streamed", "4 of 64", 1, {"n_cpu_moe": 0}),
)


class Clock:
    """Counts CPU seconds inside the device's callback, and CPU seconds in native code."""

    def __init__(self) -> None:
        self.callback_s = self.native_s = 0.0
        lib = library()
        for name in (f"ggml_backend_{entry}" for entry in _NATIVE):
            setattr(lib, name, self._native(getattr(lib, name)))

    def _native(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            start_s = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.native_s += time.thread_time() - start_s

        return timed

    def watch(self, device: StreamingDevice) -> None:
        compute = device.compute

        def timed(stream: WrappedStream, graph: Graph) -> int:
            start_s = time.thread_time()
            try:
                return compute(stream, graph)
            finally:
                self.callback_s += time.thread_time() - start_s

        device.compute = timed  # type: ignore[method-assign]


def measure(
    clock: Clock, path: Path, n_tokens: int, streaming: StreamingOptions, n: int, most_warm: int
) -> dict[str, Any]:
    """Medians of `n` decodes of the same `n_tokens` tokens. Up to `most_warm` decodes fill the
    slots first."""
    options = EngineOptions(
        device="sim",
        streaming=streaming,
        min_batch=MinBatch(1, 1),
        n_ctx=512,
        n_ubatch=64,
        n_threads=1,
        n_threads_batch=1,
    )
    python_s, share = [], []
    with Engine(path, options) as engine:
        assert engine.device is not None
        clock.watch(engine.device)
        engine.routing.is_on = streaming.record_routing
        tokens = [(13 * i + 5) % engine.n_vocab for i in range(n_tokens)]
        _fill(engine, tokens, most_warm)
        before = engine.counters()
        for _ in range(n):
            clock.callback_s = clock.native_s = 0.0
            start_s = time.thread_time()
            engine.sequences.extend(0, tokens, n_logits=1)
            step_s = time.thread_time() - start_s
            engine.sequences.rewind(0, 0)
            python_s.append(clock.callback_s - clock.native_s)
            share.append(python_s[-1] / step_s)
        counters = engine.counters()
    n_uses = counters.hits + counters.misses - before.hits - before.misses
    return {
        "n_tokens": n_tokens,
        "layer_us": round(statistics.median(python_s) / N_LAYERS * 1e6, 1),
        "share_of_step": round(statistics.median(share), 4),
        "pieces_per_layer": round(n_uses / n / N_LAYERS, 1),
        "copies": counters.copies - before.copies,
    }


def _fill(engine: Engine, tokens: list[int], most: int) -> None:
    """Decode until a decode copies nothing, at most `most` times."""
    for i in range(most):
        n_copies = engine.counters().copies
        engine.sequences.extend(0, tokens, n_logits=1)
        engine.sequences.rewind(0, 0)
        if i >= LEAST_WARM and engine.counters().copies == n_copies:
            return


def main() -> None:
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 25
    clock = Clock()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            name: write_preset(preset, Path(folder) / f"{name}.gguf", seed=1, **changes)
            for name, (preset, changes) in MODELS.items()
        }
        for title, model, n_tokens, streaming in CASES:
            options = StreamingOptions(hybrid="splitter" in streaming, **streaming)
            most_warm = LEAST_WARM if title.endswith("promoting") else MOST_WARM
            case = measure(clock, paths[model], n_tokens, options, n, most_warm)
            found.append({"case": title} | case)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
