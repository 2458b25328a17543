"""Sets the context of a configuration whose user asked for none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts
from offload.model_file import read_facts
from offload.notes import Note, NoteKind
from offload.open_check import check_opens
from offload.plan.context_choice import LEAST_CTX, RequestSeconds, choose_context
from offload.plan.workload import TokenMix
from offload.times.context import context_memory, mtp_context_bytes, trained_context
from offload.times.decodes import cpu_s
from offload.times.disk import DiskUse
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.prompts import prefill_s
from offload.times.work import model_work
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.opening.drafters import with_usable_drafters
from specoffload.opening.kept_plan import disk_rate
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned
from specoffload.opening.target import projector_of, rope_of, wanted_of
from specoffload.opening.tokenizer import tokenizer_complaint

# Mix of the request by which contexts are compared if no mix is known. It has more prompt tokens
# than the usual mix of plans, because long contexts are for long prompts.
_USUAL = TokenMix(8, 1)
SHOWN_CTX = (LEAST_CTX, 32768, 65536, 131072)  # contexts whose cost `plan` shows
_LAYERS_IN_RAM = 1.5  # layers of experts that have room beside a context, as others are read
_MOST_OF_RAM = 1 / 4  # most share that a context takes of the memory that the weights leave


def context_complaint(config: Config, facts: ModelFacts) -> str:
    """Say that --ctx-size exceeds what the model was trained for, or ""."""
    trained = trained_context(facts, rope_of(config))
    if config.ctx_size is None or config.ctx_size <= trained:
        return ""
    return (
        f"--ctx-size {config.ctx_size}: the model was trained for {trained:,} tokens, so texts "
        "beyond them are likely to be wrong (--rope-scaling and --rope-scale stretch the context)"
    )


def sized(config: Config, planner: Planner) -> Config:
    """Return `config` with a context size, and the reason if it had none.

    The context is chosen for the devices of the planner's machine and of its workers, or for its
    RAM if the context is there.
    """
    if config.ctx_size is not None:
        return config
    request_s = _on_devices(planner)
    if planner.in_ram:
        request_s = _InRam(config, planner.facts, planner.ram_bytes).request_s
    return _sized(config, planner.facts, request_s)


def planned_with_context(config: Config, own: PlanOptions) -> tuple[Config, Planned]:
    """Return `config` with a context size as `sized` does, and the plan for it.

    The plan is the layout that a start executes on this machine, or on the one that `own`
    describes. Raises BadModel, DoesNotFit or UsageError, or WorkerUnavailable for a worker that
    cannot be reached.
    """
    return _planned(*planner_of(config, own))


def planner_of(config: Config, own: PlanOptions) -> tuple[Config, Planner]:
    """Return `config` with drafters that can draft, and a planner for the machine of `own`."""
    config.check_unused_workers()
    check_opens(read_facts(config.model))
    if config.draft is not None:
        check_opens(read_facts(config.draft), is_draft=True)
    n_told, config = len(config.spec.reasons), with_usable_drafters(config)
    facts = read_facts(config.model)
    own_complaints = (tokenizer_complaint(facts.header.metadata), context_complaint(config, facts))
    complaints = (*filter(None, own_complaints), *config.spec.reasons[n_told:])
    return config, Planner(config, own, complaints)


def _planned(config: Config, planner: Planner) -> tuple[Config, Planned]:
    config = sized(config, planner)
    return config, planner.planned(config.ctx_size)


@dataclass(frozen=True)
class ContextCost:
    """A context that could be chosen, and the plan with it. None: it does not fit memory."""

    n_ctx: int
    planned: Planned | None


@dataclass(frozen=True)
class Contexts:
    """Why a context was chosen, and what it and others cost. Empty if the user asked for one."""

    why: str = ""
    costs: tuple[ContextCost, ...] = ()


def planned_contexts(config: Config, planner: Planner) -> tuple[Config, Planned, Contexts]:
    """Return what `planned_with_context` does, and what other contexts would cost.

    These are the contexts of `SHOWN_CTX` that the model was trained for, and the chosen one.
    """
    with_size, planned = _planned(config, planner)
    if config.ctx_size is not None:
        return with_size, planned, Contexts()
    trained = trained_context(planner.facts, rope_of(config))
    sizes = sorted({*(n for n in SHOWN_CTX if n <= trained), planned.context.n_ctx})
    costs = []
    for n_ctx in sizes:
        its: Planned | None = None
        with suppress(DoesNotFit):
            its = planner.planned(n_ctx)
        # On the CPU, a context and the dense weights have to be in RAM.
        is_left = its is None or its.room is None or bool(its.room.available_bytes)
        costs.append(ContextCost(n_ctx, its if is_left else None))
    return with_size, planned, Contexts(with_size.reasons[0], tuple(costs))


def _sized(
    config: Config, facts: ModelFacts, request_s: Callable[[int], RequestSeconds | None]
) -> Config:
    trained = trained_context(facts, rope_of(config))
    choice = choose_context(trained, request_s, for_agents=config.serves)
    why = Note(NoteKind.CONTEXT, choice.why)
    kv_offload = config.kv_offload is not False  # a chosen context is one that the GPU has room for
    return replace(
        config, ctx_size=choice.n_ctx, kv_offload=kv_offload, reasons=(why, *config.reasons)
    )


def _on_devices(planner: Planner) -> Callable[[int], RequestSeconds | None]:
    """Return a function of the context: a request's seconds, None if it does not fit memory."""

    def request_s(n_ctx: int) -> RequestSeconds | None:
        try:
            # Contexts are compared alike for every --plan-for, so that its plans can be compared.
            return request_seconds(planner.planned(n_ctx, for_kept_mix=True))
        except DoesNotFit:
            return None

    return request_s


def request_seconds(planned: Planned) -> RequestSeconds:
    """Return the seconds of a request by which contexts are compared, with this plan's context.

    It is the same request for every context, in the proportion that the plan is made for. Its hits
    are at their low end.
    """
    usual = (planned.request.mix or _USUAL).workload(LEAST_CTX)
    prompt_s = usual.n_prompt / planned.expected["prefill_tps"]
    in_ram_s = 0.0
    for part in planned.parts or (planned,):
        ring = Sharing(part.work.n_experts)
        if usual.n_prompt:
            n_ubatch = part.plan.n_ubatch
            in_ram_s += float(prefill_s(part.machine, part.work, ring, usual.n_prompt, n_ubatch))
        in_ram_s += usual.n_generated * float(cpu_s(part.machine, part.work, ring, 1))
    return RequestSeconds(prompt_s + usual.n_generated / planned.least_decode_tps, in_ram_s)


class _InRam:
    """The expected time of an answer with a context in RAM, where a simulated device has it too.

    The time of prompts counts as the same with every context, because they need no slots.
    """

    def __init__(self, config: Config, facts: ModelFacts, available_bytes: int) -> None:
        self._config, self._facts = config, facts
        self._available_bytes = available_bytes
        self._work = model_work(facts)
        self._expert_bytes = sum(e.size_bytes for e in facts.loaded if is_experts(e))

    def request_s(self, n_ctx: int) -> RequestSeconds | None:
        facts, config = self._facts, replace(self._config, ctx_size=n_ctx)
        wanted = wanted_of(config, projector_of(config))
        context = replace(wanted.context, kv_offload=True)  # all of it is in RAM
        taken_bytes = context_memory(facts, context).total_bytes + wanted.reserve_bytes
        taken_bytes += mtp_context_bytes(facts, context) if wanted.mtp else 0
        machine = TYPICAL
        compute_s = float(cpu_s(machine, self._work, Sharing(), 1))
        left_bytes = self._available_bytes - facts.size_bytes
        if left_bytes > 0:
            fits = taken_bytes <= _MOST_OF_RAM * left_bytes or n_ctx <= LEAST_CTX
            return RequestSeconds(compute_s) if fits else None
        # The experts are read from the disk, and the context takes some of their memory.
        memory_bytes = self._available_bytes - (facts.size_bytes - self._expert_bytes) - taken_bytes
        if memory_bytes < _LAYERS_IN_RAM * self._expert_bytes / max(1, self._work.n_expert_layers):
            return None
        disk = DiskUse(self._work, Sharing(), memory_bytes, disk_rate(config))
        return RequestSeconds(float(disk.with_reads(compute_s, 1)))
