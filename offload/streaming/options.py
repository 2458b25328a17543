"""The options of streaming, and the parts that a plan and a device call for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.device import DeviceChoice
from offload.errors import BadRequest
from offload.ggml.backend import Stream
from offload.ggml.hostbuffer import HostBufferType
from offload.model import ModelFacts
from offload.plan.context import ContextSpec
from offload.plan.placement import (
    LEAST_FREE_BYTES,
    MARGIN_BYTES,
    NCpuMoe,
    Plan,
    PlanForSplits,
    make_plan,
)
from offload.plan.room_for_splits import MeasuredDecode
from offload.plan.sharing import TokenMix
from offload.routing.counted import HitCurve
from offload.routing.recording import RoutingRecorder
from offload.schedule.cache_rules import make_cache_rule
from offload.schedule.chunks import Chunks
from offload.schedule.schedule import Schedule
from offload.schedule.slots import SlotTable
from offload.split.layers import Hybrid
from offload.split.switch import Splitter
from offload.streaming.bounce import RING_BYTES, BounceCopier
from offload.streaming.copy import Copier, DeviceCopier, Link, NoCopier, ThreadCopier
from offload.streaming.device import Executor, MakeExecutor
from offload.streaming.scheduled import ScheduledExecutor
from offload.streaming.serial import SerialExecutor
from offload.trace import NO_TRACE, Trace

_BOUNCING = (
    f"what is not pinned is copied through a ring of {RING_BYTES >> 20} MiB that is, which a thread"
    " fills; --no-bounce leaves it to the driver"
)


@dataclass(frozen=True)
class StreamingOptions:
    """Switches of the layer scheduler; each has a slow twin it is tested equal to."""

    vram_bytes: int | None = None  # for weights and slots alone; None: as device_bytes says
    device_bytes: int | None = None  # for all there is on a GPU; None: what is free, less a margin
    n_cpu_moe: NCpuMoe = None  # layers whose experts stream; None: all; "fit": as few as must
    n_gpu_layers: int | None = None  # layers whose dense weights stay resident; None: what fits
    reserve_bytes: int = 0  # of the budget, for others: a draft and its context
    chunks: Chunks = "auto"  # of tokens, where the experts of a batch have no slots all at once
    band: bool = True  # show kernels the slots between which a batch's experts lie, not all
    vector_tokens: int = 0  # batches of up to 100 tokens go in chunks of so many; 0: they do not
    overlap: bool = True  # off: the serial twin, a copy at a time, nothing cached
    depth: int = 8  # cuts that copies run ahead
    bounce: bool = True  # copy through a pinned ring what cannot be pinned
    native: bool = True  # off: Python is asked for each node which side computes it
    warmup: bool = True  # size slots by what a GPU has left after a ubatch; off: by the header
    prefetch: bool = True  # guess a verification batch's experts from the last one's
    n_guesses: int = 20  # guessed experts under way at most (docs/log.md)
    cache: str = "lrfu"  # one of CACHE_RULES
    hybrid: bool = False  # split layers of small batches between the CPU and the device
    # Slots rather than resident layers, since they serve every batch; "auto": if `hits` say so.
    plan_for_hybrid: PlanForSplits = False
    hits: HitCurve | None = None  # as counted of this model
    decodes: tuple[MeasuredDecode, ...] = ()  # that earlier starts timed here, the last comes last
    mix: TokenMix | None = None  # that the plan is made for; None: a prompt, then an answer
    splitter: Splitter | None = None  # decides how; None: by what was measured
    record_routing: bool = False  # what routers choose for small batches: it tells of hits
    ahead: bool = True  # nodes that do not read the CPU's rows are computed before those are there
    trace: Trace = NO_TRACE


def free_bytes(choice: DeviceChoice) -> int:
    """Bytes free on the device now, less the margin that is left to others."""
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
    """The plan for this device; with `most_ubatch` it chooses the context's ubatch. Raises
    DoesNotFit.

    On a GPU the context, its buffers and `reserve_bytes` are part of the budget, and
    `LEAST_FREE_BYTES` stay free whatever was asked for. A simulated device computes in host memory:
    there the budget is for weights and slots alone. What streams takes at most `host_bytes` of host
    memory where any plan does.
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
    return plan.with_chunks(options.chunks if options.overlap else "off")


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
    """The maker of an executor for each stream that libllama opens on the device.

    `is_pinned` tells, once the weights are loaded, if the device copies from them by itself.
    `note` gets a sentence for the user on what is done where it does not. Without `copies` the
    executor computes with whatever the slots hold. With `hybrid` it splits layers.
    `recorder` hears what routers choose.
    """
    if options.depth < 0:
        raise BadRequest(f"--prefetch-depth {options.depth}: must be 0 or more")

    def make(stream: Stream, host: HostBufferType) -> Executor:
        copier: Copier = NoCopier()
        if copies:
            copier = _copier(choice, stream, options, bounce=options.bounce and not is_pinned())
        if isinstance(copier, BounceCopier):
            note(_BOUNCING)
        if not options.overlap or not plan.layout.pools:
            return SerialExecutor(stream, copier, options.trace)
        table = SlotTable({i: pool.n_slots for i, pool in enumerate(plan.layout.pools)})
        n_used = max((pool.n_used for pool in plan.layout.pools), default=1)
        n_experts = max((pool.n_experts for pool in plan.layout.pools), default=0)
        rule = make_cache_rule(options.cache, len(plan.layout.groups), n_used, n_experts)
        schedule = Schedule(table, rule, options.depth, options.n_guesses)
        return ScheduledExecutor(
            stream,
            host,
            plan.layout,
            schedule,
            copier,
            options.trace,
            prefetch=options.prefetch,
            band=options.band,
            vector_tokens=options.vector_tokens,
            hybrid=hybrid,
            recorder=recorder,
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
