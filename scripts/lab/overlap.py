"""Measures on `sim` how far copies are hidden behind computation.

Each case runs the same model three ways in one process: everything resident (compute alone),
streamed one copy at a time (serial), and streamed by schedule (step). One thread computes, and
another core serves the link.

The link's bandwidth is chosen so that copies take as long as the computation, because overlap
matters most then. For verification batches, copies take half as long again, because the computation
competes with the link's thread for memory bandwidth. With perfect overlap, step =
max(copy, compute). Without any, step is their sum.

A case of several ubatches is streamed by schedule in a fourth way, in turns with the third: no copy
for the next ubatch begins before it is handed over (late).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import open_engine
from offload.measuring import decode_s
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.slots import StreamCounters
from offload.times.min_batch import MinBatch
from specoffload import report
from specoffload.bench.load import warn_of_load
from specoffload.commands.bench import commit, machine

LIMIT = 1.10
# A common quantisation with much computation per byte. The simulated link is a thread that copies
# memory, and must not take the memory bandwidth that the computation needs.
_QUANT = {"quant": "q4_K"}


@dataclass(frozen=True)
class Case:
    """One model and batch size. `slots` is the share of the streamed weights that has slots."""

    name: str
    preset: str
    n_tokens: int
    overrides: dict[str, Any]
    n_gpu_layers: int | None = None
    slots: float = 0.15
    copy_share: float = 1.0  # wanted ratio of copy time to compute time
    n_ubatch: int = 512  # tokens that are computed at once


CASES = (
    Case(
        "dense stream",
        "mistral-large",
        16,
        {"n_layer": 40, "n_embd": 768, "n_ff": 2048, "n_head": 12, "n_head_kv": 4} | _QUANT,
        n_gpu_layers=0,
    ),
    Case(
        "expert prefill",
        "kimi-k2",
        512,
        {"n_layer": 24, "n_embd": 256, "n_expert": 16, "n_expert_used": 4, "n_ff_exp": 256}
        | _QUANT,
    ),
    # Between two ubatches libllama prepares the next graph. Copies go on meanwhile.
    Case(
        "prompt of 4 ubatches",
        "kimi-k2",
        512,
        {"n_layer": 6, "n_embd": 512, "n_expert": 16, "n_expert_used": 4, "n_ff_exp": 512} | _QUANT,
        n_ubatch=128,
        slots=0.4,
    ),
    Case(
        "4 ubatches, slow link",
        "kimi-k2",
        512,
        {"n_layer": 6, "n_embd": 512, "n_expert": 16, "n_expert_used": 4, "n_ff_exp": 512} | _QUANT,
        n_ubatch=128,
        slots=0.4,
        copy_share=2.0,
    ),
    Case(
        "verification batch",
        "kimi-k2",
        16,
        {"n_layer": 24, "n_embd": 1024, "n_expert": 16, "n_expert_used": 4, "n_ff_exp": 1024}
        | _QUANT,
        copy_share=1.5,
    ),
    # LIMIT need not hold for this case. Its 16 tokens use two thirds of 64 experts, and each step
    # has new tokens. So a third of the guesses is wrong, and misses wait for the router.
    Case(
        "verification, 64 experts",
        "kimi-k2",
        16,
        {"n_layer": 16, "n_embd": 768, "n_expert": 64, "n_expert_used": 4, "n_ff_exp": 512}
        | _QUANT,
        slots=0.3,
        copy_share=1.5,
    ),
)


@dataclass(frozen=True)
class Overlap:
    """The times of one case. `copy_s` is computed from the copied bytes and the link's bandwidth;
    the others are measured. `ratio` is step ÷ max(copy, compute). `late_s` is a step in which no
    ubatch's copies begin before it is handed over, or None if there is one ubatch only."""

    case: str
    copy_s: float
    compute_s: float
    serial_s: float
    step_s: float
    late_s: float | None
    ratio: float
    copied_bytes: int
    bandwidth_bytes_per_s: float
    hits: int
    misses: int
    n_early: int  # ubatches of the measured steps whose copies began early


def bench(
    key: str, title: str, cases: Sequence[Any], measure: Callable[[Any, Path, int], Any]
) -> None:
    """Run the command line of a bench on `sim`: measure all cases, print a table and a JSON line.

    `measure` takes a case, a folder for models and the number of repetitions.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("-r", "--repetitions", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--case", default="", help="only the cases whose names contain this")
    parser.add_argument("--json", action="store_true", help="print one line of JSON alone")
    args = parser.parse_args()
    report.only_data(args.json)
    warn_of_load()
    cases = [case for case in cases if args.case in case.name]
    if not cases:
        parser.error(f"--case {args.case}: no case has this in its name")
    rows = []
    with tempfile.TemporaryDirectory() as folder, report.progress(f"measuring {key}") as bar:
        for i, case in enumerate(cases):
            rows.append(asdict(measure(case, Path(folder), args.repetitions)))
            bar((i + 1) / len(cases))
    times = [name for name in rows[0] if name.endswith("_s") and not name.endswith("_per_s")]
    report.table(
        title,
        ("case", *(f"{name.removesuffix('_s')} ms" for name in times), "step ÷ max", f"<= {LIMIT}"),
        [
            (
                row["case"],
                *("-" if row[name] is None else f"{row[name] * 1e3:.1f}" for name in times),
                f"{row['ratio']:.3f}",
                "yes" if row["ratio"] <= LIMIT else "no",
            )
            for row in rows
        ],
    )
    report.data({key: rows, "machine": machine(), "commit": commit()})


def measure(case: Case, folder: Path, repetitions: int) -> Overlap:
    """Run one case. Computation alone is measured before and after the other ways, and its time is
    the median of both measurements together."""
    path = folder / f"{case.name.replace(' ', '-').replace(',', '')}.gguf"
    if not path.exists():
        write_preset(case.preset, path, size="tiny", seed=1, **case.overrides)
    whole = make_plan(read_facts(path), PlanRequest(n_gpu_layers=case.n_gpu_layers))
    vram = whole.resident_bytes + int(whole.slot_bytes * case.slots)
    # The buffer of so small a model would hold all experts, so that nothing would be copied.
    streaming = Streaming(vram_bytes=vram, n_gpu_layers=case.n_gpu_layers, lend=False)
    resident = _step(path, "sim", None, case, repetitions)
    free = _step(path, "sim", streaming, case, 2)
    bandwidth = free.copied_bytes / (resident.median_s * case.copy_share)
    device = f"sim:bw={bandwidth:.0f}B/s"
    turns = (True, False) if case.n_tokens > case.n_ubatch else (True,)
    overlapped, *late = _steps_in_turns(path, device, streaming, case, repetitions, turns)
    one_by_one = streaming | Streaming(depth=0, prefetch=False)
    serial = _step(path, device, one_by_one, case, max(3, repetitions // 2))
    again = _step(path, "sim", None, case, repetitions)
    compute_s = statistics.median([*resident.times, *again.times])
    copy_s = overlapped.copied_bytes / bandwidth
    return Overlap(
        case.name,
        copy_s,
        compute_s,
        serial.median_s,
        overlapped.median_s,
        late[0].median_s if late else None,
        overlapped.median_s / max(copy_s, compute_s),
        overlapped.copied_bytes,
        bandwidth,
        overlapped.gained.hits,
        overlapped.gained.misses,
        overlapped.gained.n_early,
    )


@dataclass
class _Steps:
    """The timed steps of one way, and what their counters have gained."""

    times: list[float]
    gained: StreamCounters

    @property
    def median_s(self) -> float:
        return statistics.median(self.times)

    @property
    def copied_bytes(self) -> int:
        """Bytes per step."""
        return self.gained.streamed_bytes // len(self.times)


def _step(
    path: Path, device: str, streaming: Streaming | None, case: Case, repetitions: int
) -> _Steps:
    """Time `repetitions` steps of new tokens."""
    (steps,) = _steps_in_turns(path, device, streaming, case, repetitions, (True,))
    return steps


def _steps_in_turns(
    path: Path,
    device: str,
    streaming: Streaming | None,
    case: Case,
    repetitions: int,
    turns: Sequence[bool],
) -> list[_Steps]:
    """Time `repetitions` steps of new tokens for each turn, after two for warm-up.

    The turns alternate, and every second round goes through them backwards. A turn that is False
    starts no copy of a next ubatch early.
    """
    options = engine_options(
        device=device,
        stream_experts=streaming is not None,
        streaming=streaming or Streaming(),
        min_batch=MinBatch(1, 1),
        n_ctx=max(1024, 2 * case.n_tokens),
        n_ubatch=case.n_ubatch,
        n_outputs=max(64, case.n_tokens),
        n_threads=1,
        n_threads_batch=1,
    )
    found = [_Steps([], StreamCounters()) for _ in turns]
    order = [i for k in range(repetitions) for i in range(len(turns))[:: -1 if k % 2 else 1]]
    with open_engine(path, options) as engine:
        for k, i in enumerate([0, 0, *order]):
            if len(turns) > 1 and engine.device is not None:
                for executor in engine.device.executors.values():
                    executor.may_start_next = turns[i]
            before = engine.counters()
            tokens = [(17 * n + 101 * k + 3) % engine.n_vocab for n in range(case.n_tokens)]
            step_s = decode_s(engine.sequences, 0, tokens, n_logits=1)
            engine.sequences.rewind(0, 0)
            if k > 1:
                found[i].times.append(step_s)
                found[i].gained += _difference(engine.counters(), before)
    return found


def _difference(after: StreamCounters, before: StreamCounters) -> StreamCounters:
    names = [field.name for field in fields(after)]
    return StreamCounters(**{n: getattr(after, n) - getattr(before, n) for n in names})


if __name__ == "__main__":
    title = "overlap of copies with compute (sim, one compute thread; copy ms are computed)"
    bench("overlap", title, CASES, measure)
