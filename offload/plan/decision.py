"""Decides a model's layout from its header, the machine and what was asked for. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from offload.errors import DeviceUnavailable, DoesNotFit
from offload.model import ModelFacts, is_experts, layer_of
from offload.notes import Note, NoteKind
from offload.plan.cache_place import CachePlace, faster_place
from offload.plan.devices import Division, divide, placed_by_libllama, plan_parts
from offload.plan.found import DeviceRoom, Found, FoundDevice, Kind
from offload.plan.host import (
    BOUNCE_BYTES,
    CONTEXT,
    DRIVER,
    DRIVER_BYTES,
    PINNED,
    ExpertLimits,
    LaterBytes,
    later_bytes,
    limits_of_experts,
)
from offload.plan.layout import Layout
from offload.plan.long_prompts import LONG_UBATCHES
from offload.plan.placement import Plan, PlanRequest, make_plan
from offload.plan.ranges import LayerRange, by_memory, by_shares, shares_for
from offload.plan.row_draft import no_mtp_reason
from offload.plan.sharing import UBATCHES
from offload.plan.slot_layout import SlotLayout
from offload.plan.tables import host_tables
from offload.plan.wanted import Wanted
from offload.times.context_memory import (
    ContextOptions,
    check_cache_types,
    context_memory,
    trained_context,
    with_cache_in_ram,
)
from offload.times.min_batch import MinBatch
from offload.units import size_words

_UBATCHES_FROM_DISK = (2048, 1024)  # sizes to try if the CPU reads experts from the disk
_MOST_ATTENTION_PART = 1 / 8  # largest part of the RAM that buffers for attention may take
_UBATCHES = 4  # ubatches in one decode of several devices
_NO_MTP = "the installed library has no functions for it"
_NO_PLANNING = "the installed library cannot plan a graph in advance"
_NO_ROOM_FOR_MTP = "they do not fit the GPU"


def decide(facts: ModelFacts, found: Found, wanted: Wanted) -> Layout:
    """Return the layout that a start uses.

    Raises BadRequest, DoesNotFit or DeviceUnavailable.
    """
    n_tuned = wanted.tuned_ubatch
    try:
        layout = _decided(facts, found, wanted)
        n_ubatch, may_choose = layout.context.n_ubatch, wanted.most_ubatch is not None
        if layout.experts is None or n_ubatch not in LONG_UBATCHES or not may_choose:
            return layout
        # A large ubatch needs RAM for its inputs, which may be what the experts lack.
        return _decided(facts, found, replace(wanted, most_ubatch=UBATCHES[-1]))
    except DoesNotFit:
        if n_tuned is None:
            raise
    # Less memory is free than when the ubatch was measured.
    words = (
        f"A ubatch of {n_tuned} tokens, which was the fastest when `specoffload tune` measured, "
        "does not fit the memory that is free now"
    )
    layout = _decided(facts, found, replace(wanted, tuned_ubatch=None))
    return layout.with_devices(
        replace(device, plan=device.plan.because(words)) for device in layout.devices
    )


def _decided(facts: ModelFacts, found: Found, wanted: Wanted) -> Layout:
    """Return the layout with the tuned ubatch, if there is one."""
    flash_attn = check_cache_types(
        facts, wanted.context.type_k, wanted.context.type_v, wanted.context.flash_attn
    )
    n_ctx = wanted.context.n_ctx or trained_context(facts, wanted.context.rope)
    context = replace(wanted.context, n_ctx=n_ctx, flash_attn=flash_attn)
    wanted, context = _with_cache(facts, found, wanted, context)
    no_rows_reason = ""
    if wanted.mtp:
        no_rows_reason = no_mtp_reason(facts) or ("" if found.has_mtp else _NO_MTP)
    loads_mtp = wanted.mtp and not no_rows_reason
    request = replace(
        _request(found, wanted),
        context=context,
        mtp=loads_mtp,
        not_lent_reason="" if found.plans_graphs else _NO_PLANNING,
    )
    layout = Layout(
        facts, Division(()), context, wanted.min_batch, loads_mtp,
        splits=wanted.hybrid, repack=wanted.repack, no_rows_reason=no_rows_reason,
    )  # fmt: skip
    if found.workers:
        layout = replace(layout, cache_reason=_asked_reason(facts, context))
        layout = _with_workers(layout, found, wanted, _beside_cache(facts, request, context))
    elif not found.devices[0].kind.streams:
        layout = _on_cpu(layout, found, wanted)
    elif not wanted.wrapped:
        layout = _by_libllama(layout, found, wanted)
    else:
        layout = _with_cache_place(layout, found, wanted, request)
    return _finished(layout, found, wanted)


def _request(found: Found, wanted: Wanted) -> PlanRequest:
    """Return what all devices are asked for. Each gets a budget, and the context has a place."""
    return PlanRequest(
        reserve_bytes=wanted.reserve_bytes,
        projector_bytes=wanted.projector_bytes,
        host_projector_bytes=wanted.host_projector_bytes,
        most_ubatch=_most_ubatch(found, wanted),
        n_gpu_layers=wanted.n_gpu_layers,
        n_cpu_moe=wanted.n_cpu_moe,
        stream_experts=wanted.stream_experts,
        host_bytes=_host_bytes(found, wanted),
        passes=wanted.passes,
        plan_for_splits=wanted.plan_for_splits,
        hits=wanted.hits,
        unions=wanted.unions,
        decodes=wanted.decodes,
        mix=wanted.mix,
        tuned_ubatch=wanted.tuned_ubatch,
        lend=wanted.lend,
        machine=wanted.machine,
    )


def _most_ubatch(found: Found, wanted: Wanted) -> int | None:
    """Return the largest ubatch that a plan may choose, which the kernels of all devices take."""
    limits = [device.most_tokens for device in found.devices if device.most_tokens]
    limits += [UBATCHES[-1]] if found.workers else []  # whose cards are not asked
    return None if wanted.most_ubatch is None else min([wanted.most_ubatch, *limits])


def _with_cache(
    facts: ModelFacts, found: Found, wanted: Wanted, context: ContextOptions
) -> tuple[Wanted, ContextOptions]:
    """Return what is wanted with a context that can be.

    A cache in RAM would cross the network to workers, so it is in RAM beside them only if asked.
    """
    streams = found.devices[0].kind.streams and wanted.wrapped
    may_choose = wanted.chooses_cache and streams and not found.workers
    wanted = replace(wanted, chooses_cache=may_choose)
    if context.kv_offload:
        return wanted, context
    if not streams and not found.workers:  # all of the context is in RAM
        return wanted, replace(context, kv_offload=True)
    return wanted, with_cache_in_ram(facts, context)


def _with_cache_place(layout: Layout, found: Found, wanted: Wanted, request: PlanRequest) -> Layout:
    """Return the layout with the KV cache where the flag says, or else where it is faster."""
    facts, context = layout.facts, layout.context
    if not context.kv_offload:
        asked = _divided(facts, found, wanted, _beside_cache(facts, request, context))
        layout = replace(layout, cache_reason=_asked_reason(facts, context))
        return _planned(layout, asked, found, wanted)
    divided: Division | None = None
    error: DoesNotFit | None = None
    try:
        divided = _divided(facts, found, wanted, request)
    except DoesNotFit as e:
        error = e
    streams = divided is None or any(part.plan.streamed for part in divided.parts)
    counted = any(device.is_counted(wanted) for device in found.devices)
    if wanted.chooses_cache and streams and counted:
        ram = with_cache_in_ram(facts, context)
        try:
            there = _divided(facts, found, wanted, _beside_cache(facts, request, ram))
        except DoesNotFit as e:
            error = _least_needed(error, e)
        else:
            on_device = None if divided is None else CachePlace(divided, context)
            best = faster_place(facts, on_device, CachePlace(there, ram))
            if best.reason:
                layout = replace(layout, context=ram, cache_reason=best.reason)
                divided = there
    if divided is None:
        assert error is not None
        raise error
    return _planned(layout, divided, found, wanted)


def _least_needed(error: DoesNotFit | None, other: DoesNotFit) -> DoesNotFit:
    """Return the error that names less memory, which is enough for a start."""
    if error is None:
        return other
    sizes = [math.inf if e.least_bytes is None else e.least_bytes for e in (error, other)]
    return other if sizes[1] < sizes[0] else error


def _asked_reason(facts: ModelFacts, context: ContextOptions) -> str:
    """Return why a KV cache is in RAM that was asked for there; "" if it is on the device."""
    if context.kv_offload:
        return ""
    size = size_words(context_memory(facts, context).host_kv_bytes)
    return f"The KV cache ({size} for {context.n_ctx:,} tokens) is in RAM (--no-kv-offload)"


def _beside_cache(facts: ModelFacts, request: PlanRequest, context: ContextOptions) -> PlanRequest:
    """Return the request for a context whose KV cache takes host memory.

    Ubatches are limited if the CPU's buffers for attention would take much of that memory.
    """
    host_bytes, most = request.host_bytes, request.most_ubatch

    def attention_bytes(n_ubatch: int) -> int:
        return context_memory(facts, replace(context, n_ubatch=n_ubatch)).host_compute_bytes

    if host_bytes is not None:
        if most is not None:
            most_bytes = _MOST_ATTENTION_PART * host_bytes
            fitting = [n for n in UBATCHES if n <= most and attention_bytes(n) <= most_bytes]
            most = max(fitting, default=min(most, UBATCHES[0]))
        taken_bytes = context_memory(facts, context).host_kv_bytes
        taken_bytes += attention_bytes(context.n_ubatch if most is None else most)
        host_bytes = max(0, host_bytes - taken_bytes)
    return replace(request, context=context, host_bytes=host_bytes, most_ubatch=most)


def _host_bytes(found: Found, wanted: Wanted) -> int | None:
    """Return the most host memory for streamed weights, None if they stay in the page cache."""
    if wanted.keep_page_cache:
        return None
    return found.ram_bytes if wanted.ram_bytes is None else min(wanted.ram_bytes, found.ram_bytes)


def decide_part(facts: ModelFacts, found: Found, wanted: Wanted) -> Layout:
    """Return the layout of a worker's device, which computes all layers of `facts` for a client.

    The client holds the context's options. Its context and buffers take `reserve_bytes`.
    The device has to take every batch. Raises DoesNotFit.
    """
    device = found.devices[0]
    # The plain CPU reads weights in host memory, so it needs no slots.
    request = replace(_request(found, wanted), stream_experts=device.kind.streams)
    division = divide(facts, _rooms(found, wanted)[:1], request, draft_on=0)
    part = division.parts[0].in_passes()
    on_gpu = device.kind is Kind.GPU
    fixed = {PINNED: BOUNCE_BYTES, DRIVER: DRIVER_BYTES} if on_gpu else {}
    fixed |= {} if on_gpu else {CONTEXT: wanted.reserve_bytes}
    later = LaterBytes(device.kind, tuple(fixed.items()))
    limits = limits_of_experts(facts, part.plan, found, wanted, later)
    layout = Layout(facts, division, wanted.context, MinBatch(1, 1), experts=limits)
    return layout.with_devices((part,))


# -- devices of this machine -----------------------------------------------------------------------


def _rooms(found: Found, wanted: Wanted) -> list[DeviceRoom]:
    """Return each local device's room.

    Raises DeviceUnavailable if the number of sizes is not the number of devices.
    """
    devices, each = found.devices, wanted.each_device_bytes
    if each and len(each) != len(devices):
        raise DeviceUnavailable(
            f"--vram has {len(each)} sizes, but --device has {len(devices)} "
            f"({', '.join(device.name for device in devices)})"
        )
    return [
        device.room(wanted, each[i] if each else wanted.device_bytes)
        for i, device in enumerate(devices)
    ]


def _draft_number(found: Found, wanted: Wanted) -> int | None:
    """Return the number of the device that -devd names, None if it names none of these."""
    names = [device.name.lower() for device in found.devices]
    name = (wanted.draft_device or "").lower()
    return names.index(name) if name in names else None


def _divided(facts: ModelFacts, found: Found, wanted: Wanted, request: PlanRequest) -> Division:
    """Return the division between local devices."""
    devices = _rooms(found, wanted)
    draft_on = _draft_number(found, wanted)
    if wanted.draft_device is not None and draft_on is None:
        request = replace(request, reserve_bytes=request.projector_bytes)
    reasons: tuple[str, ...] = ()
    if not wanted.tensor_split:
        return divide(facts, devices, request, use_all=found.takes_all, draft_on=draft_on)
    shares, words = shares_for(wanted.tensor_split, [device.name for device in devices])
    reasons = (words,) if words else ()
    if len(devices) == 1:
        shares = (1.0,)
    ranges = by_shares(facts.n_layers, shares)
    if draft_on is None or not ranges[draft_on]:
        draft_on = next(i for i, layers in enumerate(ranges) if layers)
    division = plan_parts(facts, devices, ranges, request, draft_on=draft_on)
    return replace(division, reasons=reasons)


def _planned(layout: Layout, division: Division, found: Found, wanted: Wanted) -> Layout:
    """Return the layout with the devices of a division, and with what follows from their plans."""
    devices, draft_on = division.parts, division.draft_on
    number = _draft_number(found, wanted)
    if draft_on is None and (wanted.draft_device is None or number is not None):
        local = [device.name for device in devices if not device.kind.is_remote]
        named = None if number is None else found.devices[number].name
        draft_on = next(iter(local), None) if named is None else named
    context = layout.context
    if wanted.most_ubatch is not None:
        context = replace(context, n_ubatch=devices[0].plan.n_ubatch)
    return replace(layout, division=replace(division, draft_on=draft_on), context=context)


def _by_libllama(layout: Layout, found: Found, wanted: Wanted) -> Layout:
    """Return the layout of a model whose weights libllama itself places, as for a draft model."""
    facts, devices = layout.facts, found.devices
    ranges: Sequence[LayerRange] = (LayerRange(0, facts.n_layers + 1),)
    reasons: tuple[str, ...] = ()
    if len(devices) > 1:
        shares: Sequence[float] = [device.layer_bytes for device in devices]
        if wanted.tensor_split:
            shares, words = shares_for(wanted.tensor_split, [device.name for device in devices])
            reasons = (words,) if words else ()
        ranges = by_shares(facts.n_layers, shares)
    used = tuple(
        placed_by_libllama(device, layers, facts)
        for device, layers in zip(devices, ranges, strict=True)
        if layers
    )
    return replace(layout, division=Division(used, used[0].name, reasons))


def _on_cpu(layout: Layout, found: Found, wanted: Wanted) -> Layout:
    """Return the layout for libllama's own CPU backend, which reads all weights in place."""
    whole = LayerRange(0, layout.facts.n_layers + 1)
    (device,) = found.devices
    division = Division((placed_by_libllama(device, whole, layout.facts),), device.name)
    notes = layout.notes
    if wanted.tensor_split:
        notes += ("--tensor-split: no effect, since there is one device, the CPU",)
    return replace(layout, division=division, notes=notes)


# -- devices of workers ----------------------------------------------------------------------------


def _with_workers(layout: Layout, found: Found, wanted: Wanted, request: PlanRequest) -> Layout:
    """Return the layout with layers on this machine's devices and on those of workers."""
    facts, on_cpu = layout.facts, not found.devices[0].kind.streams
    rooms = [] if on_cpu else _rooms(found, wanted)
    there = [device.room(wanted, None) for device in found.workers]
    local_first = on_cpu or wanted.order == "last"
    devices = [*rooms, *there] if local_first else [*there, *rooms]
    names = [device.name for device in devices]
    is_timed = bool(rooms) and all(device.measured for device in found.workers)
    reason, shares = "by free memory", tuple(wanted.tensor_split)
    division: Division | None = None
    ranges: list[LayerRange] = []
    if shares:
        shares, words = shares_for(shares, names)
        reason = f"by {words or '--tensor-split'}"
    elif on_cpu:
        reason = "so that as many as fit are remote, since this machine computes on its CPU"
    elif is_timed:
        try:
            division = divide(
                facts, devices, request, use_all=True, draft_on=devices.index(rooms[0])
            )
            rates = "; ".join(f"{device.name}: {device.measured}" for device in found.workers)
            reason = f"by expected time ({rates})"
        except DoesNotFit as e:
            reason += f", since a division by time does not fit: {e}"
    elif ours := [device.name for device in found.workers if device.kind is Kind.WORKER]:
        reason += f", since the speed of {', '.join(ours)} is not measured"
    elif found.unmeasured:
        reason += f", since speeds could not be measured: {found.unmeasured}"
    if division is None:
        ranges = _by_memory(facts, found, wanted, request, shares, rooms)
        cpu = _cpu_room(found.devices[0], request) if on_cpu else None
        devices = [cpu, *there] if cpu is not None else devices
        first = 0 if cpu is not None else devices.index(rooms[0])
        here = [layers for layers in ranges[first : first + len(rooms)] if layers]
        if rooms and not (here and here[0].first < facts.n_layers):
            name = found.devices[0].name
            raise DeviceUnavailable(
                f"--tensor-split leaves {name} no layers; leave it out of --device"
            )
        division = _parts_or_refused_there(facts, devices, ranges, request, first)
    used = {part.name for part in division.parts}
    if idle := [device.name for device in found.workers if device.name not in used]:
        reason += f"; no layers are left for {', '.join(idle)}"
    planned = _planned(layout, division, found, wanted)
    if not wanted.wrapped:
        planned = planned.with_devices(
            placed_by_libllama(placed.device, placed.layers, facts) for placed in planned.devices
        )
    if on_cpu:
        planned = _with_cpu(planned, found, ranges[0])
    return replace(planned, division=replace(planned.division, reasons=(reason,)))


def _by_memory(
    facts: ModelFacts, found: Found, wanted: Wanted, request: PlanRequest,
    shares: tuple[float, ...], rooms: Sequence[DeviceRoom],
) -> list[LayerRange]:  # fmt: skip
    """Return the layers of each device, in the order of the layers, as free memory divides them."""
    local_first = not rooms or wanted.order == "last"
    local, remote = by_memory(
        facts,
        request.context or ContextOptions(),
        [
            device.layer_bytes if room.budget_bytes is None else room.budget_bytes
            for device, room in zip(found.devices, rooms, strict=False)
        ],
        [device.free_bytes for device in found.workers],
        local_first=local_first,
        has_head=wanted.order in ("last", "only"),
        streams=[device.kind is Kind.WORKER for device in found.workers],
        shares=shares,
        most_remote=request.n_gpu_layers,
    )
    return [*local, *remote] if local_first else [*remote, *local]


def _cpu_room(cpu: FoundDevice, request: PlanRequest) -> DeviceRoom:
    """The CPU as a device whose weights are all in its own memory."""
    machine = replace(
        request.machine,
        vram_bytes_per_s=request.machine.ram_bytes_per_s,
        gpu_flops=request.machine.cpu_flops,
    )
    return DeviceRoom(cpu, None, machine, is_counted=False, is_remote=True)


def _parts_or_refused_there(
    facts: ModelFacts,
    devices: Sequence[DeviceRoom],
    ranges: Sequence[LayerRange],
    request: PlanRequest,
    first: int,
) -> Division:
    """Return the planned parts. A worker that streams itself refuses layers that do not fit it."""
    try:
        return plan_parts(facts, devices, ranges, request, draft_on=first)
    except DoesNotFit:
        endless = [
            replace(device, budget_bytes=None) if i != first and not device.is_remote else device
            for i, device in enumerate(devices)
        ]
        return plan_parts(facts, endless, ranges, request, draft_on=first)


def _with_cpu(layout: Layout, found: Found, layers: LayerRange) -> Layout:
    """Return the layout with the CPU first, even without layers."""
    cpu = next((cpu for cpu in layout.devices if cpu.kind is Kind.CPU), None)
    cpu = placed_by_libllama(found.devices[0], layers, layout.facts) if cpu is None else cpu
    others = tuple(other for other in layout.devices if other.kind is not Kind.CPU)
    return replace(layout, division=Division((cpu, *others), cpu.name))


# -- what follows from the devices -----------------------------------------------------------------


def _finished(layout: Layout, found: Found, wanted: Wanted) -> Layout:
    """Return the layout with host memory, batches and snapshots."""
    kind, plan = found.devices[0].kind, layout.plan
    if wanted.wrapped:
        if not kind.streams:  # ggml's CPU backend reads all weights in place
            plan = make_plan(layout.local_facts)
        later = later_bytes(
            layout.local_facts, found, wanted, layout.context, loads_mtp=layout.loads_mtp
        )
        layout = replace(
            layout,
            tables=host_tables(layout.facts, plan, found, wanted, later),
            experts=limits_of_experts(layout.facts, plan, found, wanted, later),
        )
    if layout.experts is not None:
        layout = _from_disk(layout, plan, found, wanted, layout.experts)
    if layout.loads_mtp and kind.streams and wanted.wrapped and not _holds_mtp(layout):
        layout = replace(layout, loads_mtp=False, no_rows_reason=_NO_ROOM_FOR_MTP)
    if layout.cache_words:
        cached = Note(NoteKind.CONTEXT, layout.cache_words)
        layout = replace(layout, notes=(*layout.notes, cached))
    if wanted.repack and kind.streams and wanted.wrapped:
        kept = "the weights beside it keep the file's layout, in which they are copied"
        words = f"--repack: no effect with {found.devices[0].name}: {kept}"
        layout = replace(layout, notes=(*layout.notes, words))
    layout = _with_batches(layout, wanted)
    alone = kind is Kind.CPU and wanted.wrapped and not layout.remote
    return _read_in_place(layout, wanted) if alone else layout


def _read_in_place(layout: Layout, wanted: Wanted) -> Layout:
    """Return the layout with the CPU's plan, if the CPU reads all weights in place."""
    (cpu,), facts, context = layout.devices, layout.facts, layout.context
    weights = [e for e in facts.loaded if e.name not in layout.on_disk]
    in_layers = tuple(e for e in weights if layer_of(e.name) >= 0)
    others_bytes = sum(e.size_bytes for e in weights if layer_of(e.name) < 0)
    reserve_bytes = context_memory(facts, context).total_bytes + wanted.reserve_bytes
    plan = Plan(
        in_layers, others_bytes, SlotLayout(), ("The CPU computes all, and nothing is copied",),
        reserve_bytes, context.n_ubatch,
    )  # fmt: skip
    own = PlanRequest(
        reserve_bytes=wanted.reserve_bytes, projector_bytes=wanted.projector_bytes,
        context=context, machine=wanted.machine,
    )  # fmt: skip
    return layout.with_devices((replace(cpu, plan=plan, request=own),))


def _holds_mtp(layout: Layout) -> bool:
    return any(device.plan.mtp is not None for device in layout.devices)


def _from_disk(
    layout: Layout, plan: Plan, found: Found, wanted: Wanted, limits: ExpertLimits
) -> Layout:
    """Return the layout for experts that are read from the disk while the model runs."""
    min_batch = replace(wanted.min_batch, experts=1, prefill_experts=None, swapped=frozenset())
    context = layout.context
    if found.devices[0].kind.streams:  # devices have to take every batch
        layout = layout.with_devices(device.in_passes() for device in layout.devices)
    elif wanted.most_ubatch is not None:
        # Each ubatch of a prompt reads all experts once.
        n_ubatch = _ubatch_from_disk(plan, found, wanted, context, limits)
        context = replace(context, n_ubatch=n_ubatch)
    return replace(layout, min_batch=min_batch, context=context)


def _ubatch_from_disk(
    plan: Plan, found: Found, wanted: Wanted, context: ContextOptions, limits: ExpertLimits
) -> int:
    """Return the largest ubatch whose buffers leave memory for 1.5 times a layer's experts."""
    of_layer = Counter[int]()
    for entry in filter(is_experts, plan.streamed):
        of_layer[layer_of(entry.name)] += entry.size_bytes
    most = min(wanted.most_ubatch or context.n_ubatch, context.n_ctx)
    needed_bytes = 1.5 * max(of_layer.values())
    fitting = (
        n for n in _UBATCHES_FROM_DISK if limits.start_bytes(found.ram_bytes, n) >= needed_bytes
    )
    return max(context.n_ubatch, min(most, next(fitting, context.n_ubatch)))


def _with_batches(layout: Layout, wanted: Wanted) -> Layout:
    """Return the layout with the most tokens of a decode and of a rollback.

    Several devices compute a decode's ubatches at the same time. So they get several ubatches, if
    the plan has chosen ubatches that may be larger than the batch that was asked for. The library
    asserts that a recurrent model has at least two snapshots less than an ubatch has tokens.
    """
    c = layout.context
    n_batch = max(c.n_batch, c.n_outputs, c.n_ubatch)
    is_free = wanted.most_ubatch is not None and wanted.most_ubatch > c.n_batch
    n_streaming = sum(device.kind.streams for device in layout.devices)
    if is_free and wanted.wrapped and n_streaming > 1:
        n_batch = max(n_batch, _UBATCHES * c.n_ubatch)
    wanted_n, most = c.n_rs_seq, max(0, c.n_ubatch - 2)
    notes = layout.notes
    if wanted_n > most and layout.facts.recurrent_layers:
        notes += (
            f"only {most} of {wanted_n} snapshots are kept, because --ubatch-size {c.n_ubatch} has "
            "room for no more",
        )
    context = replace(c, n_batch=n_batch, n_rs_seq=min(wanted_n, most))
    return replace(layout, context=context, notes=notes)
