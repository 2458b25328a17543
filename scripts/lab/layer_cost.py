"""Measures our own time per layer of streamed weights, in microseconds, and its share of a step.

The models are small and random, on `sim`, with a slot for every piece. They are decoded until
nothing is copied any more, so that only the time of decisions is left. In cases with half of the
experts on the CPU, the other half is copied into slots before. In the *promoting* case, experts are
promoted in every decode. The time is the calling thread's CPU time inside the device's callback,
less the time in ggml's functions, and the time that reading the clock takes. Figures are minima
over decodes. Prints one JSON object.

Usage: scripts/lab/run layer-cost [REPETITIONS]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import Engine, open_engine
from offload.ggml.graph import Graph
from offload.ggml.library.lib import library
from offload.ggml.pydevice import WrappedStream
from offload.schedule.division import SplitCosts
from offload.schedule.splitter import ByCosts, all_on_device
from offload.stream.device import StreamingDevice
from offload.stream.play import GraphPlayer, calls
from offload.times.min_batch import MinBatch

N_LAYERS = 40
LEAST_WARM, MOST_WARM = 5, 100  # decodes that fill the slots
_NATIVE = ("graph_compute_async", "synchronize", "tensor_get_async", "tensor_set_async")
_MOE = {"n_layer": N_LAYERS + 1, "n_expert": 64}  # the first layer is dense


SECONDS = np.array([0.0, 1.0, 1.5])
KINDS = (0.3, 0.3, 0.4)
COSTS = SplitCosts(SECONDS, SECONDS, 0.0, 0.0, 2e3, 1.5, 1.25, KINDS)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "1 of 64": ("kimi-k2", {**_MOE, "n_expert_used": 1}),
    "4 of 64": ("kimi-k2", {**_MOE, "n_expert_used": 4}),
    "dense": ("mistral-large", {"n_layer": N_LAYERS}),
}
HIT = {"splitter": all_on_device}
BY_COSTS = {"splitter": ByCosts(COSTS)}
PROMOTING = {"splitter": ByCosts(replace(COSTS, copy_s=25.0))}
# (title, model, tokens per decode, streaming options). Cases with a `splitter` split layers.
CASES: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("experts, 1 of 64 per token", "1 of 64", 16, {}),
    ("experts, 4 of 64 per token", "4 of 64", 16, {}),
    ("experts, 4 of 64 per token", "4 of 64", 1, {}),
    ("split, 4 of 64, all hit", "4 of 64", 1, HIT),
    ("split, 4 of 64, all hit, recorded", "4 of 64", 1, HIT | {"record_routing": True}),
    ("split, 4 of 64, all hit", "4 of 64", 16, HIT),
    ("split by costs, half on the CPU", "4 of 64", 1, BY_COSTS),
    ("split by costs, half on the CPU", "4 of 64", 16, BY_COSTS),
    ("split by costs, half on the CPU, promoting", "4 of 64", 16, PROMOTING),
    ("experts, 4 of 64, each of the 64 in a slot", "4 of 64", 1, {}),
    ("split, 4 of 64, each of the 64 in a slot", "4 of 64", 1, HIT),
    ("dense, 7 weights a layer", "dense", 1, {"n_gpu_layers": 0}),
    ("nothing streamed", "4 of 64", 1, {"n_cpu_moe": 0}),
)
MOST_PROMOTING = 12  # decodes in which all layers promote an expert


class Clock:
    """Counts CPU seconds inside the device's callback, and CPU seconds in ggml's functions.

    The player counts the latter itself.
    """

    def __init__(self) -> None:
        self.callback_s = self.native_s = 0.0
        self._read_s = min(-time.thread_time() + time.thread_time() for _ in range(1000))
        self._players: list[GraphPlayer] = []
        calls()  # the player gets the functions themselves
        lib = library()
        for name in (f"ggml_backend_{entry}" for entry in _NATIVE):
            setattr(lib, name, self._native(getattr(lib, name)))

    def _native(self, function: Any) -> Any:
        def timed(*arguments: Any) -> Any:
            start_s = time.thread_time()
            try:
                return function(*arguments)
            finally:
                self.native_s += time.thread_time() - start_s + self._read_s

        return timed

    def watch(self, device: StreamingDevice) -> None:
        self._players = [e.player for e in device.executors.values() if e.player is not None]
        for player in self._players:
            player.clock_ns = round(1e9 * self._read_s)
        compute = device.compute

        def timed(stream: WrappedStream, graph: Graph) -> int:
            start_s = time.thread_time()
            try:
                return compute(stream, graph)
            finally:
                self.callback_s += time.thread_time() - start_s

        device.compute = timed  # type: ignore[method-assign]

    def restart(self) -> None:
        self.callback_s = self.native_s = 0.0
        for player in self._players:
            player.native_s = 0.0

    @property
    def own_s(self) -> float:
        return self.callback_s - self.native_s - sum(p.native_s for p in self._players)


def measure(
    clock: Clock, path: Path, n_tokens: int, streaming: Streaming, n: int, most_warm: int,
    filled: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    """Return minima of `n` decodes of the same `n_tokens` tokens.

    Up to `most_warm` decodes fill the slots first. If it is 0, experts are copied into slots
    instead: of each two neighbours those for which `filled` has a 1.
    """
    options = engine_options(
        device="sim",
        streaming=streaming,
        min_batch=MinBatch(1, 1),
        n_ctx=512,
        n_ubatch=64,
        n_threads=1,
        n_threads_batch=1,
    )
    own_s, share, steps_s = [], [], []
    with open_engine(path, options) as engine:
        assert engine.device is not None
        clock.watch(engine.device)
        engine.opened.routing.is_on = bool(streaming.get("record_routing"))
        tokens = [(13 * i + 5) % engine.n_vocab for i in range(n_tokens)]
        if most_warm:
            _fill(engine, tokens, most_warm)
        else:
            for _ in engine.device.fill(dict.fromkeys(range(N_LAYERS + 1), [*filled] * 32)):
                pass
        engine.sequences.extend(0, tokens, n_logits=1)
        engine.sequences.rewind(0, 0)
        before = engine.counters()
        for _ in range(n):
            clock.restart()
            start_s = time.thread_time()
            engine.sequences.extend(0, tokens, n_logits=1)
            step_s = time.thread_time() - start_s
            engine.sequences.rewind(0, 0)
            own_s.append(clock.own_s)
            share.append(own_s[-1] / step_s)
            steps_s.append(step_s)
        counters = engine.counters()
    n_uses = counters.hits + counters.misses - before.hits - before.misses
    return {
        "n_tokens": n_tokens,
        "layer_us": round(min(own_s) / N_LAYERS * 1e6, 1),
        "share_of_step": round(min(share), 4),
        "step_ms": round(min(steps_s) * 1e3, 3),
        "pieces_per_layer": round(n_uses / n / N_LAYERS, 1),
        "copies": counters.copies - before.copies,
        "pairs_on_cpu": round((counters.n_pairs_host - before.n_pairs_host) / n / N_LAYERS, 1),
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
            options = Streaming(hybrid="splitter" in streaming, **streaming)
            filled = (1, 1) if "each" in title else (1, 0)
            most_warm = 0 if "half" in title or "each" in title else MOST_WARM
            n_timed = min(n, MOST_PROMOTING) if title.endswith("promoting") else n
            case = measure(clock, paths[model], n_tokens, options, n_timed, most_warm, filled)
            found.append({"case": title} | case)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
