"""Fills the tables on MTP in docs/hybrid-model.md: modelled decodes with and without drafts.

The draft is made by the model's own layer for multi-token prediction (MTP). The batch that verifies
a draft of m tokens has 1 + m tokens, which use more experts than one token. The numbers of experts
and of hits are counted in drawn routing, in batches of each size. It reads headers only: no model
is opened, and no time is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from lab.hybrid_model import (
    CONTEXT,
    DRAWN,
    GIB,
    LRU_HALF_LIFE_STEPS,
    MACHINES,
    N_LAYERS,
    N_TOKENS,
    NO_DAY,
    PAGE,
    draw,
    plan_of,
)
from lab.simulation import DraftTrace, Simulated, simulate
from lab.synth.published import published_facts
from lab.tables import filled
from offload.model import ModelFacts
from offload.plan.llama_cpp import LlamaCpp, copied_s
from offload.plan.row_draft import MtpLayer, plan_mtp
from offload.routing.routing import HALF_LIFE_STEPS, HitCurve, UnionCurve
from offload.times.decodes import best_s, cpu_s
from offload.times.machine import Machine
from offload.times.work import ModelWork, model_work
from specdec.costs.profile import CostProfile
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput

MOST_DRAFTED = 6
N_TEXT = 3000  # tokens of the simulated text
LLAMA_DRAFTED = 3  # default of llama.cpp's --spec-draft-n-max
# The share of drafts whose first, second, ... token is accepted. The page names the sources.
ACCEPTED: dict[str, tuple[float, ...]] = {
    "GLM-4.6": (0.834, 0.653, 0.494),
    "DeepSeek-R1": (0.85, 0.536, 0.337),
    "Qwen3-Next-80B-A3B": (0.873, 0.762, 0.665),
}
CHECKED = "Qwen3.5-35B-A3B"  # others measured it on the first machine
ACCEPTED_CHECKED = (0.778, 0.605, 0.471)


@dataclass(frozen=True)
class BatchTrace(DraftTrace):
    """A text whose drafted tokens are right with a chance that depends on their place in the draft.

    `p` is a random number for each position. `chances[k]` is the chance of a draft's token k if all
    tokens before it are right. The drafter knows it, and nothing else.
    """

    chances: tuple[float, ...] = ()

    def p_of(self, at: int, place: int) -> float:
        return self.chances[min(place, len(self.chances) - 1)]

    def is_right(self, at: int, place: int) -> bool:
        return self.p[at + place] < self.p_of(at, place)


def text(accepted: Sequence[float]) -> BatchTrace:
    """A text whose drafts are accepted at these rates. All texts have the same random numbers."""
    numbers = np.random.default_rng(1).random(N_TEXT)
    chances = [a / b for a, b in zip(accepted, (1.0, *accepted), strict=False)]
    wrong = (False,) * N_TEXT
    return BatchTrace(tuple(numbers.tolist()), wrong, chances=tuple(chances))


# -- experts of a batch ----------------------------------------------------------------------------


@cache
def counted(
    routing: str, n_experts: int, n_used: int, n_tokens: int, half_life_steps: float
) -> tuple[float, HitCurve]:
    """The mean number of a layer's experts that `n_tokens` use, and the share of them that hit.

    The cache rule counts each expert once in a batch. Every layer has an equal share of the slots.
    The first half of the text only fills them.
    """
    drawn = draw(n_experts, n_used, DRAWN[routing], N_TOKENS, N_LAYERS)
    weight, decay = np.zeros((N_LAYERS, n_experts)), 2.0 ** (-1.0 / half_life_steps)
    layers, ranks = np.arange(N_LAYERS)[:, None], np.empty((N_LAYERS, n_experts), np.intp)
    found, n_batches = np.zeros(n_experts), 0  # uses by rank of their expert
    for start in range(0, N_TOKENS - n_tokens + 1, n_tokens):
        is_used = np.zeros((N_LAYERS, n_experts), np.bool_)
        for ids in drawn[start : start + n_tokens]:
            is_used[layers, ids] = True
        if start >= N_TOKENS // 2:
            np.put_along_axis(ranks, np.argsort(-weight, axis=1), np.arange(n_experts)[None], 1)
            found += np.bincount(ranks[is_used], minlength=n_experts)
            n_batches += 1
        weight = weight * decay + is_used
    hits = np.cumsum(found) / found.sum()
    shares = np.arange(1, n_experts + 1) / n_experts
    curve = HitCurve(tuple(zip(shares.tolist(), hits.tolist(), strict=True)), N_TOKENS, NO_DAY)
    return float(found.sum()) / (n_batches * N_LAYERS), curve


def batch_works(
    facts: ModelFacts, routing: str, n_most: int, half_life_steps: float = HALF_LIFE_STEPS
) -> list[ModelWork]:
    """The work of batches of 1 to `n_most` tokens. `hits` are those of batches of each size."""
    shape = routing, facts.n_experts, facts.n_experts_used
    of_sizes = [counted(*shape, n, half_life_steps) for n in range(1, n_most + 1)]
    points = tuple((n, union) for n, (union, _) in enumerate(of_sizes, 1))
    unions = UnionCurve(points, N_TOKENS, NO_DAY)
    return [model_work(facts, hits, unions) for _, hits in of_sizes]


# -- the cost of a draft ---------------------------------------------------------------------------


# -- speeds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Speed:
    """Tokens/s without and with MTP, and the mean number of drafted tokens in a round."""

    plain: float
    mtp: float
    n_drafted: float

    @property
    def cell(self) -> str:
        return f"{self.plain:.1f} → {self.mtp:.1f}"


def _speed(plain_s: float, drafted: Simulated) -> Speed:
    return Speed(1.0 / plain_s, drafted.rate, drafted.n_drafted / drafted.n_rounds)


def rivals(
    facts: ModelFacts, gib: int, machine: Machine, routing: str, accepted: Sequence[float]
) -> tuple[Speed, Speed]:
    """The speeds of --n-cpu-moe and of the LRU cache. All drafts have LLAMA_DRAFTED tokens.

    llama.cpp computes the verified tokens with the MTP layer once more, in a decode of their own.
    """
    budget_bytes = gib * GIB
    plan = plan_mtp(facts, CONTEXT, budget_bytes)
    llama = LlamaCpp(facts, budget_bytes, CONTEXT)
    n = 1 + LLAMA_DRAFTED
    one, *_, several = batch_works(facts, routing, n, LRU_HALF_LIFE_STEPS)
    layer = MtpLayer(machine, facts, plan)
    step_s, again_s = layer.seconds(several, 1), layer.seconds(several, n)
    reserve_bytes = plan.device_bytes
    cpu_moe = tuple(llama.n_cpu_moe(its) for its in (0, reserve_bytes))
    lru = (
        llama.lru_cache(machine, one),
        llama.lru_cache(machine, several, n, reserve_bytes),
    )

    def speed(plain_s: float, verify_s: float) -> Speed:
        # Only batches of 1 + LLAMA_DRAFTED tokens are decoded, and a shorter one at the text's end.
        profile = CostProfile((verify_s + again_s,) * n, step_s)
        return _speed(plain_s, simulate(text(accepted), profile, Fixed(LLAMA_DRAFTED)))

    return (
        speed(cpu_s(machine, one, cpu_moe[0], 1), cpu_s(machine, several, cpu_moe[1], n)),
        speed(
            copied_s(machine, one, lru[0], 1),
            copied_s(machine, several, lru[1], n),
        ),
    )


def ours(
    facts: ModelFacts, gib: int, machine: Machine, routing: str, accepted: Sequence[float]
) -> Speed:
    """The speed of `--hybrid on`. The policy `throughput` chooses the drafts' lengths."""
    works = batch_works(facts, routing, 1 + MOST_DRAFTED)
    hits = works[0].hits
    without = plan_of(facts, gib, machine, hybrid=True, hits=hits)
    plan = plan_of(facts, gib, machine, hybrid=True, hits=hits, mtp=True)
    plain_s = best_s(machine, works[0], without.sharing, 1, hybrid=True)
    if plan.mtp is None:
        raise ValueError(f"the layer for multi-token prediction does not fit {gib} GiB")
    layer = MtpLayer(machine, facts, plan.mtp)
    step_s = layer.seconds(works[0], 1)
    # The next draft's first step computes the accepted tokens, too. Here it computes all of them.
    times = [
        best_s(machine, work, plan.sharing, n, hybrid=True) + layer.seconds(work, n) - step_s
        for n, work in enumerate(works, 1)
    ]
    profile = CostProfile(tuple(times), step_s)
    return _speed(plain_s, simulate(text(accepted), profile, Throughput(profile), "mtp"))


# -- tables ----------------------------------------------------------------------------------------


def speed_row(facts: ModelFacts, accepted: Sequence[float], name: str, routing: str) -> str:
    """Compute the row of machine `name` and of this routing."""
    gib, machine = MACHINES[name]
    cpu_moe, lru = rivals(facts, gib, machine, routing, accepted)
    own = ours(facts, gib, machine, routing, accepted)
    best = max(cpu_moe.plain, cpu_moe.mtp, lru.plain, lru.mtp)
    cells = (
        name,
        routing,
        cpu_moe.cell,
        lru.cell,
        own.cell,
        f"{own.n_drafted:.1f}",
        f"{own.mtp / own.plain:.2f}",
        f"{own.mtp / best:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def speed_table(facts: ModelFacts, accepted: Sequence[float], machines: Sequence[str]) -> str:
    heads = ("machine", "routing", "--n-cpu-moe", "LRU cache", "on", "drafted", "with / without",
             "on with / best rival")  # fmt: skip
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [speed_row(facts, accepted, name, routing) for name in machines for routing in DRAWN]
    return "\n".join(lines)


def union_table(all_facts: Sequence[tuple[str, ModelFacts]]) -> str:
    """The number of experts that a batch uses, as a multiple of those that one token uses."""
    sizes = (2, 4, 1 + MOST_DRAFTED)
    lines = [
        "| model | routing | " + " | ".join(f"{n} tokens" for n in sizes) + " |",
        "|---|---|" + "---|" * len(sizes),
    ]
    for title, facts in all_facts:
        for routing in DRAWN:
            work = batch_works(facts, routing, sizes[-1])[0]
            cells = " | ".join(f"{work.union(n) / work.union(1):.2f}" for n in sizes)
            lines.append(f"| {title} | {routing} | {cells} |")
    return "\n".join(lines)


def page() -> str:
    """The text of docs/hybrid-model.md with new tables on MTP."""
    with tempfile.TemporaryDirectory() as folder:
        titles = (*ACCEPTED, CHECKED)
        facts = {title: published_facts(title, Path(folder), mtp=True) for title in titles}
    parts = {"experts of a batch": union_table([(title, facts[title]) for title in ACCEPTED])}
    for title, accepted in ACCEPTED.items():
        table = speed_table(facts[title], accepted, tuple(MACHINES))
        parts[f"{title}, MTP"] = f"### {title}, with and without MTP\n\n{table}"
    first = tuple(MACHINES)[:1]
    parts[f"{CHECKED}, MTP"] = speed_table(facts[CHECKED], ACCEPTED_CHECKED, first)
    return filled(PAGE, parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
