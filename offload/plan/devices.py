"""Divides a model's layers between devices, and plans each device's part. Pure.

A token passes the devices one after the other, so the expected seconds of all parts add up. The
division with the least seconds is chosen. A device's memory and link decide how long its layers
take.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts, layer_of
from offload.plan.context import DEFAULT_UBATCH, context_memory
from offload.plan.machine import TYPICAL, Machine, Part, Sharing, model_work
from offload.plan.mtp import plan_mtp
from offload.plan.placement import DENSE, Plan, PlanRequest, make_plan
from offload.plan.ranges import LayerRange
from offload.plan.sharing import (
    SMALL_UBATCHES,
    Weights,
    device_bytes,
    expected_s,
    least_expert_bytes,
    ring_slots,
    slots_within,
    spread,
)
from offload.plan.slot_layout import SlotLayout, SlotPool, WeightGroup

LEAST_GAIN = 1.05  # least speed-up over the best single device for which `auto` uses several
_TIE = 1e-6  # part of the streamed bytes' link time that is added to decide between equal times


@dataclass(frozen=True)
class DeviceRoom:
    """A device that may compute layers."""

    name: str
    budget_bytes: int | None = None  # memory that the plan may use; None: no limit
    machine: Machine = TYPICAL  # its link's rate is that reached while the other links copy, too
    is_counted: bool = True  # False: the context and other models are not part of the budget


@dataclass(frozen=True)
class DevicePart:
    """The layers that one device computes, and their plan."""

    room: DeviceRoom
    layers: LayerRange
    plan: Plan
    expected_s: float  # expected seconds of the planned workload in this part
    facts: ModelFacts  # the header with only these layers
    request: PlanRequest  # the request that the plan was made for


@dataclass(frozen=True)
class Division:
    """The parts of a model, in the order of its layers. Devices without layers have no part."""

    parts: tuple[DevicePart, ...]
    draft_on: str = ""  # the device that has room for the draft model; "": none was asked for
    reasons: tuple[str, ...] = ()

    @property
    def expected_s(self) -> float:
        return sum(part.expected_s for part in self.parts)

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        return tuple(part.layers for part in self.parts)

    @cached_property
    def plan(self) -> Plan:
        """The plan of all devices together. Each device keeps its own pools of slots."""
        if len(self.parts) == 1:
            return self.parts[0].plan
        named = []
        for part in self.parts:
            layout, name = part.plan.layout, part.room.name
            pools = tuple(replace(pool, name=f"{name}: {pool.name}") for pool in layout.pools)
            named.append(replace(part.plan, layout=replace(layout, pools=pools)))
        return joined(named, [part.room.name for part in self.parts], self.reasons)

    @property
    def words(self) -> str:
        n_layers = self.parts[-1].layers.end - 1
        return ", ".join(f"{p.room.name} {layer_words(p.layers, n_layers)}" for p in self.parts)


def joined(plans: Sequence[Plan], names: Sequence[str], reasons: tuple[str, ...] = ()) -> Plan:
    """Return the plan of all devices together. Each device keeps its own pools of slots.

    The joined plan has `reasons` and then each plan's own reasons, which begin with the device's
    name. A single plan is returned unchanged.
    """
    if len(plans) == 1:
        return plans[0]
    pools: list[SlotPool] = []
    groups: list[WeightGroup] = []
    named = list(zip(names, plans, strict=True))
    for plan in plans:
        groups += [replace(g, pool=g.pool + len(pools)) for g in plan.layout.groups]
        pools += plan.layout.pools
    own = tuple(f"{name}: {reason}" for name, plan in named for reason in plan.reasons)
    return replace(
        plans[-1],
        streamed=tuple(entry for plan in plans for entry in plan.streamed),
        resident_bytes=sum(plan.resident_bytes for plan in plans),
        layout=SlotLayout(tuple(pools), tuple(groups)),
        reasons=(*reasons, *own),
        reserve_bytes=sum(plan.reserve_bytes for plan in plans),
        min_batch=max((p.min_batch for p in plans if p.min_batch is not None), default=None),
        chunk_tokens=min((p.chunk_tokens for p in plans if p.chunk_tokens), default=0),
        declined=tuple(f"{name}: {why}" for name, plan in named for why in plan.declined),
        n_resident=sum(plan.n_resident for plan in plans),
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
    devices are `LEAST_GAIN` times as fast.
    """
    if use_all and len(devices) > facts.n_layers:
        raise DoesNotFit(
            f"{len(devices)} devices cannot share {facts.n_layers} layers: name fewer in --device"
        )
    if len(devices) == 1:
        whole = LayerRange(0, facts.n_layers + 1)
        return plan_parts(facts, devices, [whole], request, draft_on=0)
    homes = range(len(devices)) if draft_on is None and request.reserve_bytes else [draft_on or 0]
    search = _Search(facts, devices, request)
    best = min((search.best(home, use_all=use_all) for home in homes), key=lambda b: b.seconds)
    alone = [] if use_all else _alone(facts, devices, request, homes)
    ranges = best.ranges
    if not ranges:
        if alone:
            return alone[0]
        # The search found nothing that fits. Plans of equal parts are exact, and their DoesNotFit
        # says what is missing.
        n, cuts = facts.n_layers + 1, range(len(devices) + 1)
        ranges = [LayerRange(*p) for p in pairwise(n * i // len(devices) for i in cuts)]
    found: Division | None = None
    for n_ubatch in (best.n_ubatch, None):
        with suppress(DoesNotFit):
            found = plan_parts(
                facts, devices, ranges, request, draft_on=best.draft_on, n_ubatch=n_ubatch
            )
            break
    if found is None:
        if alone:
            return alone[0]
        return plan_parts(facts, devices, ranges, request, draft_on=best.draft_on)
    if not alone:
        why = "" if use_all else ": no device can hold it alone"
        return replace(found, reasons=(f"{found.words}{why}",))
    one = alone[0]
    gain = one.expected_s / found.expected_s
    if len(found.parts) == 1 or gain < LEAST_GAIN:
        return replace(one, reasons=(_left_out(devices, one, gain),))
    others = [d.name for d, r in zip(devices, ranges, strict=True) if not len(r)]
    words = f"{found.words}: {gain:.1f} x {one.parts[0].room.name} alone (estimate)"
    left = (f"{', '.join(others)}: not used, which would save no time",) if others else ()
    return replace(found, reasons=(words, *left))


def _alone(
    facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest, homes: Sequence[int]
) -> list[Division]:
    """Return the divisions that fit with all layers on one device, the fastest first."""
    found, whole = [], LayerRange(0, facts.n_layers + 1)
    for i in range(len(devices)):
        ranges = [whole if i == j else LayerRange(0, 0) for j in range(len(devices))]
        for home in homes:
            try:
                found.append(plan_parts(facts, devices, ranges, request, draft_on=home))
            except DoesNotFit:
                continue
    return sorted(found, key=lambda division: division.expected_s)


def _left_out(devices: Sequence[DeviceRoom], one: Division, gain: float) -> str:
    used = one.parts[0].room.name
    others = ", ".join(device.name for device in devices if device.name != used)
    if not any(part.plan.streamed for part in one.parts):
        return f"{others}: not used, because the whole model fits {used}"
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

    Empty ranges get no part. All parts have the ubatch `n_ubatch`. If it is None, they get the
    ubatch with which all parts together take the least time. The request's `reserve_bytes` for a
    draft model are taken from `devices[draft_on]`.
    """
    draft = devices[draft_on].name if request.reserve_bytes else ""
    home = devices[draft_on]
    if (
        draft and home.is_counted and home.budget_bytes is not None
        and not len(ranges[draft_on]) and request.reserve_bytes > home.budget_bytes
    ):  # fmt: skip
        raise DoesNotFit(
            f"{draft} has {home.budget_bytes / 2**20:.1f} MiB, and the draft needs "
            f"{request.reserve_bytes / 2**20:.1f}: name another device (-devd) or raise --vram"
        )
    used = [(i, d, r) for i, (d, r) in enumerate(zip(devices, ranges, strict=True)) if len(r)]
    sizes: Sequence[int | None] = (None,)
    if len(used) > 1:
        sizes = (n_ubatch,) if n_ubatch else _ubatches(facts, [d for _, d, _ in used], request)
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
) -> tuple[list[DevicePart] | None, DoesNotFit | None]:
    """Return the parts with the fastest ubatch of `sizes`, or None and why no ubatch fits.

    `used` has each device's index, the device and its layers. `host_bytes` is the host memory for
    each part's streamed weights, None for no limit.
    """
    best: list[DevicePart] | None = None
    error: DoesNotFit | None = None
    for n_ubatch in sizes:
        found = []
        for k, (i, device, layers) in enumerate(used):
            asked = _request_of(
                facts, device, layers, request, n_ubatch, has_draft=i == draft_on,
                has_mtp=k == len(used) - 1,
            )  # fmt: skip
            if len(used) > 1:
                asked = replace(asked, host_bytes=None if host_bytes is None else host_bytes[k])
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
                plan = replace(plan, n_ubatch=n_ubatch).with_chunks(request.chunks)
            splits = bool(request.plan_for_splits)
            work = model_work(part, request.hits if splits else None)
            seconds = expected_s(
                device.machine, work, request.workload, plan.sharing, plan.n_ubatch, hybrid=splits
            ) + (hand_over_s(facts, device.machine, request, plan.n_ubatch) if k else 0.0)
            found.append(DevicePart(device, layers, plan, seconds, part, asked))
        if len(found) < len(used):
            continue
        if best is None or _seconds(found) < _seconds(best):
            best = found
        if n_ubatch not in SMALL_UBATCHES and not any(part.plan.streamed for part in found):
            break  # all weights are resident, so larger ubatches would save nothing
    return best, error


def _seconds(parts: Sequence[DevicePart]) -> float:
    return sum(part.expected_s for part in parts)


def hand_over_s(facts: ModelFacts, machine: Machine, request: PlanRequest, n_ubatch: int) -> float:
    """Return the seconds to hand all activations of the workload from one device to the next.

    `machine` is that of the receiving device.
    """
    work = request.workload
    n_decodes = math.ceil(work.n_prompt / n_ubatch) + work.n_generated / work.n_batch
    sent = (work.n_prompt + work.n_generated) * 4 * facts.number("embedding_length")
    return n_decodes * machine.per_switch_s + sent / machine.link_bytes_per_s


def _ubatches(
    facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest
) -> tuple[int, ...]:
    """Return the ubatches to choose from, which all devices share."""
    if not any(device.is_counted for device in devices):
        return (DEFAULT_UBATCH,)
    return request.ubatches(has_experts=request.stream_experts and bool(facts.expert_weights))


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
    of its layers that a plan of the whole model would choose.
    """
    n, n_gpu_layers, n_cpu_moe = facts.n_layers, request.n_gpu_layers, request.n_cpu_moe
    expert_layers = _expert_layers(facts)
    n_here = min(layers.end, n) - layers.first
    if n_gpu_layers is not None and n_here < n:
        n_gpu_layers = n_here - sum(i in layers for i in spread(n - n_gpu_layers, n))
    if isinstance(n_cpu_moe, int) and n_here < n:
        chosen = spread(n_cpu_moe, len(expert_layers))
        n_cpu_moe = sum(expert_layers[i] in layers for i in chosen)
    context = request.context if device.is_counted else None
    if context is not None and n_ubatch is not None:
        context = replace(context, n_ubatch=n_ubatch)
    return replace(
        request,
        budget_bytes=device.budget_bytes if request.stream_experts else None,
        machine=device.machine,
        reserve_bytes=request.reserve_bytes if has_draft and device.is_counted else 0,
        context=context,
        most_ubatch=request.most_ubatch if n_ubatch is None else None,
        n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe,
        mtp=request.mtp and has_mtp,
        decodes=request.decodes if n_here == n else (),  # measured with all layers
    )


def _expert_layers(facts: ModelFacts) -> list[int]:
    return sorted({layer_of(entry.name) for entry in facts.expert_weights})


# -- search ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Found:
    """The fastest ranges that a search found. `ranges` is empty if nothing fits."""

    seconds: float = math.inf
    ranges: Sequence[LayerRange] = ()
    n_ubatch: int | None = None
    draft_on: int = 0


class _Search:
    """Finds the fastest ranges. Times are those of average layers; sizes are each layer's own."""

    def __init__(
        self, facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest
    ) -> None:
        self._facts, self._devices, self._request = facts, devices, request
        self._n = n = facts.n_layers
        self._n_experts = facts.n_experts
        self._hybrid = bool(request.plan_for_splits)
        self._work = model_work(facts, request.hits if self._hybrid else None)
        experts = [e for e in facts.loaded if is_experts(e)] if request.stream_experts else []
        dense = [e for e in facts.loaded if DENSE.match(e.name)]
        weights = Weights(facts, experts, dense)
        self._layout, self._dense_ring_bytes = weights.layout, weights.dense_ring_bytes
        self._least_bytes = least_expert_bytes(self._layout)
        self._ring_bytes = sum(ring_slots(p) * p.slot_bytes for p in self._layout.pools)
        held, expert, loose = [0] * n, [0] * n, [0] * n
        self._outside_bytes = device_bytes(facts)
        for entry in facts.loaded:
            i = layer_of(entry.name)
            if i < 0:
                continue
            self._outside_bytes -= entry.size_bytes
            held[i] += entry.size_bytes
        for entries, sizes in ((experts, expert), (dense, loose)):
            for entry in entries:
                sizes[layer_of(entry.name)] += entry.size_bytes
        has_experts = [bool(size) for size in expert]
        if request.n_cpu_moe is None:
            in_ram = has_experts
        elif request.n_cpu_moe == "fit":
            in_ram = [False] * n  # `_ways` adds layers if not all experts fit the device
        else:
            layers = _expert_layers(facts) if experts else []
            chosen = {layers[i] for i in spread(request.n_cpu_moe, len(layers))}
            in_ram = [i in chosen for i in range(n)]
        n_dense = 0 if request.n_gpu_layers is None else n - request.n_gpu_layers
        streamed = spread(n_dense, n)
        self._held, self._expert = _sums(held), _sums(expert)
        self._n_expert, self._in_ram = _sums(has_experts), _sums(in_ram)
        self._loose = _sums(loose)
        self._n_dense = _sums([i in streamed for i in range(n)])
        self._cached = [0] * (n + 1)  # bytes of caches and states of all layers before each one
        self._mtp_bytes = 0
        if request.context is not None:
            memory = (context_memory(facts.part(i, i + 1), request.context) for i in range(n))
            self._cached = _sums([m.kv_bytes + m.recurrent_bytes for m in memory])
            if request.mtp:
                mtp = plan_mtp(facts, request.context, None)
                self._mtp_bytes = mtp.weight_bytes + mtp.context_bytes
        self._seconds: dict[tuple[object, ...], float] = {}
        self._parts_s: dict[tuple[object, ...], float] = {}

    def best(self, draft_on: int, *, use_all: bool) -> _Found:
        """Return the fastest ranges if the draft model is on device `draft_on`."""
        sizes = _ubatches(self._facts, self._devices, self._request)
        found = (self._with_ubatch(n, draft_on, use_all=use_all) for n in sizes)
        return min(found, key=lambda f: f.seconds)

    def _with_ubatch(self, n_ubatch: int, draft_on: int, *, use_all: bool) -> _Found:
        """Return the fastest ranges with this ubatch, by dynamic programming over the devices."""
        n, request = self._facts.n_layers, self._request
        fixed = 0
        if request.context is not None:
            memory = context_memory(self._facts, replace(request.context, n_ubatch=n_ubatch))
            fixed = memory.compute_bytes + memory.pool_bytes
        # (seconds, end of each device's range), by number of layers on the devices so far
        so_far: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
        for d, device in enumerate(self._devices):
            room: int | None = device.budget_bytes
            if room is not None and device.is_counted:
                room -= request.reserve_bytes if d == draft_on else 0
            if room is not None and room < 0:
                return _Found()  # the draft model does not fit
            buffers = fixed if device.is_counted else 0
            after = d + 1 if use_all else 0  # least number of layers up to this device
            most = n - (len(self._devices) - 1 - d) if use_all else n
            handed_s = hand_over_s(self._facts, device.machine, request, n_ubatch)
            then = {} if use_all else {end: (s, (*e, end)) for end, (s, e) in so_far.items()}
            for first, (before_s, ends) in so_far.items():
                least = max(first + 1, after) if d < len(self._devices) - 1 else n
                for end in range(least, most + 1) if first < n else ():
                    seconds = self._part_s(device, room, buffers, first, end, n_ubatch)
                    seconds += before_s + (handed_s if first else 0.0)
                    if seconds < then.get(end, (math.inf,))[0]:
                        then[end] = seconds, (*ends, end)
            so_far = then
        if n not in so_far:
            return _Found()
        seconds, ends = so_far[n]
        # The last range also has the output, which counts as one more layer. Empty ranges stay so.
        ranges = [LayerRange(a, b + (b == n and a < n)) for a, b in pairwise((0, *ends))]
        return _Found(seconds, ranges, n_ubatch, draft_on)

    def _part_s(
        self, device: DeviceRoom, room: int | None, buffers_bytes: int, first: int, end: int,
        n_ubatch: int,
    ) -> float:  # fmt: skip
        """Return the expected seconds of these layers on a device; infinite if they do not fit."""
        part = (device.machine, device.is_counted, room, first, end, n_ubatch)
        if part in self._parts_s:
            return self._parts_s[part]
        is_last, best = end == self._n, math.inf
        for sharing, streamed_bytes in self._ways(device, room, buffers_bytes, first, end):
            key = (device.machine, n_ubatch, end - first, is_last,
                   self._n_expert[end] - self._n_expert[first], sharing)  # fmt: skip
            if key not in self._seconds:
                work = replace(
                    self._work,
                    n_layers=end - first,
                    n_expert_layers=self._n_expert[end] - self._n_expert[first],
                    head=self._work.head if is_last else Part(),
                )
                self._seconds[key] = expected_s(
                    device.machine, work, self._request.workload, sharing, n_ubatch,
                    hybrid=self._hybrid,
                )  # fmt: skip
            tie_s = _TIE * streamed_bytes / device.machine.link_bytes_per_s
            best = min(best, self._seconds[key] + tie_s)
        self._parts_s[part] = best
        return best

    def _ways(
        self, device: DeviceRoom, room: int | None, buffers_bytes: int, first: int, end: int
    ) -> Iterator[tuple[Sharing, int]]:
        """Yield the ways to use the device's memory for these layers, with the bytes that stream.

        Yields nothing if the layers do not fit.
        """
        n_layers, n = end - first, self._n_expert[end] - self._n_expert[first]
        n_experts = self._n_experts
        expert_bytes = self._expert[end] - self._expert[first]
        in_ram, n_dense = (sums[end] - sums[first] for sums in (self._in_ram, self._n_dense))
        if room is None:
            yield Sharing(in_ram * n_experts, n - in_ram, n_dense), expert_bytes
            return
        loose = (
            self._loose[end] - self._loose[first]
        ) / n_layers  # mean bytes of a layer's dense weights
        room -= buffers_bytes + self._held[end] - self._held[first] - expert_bytes
        room -= self._cached[end] - self._cached[first] if device.is_counted else 0
        if end == self._n:
            room -= self._outside_bytes + self._mtp_bytes
        mean = expert_bytes / max(1, n)
        may_choose = self._request.n_cpu_moe == "fit"
        if in_ram == 0 and room >= expert_bytes and not n_dense:
            yield Sharing(0, n, 0), 0
            return
        in_ram = n if may_choose else in_ram
        least = self._least_bytes if in_ram else 0
        left = room - (n - in_ram) * mean
        if n_dense:
            left += n_dense * loose - self._dense_ring_bytes
        if left < least and self._request.n_gpu_layers is None:  # dense weights have to stream
            n_dense = math.ceil((least - left + self._dense_ring_bytes) / max(1.0, loose))
            left += n_dense * loose - self._dense_ring_bytes
        if left < least or n_dense > n_layers:
            return
        numbers = {0}
        if may_choose and not n_dense and mean:
            most = max(0, int((left - self._ring_bytes) / mean))
            numbers = {0, min(n, most), min(n, most) // 2}
        for resident in numbers:
            n_streamed = in_ram - resident
            n_slots = slots_within(self._layout, int(left - resident * mean), n_streamed)
            if n_streamed and not n_slots:
                continue
            if n_slots > n_experts:  # rounded, so that similar parts are estimated once
                n_slots -= n_slots % max(1, n_experts // 8)
            bytes_ = int(n_streamed * mean + n_dense * loose)
            yield Sharing(n_slots, n - n_streamed, n_dense), bytes_


def _sums(numbers: Sequence[int]) -> list[int]:
    return [0, *accumulate(int(number) for number in numbers)]
