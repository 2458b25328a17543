"""Measures in virtual time how well CPU and device share the experts of answers and prompts.

    scripts/lab/run split [-r REPETITIONS] [--case TEXT] [--json]

The program runs on the stand-in for CUDA, whose clock gives each copy of an expert and each of the
CPU's pairs a fixed time (docs/gpu.md). The device's own kernels take no time. So the bench measures
the division and the order of the work. Three ways are measured by turns:

    cpu      the CPU computes all experts that have no slot
    copy     all experts that have no slot are copied to the device
    step     CPU and device share each layer, by these costs

If both sides work all the time, a step takes 1 / (1 / cpu + 1 / copy), which is `both`. `ratio` is
step / both, and `best` is step divided by the faster one of the other ways. Each step has new
tokens.
"""

from __future__ import annotations

import argparse
import ctypes as C
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lab.options import engine_options
from lab.split_price import use_experts_time
from lab.timing import by_turns, decode_s
from lab.virtual_gpu import again_on_standin, has_clock, set_rate, use_virtual_time

_ENVIRONMENT = {"STANDIN_CLOCK": "1", "STANDIN_SKIP": "products", "STANDIN_FILL": "0"}
N_EXPERTS = 32
_SHAPE: dict[str, Any] = {
    "n_layer": 4, "n_embd": 256, "n_expert": N_EXPERTS, "n_ff_exp": 4096, "quant": "q4_K",
}  # fmt: skip
COPY_S = 8e-3  # seconds to copy one expert over the link
_SLOTS = 0.25  # share of the streamed weights that has slots
_NO_TIME = 1e18  # rate of the device's kernels
_DEAR = 1e6  # factor on the costs of the side that shall compute nothing


@dataclass(frozen=True)
class Case:
    """A ratio of the CPU's time of an expert to that of its copy, and a number of tokens.

    The time is for as many rows as an expert has on average. A token uses `n_used` experts.
    """

    cpu_share: float
    n_tokens: int
    n_used: int

    @property
    def name(self) -> str:
        words = "1 token" if self.n_tokens == 1 else f"{self.n_tokens:,} tokens"
        return f"CPU ÷ copy {self.cpu_share:g}, {words}"

    @property
    def pair_s(self) -> float:
        """Seconds that the CPU takes for one token with one of its experts."""
        n_rows = self.n_tokens * self.n_used / N_EXPERTS
        return self.cpu_share * COPY_S / max(1.0, n_rows)


@dataclass(frozen=True)
class Shared:
    """The times of a step in one case."""

    case: str
    cpu_s: float
    copy_s: float
    both_s: float
    step_s: float
    best: float
    ratio: float


ANSWERS = [Case(share, n, 8) for share in (0.4, 1.0, 1.7, 4.0) for n in (1, 4)]
PROMPTS = [Case(share, n, 2) for share in (0.4, 1.0, 1.7, 4.0) for n in (128, 512, 1024)]
CASES = (*ANSWERS, *PROMPTS)


def measure(case: Case, folder: Path, repetitions: int) -> Shared:
    """Run one case: `repetitions` steps of new tokens in each way, after two for warm-up."""
    from lab.options import Streaming
    from lab.synth import write_preset
    from offload.device import devices
    from offload.engine import open_engine
    from offload.model_file import read_facts
    from offload.plan.placement import PlanRequest, make_plan
    from offload.schedule.division import SplitCosts
    from offload.schedule.splitter import ByCosts, Splitter, all_on_device
    from offload.times.min_batch import NEVER, MinBatch

    path = folder / f"split-{case.n_used}.gguf"
    if not path.exists():
        write_preset("qwen3-30b-a3b", path, seed=1, n_expert_used=case.n_used, **_SHAPE)
    whole = make_plan(read_facts(path), PlanRequest(n_cpu_moe=999))
    expert_bytes = max(sum(group.matrix_bytes.values()) for group in whole.layout.groups)
    set_rate("link_bytes_per_s", expert_bytes / COPY_S)
    set_rate("host_expert_s", case.pair_s)
    by_rows_s = np.array([0.0, case.pair_s, 2 * case.pair_s])
    costs = SplitCosts(by_rows_s, np.zeros(3), 0.0, 0.0, COPY_S)
    ways: dict[str, Splitter] = {
        "cpu": ByCosts(replace(costs, copy_s=_DEAR)),
        "copy": all_on_device,
        "step": ByCosts(costs),
    }
    gpu = next(device.name for device in devices() if device.on_gpu)
    options = engine_options(
        device=gpu,
        streaming=Streaming(
            vram_bytes=whole.resident_bytes + int(whole.slot_bytes * _SLOTS),
            n_cpu_moe=999, hybrid=True, splitter=all_on_device, lend=False,
        ),
        min_batch=MinBatch(NEVER, NEVER), n_ctx=max(case.n_tokens, 64) + 256,
        n_ubatch=max(case.n_tokens, 64), n_threads=1, n_threads_batch=1, flash_attn="auto",
    )  # fmt: skip
    with open_engine(path, options) as engine:
        assert engine.opened.weights.hybrid is not None
        compute: Any = C.CDLL(None).standin_compute
        compute.argtypes = [C.c_void_p, C.c_void_p]
        engine.opened.weights.hybrid.team.open()
        engine.opened.weights.hybrid.team.stream._compute = compute

        def step_s(nth: int, place: int, splitter: Splitter) -> float:
            seed = 131 * (len(ways) * nth + place) + 3  # no way has the experts of another's step
            tokens = [(7 * k * k + seed) % engine.n_vocab for k in range(case.n_tokens)]
            in_use = engine.opened.weights.ways
            with in_use.trying(in_use.now.splitting_by(splitter)):
                took_s = decode_s(engine.sequences, tokens, 1)
            engine.sequences.rewind(0, 0)
            return took_s

        steps = {
            way: partial(step_s, place=place, splitter=splitter)
            for place, (way, splitter) in enumerate(ways.items())
        }
        times = by_turns(steps, repetitions, n_warm=2)
    cpu_s, copy_s, shared_s = map(statistics.median, times.values())
    both_s = 1 / (1 / cpu_s + 1 / copy_s)
    best = shared_s / min(cpu_s, copy_s)
    return Shared(case.name, cpu_s, copy_s, both_s, shared_s, best, shared_s / both_s)


def measure_all(wanted: str, repetitions: int) -> Iterator[Shared]:
    """Run the cases whose names contain `wanted`."""
    use_experts_time()
    for rate in ("vram_bytes_per_s", "flops", "attention_flops"):
        set_rate(rate, _NO_TIME)
    set_rate("kernel_s", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            if wanted in case.name:
                yield measure(case, Path(folder), repetitions)


def table(rows: list[Shared]) -> str:
    heads = ("case", "CPU, ms", "copies, ms", "shared, ms", "shared ÷ both", "shared ÷ the better")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for row in rows:
        times = (f"{1e3 * seconds:,.0f}" for seconds in (row.cpu_s, row.copy_s, row.step_s))
        lines.append(f"| {' | '.join([row.case, *times])} | {row.ratio:.2f} | {row.best:.2f} |")
    return "\n".join(lines)


def main() -> None:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, prog="scripts/lab/run split",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="timed steps of each way")
    parser.add_argument("--case", default="", help="only the cases whose names contain this")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    if not has_clock():
        sys.exit(again_on_standin("lab.split", _ENVIRONMENT))
    use_virtual_time()
    rows = [*measure_all(args.case, args.repetitions)]
    if not rows:
        parser.error(f"--case {args.case}: no case has this in its name")
    print(json.dumps({"split": [asdict(row) for row in rows]}) if args.json else table(rows))


if __name__ == "__main__":
    main()
