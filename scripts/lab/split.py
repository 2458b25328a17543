"""Measures on `sim` whether CPU and device compute a layer's experts at the same time.

Options: [-r REPETITIONS] [--json]

A copy over the link, an expert on the device and an expert on the CPU each take a fixed time
(`sim:bw=,expert=,host=`), which is longer than this machine needs. So the bench measures the order
of the work and not this machine's kernels. A step takes at least the time of the slower side,

    cpu    = experts of the CPU x host
    device = its experts and their copies, as offload/schedule/division.py expects at these rates
             + all else that a step computes

and without overlap the sum of both sides' times. The device begins a product when all copies for
that kind of weight (gate, up or down) have arrived. One token uses the same number of experts in
every layer, so the same side is slower in all layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.overlap import bench
from lab.synth import write_preset
from offload.engine import Engine, EngineOptions, open_engine
from offload.measuring import decode_s
from offload.model_file import read_facts
from offload.plan.placement import Plan, make_plan
from offload.schedule.division import HOST, SplitCosts, expected, split_pairs
from offload.schedule.switch import Splitter, all_on_device
from offload.stream.options import StreamingOptions
from offload.times.min_batch import NEVER, MinBatch

_SHAPE: dict[str, Any] = {
    "n_layer": 6,
    "n_embd": 256,
    "n_expert": 32,
    "n_expert_used": 8,
    "n_ff_exp": 256,
    "quant": "q4_K",
}
_EXPERT_S = 4e-3
_COPY_S = 4e-3  # seconds to copy one expert over the link


@dataclass(frozen=True)
class Case:
    """One way of splitting. `slots` is the share of the streamed weights that has slots."""

    name: str
    splitter: Splitter
    slots: float = 0.5
    device_s: float = _EXPERT_S
    host_s: float = _EXPERT_S


@dataclass(frozen=True)
class Split:
    """The times of a step in one case. `ratio` is step ÷ the slower of CPU and device."""

    case: str
    cpu_s: float
    device_s: float
    sum_s: float
    step_s: float
    ratio: float


def all_host(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Give all experts to the CPU."""
    return np.full(len(resident), HOST, np.uint8)


def _halves(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Give every second used expert to the CPU."""
    kinds = all_on_device(ids, resident)
    kinds[np.unique(ids)[::2]] = HOST
    return kinds


def _by_costs(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return split_pairs(ids, resident, _COSTS).kind


def _costs(device_s: float, host_s: float) -> SplitCosts:
    """The costs that `sim` simulates: an expert takes the same time for any number of rows. Gate,
    up and down of _SHAPE have equal sizes."""
    return SplitCosts(
        host_s=np.array([0.0, host_s, host_s]),
        device_s=np.array([0.0, device_s, device_s]),
        host_fixed_s=0.0,
        device_fixed_s=0.0,
        copy_s=_COPY_S,
        kinds=(1 / 3, 1 / 3, 1 / 3),
    )


_COSTS = _costs(_EXPERT_S, 3 * _EXPERT_S)

CASES = (
    Case("all on the device, all cached", all_on_device, slots=1.0),
    Case("all on the CPU", all_host),
    Case("half each, cached", _halves, slots=1.0),
    # The CPU ends last here, regardless of how many experts are cached.
    Case("half copied, half on the CPU", _halves, slots=0.25, host_s=2.1 * _EXPERT_S),
    Case("by costs, misses copied too", _by_costs, host_s=3 * _EXPERT_S),
)


class _Counted:
    """A splitter that adds up the expected seconds of both sides."""

    def __init__(self, splitter: Splitter, costs: SplitCosts) -> None:
        self.splitter, self._costs = splitter, costs
        self.cpu_s = self.device_s = 0.0

    def __call__(self, ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        split = expected(ids, self.splitter(ids, resident), self._costs)
        self.cpu_s += split.cpu_s
        self.device_s += split.device_s
        return split.kind


def shaped(path: Path, shape: Mapping[str, Any], copy_s: float) -> tuple[Plan, float]:
    """Write a model to `path` if there is none. Returns the plan of the whole model, and a rate.

    At this rate of the link, in bytes/s, the copy of an expert takes `copy_s` seconds.
    """
    if not path.exists():
        write_preset("qwen3-30b-a3b", path, seed=1, **shape)
    whole = make_plan(read_facts(path))
    expert_bytes = max(sum(group.matrix_bytes.values()) for group in whole.layout.groups)
    return whole, expert_bytes / copy_s


def measure(case: Case, folder: Path, repetitions: int) -> Split:
    """Run one case: `repetitions` steps of new tokens after two for warm-up."""
    path = folder / "split.gguf"
    whole, bandwidth = shaped(path, _SHAPE, _COPY_S)
    vram = whole.resident_bytes + int(whole.slot_bytes * case.slots)
    rates = f"expert={case.device_s * 1e6:.0f}us,host={case.host_s * 1e6:.0f}us"
    counted = _Counted(case.splitter, _costs(case.device_s, case.host_s))
    streaming = StreamingOptions(vram_bytes=vram, prefetch=False, hybrid=True, splitter=counted)
    times = _steps(path, f"sim:bw={bandwidth:.0f}B/s,{rates}", streaming, repetitions, counted)
    # The rest of a step is timed on the same model without copies and without fixed times.
    rest_s = statistics.median(_steps(path, "sim", None, repetitions, None))
    cpu_s = counted.cpu_s / repetitions
    device_s = rest_s + counted.device_s / repetitions
    step_s = statistics.mean(times)  # a mean like the counts, because steps differ in misses
    return Split(
        case.name, cpu_s, device_s, cpu_s + device_s, step_s, step_s / max(cpu_s, device_s)
    )


def _steps(
    path: Path,
    device: str,
    streaming: StreamingOptions | None,
    repetitions: int,
    counted: _Counted | None,
) -> list[float]:
    """Seconds of each step. Adds the expected seconds of all split layers to `counted`."""
    options = EngineOptions(
        device=device,
        stream_experts=streaming is not None,
        streaming=streaming or StreamingOptions(),
        min_batch=MinBatch(NEVER, NEVER),
        n_ctx=512,
        n_threads=1,
        n_threads_batch=1,
    )
    times: list[float] = []
    with open_engine(path, options) as engine:
        if counted is not None:
            _fill(engine, counted)
        for i in range(repetitions + 2):
            if i == 2 and counted is not None:
                counted.cpu_s = counted.device_s = 0.0
            token = (101 * i + 3) % engine.n_vocab
            times.append(decode_s(engine.sequences, 0, [token], n_logits=1))
            engine.sequences.rewind(0, 0)
    return times[2:]


def _fill(engine: Engine, counted: _Counted) -> None:
    """Fill the slots before the measurement."""
    splitter, counted.splitter = counted.splitter, all_on_device
    for i in range(3):
        engine.sequences.extend(0, [(7 * k + 31 * i) % engine.n_vocab for k in range(64)], 1)
        engine.sequences.rewind(0, 0)
    counted.splitter = splitter


if __name__ == "__main__":
    bench(
        "hybrid", "layers split between CPU and device (sim, each held to a rate)", CASES, measure
    )
