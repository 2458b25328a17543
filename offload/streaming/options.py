"""The options of streaming, the executor that they call for, and the sizing of slots.

The header tells a context's memory within a few per cent, but not the memory of a driver and its
kernels. So on a GPU one ubatch is computed with few slots and without copies. Then the free memory
is read, and the slots get it (`for_warm_up`, `room_left`, `fitted`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.device import DeviceChoice
from offload.errors import DoesNotFit
from offload.ggml.backend import Stream
from offload.ggml.hostbuffer import HostBufferType
from offload.model import ModelFacts
from offload.plan.context import ContextSpec
from offload.plan.placement import (
    LEAST_FREE_BYTES,
    MARGIN_BYTES,
    Chunks,
    MeasuredDecode,
    NCpuMoe,
    Plan,
    PlanForSplits,
    make_plan,
)
from offload.plan.sharing import TokenMix, ring_slots
from offload.routing import HitCurve, RoutingRecorder
from offload.schedule.cache import Lrfu
from offload.schedule.schedule import Schedule
from offload.split.path import Hybrid
from offload.split.switch import Splitter
from offload.streaming.copying import (
    RING_BYTES,
    BounceCopier,
    Copier,
    DeviceCopier,
    Link,
    NoCopier,
    ThreadCopier,
)
from offload.streaming.device import MakeExecutor
from offload.streaming.executor import Executor
from offload.trace import NO_TRACE, Trace

_GUESSES = 20  # guessed experts under way, at most (docs/log.md)
_FEWER = 0.9  # factor on the size of slots that the device refused
_BOUNCING = (
    f"weights that are not pinned are copied through a pinned ring of {RING_BYTES >> 20} MiB, which"
    " a thread fills"
)


@dataclass(frozen=True)
class StreamingOptions:
    """The options of streaming weights to a device.

    SPECOFFLOAD_WITHOUT can turn off what is on by default, to find out which part causes an error.
    """

    vram_bytes: int | None = None  # for weights and slots alone; None: as device_bytes says
    device_bytes: int | None = None  # for everything on a GPU; None: what is free, less a margin
    n_cpu_moe: NCpuMoe = None  # layers whose experts stream; None: all; "fit": as few as possible
    n_gpu_layers: int | None = None  # layers whose dense weights stay resident; None: what fits
    reserve_bytes: int = 0  # part of the budget for others: a draft and its context
    chunks: Chunks = "auto"  # tokens of a chunk, if a batch's experts do not fit the slots
    depth: int = 8  # cuts that copies run ahead; 0: nothing is copied while the device computes
    warmup: bool = True  # size slots by what a GPU has left after a ubatch; off: by the header
    hybrid: bool = False  # split layers of small batches between the CPU and the device
    # Prefer slots to resident layers, because they serve every batch; "auto": if `hits` say so.
    plan_for_hybrid: PlanForSplits = False
    hits: HitCurve | None = None  # counted of this model
    decodes: tuple[MeasuredDecode, ...] = ()  # timed here by earlier starts, the last comes last
    mix: TokenMix | None = None  # what the plan is made for; None: a prompt, then an answer
    splitter: Splitter | None = None  # divides split layers; None: by measured costs
    record_routing: bool = False  # record what routers choose for small batches, to count hits
    trace: Trace = NO_TRACE
    cache: bool = True  # keep experts in slots for later graphs; off: copy them anew for each graph
    prefetch: bool = True  # guess the experts of small batches from the last batch, and promote
    band: bool = True  # let kernels see the range of slots that a batch uses, not all slots
    ahead: bool = True  # compute nodes that do not read the CPU's rows before those are there
    bounce: bool = True  # copy weights that cannot be pinned through a pinned ring
    native: bool = True  # the backend itself, not Python, decides which nodes it computes


def free_bytes(choice: DeviceChoice) -> int:
    """Return the bytes free on the device now, less the margin that is left to other programs."""
    return max(0, choice.device.memory_bytes()[0] - MARGIN_BYTES)


def plan_streaming(
    facts: ModelFacts,
    choice: DeviceChoice,
    options: StreamingOptions,
    stream_experts: bool,
    context: ContextSpec,
    most_ubatch: int | None = None,
    host_bytes: int | None = None,
) -> Plan:
    """Plan for this device. With `most_ubatch` the plan chooses the context's ubatch.

    On a GPU the context, its buffers and `reserve_bytes` are part of the budget, and
    `LEAST_FREE_BYTES` stay free whatever was asked for. A simulated device computes in host memory:
    its budget is for weights and slots alone. Streamed weights take at most `host_bytes` of host
    memory if any plan allows it. Raises DoesNotFit.
    """
    budget, counted = options.vram_bytes, is_counted(choice, options)
    lowered = ""
    asked = options.device_bytes
    if counted:
        free = choice.device.memory_bytes()[0]
        margin = MARGIN_BYTES if asked is None else LEAST_FREE_BYTES
        budget = min(free if asked is None else asked, max(0, free - margin))
        if asked is not None and budget < asked:
            lowered = (
                f"--vram {asked / 2**30:.2f}GiB: {budget / 2**30:.2f} GiB are used, since "
                f"{choice.name} has {free / 2**30:.2f} GiB free and {margin >> 20} MiB stay free "
                "for its driver and kernels"
            )
    elif budget is None and choice.sim is not None:
        budget = asked or choice.sim.vram_bytes
    plan = make_plan(
        facts,
        budget_bytes=budget if stream_experts else None,
        reserve_bytes=options.reserve_bytes if counted else 0,
        n_gpu_layers=options.n_gpu_layers,
        n_cpu_moe=options.n_cpu_moe,
        stream_experts=stream_experts,
        context=context if counted else None,
        most_ubatch=most_ubatch,
        hybrid=options.plan_for_hybrid,
        hits=options.hits,
        decodes=options.decodes,
        host_bytes=host_bytes,
        mix=options.mix,
    )
    plan = plan.because(lowered) if lowered else plan
    return plan.with_chunks(options.chunks)


def is_counted(choice: DeviceChoice, options: StreamingOptions) -> bool:
    """True if the context, its buffers and others are part of the device's budget."""
    return choice.on_gpu and options.vram_bytes is None


def executor_maker(
    plan: Plan,
    choice: DeviceChoice,
    options: StreamingOptions,
    is_pinned: Callable[[], bool] = lambda: True,
    note: Callable[[str], None] = lambda sentence: None,
    *,
    copies: bool = True,
    hybrid: Hybrid | None = None,
    recorder: RoutingRecorder | None = None,
) -> MakeExecutor:
    """Return a function that makes an executor for a stream of the device.

    `is_pinned` says, once the weights are loaded, if the device copies directly from them; if not,
    `note` gets a sentence for the user. Without `copies` the executor computes with whatever the
    slots hold. `hybrid` and `recorder`: as for Executor.
    """
    pools = plan.layout.pools

    def make(stream: Stream, host: HostBufferType) -> Executor:
        copier: Copier = NoCopier()
        if copies:
            bounce = options.bounce and not is_pinned()
            copier = _copier(choice, stream, options, bounce=bounce)
        if isinstance(copier, BounceCopier):
            note(_BOUNCING)
        n_used = max((pool.n_used for pool in pools), default=1)
        n_experts = max((pool.n_experts for pool in pools), default=0)
        rule = Lrfu.for_model(len(plan.layout.groups), n_used, n_experts)
        n_slots = {i: pool.n_slots for i, pool in enumerate(pools)}
        schedule = Schedule(n_slots, rule, options.depth, _GUESSES, keeps=options.cache)
        return Executor(
            stream,
            host,
            plan.layout,
            schedule,
            copier,
            options.trace,
            hybrid=hybrid,
            recorder=recorder,
            prefetch=options.prefetch,
            band=options.band,
            ahead=options.ahead,
        )

    return make


def _copier(
    choice: DeviceChoice, stream: Stream, options: StreamingOptions, *, bounce: bool
) -> Copier:
    if stream.device.has_async_and_events:
        ring = stream.device.pinned_memory(RING_BYTES) if bounce else None
        if ring is not None:
            return BounceCopier(stream, ring, options.trace)
        return DeviceCopier(stream, options.trace)
    link = Link()
    if choice.sim is not None:
        link = Link(choice.sim.bandwidth_bytes_per_s, choice.sim.latency_s)
    return ThreadCopier(link, options.trace)


# -- slots of fitting size -------------------------------------------------------------------------


def for_warm_up(plan: Plan) -> Plan:
    """Return the plan with only the slots that a ubatch needs at once."""
    pools = plan.layout.pools
    counts = [min(p.n_slots, ring_slots(p)) if p.n_experts else p.n_slots for p in pools]
    return plan.with_slots(counts)


def room_left(
    plan: Plan, *, free_before: int, free_now: int, device_bytes: int | None, others_bytes: int
) -> int:
    """Return the bytes for slots, when everything else but `others_bytes` has its memory.

    `device_bytes` is the most that may be used; None: all but a margin. `LEAST_FREE_BYTES` stay
    free. If the driver does not report memory in use, returns the plan's own estimate.
    """
    used = free_before - free_now
    if used < plan.resident_bytes // 2:
        return plan.slot_bytes
    if device_bytes is None:
        return free_now - MARGIN_BYTES - others_bytes
    return min(device_bytes - used, free_now - LEAST_FREE_BYTES) - others_bytes


def fitted(plan: Plan, room_bytes: int, use: Callable[[Plan], None]) -> Plan:
    """Return the plan with as many slots in `room_bytes` as `use` accepts.

    `use` raises DoesNotFit to refuse. It is then called again with fewer slots. Raises DoesNotFit
    if not even the least slots fit.
    """
    while True:
        sized = plan.with_room(room_bytes)
        try:
            use(sized)
        except DoesNotFit as refused:
            room_bytes = int(sized.slot_bytes * _FEWER)
            try:
                plan.with_room(room_bytes)
            except DoesNotFit:
                raise refused from None
        else:
            return sized
