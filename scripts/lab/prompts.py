"""Measures on `sim` prompts whose layers CPU and device share, beside each of them alone.

Options: [-r REPETITIONS] [--case TEXT] [--json]

A copy over the link takes 8 ms, and the CPU takes a fixed time for each expert
(`sim:bw=,host=`), which is longer than this machine needs. So the bench measures the division and
the order of the work, and not this machine's kernels. Three ways are measured by turns:

    cpu      the CPU computes all experts
    copy     all experts are copied to the device
    step     CPU and device share each layer (offload/stream/prompt_side.py)

If both sides work all the time, a step takes 1 / (1 / cpu + 1 / copy), which is `both`. `ratio` is
step / both, and `best` is step divided by the faster one of the other ways. `division` is the time
to divide 4,096 tokens among 256 experts, on this processor.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lab.overlap import bench
from lab.split import all_host, shaped
from offload.engine import EngineOptions, open_engine
from offload.measuring import decode_s
from offload.schedule.division import SplitCosts, split_pairs
from offload.schedule.switch import ByCosts, Splitter, all_on_device
from offload.stream.options import StreamingOptions
from offload.times.min_batch import NEVER, MinBatch

_SHAPE: dict[str, Any] = {
    "n_layer": 3,
    "n_embd": 256,
    "n_expert": 32,
    "n_expert_used": 2,
    "n_ff_exp": 256,
    "quant": "q4_K",
}
_COPY_S = 8e-3  # seconds to copy one expert over the link
_SLOTS = 0.25  # share of the streamed weights that has slots
_N_DIVIDED = 20


@dataclass(frozen=True)
class Case:
    """A ratio of the CPU's time of an expert to that of its copy, and a number of tokens."""

    cpu_share: float
    n_tokens: int

    @property
    def name(self) -> str:
        return f"CPU ÷ copy {self.cpu_share}, {self.n_tokens} tokens"


@dataclass(frozen=True)
class Prompt:
    """The times of a prompt in one case."""

    case: str
    cpu_s: float
    copy_s: float
    both_s: float
    step_s: float
    division_s: float
    best: float
    ratio: float


CASES = [Case(share, n) for share in (0.4, 1.0, 1.7, 4.0) for n in (128, 512, 1024)]


def measure(case: Case, folder: Path, repetitions: int) -> Prompt:
    """Run one case: `repetitions` prompts of new tokens in each way, after one for warm-up."""
    path = folder / "prompts.gguf"
    whole, bandwidth = shaped(path, _SHAPE, _COPY_S)
    host_s = case.cpu_share * _COPY_S
    host = np.array([0.0, host_s, host_s])
    costs = SplitCosts(host, np.zeros(3), 0.0, 0.0, _COPY_S)
    ways: dict[str, Splitter] = {"cpu": all_host, "copy": all_on_device, "step": ByCosts(costs)}
    options = EngineOptions(
        device=f"sim:bw={bandwidth:.0f}B/s,host={host_s * 1e6:.0f}us",
        streaming=StreamingOptions(
            vram_bytes=whole.resident_bytes + int(whole.slot_bytes * _SLOTS),
            n_gpu_layers=99,
            hybrid=True,
            splitter=all_on_device,
        ),
        min_batch=MinBatch(NEVER, NEVER),
        n_ctx=case.n_tokens,
        n_ubatch=case.n_tokens,
        n_threads=1,
        n_threads_batch=1,
    )
    times: dict[str, list[float]] = {way: [] for way in ways}
    with open_engine(path, options) as engine:
        assert engine.hybrid is not None
        for i in range(repetitions + 1):
            for way, splitter in ways.items():
                tokens = [(7 * k + 31 * i) % engine.n_vocab for k in range(case.n_tokens)]
                with engine.hybrid.switch.splitting(splitter):
                    took_s = decode_s(engine.sequences, 0, tokens, n_logits=1)
                engine.sequences.rewind(0, 0)
                if i:
                    times[way].append(took_s)
    cpu_s, copy_s, step_s = (statistics.median(its) for its in times.values())
    both_s = 1 / (1 / cpu_s + 1 / copy_s)
    best = step_s / min(cpu_s, copy_s)
    return Prompt(case.name, cpu_s, copy_s, both_s, step_s, division_s(), best, step_s / both_s)


def division_s() -> float:
    """Return the median seconds of dividing 4,096 tokens among 256 experts, 8 for each."""
    rng = np.random.default_rng(0)
    costs = SplitCosts(
        np.linspace(0.0, 16e-4, 17),
        np.linspace(0.0, 16e-6, 17),
        1e-4,
        1e-4,
        1e-3,
        1.2,
        1.1,
        (1 / 4,) * 4,
    )
    ids = rng.random((4096, 256)).argpartition(8, axis=1)[:, :8].astype(np.int32)
    rows = np.bincount(ids.ravel(), minlength=256)
    resident = rng.random(256) < 0.1
    split_pairs(ids, resident, costs, rows)
    took_s = []
    for _ in range(_N_DIVIDED):
        start_s = time.perf_counter()
        split_pairs(ids, resident, costs, rows)
        took_s.append(time.perf_counter() - start_s)
    return statistics.median(took_s)


if __name__ == "__main__":
    bench("prompts", "prompts shared by CPU and device (sim, held to rates)", CASES, measure)
