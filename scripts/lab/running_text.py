"""Batch sizes as measured beside what running text takes, with 30 % of the experts cached.

A random mixture on `sim` behind a slow link. T(n) is measured as `specoffload profile` measures it,
and both sides of --min-batch as a first start does. Two texts of 250 tokens run through in batches
of n tokens, one before and one after the measurements, since a machine may change meanwhile.
Prints a table and one JSON object; exit code 1 where a size is off by more than 10 %.

Usage: scripts/lab/run running-text [REPETITIONS]
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.plan.min_batch import NEVER, VERIFY_MOST, MinBatch
from offload.streaming.options import StreamingOptions
from specdec.costs.measure import MeasureOptions, TextWalk, measure
from specoffload.session.min_batch import measure as measure_both_sides
from specoffload.speculation.profiling import LEAD_TOKENS, real_text

SIZES = (1, 2, 4, 8, 16, 32, 64)
DEPTH = 16
MIDDLE = 128  # 250 tokens from here on have the context of a generation of 500, on average
N_TOKENS = 500
CACHED = 0.3
LINK = "sim:bw=1GB/s"
STREAMED, CPU = MinBatch(1, NEVER), MinBatch(NEVER, NEVER)
MOST_OFF = 0.1


def options(vram_bytes: int | None) -> EngineOptions:
    return EngineOptions(
        device=LINK,
        min_batch=STREAMED,
        n_ctx=2048,
        n_ubatch=256,
        streaming=StreamingOptions(vram_bytes=vram_bytes),
    )


@dataclass
class Running:
    """Texts that run through an engine by one side: from a quarter, then from three."""

    engine: Engine
    side: MinBatch
    text: list[int]
    times: dict[int, list[float]] = field(default_factory=dict)

    def run(self, sizes: tuple[int, ...], n_tokens: int) -> None:
        """`n_tokens` of the text for each size, in batches of it."""
        for n in sizes:
            self.engine.set_min_batch_by_decoding(self.side)
            at = len(self.text) * (1 if n not in self.times else 3) // 4
            text = self.text[at:] + self.text[:at]
            walk = TextWalk(self.engine.sequences, 0, text, MIDDLE, 2 * n_tokens)
            walk.lead(n, -(-LEAD_TOKENS // n))
            rows = None if n <= VERIFY_MOST else 1  # as where it is measured
            steps = [walk.time_s(n, n_logits=rows) for _ in range(max(4, n_tokens // n))]
            self.times.setdefault(n, []).extend(steps)

    def mean_s(self, n: int) -> float:
        """The mean time of a batch."""
        return fmean(self.times[n])

    def drift(self, n: int) -> float:
        """The time of the second text over that of the first."""
        half = len(self.times[n]) // 2
        return fmean(self.times[n][half:]) / fmean(self.times[n][:half])


def rows(measured: Mapping[int, float], running: Running) -> list[dict[str, float]]:
    return [
        {
            "n": n,
            "measured_ms": 1e3 * measured[n],
            "running_ms": 1e3 * running.mean_s(n),
            "ratio": measured[n] / running.mean_s(n),
            "drift": running.drift(n),
        }
        for n in sorted(set(measured) & set(running.times))
    ]


def main() -> int:
    n_repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    with tempfile.TemporaryDirectory() as folder:
        path = write_preset(
            "qwen3moe", Path(folder) / "model.gguf", size="tiny", seed=5, n_layer=12, n_expert=32,
            n_expert_used=3, n_embd=512, n_ff_exp=256,
        )  # fmt: skip
        with Engine(path, options(None)) as whole:
            assert whole.plan is not None
            vram = whole.plan.resident_bytes + int(CACHED * whole.plan.slot_bytes)
        with Engine(path, options(vram)) as engine:
            text = real_text(engine)
            streamed, cpu = Running(engine, STREAMED, text), Running(engine, CPU, text)
            streamed.run(SIZES, N_TOKENS // 2)
            cpu.run(SIZES, N_TOKENS // 2)
            engine.set_min_batch_by_decoding(STREAMED)
            asked = MeasureOptions(
                SIZES[-1], n_repeats, (DEPTH,), SIZES, n_most=2 * n_repeats, lead_tokens=LEAD_TOKENS
            )
            steps = measure(engine.sequences, text, asked).step_s
            sides = measure_both_sides(engine, text)["experts"]
            others = tuple({*sides.streamed, *sides.cpu} - set(SIZES))
            for running in (streamed, cpu):
                running.run(SIZES, N_TOKENS // 2)
                for _ in range(2):
                    running.run(others, N_TOKENS // 2)
    found = {
        "T(n)": rows({n: steps[n - 1] for n in SIZES}, streamed),
        "min-batch, streamed": rows(sides.streamed, streamed),
        "min-batch, CPU": rows(sides.cpu, cpu),
    }
    print(f"{'':20} {'n':>4} {'measured':>9} {'running':>9}  ratio  drift")
    for what, compared in found.items():
        for row in compared:
            numbers = "{n:4d} {measured_ms:6.2f} ms {running_ms:6.2f} ms {ratio:6.3f} {drift:6.3f}"
            print(f"{what:20} {numbers.format(**row)}")
    print(json.dumps(found))
    off = [
        row for compared in found.values() for row in compared if abs(row["ratio"] - 1) > MOST_OFF
    ]
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
