"""Divides a model's layers between devices, and plans each device's part. Pure.

A device's memory and link decide how long its layers take. The division with the fewest expected
seconds is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from offload.errors import DoesNotFit
from offload.model import ModelFacts, layer_of
from offload.plan.found import DeviceRoom, FoundDevice, Kind
from offload.plan.placement import Plan, PlannedModel, PlanRequest, make_plan
from offload.plan.range_times import hand_over_s, ubatches
from offload.plan.ranges import LayerRange
from offload.plan.search import FoundRanges, Search, n_passes, prompt_s
from offload.plan.sharing import SMALL_UBATCHES
from offload.plan.slot_layout import SlotLayout, SlotPool, WeightGroup
from offload.plan.weights import device_bytes, spread
from offload.plan.working import WorkingMemory
from offload.times.decodes import attention_crossover
from offload.times.work import model_work, with_context

LEAST_GAIN = 1.05  # least speed-up over the best single device for which `auto` uses several


@dataclass(frozen=True)
class DevicePlan:
    """The layers that one device computes, where their weights are, and why.

    `specoffload plan` prints it, and a start executes it. Two are equal if they lead to the same
    placement, whatever their expected times.
    """

    room: DeviceRoom
    layers: LayerRange
    plan: Plan
    facts: ModelFacts = field(compare=False, repr=False)  # the header with only these layers
    # The request that the plan was made for.
    request: PlanRequest = field(default=PlanRequest(), compare=False, repr=False)
    # Expected seconds of the planned prompt, and of all generated tokens, with the hand-overs.
    prompt_s: float = field(default=0.0, compare=False)
    decode_s: float = field(default=0.0, compare=False)

    @property
    def device(self) -> FoundDevice:
        return self.room.device

    @property
    def name(self) -> str:
        return self.room.name

    @property
    def kind(self) -> Kind:
        return self.device.kind

    @property
    def reserve_bytes(self) -> int:
        """Device memory for a draft model and a projector."""
        return self.request.reserve_bytes

    def in_passes(self) -> DevicePlan:
        """Return the plan with every batch in passes that the slots do not hold."""
        return replace(self, plan=self.plan.with_passes("on"))


def placed_by_libllama(device: FoundDevice, layers: LayerRange, facts: ModelFacts) -> DevicePlan:
    """Return the plan of a device on which libllama itself places all weights of these layers."""
    part = facts.part(layers.first, layers.end)
    return DevicePlan(
        DeviceRoom(device), layers, Plan((), device_bytes(part), SlotLayout(), ()), part
    )


@dataclass(frozen=True)
class Division:
    """The parts of a model, in the order of its layers, and why it is divided so."""

    parts: tuple[DevicePlan, ...]
    draft_on: str | None = None  # name of the draft model's device; None: it has no memory there
    reasons: tuple[str, ...] = field(default=(), compare=False)

    @property
    def used(self) -> tuple[DevicePlan, ...]:
        """The parts that have layers."""
        return tuple(part for part in self.parts if len(part.layers))

    @cached_property
    def expected_s(self) -> float:
        """Expected seconds of the planned workload."""
        last, parts = self.parts[-1], self.parts
        prompt = prompt_s(
            [part.prompt_s for part in parts], [part.room for part in parts],
            n_passes(last.request, last.plan.n_ubatch), overlaps=last.plan.computes_ubatches,
        )  # fmt: skip
        return prompt + sum(part.decode_s for part in parts)

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        return tuple(part.layers for part in self.parts)

    @property
    def words(self) -> str:
        n_layers = self.used[-1].layers.end - 1
        return ", ".join(f"{p.name} {layer_words(p.layers, n_layers)}" for p in self.used)


def joined(parts: Sequence[DevicePlan], reasons: tuple[str, ...] = ()) -> Plan:
    """Return the plan of all devices together. Each device keeps its own pools of slots.

    It has `reasons`, and then each device's own reasons after its name. A single device's plan
    stays as it is, but for `reasons` after its own.
    """
    plans = [part.plan for part in parts]
    if len(plans) == 1:
        return plans[0].because(*reasons)
    pools: list[SlotPool] = []
    groups: list[WeightGroup] = []
    named = [(part.name, part.plan) for part in parts]
    for name, plan in named:
        groups += [replace(g, pool=g.pool + len(pools)) for g in plan.layout.groups]
        pools += [replace(pool, name=f"{name}: {pool.name}") for pool in plan.layout.pools]
    own = tuple(f"{name}: {reason}" for name, plan in named for reason in plan.reasons)
    return replace(
        plans[-1],
        streamed=tuple(entry for plan in plans for entry in plan.streamed),
        resident_bytes=sum(plan.resident_bytes for plan in plans),
        layout=SlotLayout(tuple(pools), tuple(groups)),
        reasons=(*reasons, *own),
        reserve_bytes=sum(plan.reserve_bytes for plan in plans),
        min_batch=max((p.min_batch for p in plans if p.min_batch is not None), default=None),
        pass_experts=min((p.pass_experts for p in plans if p.pass_experts), default=0),
        declined=tuple(f"{name}: {reason}" for name, plan in named for reason in plan.declined),
        n_resident=sum(plan.n_resident for plan in plans),
        working=sum((plan.working for plan in plans), WorkingMemory()),
    )


def layer_words(layers: LayerRange, n_layers: int) -> str:
    """Return a text such as "layers 0-29" for a range of a model with `n_layers` layers."""
    last = min(layers.end, n_layers) - 1
    if last < layers.first:
        return "the output"
    return f"layers {layers.first}-{last}" if layers.first < last else f"layer {layers.first}"


def divide(
    facts: ModelFacts,
    devices: Sequence[DeviceRoom],
    request: PlanRequest,
    *,
    use_all: bool = False,
    draft_on: int | None = None,
) -> Division:
    """Return the division that the machine model expects to be the fastest. Raises DoesNotFit.

    Each device's own `budget_bytes` and `machine` replace those of the request. The request's
    `reserve_bytes` are for a draft model on `devices[draft_on]`. If `draft_on` is None, the draft
    model is put where it costs the least time. With `use_all` every device gets at least one layer.
    Otherwise the fastest device that can hold the model alone gets all layers, unless several
    devices are at least `LEAST_GAIN` times as fast.
    """
    if use_all and len(devices) > facts.n_layers:
        raise DoesNotFit(
            f"{len(devices)} devices cannot share {facts.n_layers} layers: name fewer in --device"
        )
    if len(devices) == 1:
        whole = LayerRange(0, facts.n_layers + 1)
        return plan_parts(facts, devices, [whole], request, draft_on=0)
    is_open = draft_on is None and request.reserve_bytes
    draft_places = range(len(devices)) if is_open else [draft_on or 0]
    best, alone = Search(facts, devices, request).best(draft_places, use_all=use_all)
    gain = alone.seconds / best.seconds if alone.ranges else None
    order = [candidate for candidate in (best, alone) if candidate.ranges]
    if gain is not None and gain < LEAST_GAIN:
        order.reverse()
    if not order:
        # The search found nothing that fits. The plans of equal parts are exact: if they do not
        # fit either, their DoesNotFit says what is missing.
        n, cuts = facts.n_layers + 1, range(len(devices) + 1)
        equal = [LayerRange(*p) for p in pairwise(n * i // len(devices) for i in cuts)]
        order = [FoundRanges(ranges=tuple(equal), draft_on=draft_places[0])]
    division = _first_that_fits(facts, devices, order, request)
    if len(division.parts) == 1 and not use_all:
        # The search works with estimates. Exact plans of the ranges that it prefers may not fit.
        fits = sum(len(layers) > 0 for layers in order[0].ranges) == 1
        return replace(division, reasons=(_left_out(devices, division, gain or 1.0, fits=fits),))
    if gain is None:
        reason = "" if use_all else ": no device can hold it alone"
        return replace(division, reasons=(f"{division.words}{reason}",))
    used = [part.name for part in division.parts]
    others = [device.name for device in devices if device.name not in used]
    on_one = next(d.name for d, r in zip(devices, alone.ranges, strict=True) if len(r))
    words = f"{division.words}: {gain:.1f} x {on_one} alone (estimate)"
    left = (f"{', '.join(others)}: not used, which would save no time",) if others else ()
    return replace(division, reasons=(words, *left))


def _first_that_fits(
    facts: ModelFacts,
    devices: Sequence[DeviceRoom],
    order: Sequence[FoundRanges],
    request: PlanRequest,
) -> Division:
    """Return the first division of `order` that fits. Raises DoesNotFit if none does."""
    for candidate in order:
        for n_ubatch in dict.fromkeys((candidate.n_ubatch, None)):
            with suppress(DoesNotFit):
                return plan_parts(
                    facts, devices, candidate.ranges, request, draft_on=candidate.draft_on,
                    n_ubatch=n_ubatch,
                )  # fmt: skip
    return plan_parts(facts, devices, order[0].ranges, request, draft_on=order[0].draft_on)


def _left_out(
    devices: Sequence[DeviceRoom], one: Division, gain: float, *, fits: bool = True
) -> str:
    used = one.parts[0].name
    others = ", ".join(device.name for device in devices if device.name != used)
    if not any(part.plan.streamed for part in one.parts):
        return f"{others}: not used, because the whole model fits {used}"
    if not fits:
        return f"{others}: not used, because the division that would be faster does not fit"
    saved = max(0.0, 1.0 - 1.0 / gain)
    return f"{others}: not used, because the whole model on {used} is as fast ({saved:.0%} saved)"


def plan_parts(
    facts: ModelFacts,
    devices: Sequence[DeviceRoom],
    ranges: Sequence[LayerRange],
    request: PlanRequest,
    *,
    draft_on: int = 0,
    n_ubatch: int | None = None,
) -> Division:
    """Return the division with these ranges, one per device. Raises DoesNotFit.

    Empty ranges get no part. All parts use the ubatch `n_ubatch`. If it is None, they use the
    ubatch with which all parts together take the least time. The request's `reserve_bytes` for a
    draft model are taken from `devices[draft_on]`.
    """
    draft = devices[draft_on].name if request.reserve_bytes else None
    draft_device = devices[draft_on]
    if (
        draft and draft_device.is_counted and draft_device.budget_bytes is not None
        and not len(ranges[draft_on]) and request.reserve_bytes > draft_device.budget_bytes
    ):  # fmt: skip
        raise DoesNotFit(
            f"{draft} has {draft_device.budget_bytes / 2**20:.1f} MiB, and the draft needs "
            f"{request.reserve_bytes / 2**20:.1f}: name another device (-devd) or raise --vram"
        )
    used = [(i, d, r) for i, (d, r) in enumerate(zip(devices, ranges, strict=True)) if len(r)]
    sizes: Sequence[int | None] = (None,)
    if len(used) > 1:
        sizes = (n_ubatch,) if n_ubatch else ubatches([d for _, d, _ in used], request)
    best, error = _fastest_parts(facts, used, request, draft_on, sizes, None)
    host_bytes = request.host_bytes
    streamed = 0 if best is None else sum(part.plan.streamed_bytes for part in best)
    if best is not None and host_bytes is not None and streamed > host_bytes:
        shares = [host_bytes * part.plan.streamed_bytes // streamed for part in best]
        best = _fastest_parts(facts, used, request, draft_on, sizes, shares)[0] or best
    if best is None:
        assert error is not None
        raise error
    return Division(tuple(best), draft)


def _fastest_parts(
    facts: ModelFacts,
    used: Sequence[tuple[int, DeviceRoom, LayerRange]],
    request: PlanRequest,
    draft_on: int,
    sizes: Sequence[int | None],
    host_bytes: Sequence[int] | None,
) -> tuple[list[DevicePlan] | None, DoesNotFit | None]:
    """Return the parts with the fastest ubatch of `sizes`, or None if none fits, and an error.

    The error is the DoesNotFit of the last ubatch that did not fit, or None.

    `used` has each device's index, the device and its layers. `host_bytes` is the host memory for
    each part's streamed weights, None for no limit.
    """
    best: list[DevicePlan] | None = None
    error: DoesNotFit | None = None
    for n_ubatch in sizes:
        plans = []
        for k, (i, device, layers) in enumerate(used):
            asked = _request_of(
                facts, device, layers, request, n_ubatch, has_draft=i == draft_on,
                has_mtp=k == len(used) - 1,
            )  # fmt: skip
            if len(used) > 1:
                asked = replace(
                    asked, host_bytes=None if host_bytes is None else host_bytes[k],
                    shares_prompts=False,
                )  # fmt: skip
            if sum(device.is_here for _, device, _ in used) > 1:
                asked = replace(asked, not_lent_reason="several devices compute a graph")
            part = facts.part(layers.first, layers.end)
            try:
                plan = make_plan(part, asked)
            except DoesNotFit as e:
                where = f"{device.name}, {layer_words(layers, facts.n_layers)}: "
                more = "; or give it fewer layers with --tensor-split"
                words = f"{where}{e}{more}" if len(used) > 1 else str(e)
                error = DoesNotFit(words, least_bytes=e.least_bytes)
                break
            if n_ubatch is not None:
                plan = replace(plan, n_ubatch=n_ubatch).with_passes(request.passes)
            asked_with_context = replace(asked, context=request.context)
            plan = _attending(part, asked_with_context, plan)
            seconds = PlannedModel(part, asked).seconds(
                asked_with_context, plan.sharing, plan.n_ubatch
            )
            prompt_s, decode_s = hand_over_s(facts, device, request, plan.n_ubatch, is_first=not k)
            prompt_s += float(seconds.prompt_s)
            decode_s += seconds.n_decodes * float(seconds.mean_decode_s)
            plan = plan.because(*device.reasons)
            plans.append(DevicePlan(device, layers, plan, part, asked, prompt_s, decode_s))
        if len(plans) < len(used):
            continue
        if best is None or Division(tuple(plans)).expected_s < Division(tuple(best)).expected_s:
            best = plans
        if n_ubatch not in SMALL_UBATCHES and not any(part.plan.streamed for part in plans):
            break  # all weights are resident, so larger ubatches would save nothing
    return best, error


def _attending(facts: ModelFacts, request: PlanRequest, plan: Plan) -> Plan:
    """Return the plan with the batches whose attention the device computes over a cache in RAM."""
    context = request.context
    if context is None or context.kv_offload:
        return plan
    work = with_context(model_work(facts), facts, context)
    return replace(plan, attention_batch=attention_crossover(request.machine, work))


def _request_of(
    facts: ModelFacts,
    device: DeviceRoom,
    layers: LayerRange,
    request: PlanRequest,
    n_ubatch: int | None,
    *,
    has_draft: bool,
    has_mtp: bool,
) -> PlanRequest:
    """Return the request for one device's part of the model.

    If the user keeps a number of layers in RAM (`n_gpu_layers`, `n_cpu_moe`), this part keeps those
    of its layers in RAM that a plan of the whole model would keep there.
    """
    n, n_gpu_layers, n_cpu_moe = facts.n_layers, request.n_gpu_layers, request.n_cpu_moe
    expert_layers = _expert_layers(facts)
    n_here = min(layers.end, n) - layers.first
    if n_gpu_layers is not None and n_here < n:
        n_gpu_layers = n_here - sum(i in layers for i in spread(n - n_gpu_layers, n))
    if isinstance(n_cpu_moe, int) and n_here < n:
        chosen = spread(n_cpu_moe, len(expert_layers))
        n_cpu_moe = sum(expert_layers[i] in layers for i in chosen)
    if device.is_remote:
        n_gpu_layers, n_cpu_moe = n_here, 0
    context = request.context if device.is_counted else None
    if context is not None and n_ubatch is not None:
        context = replace(context, n_ubatch=n_ubatch)
    return replace(
        request,
        budget_bytes=device.budget_bytes if request.stream_experts else None,
        machine=device.machine,
        reserve_bytes=request.reserve_bytes if has_draft and device.is_counted else 0,
        projector_bytes=request.projector_bytes if has_draft and device.is_counted else 0,
        context=context,
        uncounted=None if device.is_counted else request.context,
        not_lent_reason=request.not_lent_reason or device.not_lent_reason,
        most_ubatch=request.most_ubatch if n_ubatch is None else None,
        n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe,
        mtp=request.mtp and has_mtp,
        decodes=tuple(
            decode
            for decode in (request.decodes if n_here == n else ())
            if decode.device in ("", device.name)
        ),
    )


def _expert_layers(facts: ModelFacts) -> list[int]:
    return sorted({layer_of(entry.name) for entry in facts.expert_weights})
