"""Makes docs/hybrid-model.md: decodes with and without split layers, by the machine model.

It reads headers only: no model is opened, no time is measured. Hits come from drawn or recorded
routing through the built-in cache rule, and from published measurements.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab import ROOT
from lab.synth.published import published_facts
from offload.model import ModelFacts
from offload.plan.context import ContextSpec, context_memory
from offload.plan.machine import (
    Machine,
    ModelWork,
    Sharing,
    best_s,
    cpu_s,
    expected_hits,
    model_work,
    streamed_s,
)
from offload.plan.placement import Plan, make_plan
from offload.plan.sharing import DECODING, UBATCHES, device_bytes
from offload.routing import HALF_LIFE_STEPS, SHARES, HitCurve, recorded_hits

GIB = 1 << 30
MODELS = ("DeepSeek-R1", "gpt-oss-120b", "Qwen3-235B-A22B")
MACHINES: dict[str, tuple[int, Machine]] = {
    "12 GiB, PCIe 3.0, 2 channels of DDR4": (
        12,
        Machine(12e9, 40e9, 360e9, 0.4e12, 25e12),
    ),
    "24 GiB, PCIe 4.0, 2 channels of DDR5": (
        24,
        Machine(25e9, 70e9, 1000e9, 0.8e12, 80e12),
    ),
    "32 GiB, PCIe 5.0, 8 channels of DDR5": (
        32,
        Machine(50e9, 250e9, 1790e9, 2e12, 100e12),
    ),
    "48 GiB, PCIe 4.0, 12 channels of DDR5": (
        48,
        Machine(25e9, 400e9, 768e9, 4e12, 80e12),
    ),
}
N_CTX = 8192
SIZES = (1, 2, 4, 8, 16, 32, 64)
RECORDED = Path(__file__).parent / "data" / "pair-routing.npz"  # by scripts/lab/run record-routing
DISTANCES = (1, 2, 4, 8, 16, 32, 64, 128)  # tokens
N_TOKENS, N_LAYERS = 768, 8  # size of drawn routing
LRU_HALF_LIFE_STEPS = 0.5  # short enough that lrfu ranks as LRU: the last use outweighs all others
NO_DAY = date(1, 1, 1)  # date of a hit curve that was not counted
Parameters = tuple[float, float, float]
# Time constant of the drift in tokens, weight of the drift, weight of lasting popularity. The noise
# has weight 1.
DRAWN: dict[str, Parameters] = {
    "code": (8.0, 0.6, 0.2),  # fitted to recorded routing by scripts/lab/run record-routing
    "prose": (2.0, 0.8, 1.3),
    "drifting": (60.0, 1.2, 0.4),  # like llama.cpp #27861's figures for 512 experts
}
FITTED = ("code", "prose")
ROUTINGS = (*DRAWN, "published")


class Published(NamedTuple):
    """Published hits of one model. `points` are (share of all experts that have a slot, share of
    uses that hit)."""

    model: str
    experts: str
    points: tuple[tuple[float, float], ...]
    source: str


FLASH_NEXT, QWEN3_30B, DEEPSEEK_V4, GPT_OSS, ORNITH = (
    Published(
        "Qwen3.8-Flash-Next", "10 of 512",
        ((0.061, 0.435), (0.121, 0.62), (0.125, 0.67), (0.182, 0.72), (0.242, 0.789),
         (0.25, 0.81), (0.334, 0.85), (0.366, 0.937)),
        "LRU: ggml-org/llama.cpp #27861 (12.5, 25 %); kekzl/imp #2061, 300 tokens after a start; "
        "FlashML-org/FreeToken #231 (36.6 %)",
    ),
    Published(
        "Qwen3-30B-A3B", "8 of 128",
        ((0.0625, 0.366), (0.19, 0.741), (0.38, 0.894), (0.635, 0.962)),
        "LRU: kekzl/imp #1374, 256 tokens from empty slots, which hold one of an expert's three "
        "matrices each; 90 to 95 % at 40 % once they are full: kekzl/imp #1359",
    ),
    Published(
        "DeepSeek-V4-Flash", "6 of 256",
        ((0.045, 0.13), (0.094, 0.588), (0.125, 0.64), (0.156, 0.68), (0.25, 0.774)),
        "LRU: FlashML-org/FreeToken #174, 8 to 18 % on long Chinese texts (4.5 %); "
        "nibor1896/Crow #30, a coding prompt (the others)",
    ),
    Published("gpt-oss-120b", "4 of 128", ((0.03, 0.085),), "LRU: Helldez/BigMoeOnEdge #33"),
    Published("Ornith-1.5-35B-A3B", "8 of 256", ((0.22, 0.741),), "FlashML-org/FreeToken #231"),
)  # fmt: skip
# Published hits by title of the tables' models: of that model, or of the most similar one.
NEAREST: dict[str, tuple[tuple[float, float], ...]] = {
    "DeepSeek-R1": DEEPSEEK_V4.points,
    "gpt-oss-120b": (*GPT_OSS.points, *QWEN3_30B.points[1:]),
    "Qwen3-235B-A22B": QWEN3_30B.points,
}

HEAD = """# Split layers, modelled

Every figure here is **modelled**, none is measured: by the machine model of `offload/plan/machine.py`, from published headers, made by
`scripts/lab/run hybrid-model`. [hybrid.md](hybrid.md) says what a split layer is.

All ways have the same device memory, weights and context of 8,192 tokens. Two rivals, both llama.cpp:

- *--n-cpu-moe*: as many layers' experts as fit are resident, and the CPU computes those of the others, without a slot or a second of overlap.
- *LRU cache*: slots that all layers share and that are replaced least recently used first, `--moe-cache-mib` (from b11500 on). Every expert
  without a slot is copied there before the device computes it; the CPU computes none in batches of up to 32 tokens. The cache shares device
  memory with resident layers, as many as is fastest. Nothing is hit if a token uses more experts than have slots.

*off* is this program with `--hybrid off`, the faster of CPU and streaming. *on* is `--hybrid on`, planned by the hits of that routing,
as it is once they were counted; a decode goes back to the CPU or to streaming where that is faster. Both are planned for decoding
(`--plan-for decode`), as both rivals are: no room is kept for prompts. A cell has the share of streamed experts that have a slot and the hits
there, then tokens/s; the last column says **how many times the better rival's** those of *on* are. The routings:

- *code* and *prose*: as the embedded pair's, **recorded** on running text. It has 16 experts of which 4 are used, and says nothing of slots
  for less than a quarter. So a process is fitted to each recording and drawn for the model's own numbers of experts, below. Code is all
  that the pair was trained on; there its experts are chosen nearly evenly, with little for a cache to hit.
- *drifting*: the same process tuned to what llama.cpp #27861 reports, a drift with a time constant of 60 tokens: of 512 experts an LRU of 64 hits
  67 %, of 128 81 %, the 32 most popular of one half of a text 10 % of the other.
- *published*: what others measured of the model's kin, below, on lines between their points.

The first three go through our cache rule (LRFU), and for the rival through LRU, all layers sharing the slots and every miss brought in ({n} drawn
tokens). *published* was measured with LRU, and is given to both. A real cache of ours is filled by promotions and copies as the link has time: with enough
of it that hit 3 to 5 points more of the embedded pair's routing, with less it may be fewer.

No split takes RAM's bandwidth away: all misses leave RAM once, by the CPU or by the link. So what a split gains is what the slots hold,
and with RAM as fast as on the last machine, little but that.
"""  # noqa: E501

RECORDED_HEAD = """## What was recorded

1,024 tokens each, decoded alone by the embedded pair's target, of which 3 layers have 16 experts, 4 used: *code* and *prose* it was not trained
on, and its own greedy *answers* (`scripts/lab/run record-routing`, `scripts/data/pair-routing.npz`). *drawn*: the process fitted to one, by how often a
use is one again some tokens later. A score has three parts: noise of deviation 1, a drift and lasting popularity; for code the drift has a time constant
of {code[0]:g} tokens and a deviation of {code[1]:g}, and {code[2]:g} lasts, for prose {prose[0]:g}, {prose[1]:g} and {prose[2]:g}. Hits by the share of experts with a slot, and uses of an expert
that are uses of it again so many tokens later (25 % by chance). Answers soon repeat themselves, and so do their experts: nothing is drawn like them. The
pair is small and its router was trained to balance: it is no more than one model that was looked at.
"""  # noqa: E501

PUBLISHED_HEAD = """## What others measured

Shares of experts with a slot, and of uses that found theirs there. DeepSeek-R1 is given DeepSeek-V4-Flash's, Qwen3-235B-A22B those of
Qwen3-30B-A3B, which has as many experts, and gpt-oss-120b its own one point and above it Qwen3-30B-A3B's: of R1 itself nothing was found.
"""  # noqa: E501

PUBLISHED_TAIL = """Not all agree that there is much to hit. Of GLM-5.2's 256 experts 75 tokens use 237 (JustVugg/colibri #274), and even the best choice of what
to keep hits 54 % with slots for the 8 that a token uses (#1078). Qwen3-30B-A3B needs 45 to 51 % of its experts for 90 % of uses if they are chosen
once and stay (mcp-tool-shop-org/gpu-container, *Routing De-risk*). Of 20 models those with experts in every layer and none shared repeat most, and
slots for twice what a token uses serve most of them (arXiv 2505.16056). HybriMoE (arXiv 2504.05897) and MoE-Infinity (arXiv 2401.14361) keep
what scored high lately or served a like request; Fiddler (arXiv 2402.07033) keeps what is popular, and KTransformers what was placed at the start.
"""  # noqa: E501


def draw(
    n_experts: int, n_used: int, parameters: Parameters, n_tokens: int, n_layers: int
) -> NDArray[np.int64]:
    """Drawn routing [n_tokens, n_layers, n_used]."""
    constant, drift, lasting = parameters
    rng = np.random.default_rng(1)
    keep = np.exp(-1.0 / constant)
    shape = n_layers, n_experts
    popularity, state = lasting * rng.standard_normal(shape), rng.standard_normal(shape)
    rows = []
    for _ in range(n_tokens):
        state = keep * state + np.sqrt(1 - keep * keep) * rng.standard_normal(shape)
        scores = popularity + drift * state + rng.standard_normal(shape)
        rows.append(np.argpartition(-scores, n_used, axis=1)[:, :n_used])
    return np.array(rows)


def repeats(routing: NDArray[np.integer]) -> NDArray[np.float64]:
    """For each of DISTANCES, the share of uses that the same layer repeats that many tokens
    later."""
    found = []
    for distance in DISTANCES:
        now, later = routing[:-distance, :, :, None], routing[distance:, :, None, :]
        found.append((now == later).any(axis=3).mean())
    return np.array(found)


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
    facts: ModelFacts, gib: int, machine: Machine, *, hybrid: bool, hits: HitCurve | None = None
) -> Plan:
    return make_plan(
        facts,
        budget_bytes=gib * GIB,
        n_cpu_moe="fit",
        context=ContextSpec(N_CTX),
        most_ubatch=UBATCHES[-1],
        machine=machine,
        hybrid=hybrid,
        hits=hits,
        mix=DECODING,
    )


def expert_room_bytes(facts: ModelFacts, gib: int) -> int:
    """Bytes of device memory that llama.cpp has left for experts after all other weights and the
    context."""
    context = context_memory(facts, ContextSpec(N_CTX, UBATCHES[0])).total_bytes
    return max(0, gib * GIB - context - (device_bytes(facts) - facts.expert_bytes))


def n_cpu_moe(facts: ModelFacts, gib: int) -> Sharing:
    """llama.cpp's `--n-cpu-moe`: the experts of as many layers as fit are resident; no slots."""
    n_layers = model_work(facts).n_expert_layers
    n_fit = int(expert_room_bytes(facts, gib) // (facts.expert_bytes / n_layers))
    return Sharing(0, min(n_layers, n_fit))


def lru_cache(facts: ModelFacts, gib: int, machine: Machine, work: ModelWork) -> Sharing:
    """llama.cpp's `--moe-cache-mib`: some layers are resident, and the rest of the room is slots.

    The number of resident layers is the one with the fastest decode. `work` has the hits of an LRU
    cache.
    """
    n_fit = n_cpu_moe(facts, gib).n_resident
    n_pieces = int(expert_room_bytes(facts, gib) // work.expert.size_bytes)
    ways = [Sharing(n_pieces - n * work.n_experts, n) for n in range(n_fit + 1)]
    return min(ways, key=lambda sharing: streamed_s(machine, work, sharing, 1))


def lru_hits(work: ModelWork, sharing: Sharing) -> float:
    """The hit rate of the LRU cache. It is 0 unless there are more slots than experts that a token
    uses, because each expert is otherwise evicted before its next use."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    holds = sharing.n_slots > work.n_used * n_streamed
    return expected_hits(work, sharing, work.n_used) if holds else 0.0


def decode_table(facts: ModelFacts, title: str) -> str:
    heads = ("machine", "routing", "--n-cpu-moe", "LRU cache", "better rival", "off", "on",
             "on / better rival")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    plain = model_work(facts)
    for name, (gib, machine) in MACHINES.items():
        cpu_moe_s = cpu_s(machine, plain, n_cpu_moe(facts, gib), 1)
        off_s = best_s(machine, plain, plan_of(facts, gib, machine, hybrid=False).sharing, 1)
        for routing in ROUTINGS:
            of_lru = work_of(facts, title, routing, LRU_HALF_LIFE_STEPS)
            lru = lru_cache(facts, gib, machine, of_lru)
            lru_s = streamed_s(machine, of_lru, lru, 1)
            rival_s = min(cpu_moe_s, lru_s)
            work = work_of(facts, title, routing)
            on = plan_of(facts, gib, machine, hybrid=True, hits=work.hits).sharing
            on_s = best_s(machine, work, on, 1, hybrid=True)
            lru_hit, on_hit = lru_hits(of_lru, lru), expected_hits(work, on, work.n_used)
            cells = (
                name,
                routing,
                f"{1 / cpu_moe_s:.1f}",
                _slots(of_lru, lru, lru_hit, lru_s),
                f"{1 / rival_s:.1f}",
                f"{1 / off_s:.1f}",
                _slots(work, on, on_hit, on_s),
                f"**{rival_s / on_s:.2f}**",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _slots(work: ModelWork, sharing: Sharing, hits: float, seconds: float) -> str:
    """The share of streamed experts that have a slot, the hits there, and tokens/s."""
    n_layers = work.n_expert_layers - sharing.n_resident
    if not n_layers:
        return f"all resident: {1 / seconds:.1f}"
    share = sharing.n_slots / (n_layers * work.n_experts)
    return f"{share:.0%} hit {hits:.0%}: {1 / seconds:.1f}"


def batch_table(all_facts: Sequence[ModelFacts]) -> str:
    """The table of T(n) on the second machine."""
    (gib, machine) = list(MACHINES.values())[1]
    lines = [
        "| model | | " + " | ".join(f"{n}" for n in SIZES) + " |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for title, facts in zip(MODELS, all_facts, strict=True):
        plain = model_work(facts)
        old = plan_of(facts, gib, machine, hybrid=False).sharing
        rows = {"off": [best_s(machine, plain, old, n) for n in SIZES]}
        for routing in ("code", "prose", "published"):
            work = work_of(facts, title, routing)
            new = plan_of(facts, gib, machine, hybrid=True, hits=work.hits).sharing
            rows[f"on, {routing}"] = [best_s(machine, work, new, n, hybrid=True) for n in SIZES]
        for label, seconds in rows.items():
            cells = " | ".join(f"{1e3 * s:.0f}" for s in seconds)
            lines.append(f"| {title} | {label} | {cells} |")
    return "\n".join(lines)


def recorded_table() -> str:
    """The table of the embedded pair's recorded routing, beside drawn routing for as many
    experts."""
    shares = (0.25, 0.375, 0.5, 0.625, 0.75)
    with np.load(RECORDED) as data:
        n_experts = int(data["n_experts"])
        kinds = {kind: data[kind] for kind in data.files if kind != "n_experts"}
    n_used = next(iter(kinds.values())).shape[2]
    for kind in FITTED:
        kinds[f"{kind}, drawn"] = draw(n_experts, n_used, DRAWN[kind], N_TOKENS, N_LAYERS)
    heads = [*(f"{100 * share:g} %" for share in shares), *(f"{d} later" for d in (1, 8, 64))]
    lines = [f"| | {' | '.join(heads)} |", "|" + "---|" * (1 + len(heads))]
    for kind in ("code", "code, drawn", "prose", "prose, drawn", "answers"):
        rows = kinds[kind]
        again = dict(zip(DISTANCES, repeats(rows).tolist(), strict=True))
        found = [*recorded_hits(rows, n_experts, shares).mean(axis=0).tolist()]
        found += [again[d] for d in (1, 8, 64)]
        lines.append(f"| {kind} | {' | '.join(f'{one:.0%}' for one in found)} |")
    return "\n".join(lines)


def published_table() -> str:
    lines = ["| model | experts used | slots for: hits | source |", "|---|---|---|---|"]
    for one in (FLASH_NEXT, QWEN3_30B, DEEPSEEK_V4, GPT_OSS, ORNITH):
        points = ", ".join(f"{100 * share:.3g} %: {100 * hit:.3g} %" for share, hit in one.points)
        lines.append(f"| {one.model} | {one.experts} | {points} | {one.source} |")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as folder:
        facts = [published_facts(title, Path(folder)) for title in MODELS]
    parts = [HEAD.format(n=N_TOKENS), "## Decoding token by token, tokens/s, modelled\n"]
    for title, its in zip(MODELS, facts, strict=True):
        parts.append(f"### {title}, {its.size_bytes / GIB:.0f} GiB\n\n{decode_table(its, title)}\n")
    name = list(MACHINES)[1]
    parts.append(f"## T(n) in ms, {name}, modelled\n\n{batch_table(facts)}\n")
    head = RECORDED_HEAD.format(code=DRAWN["code"], prose=DRAWN["prose"])
    parts.append(f"{head}\n{recorded_table()}\n")
    parts.append(f"{PUBLISHED_HEAD}\n{published_table()}\n\n{PUBLISHED_TAIL}")
    rates = [
        f"- {name}: link {m.link_bytes_per_s / 1e9:g}, RAM {m.ram_bytes_per_s / 1e9:g}, VRAM "
        f"{m.vram_bytes_per_s / 1e9:g} GB/s; {m.cpu_flops / 1e12:g} and {m.gpu_flops / 1e12:g} "
        "TFLOPS of CPU and GPU"
        for name, (_, m) in MACHINES.items()
    ]
    parts.append("## The machines\n\n" + "\n".join(rates) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    (ROOT / "docs" / "hybrid-model.md").write_text(page(), encoding="utf-8")
