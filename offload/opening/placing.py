"""Places a model's weights: makes the store, the host buffers and the devices that stream them.

The places are those of the start's layout. libllama then loads the weights to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain

from offload.ggml.expert_watch import ExpertWatch
from offload.ggml.hostbuffer import (
    CpuBufferType,
    HostBufferType,
    mapping_without_reading,
    plain_buffer_type,
)
from offload.ggml.library.callback import Pending
from offload.ggml.memory import AnonymousMemory
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.threads import CpuTeam, has_openmp
from offload.model import TensorEntry, is_experts
from offload.notes import OnProgress
from offload.opening.start import Start
from offload.plan.devices import DevicePlan
from offload.plan.placement import name_patterns
from offload.plan.ranges import shares_of
from offload.remote.devices import RemotePart
from offload.routing.next_experts import Embeddings, NextExperts, read_routers
from offload.routing.routing import RoutingRecorder
from offload.schedule.splitter import stay
from offload.sequences.decoding import NativeExperts
from offload.store.expert_memory import ExpertMemory
from offload.store.store import READING, Store
from offload.stream.building import ExecutorBuilder, Part
from offload.stream.device import BatchRules, ModelDevices, StreamingDevice
from offload.stream.split_path import Hybrid
from offload.stream.ways_in_use import WaysInUse
from offload.threads.numa_plan import NumaPlan, PagePlacer
from offload.times.min_batch import NEVER, MinBatch
from offload.times.ways import Ways

_HOST_NAME = "SPEC_HOST"


class PlacedWeights:
    """The places of a model's weights, and what holds and streams them."""

    def __init__(
        self, start: Start, remote: RemotePart | None, pending: Pending, notes: list[str],
        routing: RoutingRecorder, closing: ExitStack,
    ) -> None:  # fmt: skip
        """`notes` gets sentences for the user, and `closing` frees what is made."""
        self._start, self._remote, self._pending = start, remote, pending
        self._notes, self._routing, self._closing = notes, routing, closing
        self._facts, self._options, self._layout = start.facts, start.options, start.layout
        self._choices = start.choices
        self._choice = start.choice
        self.numa: NumaPlan | None = None
        if self._options.numa is not None:
            self.numa = self._options.numa.in_mask_order(openmp=has_openmp())
        self.host: HostBufferType | None = None
        self.store: Store | None = None
        self.placer: PagePlacer | None = None
        self.parts: tuple[Part, ...] = ()  # the streaming devices and their layers
        self.ways = WaysInUse(Ways(self._layout.min_batch))
        self.hybrid: Hybrid | None = None
        self.native_experts: NativeExperts | None = None  # set if the CPU reads experts from disk
        placement = replace(self._make_placement(), kv_overrides=self._facts.overrides)
        self.placement = placement if remote is None else remote.added_to(placement, self._facts)

    @property
    def devices(self) -> tuple[StreamingDevice, ...]:
        """The streaming devices, in the order of their layers."""
        return tuple(part.device for part in self.parts)

    @property
    def may_be_native(self) -> bool:
        native, layout = self._options.streaming.native, self._layout
        may = self._choice.on_gpu and native and layout.min_batch.experts < NEVER
        # The backend would take all attention over a cache in RAM.
        return may and layout.context.kv_offload

    def _make_placement(self) -> ModelPlacement:
        """Make the store and the streaming devices, and return the places of all weights."""
        layout, o = self._layout, self._options
        if not self._choice.wrapped:
            return replace(self._placement_on_cpu(), load_mtp=layout.loads_mtp)
        if not self._start.streams:
            real = tuple(choice.device for choice, _ in self._choices if choice.on_gpu)
            return ModelPlacement(
                real, tensor_split=self._shares if len(real) > 1 else (),
                n_gpu_layers=999 if real else 0, use_extra_bufts=False, load_mtp=layout.loads_mtp,
            )  # fmt: skip
        plan = layout.plan
        self._make_store(plan.streamed)
        splitter, rings = o.streaming.splitter or stay, o.streaming.doorbell
        splits = layout.splits and any(map(is_experts, plan.streamed))
        # libllama reserves memory by this threshold, so it must allow all later computations.
        least = MinBatch(1, 1) if self.may_be_native else layout.min_batch
        self.ways = WaysInUse(Ways(least, may_split=splits, splitter=splitter, rings=rings))
        self.hybrid = self._hybrid() if splits else None
        devices = ModelDevices(len(layout.local))
        self.parts = tuple(
            self._part(nth, device, devices) for nth, device in enumerate(layout.local)
        )
        self.host = self.parts[0].host
        return ModelPlacement(
            devices=self.devices,
            tensor_split=self._shares,
            overrides=(
                *chain.from_iterable(part.overrides for part in self.parts),
                *((p, CpuBufferType()) for p in (plan.mtp.patterns if plan.mtp else ())),
            ),
            load_mtp=layout.loads_mtp,
            n_gpu_layers=999,
            # Repacked weights are not host memory in ggml's layout and cannot be streamed.
            use_extra_bufts=False,
            # With mapped files the store reads streamed weights, and libllama only resident ones.
            load_mode="mmap" if self.store is not None else "auto",
        )

    @property
    def _shares(self) -> tuple[float, ...]:
        """The tensor_split that gives libllama the devices' ranges of layers."""
        local = self._layout.local
        if len(local) == 1:
            return ()
        *ranges, last = [device.layers for device in local]
        # libllama counts layers for multi-token prediction, which are on the last device.
        last = replace(last, end=last.end + self._facts.n_mtp_layers)
        return shares_of([*ranges, last])

    def _part(self, nth: int, planned: DevicePlan, devices: ModelDevices) -> Part:
        """Make the `nth` of the model's `devices`, with host buffers and executors for its plan."""
        hybrid, choice = self.hybrid, self._choices[nth][0]
        context, streaming = self._layout.context, self._options.streaming
        several = len(self._choices) > 1
        host = self._host_buffers(f"{_HOST_NAME}{nth or ''}")
        if hybrid is not None and several:
            hybrid = replace(hybrid, nth=nth)
        plan, reason = planned.plan.lending()
        has_experts = any(map(is_experts, plan.streamed))  # without them, prompts have no passes
        builder = ExecutorBuilder(
            choice, streaming, self._notes, self.store, hybrid, self._routing,
            trace=streaming.trace.of_device(choice.name) if several else streaming.trace,
            most_tokens=min(context.n_ubatch, context.n_ctx or context.n_ubatch),
            measure_reads=self._options.measure_reads if has_experts else None,
        )  # fmt: skip
        crossover = self._start.crossovers[nth]
        if crossover.note:
            self._notes.append(f"{choice.name}: {crossover.note}" if several else crossover.note)
        rules = BatchRules(self.ways, crossover.n_tokens, streaming.route)
        device = StreamingDevice(
            choice,
            host,
            plan,
            builder.executors(plan),
            rules,
            trace=streaming.trace,
            devices=devices,
        )
        if (several or not context.kv_offload) and choice.sim is not None:
            device.keep_apart()
        if not context.kv_offload:
            batch, on_cpu = plan.attention_batch or NEVER, bool(self._layout.cpu_attention_reason)
            device.attend_from(batch, only_cpu=on_cpu)
        if reason:
            self._notes.append(f"{choice.name}: no experts in the compute buffer: {reason}")
        else:
            device.share_buffer()
        return Part(choice, replace(planned, plan=plan), host, builder, device)

    def _placement_on_cpu(self) -> ModelPlacement:
        """Return the placement for libllama's own CPU backend.

        If memory cannot hold all experts, they are read from the disk while the model runs.
        """
        o, layout, experts = self._options, self._layout, self._layout.local_facts.expert_weights
        is_limited = layout.reads_disk
        repacking = self._start.repacking
        self._notes += repacking.notes
        plain = plain_buffer_type()
        placement = ModelPlacement(
            use_extra_bufts=repacking.is_on,
            overrides=tuple((pattern, plain) for pattern in repacking.plain),
        )
        if not (is_limited or layout.on_disk):
            return placement
        self._make_store(experts if is_limited else ())
        if not is_limited:
            return replace(placement, load_mode="mmap")
        self.host = self._host_buffers()
        recorder = self._routing if o.streaming.record_routing else None
        assert self.store is not None
        self.native_experts = NativeExperts(self.store.on_demand, self._facts.n_experts, recorder)
        patterns = name_patterns(entry.name for entry in experts)
        return replace(
            placement,
            overrides=(*((pattern, self.host) for pattern in patterns), *placement.overrides),
            load_mode="mmap",
            watch=ExpertWatch(self.host, self._pending, self.native_experts.need),
        )

    def _hybrid(self) -> Hybrid:
        """Return the objects that executors share to split layers."""
        team = CpuTeam()
        self._closing.callback(team.close)
        return Hybrid(self.ways, team)

    def _make_store(self, streamed: Sequence[TensorEntry]) -> None:
        """Make the store, if weights are streamed or loading must not read tables on the disk."""
        if not (streamed or self._layout.on_disk):
            return
        on_gpu = self._choice.on_gpu
        places = self._choice.wrapped and bool(streamed) and not self._layout.reads_disk
        if places and self.numa is not None:
            self.placer = PagePlacer(self.numa, streamed)
        options = replace(self._start.store, pin_for=self._choice.device if on_gpu else None)
        sim = self._choice.sim
        if sim is not None and sim.disk_bytes_per_s is not None:
            options = replace(options, disk_bytes_per_s=sim.disk_bytes_per_s)
        facts = self._facts if self._remote is None else self._remote.read_here(self._facts)
        reads_ahead = self._options.streaming.prefetch
        self.store = Store(
            facts, streamed, options, place_pages=self.placer,
            read_ahead=self._next_experts if reads_ahead else None,
        )  # fmt: skip
        self._closing.callback(self.store.close)

    def _host_buffers(self, name: str = _HOST_NAME) -> HostBufferType:
        """Make a buffer type over the store. libllama treats types with equal names as one."""
        if self.store is None:
            return HostBufferType(name, AnonymousMemory(), self._pending)
        return HostBufferType(name, self.store, self._pending, placer=self.store)

    def load(self, on_progress: OnProgress) -> Model:
        """Load the weights to their places."""
        if self.store is None:
            reading = partial(on_progress, READING)
            elsewhere = self._remote is not None and self._remote.held
            with mapping_without_reading(self._pending) if elsewhere else nullcontext():
                model = Model(self._facts.path, self.placement, self._pending, reading)
            self._closing.callback(model.close)
            return model
        with self.store.loading(self._pending):
            watching = self.store.watching(on_progress)
            model = Model(self._facts.path, self.placement, self._pending, watching)
            self._closing.callback(model.close)
        self.store.finish(on_progress)
        return model

    def _next_experts(self, memory: ExpertMemory) -> NextExperts:
        """Return what finds experts to read ahead, by the model's routers."""
        facts = self._facts
        routers, embeddings = read_routers(facts), Embeddings.of(facts)
        return NextExperts(memory, routers, facts.n_experts_used, embeddings)
