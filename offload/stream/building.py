"""Makes executors for a plan, and gives slots the GPU memory that nothing else needs.

The header predicts a context's memory within a few per cent, but not the memory of a driver and its
kernels. So on a GPU one ubatch is computed first, with few slots and without copies. Then the
amount of free memory is read, and the slots get it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from offload.device import DeviceChoice
from offload.errors import DoesNotFit
from offload.ggml.backend import Stream
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.hostbuffer import HostBufferType
from offload.notes import Note, NoteKind, kind_of
from offload.plan.devices import DevicePlan
from offload.plan.host import RING_BYTES
from offload.plan.placement import Plan
from offload.plan.warm_up import WarmedUp
from offload.plan.weights import ring_slots
from offload.routing.routing import RoutingRecorder
from offload.store.store import Store
from offload.stream.copying import (
    BounceCopier,
    Copier,
    DeviceCopier,
    Link,
    NoCopier,
    ThreadCopier,
)
from offload.stream.device import PlannedSlots, StreamingDevice
from offload.stream.doorbell import try_bell
from offload.stream.executor import Executor
from offload.stream.options import StreamingOptions
from offload.stream.split_path import Hybrid
from offload.trace.trace import NO_TRACE, Trace

_FEWER = 0.9  # factor on the size of slots that the device refused
_BOUNCING = Note(
    NoteKind.COPIES,
    f"weights that are not pinned are copied through a pinned ring of {RING_BYTES >> 20} MiB, which"
    " threads fill",
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
    ) -> None:
        """`notes` gets sentences for the user. `store` holds the streamed weights.

        `hybrid`, `recorder` and `most_tokens`: as for Executor. `trace` is the device's own.
        """
        self._choice, self._options, self._notes = choice, options, notes
        self._store, self._hybrid, self._recorder = store, hybrid, recorder
        self._trace, self._most_tokens = trace, most_tokens
        rings = hybrid is not None and hybrid.ways.now.rings
        if rings and (why_not := try_bell(choice.device)):
            words = f"{choice.name}: the host waits for the GPU in each split layer: {why_not}"
            notes.append(Note(NoteKind.DEVICE, words))

    def slots(self, plan: Plan, *, copies: bool = True) -> PlannedSlots:
        """Return the plan's slots, with a function that makes an executor for a stream.

        Without `copies` the executor computes with whatever the slots hold, and the device takes
        every batch.
        """

        def make(stream: Stream, host: HostBufferType, compute: ComputeBuffer | None) -> Executor:
            copier = self._copier(stream) if copies else NoCopier()
            return Executor(
                stream, host, plan.layout, self._options, copier, self._hybrid, self._recorder,
                compute, trace=self._trace, most_tokens=self._most_tokens,
            )  # fmt: skip

        return PlannedSlots(plan, make, takes_all=not copies)

    def _copier(self, stream: Stream) -> Copier:
        options, sim = self._options, self._choice.sim
        if not stream.device.has_async_and_events:
            link = Link() if sim is None else Link(sim.bandwidth_bytes_per_s, sim.latency_s)
            return ThreadCopier(link, self._trace)
        ring = None
        if options.bounce and (self._store is None or not self._store.is_pinned):
            ring = stream.device.pinned_memory(RING_BYTES)
        if ring is None:
            return DeviceCopier(stream, self._trace)
        # Executors are made anew when slots are sized.
        if not any(kind_of(note) is NoteKind.COPIES for note in self._notes):
            self._notes.append(_BOUNCING)
        return BounceCopier(stream, ring, self._trace)

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

    def warmed_up(self, plan: Plan, device: StreamingDevice, planned: DevicePlan) -> WarmedUp:
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
            self._choice.name, plan, planned.device.free_bytes - free_now,
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
        device.use_slots(self.slots(sized, copies=copies))


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
