"""docs/hybrid-model.md: decodes with and without split layers, by the machine model.

From headers alone: no model is opened, no time is measured. Hits come from routing that is drawn,
through the cache rule that is built in.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts
from offload.plan.context import ContextSpec, context_memory
from offload.plan.machine import Machine, ModelWork, Sharing, best_s, cpu_s, hybrid_s, model_work
from offload.plan.placement import Plan, make_plan
from offload.plan.sharing import UBATCHES, device_bytes
from offload.schedule.cache_rules import Lrfu
from offload.synth.published import published_facts

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
N_STEPS = 300  # of drawn routing; the first quarter fills the slots
# Time constant of a drift in tokens, its weight and that of lasting popularity, over noise of 1.
ROUTINGS = {
    "even": (1.0, 0.0, 0.0),
    "drifting": (60.0, 1.2, 0.4),  # as llama.cpp #27861 reports of 512 experts
    "skewed": (60.0, 1.0, 2.0),  # a tenth of the experts takes most: llama.cpp #24524
}

HEAD = """# Split layers, modelled

Every figure here is **modelled**, none is measured: by the machine model of `offload/plan/machine.py`, from published headers, made by
`scripts/hybrid-model`. [hybrid.md](hybrid.md) says what a split layer is.

Both sides have the same device memory, weights and context of 8,192 tokens. *llama.cpp*: as many layers' experts as fit are resident and the
CPU computes those of the others (`--n-cpu-moe`), without a slot or a second of overlap. *old rule*: this program with `--hybrid off`,
the faster of CPU and streaming. *split*: its plan for `--hybrid on`, whose device memory goes to slots rather than to resident layers
where that is faster. Hits are those of {n} tokens of drawn routing through `--expert-cache lrfu`: *even* chooses experts at
random, *drifting* has popularity that drifts with a time constant of 60 tokens (tuned to what llama.cpp #27861 reports: of 512 experts an LRU
of 64 hits 67 %, of 128 81 %, the 32 most popular of one half of a text 10 % of the other), *skewed* has a popularity that lasts (#24524).

No split takes RAM's bandwidth away: all misses leave RAM once, by the CPU or by the link. So what a split gains is what the slots hold,
and with RAM as fast as on the last machine, little but that.

Below 1: this program's plan first keeps room for a whole layer's experts, so that prompts run on the device, and for that has fewer
layers resident, or dense weights that stream; llama.cpp's column has no such room. Slots for fewer experts of a layer than a token
uses are taken to hit nothing.
"""  # noqa: E501


@cache
def hits(n_experts: int, n_used: int, n_slots: int, routing: str) -> float:
    """The share of uses that find their expert in one of a layer's `n_slots` slots."""
    if n_slots >= n_experts:
        return 1.0
    if n_slots < n_used:
        return 0.0
    rule = Lrfu(4.0, n_used)
    held: set[int] = set()
    found = uses = 0
    for now, ids in enumerate(routed(n_experts, n_used, routing), 1):
        chosen = ids.tolist()
        if now > N_STEPS // 4:
            found += len(held.intersection(chosen))
            uses += n_used
        rule.touched([(0, expert) for expert in chosen], now)
        held.update(chosen)
        while len(held) > n_slots:
            held.remove(min(held, key=lambda e: (rule.rank((0, e)), e)))
    return found / uses


@cache
def routed(n_experts: int, n_used: int, routing: str) -> NDArray[np.int64]:
    """Drawn routing [N_STEPS, n_used]."""
    constant, drift, lasting = ROUTINGS[routing]
    rng = np.random.default_rng(1)
    keep = np.exp(-1.0 / constant)
    popularity = lasting * rng.standard_normal(n_experts)
    state = rng.standard_normal(n_experts)
    rows = []
    for _ in range(N_STEPS):
        state = keep * state + np.sqrt(1 - keep * keep) * rng.standard_normal(n_experts)
        scores = popularity + drift * state + rng.standard_normal(n_experts)
        rows.append(np.argpartition(-scores, n_used)[:n_used])
    return np.array(rows)


def plan_of(facts: ModelFacts, gib: int, machine: Machine, *, hybrid: bool) -> Plan:
    return make_plan(
        facts,
        budget_bytes=gib * GIB,
        n_cpu_moe="fit",
        context=ContextSpec(N_CTX),
        most_ubatch=UBATCHES[-1],
        machine=machine,
        hybrid=hybrid,
    )


def llama_cpp(facts: ModelFacts, gib: int) -> Sharing:
    """As many layers' experts resident as fit beside the dense weights, and no slots."""
    work = model_work(facts)
    context = context_memory(facts, ContextSpec(N_CTX, UBATCHES[0])).total_bytes
    room = gib * GIB - context - (device_bytes(facts) - facts.expert_bytes)
    n_fit = int(room // (facts.expert_bytes / work.n_expert_layers))
    return Sharing(0, max(0, min(work.n_expert_layers, n_fit)))


def split_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int, routing: str
) -> float:
    """A decode with split layers, at the hits of that routing; never worse than the old rule, to
    which batches go back."""
    n_layers = work.n_expert_layers - sharing.n_resident
    old_s = best_s(machine, work, sharing, n_tokens)
    if not n_layers:
        return old_s
    share = hits(work.n_experts, work.n_used, sharing.n_slots // n_layers, routing)
    # What a token leaves serves the next ones too: of a batch's experts at least those in slots.
    held = min(1.0, sharing.n_slots / n_layers / work.union(n_tokens))
    return min(old_s, hybrid_s(machine, work, sharing, n_tokens, min(share, held)))


def decode_table(facts: ModelFacts) -> str:
    lines = [
        "| machine | llama.cpp | old rule | slots | "
        + " | ".join(f"{name}: hits, split, × llama.cpp" for name in ROUTINGS)
        + " |",
        "|" + "---|" * (4 + len(ROUTINGS)),
    ]
    work = model_work(facts)
    for name, (gib, machine) in MACHINES.items():
        peer_s = cpu_s(machine, work, llama_cpp(facts, gib), 1)
        old = plan_of(facts, gib, machine, hybrid=False).sharing
        new = plan_of(facts, gib, machine, hybrid=True).sharing
        n_layers = work.n_expert_layers - new.n_resident
        share = new.n_slots / max(1, n_layers * work.n_experts)
        cells = [name, f"{1 / peer_s:.1f}", f"{1 / best_s(machine, work, old, 1):.1f}"]
        cells.append(f"{share:.0%}" if n_layers else "all resident")
        for routing in ROUTINGS:
            seconds = split_s(machine, work, new, 1, routing)
            n_slots = new.n_slots // n_layers if n_layers else work.n_experts
            hit = hits(work.n_experts, work.n_used, n_slots, routing)
            cells.append(f"{hit:.0%}, {1 / seconds:.1f}, **{peer_s / seconds:.2f}**")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def batch_table(all_facts: Sequence[ModelFacts]) -> str:
    """T(n) of the second machine, on drifting routing."""
    (gib, machine) = list(MACHINES.values())[1]
    lines = [
        "| model | | " + " | ".join(f"{n}" for n in SIZES) + " |",
        "|---|---|" + "---|" * len(SIZES),
    ]
    for title, facts in zip(MODELS, all_facts, strict=True):
        work = model_work(facts)
        old = plan_of(facts, gib, machine, hybrid=False).sharing
        new = plan_of(facts, gib, machine, hybrid=True).sharing
        old_ms = [1e3 * best_s(machine, work, old, n) for n in SIZES]
        new_ms = [1e3 * split_s(machine, work, new, n, "drifting") for n in SIZES]
        for label, row in (("old rule", old_ms), ("split", new_ms)):
            lines.append(f"| {title} | {label} | " + " | ".join(f"{ms:.0f}" for ms in row) + " |")
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    with tempfile.TemporaryDirectory() as folder:
        facts = [published_facts(title, Path(folder)) for title in MODELS]
    parts = [HEAD.format(n=N_STEPS), "## Decoding token by token, tokens/s\n"]
    for title, its in zip(MODELS, facts, strict=True):
        parts.append(f"### {title}, {its.size_bytes / GIB:.0f} GiB\n\n{decode_table(its)}\n")
    name = list(MACHINES)[1]
    parts.append(f"## T(n) in ms, drifting routing, {name}\n\n{batch_table(facts)}\n")
    rates = [
        f"- {name}: link {m.link_bytes_per_s / 1e9:g}, RAM {m.ram_bytes_per_s / 1e9:g}, VRAM "
        f"{m.vram_bytes_per_s / 1e9:g} GB/s; {m.cpu_flops / 1e12:g} and {m.gpu_flops / 1e12:g} "
        "TFLOPS of CPU and GPU"
        for name, (_, m) in MACHINES.items()
    ]
    parts.append("## The machines\n\n" + "\n".join(rates) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
