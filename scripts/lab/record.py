"""Fills a table of docs/background.md: our model beside the record on a 12 GB card, term by term.

The record is Strata's, for Qwen3.8-Flash-Next in Q2_0 on an RTX 5070 with 64 GB of RAM. Experts get
the published file's size, and all else is q8_0. It reads a header only: no model is opened, and no
time is measured.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lab.synth.shape import resolve
from lab.synth.write import plan_shape, write_header_only
from lab.tables import filled, page_of
from offload.model import ModelFacts, WeightPlace, is_experts
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.plan.workload import DECODING
from offload.times.context_memory import ContextOptions
from offload.times.decodes import hybrid_s
from offload.times.hits import Sharing, expected_hits
from offload.times.machine import TYPICAL, Machine, ram_seen, vram_seen
from offload.times.prompts import prefill_s
from offload.times.work import ModelWork, WeightWork, model_work, with_context

PAGE = page_of("record")
TITLE = "Qwen3.8-Flash-Next"
GIB = 1 << 30
# UD-Q2_0 has 70.6 GB, of which 28.8 GB are the table (release notes of Strata 0.2.11).
FILE_BYTES, TABLE_BYTES = 70.6e9, 28.8e9
VRAM_BYTES = 11 * GIB  # 12 GiB less the margin that a plan keeps free
# Data sheets: GDDR7 at 672 GB/s, two channels of DDR5-5200, PCIe 4.0 x16. TFLOPS lie between those
# of the neighbouring cards of --hardware by number of cores.
MACHINE = replace(
    TYPICAL,
    vram_bytes_per_s=vram_seen(672e9), gpu_flops=22e12, link_bytes_per_s=25e9, cpu_flops=0.3e12,
    ram_bytes_per_s=ram_seen(83.2e9, 2)[0], shared_ram_bytes_per_s=ram_seen(83.2e9, 2)[1],
)  # fmt: skip
CPU_COST = 1.25  # as for other types of 2 bits
# The share of drafts whose first, second and third token is accepted (docs/hybrid-model.md).
ACCEPTED = (0.873, 0.762, 0.665)
RECORD = {4096: 93.5, 131072: 76.0}  # tokens/s by tokens of context


@dataclass(frozen=True)
class Case:
    """One context on one machine."""

    machine: Machine
    work: ModelWork
    sharing: Sharing
    hits: float | None = None  # of one token and of batches; None: as guessed

    def decode_s(self, n_tokens: int) -> float:
        return float(hybrid_s(self.machine, self.work, self.sharing, n_tokens, hits=self.hits))

    @property
    def draft_step_s(self) -> float:
        """Seconds of one step of the model's own layer for drafts, which lies on the GPU."""
        gpu = self.machine.vram_bytes_per_s, self.machine.gpu_flops
        parts = self.work.dense, self.work.used(1), self.work.head
        return (
            float(sum(part.seconds(*gpu, 1) for part in parts))
            + self.work.kernels_per_layer * self.machine.per_kernel_s
        )

    def tps(self, n_drafted: int | None = None) -> float:
        """Tokens/s with drafts of `n_drafted` tokens. None: of the best length up to 3."""
        if n_drafted is None:
            return max(self.tps(n) for n in range(len(ACCEPTED) + 1))
        n_tokens = 1 + sum(ACCEPTED[:n_drafted])
        return n_tokens / (self.decode_s(1 + n_drafted) + n_drafted * self.draft_step_s)


def facts_of(folder: Path) -> ModelFacts:
    """The published shape with the file's sizes: experts have what the other weights leave."""
    shape = resolve(TITLE, "full", quant="q8_0")
    facts = read_facts(write_header_only(plan_shape(shape, "none"), folder / "record.gguf"))
    places = facts.weights.values()
    n_values = sum(math.prod(p.entry.shape) for p in places if is_experts(p.entry))
    table_bytes = sum(p.entry.size_bytes for p in places if "per_layer" in p.entry.name)
    others = sum(p.entry.size_bytes for p in places if not is_experts(p.entry)) - table_bytes
    bytes_per_value = (FILE_BYTES - TABLE_BYTES - others) / n_values

    def sized(place: WeightPlace) -> WeightPlace:
        entry = place.entry
        if not is_experts(entry):
            return place
        size_bytes = round(bytes_per_value * math.prod(entry.shape))
        return replace(place, entry=replace(entry, type="q2_0", size_bytes=size_bytes))

    return replace(facts, weights={name: sized(p) for name, p in facts.weights.items()})


def case_of(facts: ModelFacts, n_ctx: int) -> Case:
    """The plan for decoding with split layers, which leaves room for one more layer for drafts."""
    work = model_work(facts)
    work = replace(work, expert=replace(work.expert, cpu_cost=CPU_COST))
    layer_bytes = work.dense.size_bytes + work.n_experts * work.expert.size_bytes
    context = ContextOptions(n_ctx)
    request = PlanRequest(
        VRAM_BYTES - int(layer_bytes), n_cpu_moe="fit", context=context,
        most_ubatch=UBATCHES[-1], machine=MACHINE, plan_for_splits=True, mix=DECODING,
    )  # fmt: skip
    plan = make_plan(facts, request)
    context = replace(context, n_ubatch=plan.n_ubatch)
    return Case(MACHINE, with_context(work, facts, context), plan.sharing)


def needed(case: Callable[[float], Case], best: float, today: float, wanted: float) -> float | None:
    """The value nearest to `today` with which `case` reaches `wanted` tokens/s; None: none does."""
    if case(best).tps() < wanted:
        return None
    reaches, fails = best, today
    for _ in range(40):
        middle = (reaches + fails) / 2
        reaches, fails = (middle, fails) if case(middle).tps() >= wanted else (reaches, middle)
    return reaches


def terms(case: Case, n_tokens: int) -> dict[str, float]:
    """Seconds of a decode by term. They add up to all of it."""
    machine, work = case.machine, case.work

    def without(**changes: float) -> float:
        less = replace(case, machine=replace(machine, **changes))  # type: ignore[arg-type]
        return case.decode_s(n_tokens) - less.decode_s(n_tokens)

    context_s = case.decode_s(n_tokens) - replace(
        case, work=replace(work, context=WeightWork())
    ).decode_s(n_tokens)
    gpu = machine.vram_bytes_per_s, machine.gpu_flops
    dense_s = float(work.n_layers * work.dense.seconds(*gpu, n_tokens))
    dense_s += float(work.head.seconds(*gpu, n_tokens))
    found = {
        "kernels of 48 layers": without(per_kernel_s=0.0),
        "the host, before and after the decode": without(per_decode_s=0.0, per_new_layer_s=0.0),
        "submitting, waiting and merging of 48 split layers": without(per_split_s=0.0),
        "dense weights and head, read from VRAM": dense_s,
        "attention to the context": context_s,
    }
    rest_s = case.decode_s(n_tokens) - sum(found.values())
    return {**found, "experts: hits on the GPU, misses on the CPU and over the link": rest_s}


def table(facts: ModelFacts) -> str:
    cases = {n_ctx: case_of(facts, n_ctx) for n_ctx in RECORD}
    short = cases[4096]
    work, sizes = short.work, [1, 4]
    n_pieces = work.n_expert_layers * work.n_experts
    of_experts = n_pieces * work.expert.size_bytes
    lines = ["| term | 4k of context | 128k |", "|---|---|---|"]

    def row(name: str, value: Callable[[Case], str]) -> None:
        lines.append(f"| {name} | " + " | ".join(value(case) for case in cases.values()) + " |")

    sizes_text = f"{of_experts / 1e9:.1f} GB, {TABLE_BYTES / 1e9:.1f} GB"
    row("experts, and the table that is looked up", lambda c: sizes_text)
    row("experts that have a slot", lambda c: f"{c.sharing.n_cached / n_pieces:.0%}")
    row("layers whose experts are resident", lambda c: f"{c.sharing.n_resident}")
    row("layers whose dense weights stream", lambda c: f"{c.sharing.n_dense_streamed}")
    for n in sizes:
        what = "a token" if n == 1 else f"a batch of {n}"
        row(f"hits of {what}, guessed", lambda c, n=n: f"{_hits(c, n):.0%}")  # type: ignore[misc]
        row(f"misses of {what}, read from RAM",
            lambda c, n=n: f"{_missed_bytes(c, n) / 1e9:.2f} GB")  # type: ignore[misc]  # fmt: skip
    for n in sizes:
        what = "one token" if n == 1 else f"{n} tokens"
        by_case = [terms(case, n) for case in cases.values()]
        for name in by_case[0]:
            values = " | ".join(f"{1e3 * its[name]:.1f} ms" for its in by_case)
            lines.append(f"| {what}: {name} | {values} |")
        row(f"{what}: together",
            lambda c, n=n: f"**{1e3 * c.decode_s(n):.1f} ms**")  # type: ignore[misc]  # fmt: skip
    row("a draft step of its own layer", lambda c: f"{1e3 * c.draft_step_s:.1f} ms")
    row("tokens/s without drafts", lambda c: f"{c.tps(0):.0f}")
    row("**tokens/s with drafts of the best length**", lambda c: f"**{c.tps():.0f}**")
    lines.append("| the record | " + " | ".join(f"{tps:g}" for tps in RECORD.values()) + " |")
    row("prompts in ubatches of 4,096, tokens/s", lambda c: f"{_prompt_tps(c):.0f}")
    lines += ["", "One thing alone that would have to be true to reach the record:", "",
              "| what | today | 4k of context | 128k |", "|---|---|---|---|"]  # fmt: skip
    for name, today, unit, best, change in _changes():
        found = [
            needed(partial(change, case), best, today, RECORD[n_ctx])
            for n_ctx, case in cases.items()
        ]
        now = f"{today * _SCALE[unit]:.0f} {unit}" if today else "as guessed"
        cells = [
            "not enough alone" if x is None else f"{x * _SCALE[unit]:.0f} {unit}" for x in found
        ]
        lines.append(f"| {name} | {now} | {' | '.join(cells)} |")
    return "\n".join(lines)


_SCALE = {"%": 100.0, "µs": 1e6, "GB/s": 1e-9}


def _prompt_tps(case: Case) -> float:
    return float(4096 / prefill_s(case.machine, case.work, case.sharing, 4096, 4096))


def _hits(case: Case, n_tokens: int) -> float:
    return float(expected_hits(case.work, case.sharing, case.work.union(n_tokens)))


def _missed_bytes(case: Case, n_tokens: int) -> float:
    work = case.work
    missing = (1.0 - _hits(case, n_tokens)) * work.union(n_tokens)
    return float(work.n_expert_layers * missing * work.expert.size_bytes)


def _with_less_dense(case: Case, share: float) -> Case:
    """The case with fewer bytes of dense weights, whose memory goes to slots."""
    work = case.work
    dense, head = (
        replace(part, size_bytes=share * part.size_bytes) for part in (work.dense, work.head)
    )
    freed = (1 - share) * (work.n_layers * work.dense.size_bytes + work.head.size_bytes)
    n_slots = case.sharing.n_slots + int(freed // work.expert.size_bytes)
    less = replace(work, dense=dense, head=head)
    return replace(case, work=less, sharing=case.sharing.with_slots(n_slots))


def _changes() -> list[tuple[str, float, str, float, Callable[[Case, float], Case]]]:
    """What is changed: its name, today's value, its unit, the best value tried, and how."""

    def machine(**changes: float) -> Callable[[Case], Case]:
        return lambda c: replace(c, machine=replace(c.machine, **changes))  # type: ignore[arg-type]

    ram = MACHINE.ram_bytes_per_s
    return [
        ("hits", 0.0, "%", 1.0, lambda c, x: replace(c, hits=x)),
        ("bytes of dense weights and head", 1.0, "%", 0.1, _with_less_dense),
        ("cost of a split layer", MACHINE.per_split_s, "µs", 0.0,
         lambda c, x: machine(per_split_s=x)(c)),
        ("RAM's rate, as the CPU reads it", ram, "GB/s", 4 * ram,
         lambda c, x: machine(ram_bytes_per_s=x, shared_ram_bytes_per_s=x)(c)),
    ]  # fmt: skip


def page() -> str:
    with tempfile.TemporaryDirectory() as folder:
        facts = facts_of(Path(folder))
    return filled(PAGE, {"record": table(facts)})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
