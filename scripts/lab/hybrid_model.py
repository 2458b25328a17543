"""Fills the tables of docs/hybrid-model.md: modelled decodes with and without split layers.

It reads headers only: no model is opened, and no time is measured. The hits come from a simulation
of the built-in cache rule with drawn routing, and from published measurements.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.published import UNPINNED_SHARE
from lab.published_cases import DEEPSEEK_V4, GPT_OSS, QWEN3_30B
from lab.synth.published import published_facts
from lab.tables import filled, page_of
from offload.model import ModelFacts
from offload.plan.llama_cpp import LlamaCpp, copied_s
from offload.plan.placement import Plan, PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.plan.workload import DECODING
from offload.routing.routing import HALF_LIFE_STEPS, SHARES, HitCurve, recorded_hits
from offload.times.context_memory import ContextOptions
from offload.times.decodes import best_s, cpu_s, hybrid_s
from offload.times.hits import Sharing, expected_hits, hit_rate
from offload.times.machine import Machine
from offload.times.work import ModelWork, model_work
from specoffload.config.hardware import PRESETS

GIB = 1 << 30
PAGE = page_of("hybrid-model")
MODELS = ("DeepSeek-R1", "gpt-oss-120b", "Qwen3-235B-A22B")
# Device memory in GiB, and the preset of `plan --hardware` with the machine's rates.
HARDWARE = {
    "12 GiB, PCIe 3.0, 2 channels of DDR4": (12, "rtx-3060-ddr4"),
    "24 GiB, PCIe 4.0, 2 channels of DDR5": (24, "rtx-4090-ddr5"),
    "32 GiB, PCIe 5.0, 8 channels of DDR5": (32, "rtx-5090-threadripper"),
    "48 GiB, PCIe 5.0, 8 channels of DDR5": (48, "a6000-threadripper"),
}
MACHINES: dict[str, tuple[int, Machine]] = {
    name: (gib, PRESETS[preset].machine) for name, (gib, preset) in HARDWARE.items()
}
N_CTX = 8192
CONTEXT = ContextOptions(N_CTX)
SIZES = (1, 2, 4, 8, 16, 32, 64)
N_TOKENS, N_LAYERS = 768, 8  # size of drawn routing
LRU_HALF_LIFE_STEPS = 0.5  # makes lrfu an LRU: the last use outweighs all others
CLASS_LRU_HALF_LIFE_STEPS = 128  # tokens after which a use counts half, at llama.cpp c4fb5796
NO_DAY = date(1, 1, 1)  # date of a hit curve that was not counted
Parameters = tuple[float, float, float]
# Time constant of the drift in tokens, weight of the drift, weight of lasting popularity. The noise
# has weight 1.
DRAWN: dict[str, Parameters] = {
    "code": (8.0, 0.6, 0.2),  # fitted to the recorded routing of the embedded pair
    "prose": (2.0, 0.8, 1.3),
    "drifting": (60.0, 1.2, 0.4),  # like llama.cpp #27861's figures for 512 experts
}
ROUTINGS = (*DRAWN, "published")
BATCH_ROUTINGS = ("code", "prose", "published")  # of the table of T(n)


# Published hits by title of a model in the tables: hits of that model, or of the most similar one.
NEAREST: dict[str, tuple[tuple[float, float], ...]] = {
    "DeepSeek-R1": DEEPSEEK_V4,
    "gpt-oss-120b": (*GPT_OSS, *QWEN3_30B[1:]),
    "Qwen3-235B-A22B": QWEN3_30B,
}


@cache
def draw_scores(
    n_experts: int, parameters: Parameters, n_tokens: int, n_layers: int
) -> NDArray[np.float64]:
    """A router's drawn scores, from which it would compute probabilities.

    Has the shape [n_tokens, n_layers, n_experts].
    """
    constant, drift, lasting = parameters
    rng = np.random.default_rng(1)
    keep = np.exp(-1.0 / constant)
    shape = n_layers, n_experts
    popularity, state = lasting * rng.standard_normal(shape), rng.standard_normal(shape)
    scores = np.empty((n_tokens, *shape))
    for token in range(n_tokens):
        state = keep * state + np.sqrt(1 - keep * keep) * rng.standard_normal(shape)
        scores[token] = popularity + drift * state + rng.standard_normal(shape)
    return scores


@cache
def draw(
    n_experts: int, n_used: int, parameters: Parameters, n_tokens: int, n_layers: int
) -> NDArray[np.int64]:
    """Drawn routing [n_tokens, n_layers, n_used]."""
    scores = draw_scores(n_experts, parameters, n_tokens, n_layers)
    return np.argpartition(-scores, n_used, axis=2)[:, :, :n_used]


@cache
def curve(
    routing: str,
    title: str,
    n_experts: int,
    n_used: int,
    half_life_steps: float = HALF_LIFE_STEPS,
) -> HitCurve:
    """The hit rate by the share of experts that have a slot."""
    if routing == "published":
        return HitCurve(NEAREST[title], 0, NO_DAY)
    drawn = draw(n_experts, n_used, DRAWN[routing], N_TOKENS, N_LAYERS)
    rates = recorded_hits(drawn, n_experts, half_life=half_life_steps).mean(axis=0).tolist()
    return HitCurve(tuple(zip(SHARES, rates, strict=True)), N_TOKENS, NO_DAY)


def work_of(
    facts: ModelFacts, title: str, routing: str, half_life_steps: float = HALF_LIFE_STEPS
) -> ModelWork:
    hits = curve(routing, title, facts.n_experts, facts.n_experts_used, half_life_steps)
    return model_work(facts, hits)


def plan_of(
    facts: ModelFacts,
    gib: int,
    machine: Machine,
    *,
    hybrid: bool,
    hits: HitCurve | None = None,
    mtp: bool = False,
) -> Plan:
    return make_plan(
        facts,
        PlanRequest(
            budget_bytes=gib * GIB,
            n_cpu_moe="fit",
            context=CONTEXT,
            most_ubatch=UBATCHES[-1],
            machine=machine,
            plan_for_splits=hybrid,
            hits=hits,
            mix=DECODING,
            mtp=mtp,
        ),
    )


def fastest_cache_split(
    facts: ModelFacts, title: str, routing: str, gib: int, machine: Machine
) -> tuple[ModelWork, Sharing]:
    """`cache_split` with the best of three rules for eviction, and the work with its hits.

    ClassLRU weighs recency and frequency. Its rule could not be read as a whole, so it is given the
    best of LRU, this program's rule, and one that halves uses after as many tokens as it does.
    """
    llama = LlamaCpp(facts, gib * GIB, CONTEXT)
    rules = LRU_HALF_LIFE_STEPS, HALF_LIFE_STEPS, CLASS_LRU_HALF_LIFE_STEPS
    works = [work_of(facts, title, routing, rule) for rule in rules]
    ways = [(work, llama.cache_split(machine, work)) for work in works]
    return min(ways, key=lambda way: hybrid_s(machine, *way, 1))


def lru_hits(work: ModelWork, sharing: Sharing) -> float:
    """Return the hit rate of the LRU cache.

    It is 0 unless there are more slots than experts that a token uses, because each expert is
    otherwise evicted before its next use.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    holds = sharing.n_cached > work.n_used * n_streamed
    return float(expected_hits(work, sharing, work.n_used)) if holds else 0.0


@dataclass(frozen=True)
class DecodeRow:
    """A row of a model's table: seconds of a token without and with split layers, and the rival's.

    `rival_s` are the seconds of the better one of llama.cpp's two ways.
    """

    off_s: float
    on_s: float
    rival_s: float
    line: str


def decode_row(facts: ModelFacts, title: str, name: str, routing: str) -> DecodeRow:
    """Compute the row of machine `name` and of this routing."""
    gib, machine = MACHINES[name]
    llama = LlamaCpp(facts, gib * GIB, CONTEXT)
    cpu_moe_s = float(cpu_s(machine, model_work(facts), llama.n_cpu_moe(), 1))
    off = plan_of(facts, gib, machine, hybrid=False).sharing
    of_lru = work_of(facts, title, routing, LRU_HALF_LIFE_STEPS)
    theirs = replace(machine, link_bytes_per_s=UNPINNED_SHARE * machine.link_bytes_per_s)
    lru = llama.lru_cache(theirs, of_lru)
    lru_s = float(copied_s(theirs, of_lru, lru, 1))
    rival_s = min(cpu_moe_s, lru_s)
    of_class, shared = fastest_cache_split(facts, title, routing, gib, theirs)
    shared_s = min(float(hybrid_s(theirs, of_class, shared, 1)), cpu_moe_s)
    shared_hit = expected_hits(of_class, shared, of_class.n_used)
    work = work_of(facts, title, routing)
    off_s = float(best_s(machine, work, off, 1))
    on = plan_of(facts, gib, machine, hybrid=True, hits=work.hits).sharing
    on_s = float(best_s(machine, work, on, 1, hybrid=True))
    lru_hit, on_hit = lru_hits(of_lru, lru), expected_hits(work, on, work.n_used)
    cells = (
        name,
        routing,
        f"{1 / cpu_moe_s:.1f}",
        _slots(of_lru, lru, lru_hit, lru_s),
        f"{1 / rival_s:.1f}",
        f"{1 / off_s:.1f}",
        _slots(work, on, on_hit, on_s),
        _slots(of_class, shared, shared_hit, shared_s),
        f"{shared_s / on_s:.2f}",
        f"**{rival_s / on_s:.2f}**",
    )
    return DecodeRow(off_s, on_s, rival_s, f"| {' | '.join(cells)} |")


def decode_table(facts: ModelFacts, title: str) -> str:
    heads = ("machine", "routing", "--n-cpu-moe", "LRU cache", "better rival", "off", "on",
             "cache with CPU share", "on / it", "on / better rival")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    rows = (decode_row(facts, title, name, routing) for name in MACHINES for routing in ROUTINGS)
    return "\n".join([*lines, *(row.line for row in rows)])


def _slots(work: ModelWork, sharing: Sharing, hits: float, seconds: float) -> str:
    """A cell: share of streamed experts that have a slot, share of uses that hit, tokens/s."""
    n_layers = work.n_expert_layers - sharing.n_resident
    if not n_layers:
        return f"all resident: {1 / seconds:.1f}"
    share = sharing.n_cached / (n_layers * work.n_experts)
    return f"{share:.0%} hit {hits:.0%}: {1 / seconds:.1f}"


def batch_seconds(facts: ModelFacts, title: str, routing: str) -> tuple[list[float], list[float]]:
    """T(n) in seconds for the sizes of `SIZES`, without and with split layers."""
    gib, machine = list(MACHINES.values())[1]
    old = plan_of(facts, gib, machine, hybrid=False).sharing
    work = work_of(facts, title, routing)
    new = plan_of(facts, gib, machine, hybrid=True, hits=work.hits).sharing
    return (
        [float(best_s(machine, work, old, n)) for n in SIZES],
        [float(best_s(machine, work, new, n, hybrid=True)) for n in SIZES],
    )


def batch_line(title: str, label: str, seconds: Sequence[float]) -> str:
    cells = " | ".join(f"{1e3 * s:.0f}" for s in seconds)
    return f"| {title} | {label} | {cells} |"


def batch_table(all_facts: Sequence[ModelFacts]) -> str:
    """The page's table of T(n), which is for the second machine."""
    lines = [
        "| model | | " + " | ".join(f"{n}" for n in SIZES) + " |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for title, facts in zip(MODELS, all_facts, strict=True):
        for routing in BATCH_ROUTINGS:
            off, on = batch_seconds(facts, title, routing)
            lines.append(batch_line(title, f"off, {routing}", off))
            lines.append(batch_line(title, f"on, {routing}", on))
    return "\n".join(lines)


def guess_table() -> str:
    """The guessed hits by number of experts, and at least those of experts used equally often."""
    shares = (0.05, 0.125, 0.25, 1 / 3, 0.5, 0.75)
    lines = [
        "| experts | " + " | ".join(f"slots for {share:.0%}" for share in shares) + " |",
        "|---|" + "---|" * len(shares),
    ]
    for label, n_experts, n_used in (
        ("up to 32", 16, 2), ("up to 160", 128, 4), ("up to 384", 256, 8), ("more", 512, 10),
    ):  # fmt: skip
        rates = (max(share, hit_rate(share, n_used / n_experts, n_experts)) for share in shares)
        lines.append(f"| {label} | " + " | ".join(f"{rate:.0%}" for rate in rates) + " |")
    return "\n".join(lines)


def machine_list() -> str:
    """The machines of the tables, with the rates that their presets have."""
    lines = []
    for name, (_, preset) in HARDWARE.items():
        its = PRESETS[preset].machine
        rates = (its.link_bytes_per_s, its.ram_bytes_per_s, its.most_ram_bytes_per_s,
                 its.vram_bytes_per_s)  # fmt: skip
        link, ram, shared, vram = (f"{rate / 1e9:.0f}" for rate in rates)
        lines.append(
            f"- {name} (`{preset}`): link {link} GB/s, RAM {ram} GB/s for the CPU alone and "
            f"{shared} GB/s with copies, VRAM {vram} GB/s, CPU {its.cpu_flops / 1e12:g} TFLOPS, "
            f"GPU {its.gpu_flops / 1e12:g} TFLOPS"
        )
    return "\n".join(lines)


def page() -> str:
    """The text of docs/hybrid-model.md with new tables."""
    with tempfile.TemporaryDirectory() as folder:
        facts = [published_facts(title, Path(folder)) for title in MODELS]
    parts = {
        "T(n)": batch_table(facts), "guesses": guess_table(), "machines": machine_list(),
    }  # fmt: skip
    for title, its in zip(MODELS, facts, strict=True):
        size = f"### {title}, {its.size_bytes / GIB:.0f} GiB"
        parts[title] = f"{size}\n\n{decode_table(its, title)}"
    return filled(PAGE, parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
