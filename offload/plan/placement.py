"""Placement of weights: pure, from a header and a budget, before anything is loaded.

The routed experts lie in host memory and stream through slots, or are resident in some layers;
everything else is resident on the device while it fits. What does not fit of the rest is streamed
too, whole layers spread evenly over the model. Every choice carries its reason.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from offload.errors import DoesNotFit
from offload.model import ModelFacts, TensorEntry, is_experts, layer_of
from offload.plan.context import ContextSpec, context_memory
from offload.plan.machine import (
    TYPICAL,
    Machine,
    ModelWork,
    Sharing,
    model_work,
    modelled_crossover,
)
from offload.plan.room_for_splits import MeasuredDecode, SplitRoom, hit_words, split_room
from offload.plan.sharing import (
    SMALL_UBATCHES,
    UBATCHES,
    Choice,
    LeastBytes,
    TokenMix,
    Weights,
    Workload,
    choose_sharing,
    device_bytes,
    least_bytes,
    least_slots,
    sized,
    spread,
)
from offload.plan.slot_layout import SlotLayout, slot_layout
from offload.routing import HitCurve

MARGIN_BYTES = 1 << 30  # llama.cpp's --fit-target
# A GPU keeps so much free whatever --vram asks for: cuBLAS's workspaces, CUDA graphs and kernels
# that are loaded late take device memory after the slots did, and abort without it.
LEAST_FREE_BYTES = 512 << 20
DEFAULT_UBATCH = 512
# Products whose weights may stream: read by MUL_MAT alone, at most once a graph.
_DENSE = re.compile(
    r"^blk\.\d+\.(attn_(q|k|v|qkv|output|q_a|q_b|kv_a_mqa|kv_b|k_b|v_b|gate)"
    r"|ffn_(up|down|gate|up_shexp|down_shexp|gate_shexp))\.weight$"
)

_AT_LEAST = ", more where they choose alike"

PlanForSplits = bool | Literal["auto"]
NCpuMoe = int | Literal["fit"] | None
Chunks = Literal["auto", "on", "off"]  # auto: if they are expected to be faster than the CPU


@dataclass(frozen=True)
class Plan:
    """Which weights stream, the slots they stream through, and what else takes device memory."""

    streamed: tuple[TensorEntry, ...]
    resident_bytes: int
    layout: SlotLayout
    reasons: tuple[str, ...]
    reserve_bytes: int = 0  # caches, buffers and what others hold
    n_ubatch: int = DEFAULT_UBATCH
    min_batch: int | None = None  # tokens from which streaming is expected to pay; None: never
    chunk_tokens: int = 0  # larger batches go in chunks, whose experts fit the slots; 0: none do
    declined: tuple[str, ...] = ()  # batches that the CPU computes for want of slots
    n_resident: int = 0  # layers whose experts are resident
    chunks: Chunks = "auto"

    @property
    def sharing(self) -> Sharing:
        """Device memory as the machine model sees it."""
        dense = {layer_of(entry.name) for entry in self.streamed if not is_experts(entry)}
        return Sharing(_expert_slots(self.layout), self.n_resident, len(dense))

    @property
    def streamed_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.streamed)

    @property
    def slot_bytes(self) -> int:
        return self.layout.size_bytes

    def patterns(self, *, experts: bool | None = None) -> tuple[str, ...]:
        """Regular expressions for libllama that match the streamed weights and nothing else; with
        `experts` those of experts alone, or all others."""
        chosen = [e for e in self.streamed if experts is None or is_experts(e) == experts]
        return tuple(_patterns(chosen))

    def with_room(self, room_bytes: int) -> Plan:
        """The same weights through slots of `room_bytes`, as measured once all else has its memory.

        Raises DoesNotFit where not even the least fits.
        """
        return self._through(_sized(self.layout_of_all, room_bytes))

    def with_slots(self, n_slots: Sequence[int]) -> Plan:
        """The same weights through that many slots of each pool."""
        return self._through(self.layout.with_slots(n_slots))

    def with_chunks(self, chunks: Chunks) -> Plan:
        """The same with batches in chunks of tokens always, never, or where that is expected to be
        faster than the CPU, if their experts have no slots all at once."""
        return replace(self, chunks=chunks)._through(self.layout)

    def _through(self, layout: SlotLayout) -> Plan:
        pays = self.min_batch is not None and self.min_batch <= self.n_ubatch
        chunk, reasons, declined = _chunks(layout, self.n_ubatch, pays, self.chunks)
        others = [reason for reason in self.reasons if not reason.endswith(_AT_LEAST)]
        return replace(
            self, layout=layout, chunk_tokens=chunk, reasons=(*others, *reasons), declined=declined
        )

    def because(self, reason: str) -> Plan:
        """The same with one more reason."""
        return replace(self, reasons=(*self.reasons, reason))

    @property
    def layout_of_all(self) -> SlotLayout:
        """The layout with a slot for everything that streams."""
        return self.layout.with_slots([pool.most_slots for pool in self.layout.pools])


def make_plan(
    facts: ModelFacts,
    *,
    budget_bytes: int | None,
    reserve_bytes: int = 0,
    n_gpu_layers: int | None = None,
    n_cpu_moe: NCpuMoe = None,
    stream_experts: bool = True,
    context: ContextSpec | None = None,
    most_ubatch: int | None = None,
    machine: Machine = TYPICAL,
    hybrid: PlanForSplits = False,
    hits: HitCurve | None = None,
    decodes: Sequence[MeasuredDecode] = (),
    host_bytes: int | None = None,
    mix: TokenMix | None = None,
) -> Plan:
    """Decide for a device with `budget_bytes` for everything (None: no limit).

    `reserve_bytes` of it go to others, such as a draft, and what `context` takes besides;
    with `most_ubatch` its ubatch is chosen, up to that. `n_gpu_layers` keeps that many layers'
    dense weights resident and streams the rest. `n_cpu_moe` streams the experts of that many layers
    only; "fit" leaves to expected time which are resident. With `hybrid` layers are going to be
    split, so that slots serve every batch, with `hits` as they were counted of this model; "auto":
    if that is expected to save time, by counted hits alone, or did by `decodes`. What streams takes
    at most `host_bytes` of host memory where any plan does. `mix` weighs prompts against generated
    tokens; None takes `Workload`'s. Raises DoesNotFit when not even the smallest working set fits
    the device.
    """
    if hybrid == "auto":
        either = partial(
            make_plan, facts, budget_bytes=budget_bytes, reserve_bytes=reserve_bytes,
            n_gpu_layers=n_gpu_layers, n_cpu_moe=n_cpu_moe, stream_experts=stream_experts,
            context=context, most_ubatch=most_ubatch, machine=machine, host_bytes=host_bytes,
            mix=mix,
        )  # fmt: skip
        return with_or_without_room(
            either, model_work(facts, hits), machine, workload_of(context, mix), decodes
        ).plan
    experts = [e for e in facts.loaded if is_experts(e)] if stream_experts else []
    dense = [e for e in facts.loaded if _DENSE.match(e.name)]
    work = model_work(facts, hits if hybrid else None)
    asked = _Asked(facts, budget_bytes, reserve_bytes, n_gpu_layers, n_cpu_moe, context)
    n_expert_layers = len({layer_of(e.name) for e in experts})
    why_host = ""
    if budget_bytes is None:
        choice = _unlimited(asked, n_expert_layers, experts)
    else:
        weights = Weights(facts, experts, dense)
        ubatches = _ubatches(context, most_ubatch, has_experts=bool(experts))
        n_resident = _resident(n_cpu_moe, n_expert_layers)
        n_dense_streamed = _dense_streamed(n_gpu_layers, facts.n_layers)
        fastest = partial(
            choose_sharing, weights, work, machine, workload_of(context, mix),
            budget_bytes=budget_bytes, reserve_bytes=asked.reserve_of, ubatches=ubatches,
            n_resident=n_resident, n_dense_streamed=n_dense_streamed, hybrid=hybrid,
        )  # fmt: skip
        found = fastest()
        if found is None:
            reserve = min(asked.reserve_of(n) for n in ubatches)
            least = least_bytes(weights, reserve, n_resident, n_dense_streamed)
            raise _does_not_fit(asked, least)
        choice = found
        if host_bytes is not None and choice.streamed_bytes > host_bytes:
            choice = fastest(host_bytes=host_bytes) or found
            if choice is not found:
                why_host = (
                    f"The fastest plan would keep {found.streamed_bytes / 2**30:.1f} GiB in RAM, "
                    f"which has room for {host_bytes / 2**30:.1f} GiB; more stays on the GPU"
                )
    plan = _plan(asked, choice, experts, dense, work, machine)
    plan = plan.because(why_host) if why_host else plan
    if mix is not None and plan.streamed:
        plan = plan.because(f"{mix.words} (--plan-for)")
    if hybrid and choice.streamed_experts and budget_bytes is not None:
        plan = plan.because(hit_words(work, plan.sharing))
    return plan


@dataclass(frozen=True)
class Either:
    """A plan with or without room for split layers, and why."""

    plan: Plan
    room: SplitRoom | None  # None: there is nothing to compare


def with_or_without_room(
    either: Callable[..., Plan],
    work: ModelWork,
    machine: Machine,
    workload: Workload,
    decodes: Sequence[MeasuredDecode] = (),
) -> Either:
    """The plan for `--hybrid auto`, whose layers may or may not be split in the end: slots have the
    room of resident layers only where hits were counted and that is expected to save time, or did
    where decodes of both plans were measured.

    `either(hybrid=..., hits=...)` makes the plans.
    """
    without = either(hybrid=False)
    if work.hits is None or not without.streamed:
        return Either(without, None)
    with_room = either(hybrid=True, hits=work.hits)
    if with_room.sharing == without.sharing:
        return Either(without, None)
    room = split_room(
        machine, work, workload,
        without=(without.sharing, without.n_ubatch),
        with_room=(with_room.sharing, with_room.n_ubatch),
        decodes=decodes,
    )  # fmt: skip
    return Either((with_room if room.pays else without).because(room.why), room)


@dataclass(frozen=True)
class _Asked:
    """The limits of a plan, and what others hold of its memory."""

    facts: ModelFacts
    budget_bytes: int | None
    reserve_bytes: int
    n_gpu_layers: int | None
    n_cpu_moe: NCpuMoe
    context: ContextSpec | None

    def reserve_of(self, n_ubatch: int) -> int:
        if self.context is None:
            return self.reserve_bytes
        spec = self.context.with_ubatch(n_ubatch)
        return self.reserve_bytes + context_memory(self.facts, spec).total_bytes


def workload_of(context: ContextSpec | None, mix: TokenMix | None = None) -> Workload:
    """The prompt and the generated tokens by whose time a plan is chosen: as many as the context
    holds of up to 8,192, and 512, or as many as `mix` says."""
    usual = Workload()
    n_prompt = usual.n_prompt if context is None else min(context.n_ctx, UBATCHES[-1])
    return replace(usual, n_prompt=n_prompt) if mix is None else mix.workload(n_prompt)


def _ubatches(
    context: ContextSpec | None, most: int | None, *, has_experts: bool
) -> tuple[int, ...]:
    if context is None:
        return (DEFAULT_UBATCH,)
    if most is None:
        return (context.n_ubatch,)
    if not has_experts:
        return (min(DEFAULT_UBATCH, most),)
    needed = [n for n in UBATCHES if n == UBATCHES[0] or n < 2 * context.n_ctx]
    return tuple(n for n in (*needed, *SMALL_UBATCHES) if n <= most) or (most,)


def _resident(n_cpu_moe: NCpuMoe, n_expert_layers: int) -> Sequence[int]:
    if n_cpu_moe is None or not n_expert_layers:
        return (0,)
    if n_cpu_moe == "fit":
        return range(n_expert_layers + 1)
    return (max(0, n_expert_layers - n_cpu_moe),)


def _dense_streamed(n_gpu_layers: int | None, n_layers: int) -> Sequence[int]:
    if n_gpu_layers is None:
        return range(n_layers + 1)
    return (max(0, n_layers - n_gpu_layers),)


def _unlimited(asked: _Asked, n_expert_layers: int, experts: Sequence[TensorEntry]) -> Choice:
    """Without a budget all experts stream, through a slot each, unless a number was asked for."""
    resident = 0 if asked.n_cpu_moe == "fit" else _resident(asked.n_cpu_moe, n_expert_layers)[0]
    weights = Weights(asked.facts, experts, [])
    n_dense = 0 if asked.n_gpu_layers is None else asked.facts.n_layers - asked.n_gpu_layers
    streamed, _ = weights.experts[resident]
    n_ubatch = asked.context.n_ubatch if asked.context else DEFAULT_UBATCH
    dense = spread(n_dense, asked.facts.n_layers)
    n_slots = len(streamed) * asked.facts.n_experts
    return Choice(streamed, dense, n_ubatch, Sharing(n_slots, resident, len(dense)))


def _plan(
    asked: _Asked,
    choice: Choice,
    experts: Sequence[TensorEntry],
    dense: Sequence[TensorEntry],
    work: ModelWork,
    machine: Machine,
) -> Plan:
    facts = asked.facts
    streamed_experts = [e for e in experts if layer_of(e.name) in choice.streamed_experts]
    streamed_dense = [e for e in dense if layer_of(e.name) in choice.streamed_dense]
    streamed = sorted((*streamed_dense, *streamed_experts), key=lambda e: layer_of(e.name))
    resident = device_bytes(facts) - sum(e.size_bytes for e in streamed)
    reserve = asked.reserve_of(choice.n_ubatch)
    layout = slot_layout(
        [*experts, *dense, *facts.expert_biases],
        facts.n_experts,
        facts.n_experts_used,
        only={entry.name for entry in streamed},
    )
    full_bytes = layout.size_bytes
    if asked.budget_bytes is not None:
        layout = _sized(layout, asked.budget_bytes - reserve - resident)
    sharing = choice.sharing.with_slots(_expert_slots(layout))
    reasons = [*_why_experts(asked, choice, experts), *_why_dense(asked, choice)]
    if layout.size_bytes < full_bytes:
        held = layout.size_bytes / full_bytes
        reasons.append(f"GPU memory caches {held:.0%} of the weights in RAM (limited by --vram)")
    crossing = modelled_crossover(machine, work, sharing) if streamed else None
    streaming_pays = crossing is not None and crossing <= choice.n_ubatch
    chunk, chunk_reasons, declined = _chunks(layout, choice.n_ubatch, streaming_pays)
    return Plan(
        tuple(streamed),
        resident,
        layout,
        (*reasons, *chunk_reasons),
        reserve,
        choice.n_ubatch,
        crossing,
        chunk,
        declined,
        choice.sharing.n_resident,
    )


def _expert_slots(layout: SlotLayout) -> int:
    """All slots for experts; where a pool has fewer than a layer has experts, that pool's."""
    pools = [pool for pool in layout.pools if pool.n_experts]
    tight = [pool.n_slots for pool in pools if pool.n_slots < pool.n_experts]
    return min(tight, default=sum(pool.n_slots for pool in pools))


def _sized(layout: SlotLayout, room_bytes: int) -> SlotLayout:
    found = sized(layout, room_bytes)
    if found is None:
        least = layout.with_slots(least_slots(layout)).size_bytes
        raise DoesNotFit(
            f"{max(0, room_bytes) / 2**20:.1f} MiB of GPU memory are left to stream weights "
            f"through, but at least {least / 2**20:.1f} MiB are needed; raise --vram or lower "
            "--ctx-size"
        )
    return found


def _does_not_fit(asked: _Asked, least: LeastBytes) -> DoesNotFit:
    assert asked.budget_bytes is not None
    mib = 1 << 20
    return DoesNotFit(
        f"{asked.budget_bytes / mib:.1f} MiB of GPU memory are too few: at least "
        f"{least.total_bytes / mib:.1f} MiB are needed, {least.resident_bytes / mib:.1f} for "
        f"weights that must stay there, {least.slot_bytes / mib:.1f} to stream the others through "
        f"and {least.reserve_bytes / mib:.1f} for the context; raise --vram, lower --ctx-size or "
        "use a smaller cache (-ctk q8_0 -ctv q8_0)",
        least_bytes=least.total_bytes,
    )


def _why_experts(asked: _Asked, choice: Choice, experts: Sequence[TensorEntry]) -> tuple[str, ...]:
    if not experts:
        return ()
    n_layers = len({layer_of(e.name) for e in experts})
    n = len(choice.streamed_experts)
    if not n and not choice.streamed_dense:
        return ("The whole model fits the GPU",)
    if n == n_layers:
        return (f"Experts of all {n} layers stay in RAM",)
    if isinstance(asked.n_cpu_moe, int):
        return (f"Experts of {n} of {n_layers} layers stay in RAM (--n-cpu-moe)",)
    return (f"Experts of {n_layers - n} layers fit the GPU; those of {n} stay in RAM",)


def _why_dense(asked: _Asked, choice: Choice) -> tuple[str, ...]:
    n = len(choice.streamed_dense)
    if not n:
        return ()
    why = "--n-gpu-layers" if asked.n_gpu_layers is not None else "they exceed --vram"
    return (f"Dense weights of {n} of {asked.facts.n_layers} layers stay in RAM ({why})",)


def _chunks(
    layout: SlotLayout, n_ubatch: int, streaming_pays: bool, chunks: Chunks = "auto"
) -> tuple[int, tuple[str, ...], tuple[str, ...]]:
    """Tokens of a chunk where a ubatch may use more experts than have slots; reasons; declined.

    `streaming_pays` is true where a ubatch is expected to be faster in chunks than on the CPU.
    """
    tight = [pool for pool in layout.pools if not pool.holds(n_ubatch)]
    if not tight:
        return 0, (), ()
    pool = min(tight, key=lambda p: p.n_slots)
    chunk = max(1, pool.n_slots // max(1, pool.n_used))
    what = f"GPU memory holds {pool.n_slots} of a layer's {pool.n_experts} experts at once"
    if chunks == "on" or (chunks == "auto" and streaming_pays):
        return (
            chunk,
            (f"{what}; larger batches are computed in chunks of {chunk} tokens{_AT_LEAST}",),
            (),
        )
    tokens = "token" if chunk == 1 else "tokens"
    declined = f"{what}; batches of more than {chunk} {tokens} run on the CPU"
    if chunks == "auto":
        declined += f", which is faster than chunks of {chunk}"
    return 0, (), (declined,)


def _patterns(streamed: Sequence[TensorEntry]) -> list[str]:
    """One alternation per kind of weight, over the layers that stream."""
    layers: dict[str, list[int]] = defaultdict(list)
    for entry in streamed:
        layers[entry.name.split(".", 2)[2]].append(layer_of(entry.name))
    return [
        rf"^blk\.({'|'.join(map(str, sorted(numbers)))})\.{re.escape(kind)}$"
        for kind, numbers in layers.items()
    ]
