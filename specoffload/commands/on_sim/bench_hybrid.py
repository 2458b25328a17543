"""`specoffload bench --hybrid`: do CPU and device compute a layer's experts at once? On `sim`.

The link, each expert on the device and each on the CPU are held to a known time (`sim:bw=,expert=,
host=`), longer than what this machine needs, so that what is measured is the order of things and
not this machine's kernels. A step can take no less than the later side,

    cpu    = experts of the CPU x host
    device = bytes copied / bw + experts of the device x expert + all else that a step computes

and without overlap it takes their sum. The device begins with a layer when its copies have landed.
One token uses as many experts in every layer, so that what is later is later in each.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.engine import Engine, EngineOptions
from offload.hybrid.split import HIT, HOST, STREAMED, SplitCosts, split_pairs
from offload.hybrid.switch import Splitter
from offload.model_file import read_facts
from offload.plan.min_batch import NEVER, MinBatch
from offload.plan.placement import make_plan
from offload.streaming.options import StreamingOptions
from offload.synth import write_preset
from offload.timing import decode_s
from specoffload import report
from specoffload.commands.bench import commit, machine

LIMIT = 1.10
_SHAPE: dict[str, Any] = {
    "n_layer": 6,
    "n_embd": 256,
    "n_expert": 32,
    "n_expert_used": 8,
    "n_ff_exp": 256,
    "quant": "q4_K",
}
_EXPERT_S = 4e-3
_COPY_S = 4e-3  # an expert's bytes through the link


@dataclass(frozen=True)
class Case:
    """One split. `slots`: the share of what streams that the slots hold."""

    name: str
    splitter: Splitter
    slots: float = 0.5
    device_s: float = _EXPERT_S
    host_s: float = _EXPERT_S


@dataclass(frozen=True)
class Split:
    """The times of one case, of a step. `ratio` is step ÷ the later of CPU and device."""

    case: str
    cpu_s: float
    device_s: float
    sum_s: float
    step_s: float
    ratio: float


def _all_host(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.full(len(resident), HOST, np.uint8)


def _all_device(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return np.where(resident, np.uint8(HIT), np.uint8(STREAMED))


def _halves(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Every second expert that is used is the CPU's."""
    kinds = _all_device(ids, resident)
    kinds[np.unique(ids)[::2]] = HOST
    return kinds


def _by_costs(ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
    return split_pairs(ids, resident, _COSTS).kind


# As `sim` is held to below: an expert takes as long whatever its rows.
_COSTS = SplitCosts(
    host_s=np.array([0.0, 3 * _EXPERT_S, 3 * _EXPERT_S]),
    device_s=np.array([0.0, _EXPERT_S, _EXPERT_S]),
    host_fixed_s=0.0,
    device_fixed_s=0.0,
    copy_s=_COPY_S,
)

CASES = (
    Case("all on the device, all cached", _all_device, slots=1.0),
    Case("all on the CPU", _all_host),
    Case("half each, cached", _halves, slots=1.0),
    # Whatever is there by chance, the CPU ends last.
    Case("half copied, half on the CPU", _halves, slots=0.25, host_s=2.1 * _EXPERT_S),
    Case("by costs, misses copied too", _by_costs, host_s=3 * _EXPERT_S),
)


class _Counted:
    """A splitter that counts the experts of each side."""

    def __init__(self, splitter: Splitter) -> None:
        self.splitter = splitter
        self.n_host = self.n_device = 0

    def __call__(self, ids: NDArray[np.int32], resident: NDArray[np.bool_]) -> NDArray[np.uint8]:
        kinds = self.splitter(ids, resident)
        used = np.unique(ids)
        n_host = int(np.count_nonzero(kinds[used] == HOST))
        self.n_host += n_host
        self.n_device += len(used) - n_host
        return kinds


def bench_hybrid(repetitions: int, cases: Sequence[Case] = CASES) -> None:
    """Measure every case and print the table and the JSON line."""
    results = []
    with tempfile.TemporaryDirectory() as folder, report.progress("measuring splits") as bar:
        path = write_preset("qwen3-30b-a3b", Path(folder) / "split.gguf", seed=1, **_SHAPE)
        for i, case in enumerate(cases):
            results.append(measure(case, path, repetitions))
            bar((i + 1) / len(cases))
    report.table(
        "layers split between CPU and device (sim, each held to a rate)",
        ("case", "CPU ms", "device ms", "sum ms", "step ms", "step ÷ max", f"<= {LIMIT}"),
        [
            (
                r.case,
                *(f"{s * 1e3:.1f}" for s in (r.cpu_s, r.device_s, r.sum_s, r.step_s)),
                f"{r.ratio:.3f}",
                "yes" if r.ratio <= LIMIT else "no",
            )
            for r in results
        ],
    )
    rows = [asdict(r) for r in results]
    report.data({"hybrid": rows, "machine": machine(), "commit": commit()})


def measure(case: Case, path: Path, repetitions: int) -> Split:
    """Run one case: `repetitions` steps of new tokens behind two of warm-up."""
    whole = make_plan(read_facts(path), budget_bytes=None)
    bandwidth = max(group.piece_bytes for group in whole.layout.groups) / _COPY_S
    vram = whole.resident_bytes + int(whole.slot_bytes * case.slots)
    rates = f"expert={case.device_s * 1e6:.0f}us,host={case.host_s * 1e6:.0f}us"
    counted = _Counted(case.splitter)
    streaming = StreamingOptions(vram_bytes=vram, prefetch=False, hybrid=True, splitter=counted)
    found = _steps(path, f"sim:bw={bandwidth:.0f}B/s,{rates}", streaming, repetitions, counted)
    # The same model with nothing to copy and nobody held to a rate: what else a step computes.
    rest = _steps(path, "sim", None, repetitions, None)
    rest_s = statistics.median(rest.times)
    cpu_s = found.n_host / repetitions * case.host_s
    copied_s = found.streamed_bytes / repetitions / bandwidth
    device_s = rest_s + copied_s + found.n_device / repetitions * case.device_s
    step_s = statistics.mean(found.times)  # as the counts are means: steps differ in what they miss
    return Split(
        case.name, cpu_s, device_s, cpu_s + device_s, step_s, step_s / max(cpu_s, device_s)
    )


@dataclass(frozen=True)
class _Steps:
    times: list[float]
    streamed_bytes: int = 0  # of all steps
    n_host: int = 0
    n_device: int = 0


def _steps(
    path: Path,
    device: str,
    streaming: StreamingOptions | None,
    repetitions: int,
    counted: _Counted | None,
) -> _Steps:
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
    with Engine(path, options) as engine:
        if counted is not None:
            _fill(engine, counted)
        for i in range(repetitions + 2):
            if i == 2:
                before = engine.counters()
                if counted is not None:
                    counted.n_host = counted.n_device = 0
            token = (101 * i + 3) % engine.n_vocab
            times.append(decode_s(engine.sequences, 0, [token], n_logits=1))
            engine.sequences.rewind(0, 0)
        streamed = engine.counters().streamed_bytes - before.streamed_bytes
    if counted is None:
        return _Steps(times[2:], streamed)
    return _Steps(times[2:], streamed, counted.n_host, counted.n_device)


def _fill(engine: Engine, counted: _Counted) -> None:
    """Have the slots full before anything is measured."""
    splitter, counted.splitter = counted.splitter, _all_device
    for i in range(3):
        engine.sequences.extend(0, [(7 * k + 31 * i) % engine.n_vocab for k in range(64)], 1)
        engine.sequences.rewind(0, 0)
    counted.splitter = splitter
