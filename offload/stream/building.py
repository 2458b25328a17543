"""Makes executors for the devices of a model, and gives slots the GPU memory that is left.

The header predicts a context's memory within a few per cent, but not the memory of a driver and its
kernels. So on a GPU one ubatch is computed first, with few slots and without copies. Then the
amount of free memory is read, and the slots get it.

ggml's scheduler gives a product to the first device that accepts the memory of its weight. So each
part of a model has a host buffer type of its own, over the one store of all weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from offload.device import DeviceChoice
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.backend import Stream
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.cuda_driver import maps_pinned
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.memory import HasAddress
from offload.notes import Note, NoteKind
from offload.plan.devices import DevicePlan
from offload.plan.host import BOUNCE_BYTES
from offload.plan.placement import Plan
from offload.plan.warm_up import WarmedUp
from offload.plan.weights import ring_slots
from offload.routing.routing import RoutingRecorder
from offload.store.store import Store
from offload.stream.copying import (
    BounceCopier,
    Copier,
    DeviceCopier,
    LinkSpeed,
    NoCopier,
    ThreadCopier,
)
from offload.stream.device import MakeExecutor, StreamingDevice
from offload.stream.doorbell import try_bell
from offload.stream.executor import Executor
from offload.stream.options import StreamingOptions
from offload.stream.read_speed import MeasureReads
from offload.stream.split_path import Hybrid
from offload.times.mapped_reads import reads_pay
from offload.trace.trace import NO_TRACE, Trace
from offload.units import plural

_FEWER = 0.9  # factor on the size of slots that the device refused
_BOUNCING = Note(
    NoteKind.COPIES,
    f"weights that are not pinned are copied through a pinned ring of {BOUNCE_BYTES >> 20} MiB, "
    "which threads fill",
)


class ExecutorBuilder:
    """Makes the executors of one engine's device, and sizes their slots."""

    def __init__(
        self,
        choice: DeviceChoice,
        options: StreamingOptions,
        notes: list[str],
        store: Store | None = None,
        hybrid: Hybrid | None = None,
        recorder: RoutingRecorder | None = None,
        *,
        trace: Trace = NO_TRACE,
        most_tokens: int = 0,
        measure_reads: MeasureReads | None = None,
    ) -> None:
        """`notes` gets sentences for the user. `store` holds the streamed weights.

        `hybrid`, `recorder` and `most_tokens`: as for Executor. `trace` is the device's own.
        `measure_reads` decides whether kernels read pinned memory. None: they do where they can.
        """
        self._choice, self._options, self._notes = choice, options, notes
        self._store, self._hybrid, self._recorder = store, hybrid, recorder
        self._trace, self._most_tokens = trace, most_tokens
        rings = hybrid is not None and hybrid.ways.now.rings
        if rings and (why_not := try_bell(choice.device)):
            words = f"{choice.name}: the host waits for the GPU in each split layer: {why_not}"
            notes.append(Note(NoteKind.DEVICE, words))
        self._reads_pinned = self._should_read_pinned(measure_reads)

    def _should_read_pinned(self, measure: MeasureReads | None) -> bool:
        """True if kernels read prompts' rows from pinned memory. A note says why, if measured."""
        choice = self._choice
        if measure is None or not maps_pinned(choice.device):
            return maps_pinned(choice.device)
        try:
            reads = measure(choice)
        except (DoesNotFit, DeviceFailed) as e:
            pays, why = False, f"how fast kernels read them was not measured: {e}"
        else:
            pays, why = reads_pay(reads), reads.words
        way = "kernels read rows of prompts" if pays else "copies bring rows of prompts"
        self._notes.append(Note(NoteKind.COPIES, f"{choice.name}: {way} from RAM: {why}"))
        return pays

    def executors(self, plan: Plan, *, copies: bool = True) -> MakeExecutor:
        """Return a function that makes a stream's executor for the plan's slots.

        Without `copies` the executor computes with whatever the slots hold.
        """

        def make(stream: Stream, host: HostBufferType, compute: ComputeBuffer | None) -> Executor:
            copier = self._copier(stream) if copies else NoCopier()
            return Executor(
                stream, host, plan.layout, self._options, copier, self._hybrid, self._recorder,
                compute, trace=self._trace, most_tokens=self._most_tokens,
                reads_pinned=self._reads_pinned,
            )  # fmt: skip

        return make

    def _copier(self, stream: Stream) -> Copier:
        options, sim = self._options, self._choice.sim
        if not stream.device.has_async_and_events:
            link = (
                LinkSpeed() if sim is None else LinkSpeed(sim.bandwidth_bytes_per_s, sim.latency_s)
            )
            return ThreadCopier(link, self._trace)
        bounce = None
        if options.bounce and (self._store is None or not self._store.is_pinned):
            bounce = stream.device.pinned_memory(BOUNCE_BYTES)
        if bounce is None:
            return DeviceCopier(stream, self._trace)
        # Executors are made anew when slots are sized.
        if _BOUNCING not in self._notes:
            self._notes.append(_BOUNCING)
        return BounceCopier(stream, bounce, self._trace)

    def use_few(self, plan: Plan, device: StreamingDevice) -> None:
        """Give the device few slots, and executors that copy nothing, for a warm-up.

        Raises DoesNotFit.
        """
        pools = plan.layout.pools
        warm = plan.with_slots(
            [min(p.n_slots, ring_slots(p)) if p.n_experts else p.n_slots for p in pools]
        )
        device.release_slots()
        _fitted(warm, warm.slot_bytes, partial(self._use, device, copies=False))

    def take_slots(self, plan: Plan, device: StreamingDevice) -> Plan:
        """Allocate the plan's slots now, or fewer if the device refuses them.

        Returns the plan with the slots. Raises DoesNotFit.
        """
        device.release_slots()
        sized = _fitted(plan, plan.slot_bytes, partial(self._use, device))
        if sized.slot_bytes < plan.slot_bytes:
            self._notes.append(
                f"slots: {sized.slot_bytes / 2**20:.0f} MiB of device memory; the device refused "
                f"the {plan.slot_bytes / 2**20:.0f} MiB that were planned"
            )
        return sized

    def warmed_up(self, planned: DevicePlan, device: StreamingDevice) -> WarmedUp:
        """Free all slots, and return the device's memory then.

        Call it after `use_few` and a computation of the largest ubatch. `size_slots` must follow.
        `planned` says what was free on the device before the model was loaded.
        """
        working_bytes = sum(executor.working_bytes for executor in device.executors.values())
        # A projector is open before slots are sized, and a draft model is not.
        others_bytes = planned.reserve_bytes - planned.request.projector_bytes
        device.release_slots()
        free_now = self._choice.device.memory_bytes()[0]
        return WarmedUp(
            self._choice.name, planned.plan, planned.device.free_bytes - free_now,
            others_bytes + working_bytes, free_now, planned.room.asked_bytes,
        )  # fmt: skip

    def size_slots(self, warmed: WarmedUp, device: StreamingDevice) -> Plan:
        """Give slots the GPU memory that nothing else needs. Returns the plan with these slots.

        If the driver does not report memory in use, the slots get the planned size. Raises
        DoesNotFit.
        """
        plan = warmed.plan
        room_bytes = warmed.room_bytes if warmed.fits else warmed.exceeding_bytes()
        sized = _fitted(plan, room_bytes, partial(self._use, device))
        if not warmed.fits:
            words = warmed.exceeded_words(sized.slot_bytes)
            self._notes.append(Note(NoteKind.DEVICE, words))
        self._notes.append(
            f"slots: {sized.slot_bytes / 2**20:.0f} MiB of device memory after a warm-up of "
            f"{plan.n_ubatch} tokens; from the header {plan.slot_bytes / 2**20:.0f} MiB were "
            "expected"
        )
        return sized

    def _use(self, device: StreamingDevice, sized: Plan, *, copies: bool = True) -> None:
        make = self.executors(sized, copies=copies)
        device.use_slots(sized, make, takes_all=not copies)


def _fitted(plan: Plan, room_bytes: int, use: Callable[[Plan], None]) -> Plan:
    """Return the plan with as many slots in `room_bytes` as `use` accepts.

    `use` raises DoesNotFit to refuse a plan. It is then called again with fewer slots. Raises
    DoesNotFit if not even the least number of slots fits.
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


@dataclass
class Part:
    """One device of a model, and the plan of its layers."""

    choice: DeviceChoice
    planned: DevicePlan  # with the slots that the device has
    host: HostBufferType
    builder: ExecutorBuilder
    device: StreamingDevice

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    def use(self, sized: Plan) -> None:
        """Keep the plan with the slots that the device has now."""
        self.planned = replace(self.planned, plan=sized)

    @property
    def overrides(self) -> tuple[tuple[str, HasAddress], ...]:
        """(pattern of names, buffer type) of the part's streamed weights, for libllama."""
        plan, host = self.plan, self.host
        return (
            *((pattern, host) for pattern in plan.patterns(experts=True)),
            *((pattern, host.dense) for pattern in plan.patterns(experts=False)),
        )


def warm_up(
    parts: Sequence[Part], compute: Callable[[], None], *, on_workers: bool
) -> tuple[WarmedUp | None, ...]:
    """Compute with few slots, and return the memory of each part's device then.

    It is None for parts whose slots keep the planned size. `compute` computes the largest ubatch on
    all devices. With `on_workers` it is called even if no slots are sized, so that workers allocate
    their memory now. `size_slots` must follow. Raises DoesNotFit.
    """
    sized = [p for p in parts if p.plan.layout.pools and p.planned.room.is_counted]
    for part in sized:
        part.builder.use_few(part.plan, part.device)
    if sized or on_workers:
        compute()
    return tuple(
        part.builder.warmed_up(part.planned, part.device) if part in sized else None
        for part in parts
    )


def size_slots(parts: Sequence[Part], warmed: Sequence[WarmedUp | None]) -> None:
    """Give slots the GPU memory that nothing else needs. Raises DoesNotFit."""
    for part, memory in zip(parts, warmed, strict=True):
        if memory is not None:
            part.use(part.builder.size_slots(memory, part.device))


def lend_buffers(parts: Sequence[Part], notes: list[str]) -> None:
    """Let slots continue in compute buffers, if `size_slots` has not done it. Adds notes."""
    for part in parts:
        buffer = part.device.compute_buffer
        if buffer is None:
            continue
        if not buffer.is_ours:
            part.use(part.builder.take_slots(part.plan, part.device))
        slots, mib = plural(part.device.n_lent, "more slot"), buffer.size_bytes / 2**20
        notes.append(
            f"slots: {slots} in the {mib:.0f} MiB of compute buffer, for experts between prompts"
        )
