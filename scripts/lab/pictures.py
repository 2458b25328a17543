"""Draws the pictures in docs/ from measurements that this script makes.

It runs on `sim` and needs at least two idle cores, one for computation and one for the link.
Bandwidths are chosen so that copies and computation take about equally long.
"""

from __future__ import annotations

import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot
from matplotlib.patches import Patch

from lab import ROOT
from lab.synth import write_preset
from offload.costs.measuring import Pass, measure
from offload.costs.table import CostTable, Way
from offload.engine import Engine, EngineOptions
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import PlanRequest, make_plan
from offload.streaming.options import StreamingOptions
from offload.trace import COMPUTE, COPY, Event, Trace
from offload.trace_report import report
from specoffload.commands.bench import machine
from specoffload.commands.demo import ways
from specoffload.config.environment import read_host
from specoffload.config.options import Options
from specoffload.config.resolution import resolve
from specoffload.config.speculation import NO_DRAFTS
from specoffload.session.session import Session
from specoffload.speculation.draft_model import real_text

# Okabe and Ito's colours, which colour-blind eyes tell apart.
COMPUTED, NEEDED, AHEAD, GUESSED = "#0072B2", "#D55E00", "#E69F00", "#F0E442"
REASONS = {"needed": NEEDED, "ahead": AHEAD, "predicted": GUESSED}
WORDS = {
    "needed": "copied: the computation stands before its layer",
    "ahead": "copied ahead, known to be needed",
    "predicted": "copied on a guess",
}
SHAPE: dict[str, Any] = {
    "n_layer": 8,
    "n_embd": 1024,
    "n_expert_used": 4,
    "n_ff_exp": 1024,
    "quant": "q4_K",
}


@dataclass(frozen=True)
class Step:
    """One decode: its events, with times since its start, and its seconds."""

    events: list[Event]
    seconds: float
    copied_bytes: int


def steps(
    path: Path, device: str, streaming: StreamingOptions | None, n_tokens: int, n: int = 7
) -> list[Step]:
    """`n` decodes of `n_tokens` new tokens each, after two for warm-up."""
    trace = streaming.trace if streaming is not None else Trace()
    options = EngineOptions(
        device=device,
        stream_experts=streaming is not None,
        streaming=streaming or StreamingOptions(),
        min_batch=MinBatch(1, 1),
        n_ctx=1024,
        n_threads=1,
        n_threads_batch=1,
    )
    made = []
    with Engine(path, options) as engine:
        for i in range(n + 2):
            tokens = [(17 * k + 101 * i + 3) % engine.n_vocab for k in range(n_tokens)]
            before = engine.counters().streamed_bytes
            began = time.perf_counter()
            engine.sequences.extend(0, tokens, n_logits=1)
            ended = time.perf_counter()
            engine.sequences.rewind(0, 0)
            events = [
                event._replace(start_s=event.start_s - began, end_s=event.end_s - began)
                for event in trace.events()
                if began <= event.start_s and event.end_s <= ended + 1e-3
            ]
            copied = engine.counters().streamed_bytes - before
            made.append(Step(events, ended - began, copied))
    return made[2:]


def typical(made: Sequence[Step]) -> Step:
    """The step with the median time."""
    return sorted(made, key=lambda step: step.seconds)[len(made) // 2]


@dataclass(frozen=True)
class Runs:
    """The same decode in three ways, and the bandwidth of the link."""

    resident: Step
    serial: Step
    scheduled: Step
    bandwidth_bytes_per_s: float


def run(folder: Path, n_tokens: int, slots: float) -> Runs:
    """Measure the decode in three ways. `slots` is the share of the experts that have slots."""
    path = folder / "kimi.gguf"
    write_preset("kimi-k2", path, size="tiny", seed=1, **SHAPE)
    whole = make_plan(read_facts(path), PlanRequest(n_gpu_layers=None))
    vram = whole.resident_bytes + int(whole.slot_bytes * slots)
    resident = typical(steps(path, "sim", None, n_tokens))
    free = typical(steps(path, "sim", StreamingOptions(vram_bytes=vram), n_tokens))
    bandwidth = free.copied_bytes / (1.2 * resident.seconds)
    device = f"sim:bw={bandwidth:.0f}B/s"

    def streamed(overlap: bool) -> Step:
        depth = StreamingOptions().depth if overlap else 0
        options = StreamingOptions(vram_bytes=vram, depth=depth, prefetch=overlap, trace=Trace())
        return typical(steps(path, device, options, n_tokens))

    return Runs(resident, streamed(False), streamed(True), bandwidth)


def caption(figure: Any, words: str) -> None:
    """Write `words`, on what was run, under the picture."""
    wrapped = textwrap.fill(words, int(figure.get_figwidth() * 17.5))
    figure.text(0.01, 0.01, wrapped, fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.05 + 0.03 * wrapped.count("\n"), 1, 1))


def bar(axes: Any, y: float, event: Event, colour: str, **more: Any) -> None:
    start_ms, end_ms = event.start_s * 1e3, event.end_s * 1e3
    more = {"linewidth": 0} | more
    axes.barh(y, end_ms - start_ms, left=start_ms, height=0.8, color=colour, **more)


def lanes(axes: Any, y: float, step: Step) -> None:
    """Draw the link's bars at y + 1 and the computation's at y."""
    for event in step.events:
        if event.lane == COPY:
            bar(axes, y + 1, event, REASONS[str(event.args["reason"])])
        elif event.lane == COMPUTE and "cause" not in event.args:
            bar(axes, y, event, COMPUTED)


def legend(axes: Any, reasons: Sequence[str], **more: Any) -> None:
    patches = [Patch(color=COMPUTED, label="computed")]
    patches += [Patch(color=REASONS[reason], label=WORDS[reason]) for reason in reasons]
    axes.legend(handles=patches, fontsize=7, frameon=False, **more)


def draw_overlap(folder: Path, out: Path) -> None:
    """Draw one decode of 16 tokens, with one copy at a time and by schedule."""
    runs = run(folder, n_tokens=16, slots=0.3)
    figure, axes = pyplot.subplots(figsize=(9, 2.9))
    for y, step in ((3, runs.serial), (0, runs.scheduled)):
        lanes(axes, y, step)
        axes.text(
            step.seconds * 1e3 + 1.5, y + 0.5, f"{step.seconds * 1e3:.0f} ms", va="center", size=9
        )
    axes.set_yticks([4, 3, 1, 0], ["link", "compute", "link", "compute"])
    axes.set_title("one copy at a time", loc="left", fontsize=9)
    axes.text(0, 1.55, "by schedule: copies under computation", fontsize=9)
    axes.set(xlabel="ms", xlim=(0, runs.serial.seconds * 1e3 * 1.1), ylim=(-0.5, 4.5))
    axes.spines[["top", "right", "left"]].set_visible(False)
    legend(axes, tuple(WORDS), loc="lower right")
    seen = report(runs.scheduled.events)
    caption(
        figure,
        f"One decode of 16 tokens; Kimi-K2's shape, 8 layers, 16 experts, random weights, q4_K, "
        f"slots for 30 % of the experts. sim, 1 thread, link {runs.bandwidth_bytes_per_s / 1e9:.1f}"
        f" GB/s. Computation alone {runs.resident.seconds * 1e3:.0f} ms, copies "
        f"{seen.copy_s * 1e3:.0f} ms, {seen.hidden_s / seen.copy_s:.0%} of them hidden. "
        f"{machine()['cpu']}",
    )
    figure.savefig(out, dpi=110)


def draw_costs(_: Path, out: Path, sizes: tuple[int, int] = (32, 5)) -> None:
    """Draw T(n) of the embedded pair's target, streamed and on the CPU. `sizes` are the largest
    batch and the number of repetitions."""
    # As in the demo, every layer streams, and half of the streamed weights have slots.
    streamed = ways()[1][2]
    plain = resolve(
        Options(device="cpu", ctx_size=1024, threads=1, spec=NO_DRAFTS), read_host(None)
    )
    figure, axes = pyplot.subplots(figsize=(5.2, 3.2))
    n_max, repeats = sizes
    most = 0.0
    for config, label, colour, marker in (
        (streamed, "weights stream (2 GB/s link)", NEEDED, "o"),
        (plain, "weights in memory (CPU)", COMPUTED, "s"),
    ):
        with Session(config) as session:
            target = session.target
            table, n = CostTable(), tuple(range(1, n_max + 1))
            asked = Pass(
                table, (Way.FIXED,), "", most_s=600.0, n_least=repeats, n_verify=n_max, edges=n
            )
            measure(target, real_text(target), asked)
        entries = table.measured(Way.FIXED)
        times = [entries[size].seconds for size in n]
        named = f"{label}: T(1) = {times[0] * 1e3:.1f} ms"
        ratios = [t / times[0] for t in times]
        most = max(most, *ratios)
        bars = [ratio * entries[size].spread for ratio, size in zip(ratios, n, strict=True)]
        axes.errorbar(
            n, ratios, yerr=bars, fmt=f"{marker}-", color=colour, markersize=3, linewidth=0.8,
            elinewidth=0.8, capsize=1.5, label=named,
        )  # fmt: skip
    axes.plot(n, n, color="#999999", linewidth=0.8, linestyle=":", label="n single decodes")
    axes.set(
        xlabel="n, tokens decoded together",
        ylabel="T(n) / T(1)",
        xlim=(1, n_max),
        ylim=(0, 1.25 * most),  # room for the legend
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)
    caption(
        figure,
        f"Embedded pair's target, 1 thread, every size measured {repeats} times (bars: the middle "
        f"half), on real text.\n{machine()['cpu']}",
    )
    figure.savefig(out, dpi=110)


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    "overlap": draw_overlap,
    "costs": draw_costs,
}


def main() -> None:
    wanted = sys.argv[1:] or list(PICTURES)
    if unknown := [name for name in wanted if name not in PICTURES]:
        raise SystemExit(f"pictures: {unknown[0]!r} is none of {', '.join(PICTURES)}")
    for name in wanted:
        out = ROOT / "docs" / f"{name}.png"
        with tempfile.TemporaryDirectory() as folder:
            PICTURES[name](Path(folder), out)
        print(f"{out.relative_to(ROOT)}: {out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
