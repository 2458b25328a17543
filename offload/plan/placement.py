"""Makes the plan from a model's header and a budget, before anything is loaded. Pure.

Experts are kept in host memory and stream through slots. Those of some layers may be resident.
Dense weights are resident while they fit. If they do not fit, the dense weights of some layers
stream too. These layers are spread evenly over the model. The plan gives a reason for each choice.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from offload.decode import SMALL_BATCH
from offload.errors import DoesNotFit
from offload.model import ModelFacts, TensorEntry, is_experts, layer_of
from offload.notes import Note, NoteKind, kind_of
from offload.plan.candidates import Limits
from offload.plan.ends import Speeds, hit_words, other_end, speeds_of
from offload.plan.lending import BufferSizes, Lending, SlotTail, lending_of
from offload.plan.long_prompts import LONG_UBATCHES, LONGEST_PROMPT, LongPrompt
from offload.plan.objective import MeasuredDecode, Objective, Seconds
from offload.plan.row_draft import MtpPlan, plan_mtp
from offload.plan.sharing import (
    SMALL_UBATCHES,
    UBATCHES,
    Choice,
    choose_sharing,
    least_bytes,
    sized,
)
from offload.plan.slot_layout import SlotLayout, slot_layout
from offload.plan.weights import Parts, Weights, device_bytes, least_slots
from offload.plan.working import WorkingMemory, working_memory
from offload.plan.workload import DECODING, USUAL, PlannedWork, TokenMix
from offload.routing.routing import HitCurve, UnionCurve
from offload.schedule.passes import group_size
from offload.times.context_memory import (
    DEFAULT_UBATCH,
    ContextOptions,
    context_memory,
)
from offload.times.first_table import modelled_crossover
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL, Machine
from offload.times.prompts import with_prompt
from offload.times.work import LayersWork, ModelWork
from offload.units import plural

MARGIN_BYTES = 1 << 30  # default of llama.cpp's --fit-target
# Bytes that stay free on a GPU, whatever --vram says. cuBLAS's workspaces, CUDA graphs and kernels
# that are loaded late take device memory after the slots. Without that memory they abort.
LEAST_FREE_BYTES = 512 << 20
# Dense weights that may stream. Only MUL_MAT reads them, and at most once in a graph.
DENSE = re.compile(
    r"^blk\.\d+\.(attn_(q|k|v|qkv|output|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b|gate)|ssm_g"
    r"|ffn_(up|down|gate|up_shexp|down_shexp|gate_shexp|routed_up|routed_down))\.weight$"
)
_SMALLER_CONTEXT = ", lower --ctx-size or use a smaller cache (-ctk q8_0 -ctv q8_0)"
_CACHE_IN_RAM = ", or keep it in RAM (-nkvo)"

NCpuMoe = int | frozenset[int] | Literal["fit"] | None
Passes = Literal["auto", "on"]  # "auto": use passes if they are expected to be faster than the CPU


@dataclass(frozen=True)
class Plan:
    """The weights that stream, their slots, and the other uses of device memory."""

    streamed: tuple[TensorEntry, ...]
    resident_bytes: int
    layout: SlotLayout
    reasons: tuple[str, ...]
    reserve_bytes: int = 0  # device memory for caches, buffers and other models such as a draft
    n_ubatch: int = DEFAULT_UBATCH
    min_batch: int | None = None  # tokens from which streaming is expected to pay; None: never
    pass_experts: int = 0  # experts of a pass, if a layer does not fit the slots; 0: it fits
    declined: tuple[str, ...] = ()  # batches that the CPU computes because slots are too few
    n_resident: int = 0  # layers whose experts are resident
    passes: Passes = "auto"
    working: WorkingMemory = WorkingMemory()  # its device memory is a part of `reserve_bytes`
    mtp: MtpPlan | None = None  # plan of the layers for multi-token prediction, if they are loaded
    # Tokens of a batch from which the device attends to a KV cache in RAM; None: the CPU does.
    attention_batch: int | None = None
    decode_end: Speeds | None = None  # speeds with --plan-for decode, if answers would be faster
    buffer: BufferSizes | None = None  # the context's compute buffer; None: there is no context
    not_lent_reason: str = ""  # why the buffer cannot hold experts between prompts; "": it may

    @property
    def sharing(self) -> Sharing:
        """The plan's use of device memory, as the machine model's input."""
        dense = {layer_of(entry.name) for entry in self.streamed if not is_experts(entry)}
        return Sharing(_expert_slots(self.layout), self.n_resident, len(dense), self.n_lent)

    @property
    def n_lent(self) -> int:
        """Number of slots in the compute buffer that are expected to hold experts."""
        pool = self._lending.pool
        if pool is None or self.buffer is None:
            return 0
        return SlotTail(pool, self.buffer.size_bytes).n_open(self.buffer.small_bytes)

    @property
    def _lending(self) -> Lending:
        """The one decision whether slots are lent, of plans and of runs."""
        if self.buffer is None or self.not_lent_reason:
            return Lending(reason=self.not_lent_reason or "no context is planned")
        return lending_of(self.layout.pools, least_slots(self.layout), self.buffer.n_tokens)

    @property
    def streamed_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.streamed)

    @property
    def used_bytes(self) -> int:
        """Device memory of weights, slots, caches and buffers."""
        return self.resident_bytes + self.slot_bytes + self.reserve_bytes

    @property
    def slot_bytes(self) -> int:
        return self.layout.size_bytes

    def patterns(self, *, experts: bool | None = None) -> tuple[str, ...]:
        """Return regular expressions that match exactly the streamed weights, for libllama.

        `experts`: match only experts' weights (True), only others (False) or both (None).
        """
        return name_patterns(
            entry.name for entry in self.streamed if experts is None or is_experts(entry) == experts
        )

    def with_room(self, room_bytes: int) -> Plan:
        """Return the plan with as many slots as fit `room_bytes`.

        Raises DoesNotFit if not even one token's experts fit.
        """
        whole = self.layout.with_slots([pool.most_slots for pool in self.layout.pools])
        return self._through(_sized(whole, room_bytes))

    def with_slots(self, n_slots: Sequence[int]) -> Plan:
        return self._through(self.layout.with_slots(n_slots))

    def lending(self) -> tuple[Plan, str]:
        """Return the plan whose largest pool of experts can be continued in a compute buffer.

        Returns the plan itself and the reason why not if that is impossible or useless.
        """
        lending = self._lending
        if lending.pool is None:
            return self, lending.reason
        pools = list(self.layout.pools)
        pools[lending.at] = lending.pool
        return self._through(replace(self.layout, pools=tuple(pools))), ""

    def with_passes(self, passes: Passes) -> Plan:
        """Return the plan with this rule for batches whose experts do not fit the slots at once.

        "on": such batches are computed in passes over groups of experts. "auto": they are computed
        so if streaming is expected to beat the CPU within a ubatch, and otherwise by the CPU.
        """
        return replace(self, passes=passes)._through(self.layout)

    def _through(self, layout: SlotLayout) -> Plan:
        reasons = [reason for reason in self.reasons if kind_of(reason) is not NoteKind.PASSES]
        plan = replace(self, layout=layout, reasons=tuple(reasons), pass_experts=0, declined=())
        tight = [pool for pool in layout.pools if not pool.holds(self.n_ubatch)]
        if not tight:
            return plan
        pool = min(tight, key=lambda p: p.n_slots)
        n_group = int(group_size(pool.n_experts, pool.n_slots, pool.slot_bytes))
        what = f"GPU memory holds {pool.n_slots} of a layer's {pool.n_experts} experts at once"
        pays = self.min_batch is not None and self.min_batch <= self.n_ubatch
        if self.passes == "on" or pays:
            group = plural(n_group, "expert")
            how = f"{what}; batches that use more are computed in passes over {group}"
            return replace(plan, pass_experts=n_group).because(Note(NoteKind.PASSES, how))
        declined = (
            f"{what}; the CPU computes batches that use more, which is faster than copying "
            "their experts"
        )
        return replace(plan, declined=(declined,))

    @property
    def computes_ubatches(self) -> bool:
        """True if the device, and not the CPU, computes a whole ubatch of a prompt."""
        takes = self.min_batch is not None and self.min_batch <= self.n_ubatch
        return not self.streamed or (takes and not self.declined)

    def because(self, *reasons: str) -> Plan:
        """Return the plan with more reasons."""
        return replace(self, reasons=(*self.reasons, *reasons))


@dataclass(frozen=True)
class PlanRequest:
    """The limits of a plan, and the workload that it is made for."""

    budget_bytes: int | None = None  # device memory for everything; None: no limit
    # Part of the budget for other models: a draft with its context, and a projector of images.
    reserve_bytes: int = 0
    projector_bytes: int = 0  # the projector's part of `reserve_bytes`
    host_projector_bytes: int = 0  # RAM of a projector that the CPU computes beside a GPU
    context: ContextOptions | None = None  # its memory is part of the budget, too
    most_ubatch: int | None = None  # largest ubatch to choose from; None: use the context's ubatch
    n_gpu_layers: int | None = None  # layers whose dense weights stay resident; None: all that fit
    # Number of layers whose experts stream, or the layers whose experts do not. None: all stream.
    # "fit": the fastest number.
    n_cpu_moe: NCpuMoe = None
    stream_experts: bool = True  # False: all experts are resident
    host_bytes: int | None = None  # most RAM for streamed weights; exceeded if no plan fits it
    passes: Passes = "auto"  # rule for batches whose experts do not fit the slots at once
    plan_for_splits: bool = False  # True: decodes may split layers, so slots serve every batch
    shares_prompts: bool = True  # False: other devices compute the same prompts at the same time
    hits: HitCurve | None = None  # hits counted with this model
    unions: UnionCurve | None = None  # experts of batches, counted with this model
    decodes: tuple[MeasuredDecode, ...] = ()  # decodes timed by earlier starts, the latest last
    mix: TokenMix | None = None  # proportion of prompt to generated tokens; None: `USUAL`
    mtp: bool = False  # load the layers for multi-token prediction, which must be usable
    tuned_ubatch: int | None = None  # the ubatch that was fastest when prompts were measured
    lend: bool = True  # cache experts in the compute buffer between prompts
    not_lent_reason: str = ""  # why the devices cannot do that
    # The context, if its memory is not part of the budget. None: it is, or there is none.
    uncounted: ContextOptions | None = None
    machine: Machine = TYPICAL

    def reserve_of(self, facts: ModelFacts, n_ubatch: int, *, streams_experts: bool = False) -> int:
        """Return the device memory that is not for weights and slots, with this ubatch.

        `streams_experts`: experts stream, so that their layers take working memory.
        """
        if self.context is None:
            return self.reserve_bytes
        spec = replace(self.context, n_ubatch=n_ubatch)
        working_bytes = self.working_of(facts, n_ubatch).device_bytes if streams_experts else 0
        return self.reserve_bytes + context_memory(facts, spec).total_bytes + working_bytes

    def working_of(self, facts: ModelFacts, n_ubatch: int) -> WorkingMemory:
        """Return the memory that layers take with this ubatch, if their experts stream.

        It is not part of a budget that counts weights and slots alone.
        """
        if self.context is None or not self.stream_experts:
            return WorkingMemory()
        return working_memory(facts, n_ubatch, splits=self.plan_for_splits)

    def buffer_of(self, facts: ModelFacts, n_ubatch: int) -> BufferSizes | None:
        """Return the expected sizes of the compute buffer with this ubatch, None if unknown.

        A context that is not part of the budget has an ubatch of its own.
        """
        spec = self.context or self.uncounted
        if spec is None:
            return None
        n = n_ubatch if self.context is not None else spec.n_ubatch
        size_bytes, small_bytes = (
            context_memory(facts, replace(spec, n_ubatch=most)).compute_bytes
            for most in (n, min(n, SMALL_BATCH))
        )
        return BufferSizes(n, size_bytes, small_bytes)

    @property
    def no_lending_reason(self) -> str:
        """Why the compute buffer holds no experts, whatever the plan is; "" if it may."""
        spec = self.context or self.uncounted
        if not self.lend:
            return "it is turned off"
        if not self.not_lent_reason and spec is not None and not spec.kv_offload:
            return "the KV cache is in RAM"
        return self.not_lent_reason

    def lent_bytes(self, facts: ModelFacts, n_ubatch: int) -> int:
        """Return the bytes of the compute buffer that experts take between prompts."""
        if self.no_lending_reason:
            return 0
        buffer = self.buffer_of(facts, n_ubatch)
        return 0 if buffer is None else max(0, buffer.size_bytes - buffer.small_bytes)

    @property
    def workload(self) -> PlannedWork:
        return workload_of(None if self.context is None else self.context.n_ctx_each, self.mix)

    @property
    def objective(self) -> Objective:
        """The expected time by which ways to use memory are compared."""
        return Objective(self.workload, self.plan_for_splits, self.shares_prompts)

    @property
    def ubatches(self) -> tuple[int, ...]:
        """The sizes of ubatches to choose from, in tokens."""
        tuned = self.tuned_ubatch
        if tuned is not None and tuned <= (self.most_ubatch or tuned):
            return (tuned,)
        if self.context is None:
            return (DEFAULT_UBATCH,)
        if self.most_ubatch is None:
            return (self.context.n_ubatch,)
        most = self.most_ubatch
        needed = [n for n in UBATCHES if n == UBATCHES[0] or n < 2 * self.context.n_ctx_each]
        return tuple(n for n in (*needed, *SMALL_UBATCHES) if n <= most) or (most,)

    @property
    def long_ubatches(self) -> tuple[int, ...]:
        """More sizes of ubatches, which only prompts longer than the planned one can fill."""
        context, most = self.context, self.most_ubatch
        if context is None or most is None or not context.kv_offload:
            return ()
        if len(self.ubatches) == 1 or not self.workload.n_prompt:
            return ()  # the ubatch was measured, or there are no prompts
        return tuple(n for n in LONG_UBATCHES if n <= min(most, context.n_ctx_each))

    @property
    def gpu_layers(self) -> frozenset[int]:
        """The layers whose experts are resident because the user named them."""
        return self.n_cpu_moe if isinstance(self.n_cpu_moe, frozenset) else frozenset()

    def limits(self, parts: Parts) -> Limits:
        """Return how many layers of each part may have resident experts, or stream dense weights.

        If the user keeps some layers in RAM, each part keeps those that it has of them.
        """
        n, n_layers, weights = parts.n_expert_layers, parts.n_layers, parts.weights
        fewest, most = np.zeros_like(n), n if self.n_cpu_moe == "fit" else np.zeros_like(n)
        if isinstance(self.n_cpu_moe, int):
            fewest = most = n - parts.count(weights.spread_experts(self.n_cpu_moe))
        elif self.gpu_layers:
            fewest = most = n - parts.count(weights.free_layers)
        fewest_dense, most_dense = np.zeros_like(n_layers), n_layers
        if self.n_gpu_layers is not None:
            n_dense = len(weights.layers) - self.n_gpu_layers
            fewest_dense = most_dense = parts.count(weights.spread_dense(n_dense))
        return Limits(fewest, most, fewest_dense, most_dense)


def name_patterns(names: Iterable[str]) -> tuple[str, ...]:
    """Return regular expressions that match exactly these names of weights, for libllama.

    Each expression matches one kind of weight in all its layers, or one weight outside the layers.
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for name in names:
        layer = layer_of(name)
        layers[name if layer < 0 else name.split(".", 2)[2]] += [layer] if layer >= 0 else []
    return tuple(
        (rf"^blk\.({'|'.join(map(str, sorted(numbers)))})\." if numbers else "^")
        + rf"{re.escape(kind)}$"
        for kind, numbers in layers.items()
    )


def workload_of(n_ctx: int | None, mix: TokenMix | None = None) -> PlannedWork:
    """Return the prompt and the generated tokens whose expected time decides between plans.

    The prompt is as long as the context, but has at most 8,192 tokens. After it, as many tokens are
    generated as `mix` says.
    """
    n_prompt = PlannedWork().n_prompt if n_ctx is None else min(n_ctx, UBATCHES[-1])
    return (mix or USUAL).workload(n_prompt)


def make_plan(facts: ModelFacts, request: PlanRequest | None = None) -> Plan:
    """Return the plan for a request, by default one without limits.

    Raises DoesNotFit if not even the smallest working set fits the device.
    """
    request = request or PlanRequest()
    model = PlannedModel(facts, request)
    return _with_other_end(model, request, _made(model, request))


class PlannedModel:
    """A model as all plans of a request see it, whatever they are made for."""

    def __init__(self, facts: ModelFacts, request: PlanRequest) -> None:
        self.facts, self.gpu_layers = facts, request.gpu_layers
        self.experts = [e for e in facts.loaded if request.stream_experts and is_experts(e)]
        self.dense = [e for e in facts.loaded if DENSE.match(e.name)]
        hits = request.hits if request.plan_for_splits else None
        self.layers_work = LayersWork(facts, hits, request.unions)

    @cached_property
    def work(self) -> ModelWork:
        return self.layers_work.whole

    @cached_property
    def weights(self) -> Weights:
        return Weights(self.facts, self.experts, self.dense, self.gpu_layers)

    def prompt_work(self, request: PlanRequest) -> ModelWork:
        """Return the work of the planned prompt, whose tokens attend to those before them."""
        context = request.context or ContextOptions()
        return with_prompt(self.work, self.facts, context, request.workload.n_prompt)

    def long_prompt(self, request: PlanRequest) -> LongPrompt | None:
        """Return the prompt that fills the context, None if no larger ubatch may be chosen."""
        context = request.context
        if context is None or not request.long_ubatches:
            return None
        n_tokens = min(context.n_ctx_each, LONGEST_PROMPT)
        work = with_prompt(self.work, self.facts, context, n_tokens)
        splits = request.plan_for_splits and request.shares_prompts
        return LongPrompt(n_tokens, request.workload.n_prompt, work, splits)

    def seconds(self, request: PlanRequest, sharing: Sharing, n_ubatch: int) -> Seconds:
        """Return the expected seconds of the request's workload."""
        return request.objective.seconds(
            request.machine, self.work, sharing, n_ubatch, prompt_work=self.prompt_work(request)
        )


def _with_other_end(model: PlannedModel, request: PlanRequest, plan: Plan) -> Plan:
    """Return the plan with the speeds of the plan for decoding alone, if its answers are faster."""
    limit_bytes = math.inf if request.host_bytes is None else request.host_bytes
    chooses = request.mix is None and request.most_ubatch is not None
    if not (chooses and plan.streamed) or request.budget_bytes is None:
        return plan
    end = _made(model, replace(request, mix=DECODING))
    if max(plan.streamed_bytes, end.streamed_bytes) > limit_bytes:
        return plan  # the disk decides the speeds
    prompt_work = model.prompt_work(request)
    here, there = (
        speeds_of(
            request.machine, model.work, one.sharing, one.n_ubatch, request.workload.n_prompt,
            hybrid=request.plan_for_splits, prompt_work=prompt_work,
        )
        for one in (plan, end)
    )  # fmt: skip
    words = other_end(here, there)
    return replace(plan, decode_end=there).because(words) if words else plan


def _made(model: PlannedModel, request: PlanRequest) -> Plan:
    """Return the plan for a request, without the speeds of another mix. Raises DoesNotFit."""
    facts, work = model.facts, model.work
    if request.mtp:
        mtp = plan_mtp(facts, request.context or ContextOptions(), request.budget_bytes)
        counted = mtp.device_bytes if request.context is not None else mtp.weight_bytes
        without = replace(request, mtp=False)
        try:
            plan = _made(model, replace(without, reserve_bytes=request.reserve_bytes + counted))
        except DoesNotFit:
            return _made(model, without).because(
                f"{mtp.what} are left out: {counted / 2**20:.0f} MiB more do not fit the GPU"
            )
        return replace(plan, mtp=mtp).because(mtp.reason)
    reasons = []
    if request.budget_bytes is None:
        choice = _unlimited(model, request)
    else:
        fastest = _fastest(model, request)
        assert fastest is not None
        choice = fastest
        host_bytes = request.host_bytes
        if host_bytes is not None and fastest.streamed_bytes > host_bytes:
            in_ram = _fastest(model, request, host_bytes)
            from_disk = _fastest(model, request, host_bytes, reads_disk=True) or fastest
            choice = in_ram or from_disk
            is_other = choice.n_ubatch != fastest.n_ubatch
            if in_ram is None and is_other and fastest.n_ubatch not in LONG_UBATCHES:
                reasons.append(
                    f"Prompts are computed {choice.n_ubatch} tokens at once instead of "
                    f"{fastest.n_ubatch}, because each time reads experts from the disk"
                )
            if in_ram is not None:
                reasons.append(
                    f"The fastest plan would keep {fastest.streamed_bytes / 2**30:.1f} GiB in RAM, "
                    f"which has room for {host_bytes / 2**30:.1f} GiB; more stays on the GPU"
                )
    plan = _plan(facts, request, choice, model.experts, model.dense, work)
    if request.mix is not None and plan.streamed:
        reasons.append(f"{request.mix.words} (--plan-for)")
    if request.plan_for_splits and choice.streamed_experts and request.budget_bytes is not None:
        reasons.append(hit_words(work, plan.sharing))
    if choice.reason:
        reasons.append(choice.reason)
    if choice.n_ubatch == request.tuned_ubatch:
        reasons.append(
            f"Prompts are computed {choice.n_ubatch} tokens at once, which was the fastest when "
            "`specoffload tune` measured"
        )
    return plan.because(*reasons)


def _fastest(
    model: PlannedModel,
    request: PlanRequest,
    host_bytes: int | None = None,
    *,
    reads_disk: bool = False,
) -> Choice | None:
    """Return the fastest way of sharing device memory.

    With `reads_disk`, experts beyond `host_bytes` of RAM are read from the disk. Otherwise returns
    None if no way takes at most `host_bytes`. Raises DoesNotFit if none fits the device.
    """
    weights, budget_bytes = model.weights, request.budget_bytes
    assert budget_bytes is not None
    long_prompt = None if reads_disk else model.long_prompt(request)
    ubatches = request.ubatches + (request.long_ubatches if long_prompt is not None else ())
    reserves_bytes = {n: request.reserve_of(model.facts, n) for n in ubatches}
    works_bytes = {n: request.working_of(model.facts, n).device_bytes for n in ubatches}
    limits = request.limits(weights.whole)
    chosen = choose_sharing(
        weights, model.work, request.machine, request.objective, limits,
        {n: budget_bytes - reserve for n, reserve in reserves_bytes.items()},
        working_bytes=works_bytes, host_bytes=host_bytes, reads_disk=reads_disk,
        prompt_work=model.prompt_work(request), decodes=request.decodes,
        lent_bytes={n: request.lent_bytes(model.facts, n) for n in ubatches},
        long_prompt=long_prompt,
    )  # fmt: skip
    if chosen is None and host_bytes is None:
        least = least_bytes(weights, limits, min(works_bytes.values()))
        reserve_bytes = min(reserves_bytes.values())
        total_bytes, mib = least.total_bytes + reserve_bytes, 1 << 20
        raise DoesNotFit(
            f"{budget_bytes / mib:.1f} MiB of GPU memory are too few: at least "
            f"{total_bytes / mib:.1f} MiB are needed, "
            f"{least.resident_bytes / mib:.1f} for weights that must stay there, "
            f"{least.slot_bytes / mib:.1f} to stream the others through and "
            f"{reserve_bytes / mib:.1f} for the context; raise --vram"
            + (_context_words(model.facts, request) if reserve_bytes >= mib // 20 else ""),
            least_bytes=total_bytes,
        )
    return chosen


def _context_words(facts: ModelFacts, request: PlanRequest) -> str:
    """Return how the context can take less device memory, as the end of a sentence."""
    context = request.context
    may_move = context is not None and context.kv_offload
    return _SMALLER_CONTEXT + (_CACHE_IN_RAM if may_move else "")


def _unlimited(model: PlannedModel, request: PlanRequest) -> Choice:
    """Return the choice without a budget: all experts stream, and each has a slot of its own.

    The request's `n_cpu_moe` and `n_gpu_layers` change which layers stream.
    """
    facts, weights = model.facts, model.weights
    fewest = request.limits(weights.whole)
    resident, n_dense = int(fewest.fewest_resident.item()), int(fewest.fewest_dense.item())
    streamed = weights.spread_experts(len(weights.expert_layers) - resident)
    n_ubatch = request.context.n_ubatch if request.context else DEFAULT_UBATCH
    sharing = Sharing(len(streamed) * facts.n_experts, resident, n_dense)
    return Choice(streamed, weights.spread_dense(n_dense), n_ubatch, sharing)


def _plan(
    facts: ModelFacts, request: PlanRequest, choice: Choice, experts: Sequence[TensorEntry],
    dense: Sequence[TensorEntry], work: ModelWork,
) -> Plan:  # fmt: skip
    streamed = [e for e in experts if layer_of(e.name) in choice.streamed_experts]
    streamed += [e for e in dense if layer_of(e.name) in choice.streamed_dense]
    streamed.sort(key=lambda e: (layer_of(e.name), is_experts(e)))
    resident = device_bytes(facts) - sum(e.size_bytes for e in streamed)
    streams_experts = bool(choice.streamed_experts)
    reserve = request.reserve_of(facts, choice.n_ubatch, streams_experts=streams_experts)
    layout = slot_layout(
        [*experts, *dense, *facts.expert_biases],
        facts.n_experts,
        facts.n_experts_used,
        only={entry.name for entry in streamed},
    )
    full_bytes = layout.size_bytes
    if request.budget_bytes is not None:
        layout = _sized(layout, request.budget_bytes - reserve - resident)
    reasons = _reasons(facts, request, choice, experts)
    if layout.size_bytes < full_bytes:
        held = layout.size_bytes / full_bytes
        reasons.append(
            f"GPU memory caches {held:.0%} of the weights outside it (limited by --vram)"
        )
    plan = Plan(
        tuple(streamed),
        resident,
        layout,
        tuple(reasons),
        reserve,
        choice.n_ubatch,
        n_resident=choice.sharing.n_resident,
        working=request.working_of(facts, choice.n_ubatch) if streams_experts else WorkingMemory(),
        buffer=request.buffer_of(facts, choice.n_ubatch),
        not_lent_reason=request.no_lending_reason,
    )
    crossover = modelled_crossover(request.machine, work, plan.sharing) if streamed else None
    return replace(plan, min_batch=crossover).with_passes(request.passes)


def _expert_slots(layout: SlotLayout) -> int:
    """Return the number of slots of all expert pools together.

    If some pools have fewer slots than a layer has experts, return that of the smallest pool.
    """
    pools = [pool for pool in layout.pools if pool.n_experts]
    tight = [pool.n_slots for pool in pools if pool.n_slots < pool.n_experts]
    return min(tight, default=sum(pool.n_slots for pool in pools))


def _sized(layout: SlotLayout, room_bytes: int) -> SlotLayout:
    fitting = sized(layout, room_bytes)
    if fitting is None:
        least = layout.with_slots(least_slots(layout)).size_bytes
        raise DoesNotFit(
            f"{max(0, room_bytes) / 2**20:.1f} MiB of GPU memory are left to stream weights "
            f"through, but at least {least / 2**20:.1f} MiB are needed; raise --vram or lower "
            "--ctx-size"
        )
    return fitting


def _reasons(
    facts: ModelFacts, request: PlanRequest, choice: Choice, experts: Sequence[TensorEntry]
) -> list[str]:
    """Return sentences for the user on the places of experts and dense weights, with reasons."""
    n_layers, n = len({layer_of(e.name) for e in experts}), len(choice.streamed_experts)
    n_dense = len(choice.streamed_dense)
    host_bytes = request.host_bytes
    fits = host_bytes is None or choice.streamed_bytes <= host_bytes
    stay = "stay in RAM" if fits else "stay in RAM, or on the disk while RAM has no room for them"
    reasons = []
    if experts and not n and not n_dense:
        reasons.append("The whole model fits the GPU")
    elif n and n == n_layers:
        every = "the one layer that has any" if n == 1 else f"all {n} layers"
        reasons.append(f"Experts of {every} {stay}")
    elif experts:
        if isinstance(request.n_cpu_moe, int | frozenset):
            reasons.append(f"Experts of {n} of {n_layers} layers {stay} (--n-cpu-moe)")
        else:
            fitting = plural(n_layers - n, "layer")
            reasons.append(f"Experts of {fitting} fit the GPU; those of {n} {stay}")
    if n_dense:
        fewer = "they do not fit --vram, or other uses of it save more; --n-gpu-layers"
        reason = "--n-gpu-layers" if request.n_gpu_layers is not None else fewer
        n_layers = len(facts.layers)
        reasons.append(f"Dense weights of {n_dense} of {n_layers} layers stay in RAM ({reason})")
    return reasons
