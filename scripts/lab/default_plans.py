"""Fills the tables of default plans beside llama.cpp's ways in docs/hybrid-model.md. Modelled.

It reads headers only: no model is opened, and no time is measured. Each way of llama.cpp has its
best flags for decodes, and its best flags for prompts, although one start has only one set of them.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from lab.hybrid_model import GIB, MACHINES, PAGE
from lab.plans import README_TITLES
from lab.synth.published import published_facts
from lab.tables import filled
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.plan.llama_cpp import LlamaCpp
from offload.plan.placement import Plan, PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.plan.workload import DECODING, USUAL, TokenMix
from offload.times.context_memory import ContextOptions
from offload.times.decodes import best_s, cpu_s, hybrid_s
from offload.times.hits import Sharing, expected_hits
from offload.times.machine import Machine
from offload.times.prompts import prefill_s, with_prompt
from offload.times.work import ModelWork, even, model_work

CARDS_GIB = (12, 16, 24, 32)
N_CTX = 4096
CONTEXT = ContextOptions(N_CTX)
GOAL = 0.95  # share of the better rival's speed that a default plan should have
PROMPTS = TokenMix(1, 0)
CPU_SHARE, NO_WAIT = "b12569", "no wait"  # rivals that split a layer's experts
# Seconds of a layer that is split without a wait of the host. A prototype with kernels and words in
# mapped memory took 34.9 to 35.4 ms a token on a V100 where the same graph without it took 33.2, in
# 48 layers of Qwen3.8-Flash-Next (docs/strata-port-plan.md, section 7.6, of anyei/llamacpp-v100 at
# commit 063bdc2a).
NO_WAIT_LAYER_S = 40e-6


@dataclass(frozen=True)
class Cell:
    """A default plan beside llama.cpp's ways: our speed ÷ the speed of the better of them."""

    title: str
    gib: int
    machine: str
    decodes: dict[tuple[str, str], float]  # by rival (CPU_SHARE, NO_WAIT) and end of hits
    prompts: float
    one_start: float  # the mix's prompts and answers together, with one start of llama.cpp
    decode_rule: str  # what makes the decode slower than `GOAL`; "": it is not
    prompt_rule: str
    names_decode_end: bool  # the plan says what `--plan-for decode` gives

    @property
    def loses(self) -> bool:
        """True if answers or prompts are below the goal, beside ways that are in llama.cpp."""
        decodes = [ratio for (rival, _), ratio in self.decodes.items() if rival == CPU_SHARE]
        return min(*decodes, self.prompts) < GOAL


ENDS = ("used equally", "guessed")  # of hits


def cells(folder: Path) -> Iterator[Cell]:
    """Compare default plans of README's models, cards and machines that fit and stream."""
    for title in README_TITLES:
        facts = published_facts(title, folder)
        for gib, (name, (_, machine)) in product(CARDS_GIB, MACHINES.items()):
            found = _cell(facts, title, gib, name, machine)
            if found is not None:
                yield found


def _plan(facts: ModelFacts, gib: int, machine: Machine, mix: TokenMix | None = None) -> Plan:
    return make_plan(
        facts,
        PlanRequest(
            budget_bytes=(gib - 1) * GIB, n_cpu_moe="fit", context=CONTEXT,
            most_ubatch=UBATCHES[-1], plan_for_splits=True, machine=machine, mix=mix,
        ),
    )  # fmt: skip


def _cell(facts: ModelFacts, title: str, gib: int, name: str, machine: Machine) -> Cell | None:
    try:
        plan = _plan(facts, gib, machine)
    except DoesNotFit:
        return None
    if not plan.streamed:
        return None
    guessed = model_work(facts)
    works = dict(zip(ENDS, (even(guessed), guessed), strict=True))
    prompt_work = with_prompt(guessed, facts, CONTEXT, N_CTX)
    budget_bytes = (gib - 1) * GIB
    llama = LlamaCpp(facts, budget_bytes, CONTEXT)
    rivals_s = {
        (rival, end): _rival_decode_s(llama, machine, work, rival)
        for rival in (CPU_SHARE, NO_WAIT)
        for end, work in works.items()
    }
    starts = llama.starts(machine, prompt_work, N_CTX)
    rival_prompt_s = min(start.prompt_s for start in starts)
    n_generated = USUAL.workload(N_CTX).n_generated

    def one_start(end: str, prompt: float, decode: float) -> float:
        """The time of the planned mix in llama.cpp's best start ÷ our time."""
        work = works[end]
        theirs_s = min(
            its.prompt_s
            + n_generated
            * _rival_decode_s(replace(llama, budget_bytes=its.left_bytes), machine, work, CPU_SHARE)
            for its in starts
        )
        ours_s = rival_prompt_s / prompt + n_generated * rivals_s[CPU_SHARE, end] / decode
        return theirs_s / ours_s

    def decodes(its: Plan) -> dict[tuple[str, str], float]:
        ours_s = {e: best_s(machine, w, its.sharing, 1, hybrid=True) for e, w in works.items()}
        return {key: float(s / ours_s[key[1]]) for key, s in rivals_s.items()}

    def prompts(its: Plan) -> float:
        ours_s = prefill_s(machine, prompt_work, its.sharing, N_CTX, its.n_ubatch, hybrid=True)
        return float(rival_prompt_s / ours_s)

    ratios, ratio = decodes(plan), prompts(plan)
    decode_rule = prompt_rule = ""
    if min(r for (rival, _), r in ratios.items() if rival == CPU_SHARE) < GOAL:
        alone = decodes(_plan(facts, gib, machine, DECODING))
        best = min(r for (rival, _), r in alone.items() if rival == CPU_SHARE)
        decode_rule = "memory kept for prompts" if best >= GOAL else "fewer slots or layers fit"
    if ratio < GOAL:
        alone_ratio = prompts(_plan(facts, gib, machine, PROMPTS))
        kept = alone_ratio >= GOAL
        prompt_rule = "memory kept for answers" if kept else "dense weights or groups of experts"
    together = min(one_start(end, ratio, ratios[CPU_SHARE, end]) for end in ENDS)
    return Cell(
        title, gib, name, ratios, ratio, together, decode_rule, prompt_rule,
        plan.decode_end is not None,
    )  # fmt: skip


def _rival_decode_s(llama: LlamaCpp, machine: Machine, work: ModelWork, rival: str) -> float:
    """Return the seconds of a decode in the fastest of llama.cpp's ways, with pinned copies.

    `rival`: how a layer's experts may be split. NO_WAIT adds the best that is known (`no_wait_s`),
    which refuses experts with biases.
    """
    in_place_s = float(cpu_s(machine, work, llama.n_cpu_moe(), 1))
    seconds = min(in_place_s, llama.cache_s(machine, work))
    if rival == NO_WAIT and not llama.facts.expert_biases:
        without_wait = replace(machine, per_split_s=NO_WAIT_LAYER_S)
        sharing = llama.cache_split(without_wait, work)
        seconds = min(seconds, no_wait_s(without_wait, work, sharing))
    return seconds


def no_wait_s(machine: Machine, work: ModelWork, sharing: Sharing) -> float:
    """Return the seconds of a decode that is split inside a captured graph.

    A kernel writes the ids and rows of the CPU's experts to mapped memory. The next kernel copies
    the other missing experts, then come the products of all experts on the device. Threads of the
    host compute meanwhile, and the kernel that adds up the rows waits for them. So copies and the
    device's products take turns, and nothing waits for the host between layers. Words and rows over
    the link take `machine.per_split_s`. The share that is copied is the fastest, and all cores
    compute.

    Source: ggml/src/ggml-cuda/moe-cpu-share.cu of FearL0rd/buun-llama-cpp at commit 639823e8.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    resident = replace(work, n_expert_layers=sharing.n_resident)
    seconds = float(hybrid_s(machine, resident, sharing, 1))
    if not n_streamed:
        return seconds
    pieces = float(work.union(1))
    misses = (1.0 - float(expected_hits(work, sharing, pieces))) * pieces
    hits = pieces - misses
    host_s = float(work.expert.cpu_seconds(machine, 1))
    device_s = float(work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, 1))
    copy_s = work.expert.size_bytes / machine.link_bytes_per_s
    n_copied = (misses * host_s - hits * device_s) / (host_s + copy_s + device_s)
    n_copied = min(max(n_copied, 0.0), misses)
    layer_s = max(
        (misses - n_copied) * host_s,
        n_copied * copy_s + (hits + n_copied) * device_s,
        misses * work.expert.size_bytes / machine.most_ram_bytes_per_s,
    )
    return float(seconds + n_streamed * (layer_s + machine.per_split_s))


def table(found: Sequence[Cell]) -> str:
    """Number of cells below the goal and their least ratio, by model."""
    columns = [(rival, end) for rival in (CPU_SHARE, NO_WAIT) for end in ENDS]
    heads = ["model", "cells", *(f"answers, {r}, {e}" for r, e in columns), "prompts"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for title in (*README_TITLES, "all"):
        its = [cell for cell in found if title in (cell.title, "all")]
        ratios = [[cell.decodes[column] for cell in its] for column in columns]
        ratios.append([cell.prompts for cell in its])
        lines.append(f"| {title} | {len(its)} | {' | '.join(map(_lost, ratios))} |")
    return "\n".join(lines)


def _lost(ratios: Sequence[float]) -> str:
    lost = [ratio for ratio in ratios if ratio < GOAL]
    return f"{len(lost)}, least {min(lost):.2f}" if lost else "none"


def rules(found: Sequence[Cell]) -> str:
    """Number of cells below the goal beside llama.cpp's own ways, by the rule that makes them."""
    counts = Counter(f"answers: {cell.decode_rule}" for cell in found if cell.decode_rule)
    counts += Counter(f"prompts: {cell.prompt_rule}" for cell in found if cell.prompt_rule)
    lines = ["| what makes the cell slower | cells |", "|---|---|"]
    lines += [f"| {rule} | {n} |" for rule, n in sorted(counts.items())]
    lost, n = sum(cell.loses for cell in found), len(found)
    slower = sum(cell.one_start < GOAL for cell in found)
    lines.append(f"| answers or prompts below {GOAL} | {lost} of {n} |")
    lines.append(f"| prompts and answers together below {GOAL} of one start | {slower} of {n} |")
    lines += ["", "The combinations that lose to one start:", ""]
    lines += [
        f"- {cell.title} on {cell.gib} GiB with the rates of ({cell.machine}): {cell.one_start:.2f}"
        for cell in found
        if cell.one_start < GOAL
    ]
    return "\n".join(lines)


def page(found: Sequence[Cell]) -> str:
    """The text of docs/hybrid-model.md with new tables of default plans."""
    return filled(PAGE, {"defaults": table(found), "default rules": rules(found)})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        PAGE.write_text(page(list(cells(Path(name)))), encoding="utf-8")
