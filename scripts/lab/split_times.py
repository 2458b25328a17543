"""Expected and measured times of split layers, on `sim`: is the model of a layer true?

A random model is opened as `--hybrid on` opens one: the sides of a layer are timed, alone and
beside each other. Then tokens are decoded with the experts divided in several ways, and of each
layer both sides are timed from the split to their end: the device's with its waits for copies, the
CPU's on a thread of its own. A row is one division: a layer's mean times in ms, measured over
expected, and measured over what would be expected if copies overlapped with products of any kind
and neither side slowed the other (`before`). Prints one JSON object for each of two devices:

held    Link, CPU and device are each held to a rate that this machine can keep.
own     The link alone; CPU and device compute as fast as they can, and all three share the RAM, and
        processors where there are less than three. The device then slows beside the CPU, which no
        GPU does and the model does not know.

Usage: scripts/lab/run split-times [TOKENS of a batch [DECODES]]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.ggml.backend import Stream
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.split.layers import HybridExecutor, HybridLayer
from offload.split.split import HIT, HOST, STREAMED, SplitCosts, expected
from offload.split.switch import ByCosts, Splitter, all_on_device
from offload.streaming.options import StreamingOptions

SHAPE: dict[str, Any] = {
    "n_layer": 4,
    "n_embd": 1024,
    "n_expert": 32,
    "n_expert_used": 8,
    "n_ff_exp": 768,
    "quant": "q8_0",
}
WARM = 3  # decodes of each division before those that count


def all_host(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.full(len(resident), HOST, np.uint8)


def every(nth: int) -> Splitter:
    """Every `nth` expert that is used is the CPU's, and no other."""

    def split(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        kinds = all_on_device(ids, resident)
        kinds[np.unique(ids)[::nth]] = HOST
        return kinds

    return split


def misses_but(nth: int) -> Splitter:
    """The CPU has the misses, but every `nth` of them is copied."""

    def split(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        kinds = np.where(resident, np.uint8(HIT), np.uint8(HOST))
        used = np.unique(ids)
        kinds[used[~resident[used]][::nth]] = STREAMED
        return kinds

    return split


@dataclass
class Sums:
    """Of one division: seconds of all its layers, in which that side had anything."""

    measured: list[float] = field(default_factory=lambda: [0.0, 0.0])
    expected: list[float] = field(default_factory=lambda: [0.0, 0.0])
    before: list[float] = field(default_factory=lambda: [0.0, 0.0])
    streamed: int = 0
    on_host: int = 0
    experts: int = 0

    def row(self, title: str, n: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "split": title,
            "experts": round(self.experts / n, 1),
            "streamed": round(self.streamed / n, 1),
            "host": round(self.on_host / n, 1),
        }
        for at, side in enumerate(("cpu", "device")):
            measured, model, before = self.measured[at], self.expected[at], self.before[at]
            found[f"{side}_ms"] = round(measured / n * 1e3, 3)
            found[f"{side}_ratio"] = round(measured / model, 3) if model else None
            found[f"{side}_ratio_before"] = round(measured / before, 3) if before else None
        later = max(self.measured), max(self.expected), max(self.before)
        found["later_ratio"] = round(later[0] / later[1], 3)
        found["later_ratio_before"] = round(later[0] / later[2], 3)
        return found


class Watch:
    """Takes each split layer's times, by functions put around what computes it."""

    def __init__(self) -> None:
        self.sums: Sums | None = None
        self.costs: SplitCosts | None = None
        self.splitter: Splitter = all_on_device
        self._last: tuple[NDArray[np.int32], NDArray[np.uint8]] | None = None
        self._host_ended_s = 0.0
        finish, compute = HybridExecutor.finish, HybridExecutor._compute

        def timed_compute(executor: HybridExecutor, layer: HybridLayer, n_experts: int = 0) -> int:
            status = compute(executor, layer, n_experts)
            self._host_ended_s = time.perf_counter()
            return status

        def timed_finish(executor: HybridExecutor, layer: HybridLayer, stream: Stream) -> int:
            stream.synchronize()
            ended_s = max(layer.ends_s, time.perf_counter())
            device_s, n_pairs = ended_s - layer.split_at_s, layer.n_pairs
            status = finish(executor, layer, stream)
            self._add(self._host_ended_s - layer.split_at_s if n_pairs else 0.0, device_s)
            return status

        HybridExecutor._compute = timed_compute  # type: ignore[method-assign]
        HybridExecutor.finish = timed_finish  # type: ignore[method-assign]

    def __call__(self, ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        kinds = self.splitter(ids, resident)
        self._last = ids.copy(), kinds.copy()
        return kinds

    def _add(self, cpu_s: float, device_s: float) -> None:
        if self.sums is None or self._last is None or self.costs is None:
            return
        (ids, kinds), sums = self._last, self.sums
        used = np.unique(ids)
        before = replace(
            self.costs,
            copy_s=self.costs.copy_s / self.costs.link_slowdown,
            host_slowdown=1.0,
            link_slowdown=1.0,
            kinds=tuple(np.full(256, 1 / 256).tolist()),
        )
        now, then = expected(ids, kinds, self.costs), expected(ids, kinds, before)
        for at, (took_s, side) in enumerate(((cpu_s, "cpu_s"), (device_s, "device_s"))):
            if getattr(now, side):
                sums.measured[at] += took_s
                sums.expected[at] += getattr(now, side)
                sums.before[at] += getattr(then, side)
        sums.experts += len(used)
        sums.streamed += int((kinds[used] == STREAMED).sum())
        sums.on_host += int((kinds[used] == HOST).sum())


DEVICES = {
    "held": "sim:bw=1.5GB/s,expert=2ms,host=2ms",
    "own": "sim:bw=4GB/s,host=1us",  # a pace has a thread compute the CPU's experts
}


def main() -> None:
    n_tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    n_decodes = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        path = write_preset("qwen3-30b-a3b", Path(folder) / "split.gguf", seed=1, **SHAPE)
        whole = make_plan(read_facts(path), budget_bytes=None)
        for name, device in DEVICES.items():
            options = EngineOptions(
                device=device,
                streaming=StreamingOptions(
                    vram_bytes=whole.resident_bytes + whole.slot_bytes // 2,
                    prefetch=False,
                    hybrid=True,
                    splitter=watch,
                ),
                min_batch=MinBatch(1000, 1000),
                n_ctx=512,
                n_threads=1,
                n_threads_batch=1,
            )
            watch.sums, watch.splitter = None, all_on_device
            with Engine(path, options) as engine:
                found = check(engine, watch, n_tokens, n_decodes)
            print(json.dumps({"device": name, "spec": device, **found}), flush=True)


def check(engine: Engine, watch: Watch, n_tokens: int, n_decodes: int) -> dict[str, Any]:
    began_s = time.perf_counter()
    measured = engine.measure_split()
    took_s = time.perf_counter() - began_s
    assert measured is not None
    watch.costs = measured.costs()
    by_costs: Callable[[], Splitter] = lambda: ByCosts(measured.costs())  # noqa: E731
    splits: dict[str, Splitter] = {
        "all on the CPU": all_host,
        "all on the device": all_on_device,
        "every second on the CPU": every(2),
        "every third on the CPU": every(3),
        "every second miss copied": misses_but(2),
        "by costs": by_costs(),
    }
    rows = []
    for title, splitter in splits.items():
        watch.splitter, watch.sums = splitter, None
        for i in range(WARM + n_decodes):
            if i == WARM:
                watch.sums = Sums()
            tokens = [(101 * (i * n_tokens + k) + 3) % engine.n_vocab for k in range(n_tokens)]
            engine.sequences.extend(0, tokens, n_logits=n_tokens)
            engine.sequences.rewind(0, 0)
        assert watch.sums is not None
        rows.append(watch.sums.row(title, n_decodes * SHAPE["n_layer"]))
    costs = asdict(measured) | {"words": measured.words, "measuring_s": round(took_s, 3)}
    return {"n_tokens": n_tokens, "costs": costs, "splits": rows}


if __name__ == "__main__":
    main()
