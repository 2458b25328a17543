"""Chooses the context if the user asked for none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from offload.device import choose_device
from offload.errors import DoesNotFit
from offload.header_check import tokenizer_reason
from offload.model import ModelFacts, is_experts
from offload.model_file import read_facts
from offload.notes import Note, NoteKind
from offload.open_check import check_opens
from offload.plan.context_choice import (
    LEAST_CTX,
    STRETCHED,
    TRAINED,
    RequestSeconds,
    choose_context,
)
from offload.plan.sharing import UBATCHES
from offload.plan.workload import TokenMix
from offload.times.context_memory import context_memory, mtp_context_bytes, trained_context
from offload.times.decodes import cpu_s
from offload.times.disk import DiskUse
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.prompts import prefill_s
from offload.times.work import model_work
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.opening.choices import shared_ram_notes
from specoffload.opening.drafters import usable_drafters
from specoffload.opening.header import override_reason, target_facts
from specoffload.opening.kept_plan import disk_rate
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned
from specoffload.opening.target import projector_of, rope_of, wanted_of

# Mix of the request by which contexts are compared if no mix is known. It has more prompt tokens
# than the usual mix of plans, because long contexts are for long prompts.
_USUAL = TokenMix(8, 1)
SHOWN_CTX = (LEAST_CTX, 32768, 65536, 131072)  # contexts whose cost `plan` shows
_LAYERS_IN_RAM = 1.5  # layers of experts that have room beside a context, as others are read
_MOST_OF_RAM = 1 / 4  # most share that a context takes of the memory that the weights leave


def context_reason(config: Config, facts: ModelFacts) -> str:
    """Say that --ctx-size exceeds what the model or the rope flags allow, or ""."""
    trained = trained_context(facts, rope_of(config))
    if config.ctx_size is None or config.n_ctx_each(config.ctx_size) <= trained:
        return ""
    if trained > facts.n_ctx_train:
        own, remedy = f"the rope flags stretch the context to {trained:,} tokens", ""
    else:
        own = f"the model was trained for {trained:,} tokens"
        remedy = " (--rope-scaling and --rope-scale stretch the context)"
    return (
        f"--ctx-size {config.ctx_size}: {own}, so texts beyond them are likely to be wrong{remedy}"
    )


@dataclass(frozen=True)
class ContextSize:
    """The size of the context, and why it was chosen; "" if the user asked for it.

    `n_ctx` is 0 for the model's own length.
    """

    n_ctx: int
    reason: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        return (Note(NoteKind.CONTEXT, self.reason),) if self.reason else ()


def chosen_context(config: Config, planner: Planner) -> ContextSize:
    """Return the context that the user asked for, or choose one.

    It is chosen for the devices of the planner's machine and of its workers, or for its RAM if the
    context is there.
    """
    if config.ctx_size is not None:
        return ContextSize(config.ctx_size)
    request_s = _on_devices(planner)
    if planner.in_ram:
        request_s = _InRam(config, planner).request_s
    trained = trained_context(planner.facts, rope_of(config))
    own = STRETCHED if trained > planner.facts.n_ctx_train else TRAINED
    choice = choose_context(trained, request_s, for_agents=config.serves, own=own)
    return ContextSize(choice.n_ctx, choice.reason)


def planned_with_context(config: Config, own: PlanOptions) -> Planned:
    """Return the plan with the context that a start chooses.

    The plan is the layout that a start executes on this machine, or on the one that `own`
    describes. Raises BadModel, DoesNotFit or UsageError, or WorkerUnavailable for a worker that
    cannot be reached.
    """
    planner = planner_of(config, own)
    return planner.planned(chosen_context(config, planner).n_ctx)


def planner_of(config: Config, own: PlanOptions) -> Planner:
    """Return a planner for the machine of `own`, with the drafters that can draft."""
    config.check_unused_workers()
    facts = target_facts(config)
    check_opens(facts)
    if config.spec.draft is not None:
        check_opens(read_facts(config.spec.draft), is_draft=True)
    spec = usable_drafters(facts, config.spec)
    own_reasons = (
        tokenizer_reason(facts.header.metadata),
        override_reason(facts),
        context_reason(config, facts),
    )
    reasons = (*filter(None, own_reasons), *spec.reasons[len(config.spec.reasons) :])
    if own.hardware is None:
        shared_ram_notes(choose_device(config.device), config)  # logs flags without effect
    return Planner(config, spec, own, reasons)


@dataclass(frozen=True)
class ContextCost:
    """A context that could be chosen, and the plan with it. None: it does not fit memory."""

    n_ctx: int
    planned: Planned | None


@dataclass(frozen=True)
class Contexts:
    """Why a context was chosen, and what it and others cost. Empty if the user asked for one."""

    reason: str = ""
    costs: tuple[ContextCost, ...] = ()


def planned_contexts(config: Config, planner: Planner) -> tuple[Planned, Contexts]:
    """Return what `planned_with_context` does, and what other contexts would cost.

    These are the contexts of `SHOWN_CTX` that the model was trained for, and the chosen one.
    """
    size = chosen_context(config, planner)
    planned = planner.planned(size.n_ctx)
    if config.ctx_size is not None:
        return planned, Contexts()
    trained = trained_context(planner.facts, rope_of(config))
    sizes = sorted({*(n for n in SHOWN_CTX if n <= trained), planned.context.n_ctx})
    costs = []
    for n_ctx in sizes:
        with_context: Planned | None = None
        with suppress(DoesNotFit):
            with_context = planner.planned(n_ctx)
        # On the CPU, a context and the dense weights have to be in RAM.
        is_left = (
            with_context is None
            or with_context.room is None
            or bool(with_context.room.available_bytes)
        )
        costs.append(ContextCost(n_ctx, with_context if is_left else None))
    return planned, Contexts(size.reason, tuple(costs))


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
    mix = planned.request.mix or _USUAL
    usual = mix.workload(LEAST_CTX)
    prompt_s = usual.n_prompt / planned.expected["prefill_tps"]
    in_ram_s = 0.0
    for part in planned.parts:
        ring = Sharing(part.work.n_experts)
        if usual.n_prompt:
            n_ubatch = part.plan.n_ubatch
            in_ram_s += float(prefill_s(part.machine, part.work, ring, usual.n_prompt, n_ubatch))
        in_ram_s += usual.n_generated * float(cpu_s(part.machine, part.work, ring, 1))
    long = mix.workload(UBATCHES[-1])  # shorter prompts would hide what a smaller ubatch costs
    return RequestSeconds(
        prompt_s + usual.n_generated / planned.least_decode_tps,
        in_ram_s,
        long.n_prompt / planned.prompt_tps(max(1, long.n_prompt)),
        long.n_generated / planned.least_decode_tps,
    )


class _InRam:
    """The expected time of an answer with a context in RAM, where a simulated device has it too.

    The time of prompts counts as the same with every context, because they need no slots.
    """

    def __init__(self, config: Config, planner: Planner) -> None:
        self._config, self._planner = config, planner
        self._facts = facts = planner.facts
        self._available_bytes = planner.ram_bytes
        self._work = model_work(facts)
        self._expert_bytes = sum(e.size_bytes for e in facts.loaded if is_experts(e))

    def request_s(self, n_ctx: int) -> RequestSeconds | None:
        facts, config = self._facts, self._config
        wanted = wanted_of(config, self._planner.choices(n_ctx), projector_of(config))
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
