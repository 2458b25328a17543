"""The engine: opens a model file on a device, with a KV cache and the sequences in it.

During a call of `llama_decode` the library calls `StreamingDevice` on the same thread, several
times per token. `Sequences.extend` re-raises an exception that such a callback raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from offload.decoding import NativeExperts, decoder, row_step
from offload.device import DeviceChoice, has_gpu
from offload.eagle import open_eagle
from offload.errors import BadModel, DoesNotFit
from offload.ggml.context import Context, Embedder
from offload.ggml.expert_watch import ExpertWatch
from offload.ggml.hostbuffer import (
    CpuBufferType,
    HostBufferType,
    mapping_without_reading,
    plain_buffer_type,
)
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library, prepare
from offload.ggml.library.log import opening
from offload.ggml.memory import AnonymousMemory
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.row_context import MtpContext, RowContext
from offload.ggml.threads import CpuTeam, has_openmp
from offload.mla import chosen_crossover
from offload.model import ModelFacts, TensorEntry, is_experts, layer_of
from offload.model_file import check_writes, read_facts
from offload.native_build import may_repack, missing_in_build
from offload.next_experts import Embeddings, NextExperts, read_routers, router_bytes
from offload.numa_plan import NOT_OURS, NumaPlan, PagePlacer
from offload.plan.context import (
    MTP_UBATCH,
    ContextOptions,
    check_cache_types,
    context_memory,
    forgetting_window,
    most_state_bytes,
    mtp_context_bytes,
    pooling_of,
    trained_context,
)
from offload.plan.devices import joined, layer_words
from offload.plan.min_batch import NEVER, MinBatch
from offload.plan.placement import Plan, make_plan, workload_of
from offload.plan.ranges import shares_of
from offload.plan.repacking import MeasureLayouts, Repacking, choose_layouts
from offload.plan.row_draft import eagle_ubatch, loading_complaint, mtp_complaint
from offload.remote.address import RemoteOptions
from offload.remote.devices import RemotePart, open_remote
from offload.remote.watch import LOAD_FACTOR, Watch
from offload.routing import RoutingRecorder
from offload.row_draft import RowDraft
from offload.schedule.slots import StreamCounters
from offload.sequences import Sequences
from offload.split.path import Hybrid, Pace
from offload.split.switch import HybridSwitch, stay
from offload.store.expert_memory import ExpertMemory
from offload.store.memory_budget import (
    CONTEXT,
    DRAFT_MODEL,
    DRIVER,
    DRIVER_BYTES,
    IN_DECODES,
    LOGITS,
    PINNED,
    PROMPTS,
    ROUTERS,
)
from offload.store.store import READING, OnProgress, Store, StoreOptions
from offload.streaming.building import ExecutorBuilder
from offload.streaming.copying import RING_BYTES
from offload.streaming.device import StreamingDevice
from offload.streaming.options import StreamingOptions
from offload.streaming.parts import (
    Divided,
    MeasureLinks,
    Part,
    divided,
    draft_bytes_in_ram,
    limits_of_experts,
    plan_parts,
    size_slots,
)
from offload.text import ModelText
from offload.threads import EngineThreads

_HOST_NAME = "SPEC_HOST"
_PROMPT_SHARE = 1 / 16  # most memory of kept prompts, as a share of that of experts
_UBATCHES_FROM_DISK = (2048, 1024)  # tokens of a prompt for which the CPU reads experts once
_UBATCHES = 4  # ubatches in one decode of several devices


@dataclass(frozen=True)
class EngineOptions(ContextOptions):
    """The options of opening a model. Names are llama.cpp's where the meaning is the same."""

    device: str = "auto"  # names of devices, separated by commas
    tensor_split: tuple[float, ...] = ()  # devices' shares of the layers; (): planned
    remote: RemoteOptions = RemoteOptions()
    min_batch: MinBatch = MinBatch()
    stream_experts: bool = True  # False: the whole model is resident on the device
    streaming: StreamingOptions = StreamingOptions()
    store: StoreOptions = StoreOptions()
    wrapped: bool = True  # False: libllama sees the real device, as for a draft
    most_ubatch: int | None = None  # largest ubatch that the plan may choose; None: use n_ubatch
    mtp: bool = False  # load the layers for multi-token prediction, if the file has usable ones
    eagle: Path | None = None  # an EAGLE-3 file that drafts from the model's rows, if it is usable
    pooling: str | None = None  # kind of embeddings (plan/context.py); None: no embeddings
    numa: NumaPlan | None = None  # its teams replace n_threads and n_threads_batch
    mla_crossover: int | None = None  # most tokens for MLA's broadcast form (tests); None: choose
    measure_links: MeasureLinks | None = None  # returns several links' rates; None: typical
    trial_folder: Path | None = None  # folder for results of AMX trials; None: try at each start
    repack: bool | None = None  # repack weights for the CPU; None: if `measure_layouts` prefers it
    measure_layouts: MeasureLayouts | None = None  # None: repack all, as llama.cpp does


class Engine(ModelText):
    """Opens a model file and evaluates tokens. Close it, or use it with `with`."""

    def __init__(
        self,
        path: str | Path,
        options: EngineOptions | None = None,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        """Open the model. `on_progress` gets the step of loading and the fraction that is done.

        Raises BadModel, DoesNotFit, DeviceUnavailable, LibraryMismatch, or BadRequest for options
        that the model cannot have.
        """
        options = options or EngineOptions()
        self.facts: ModelFacts = read_facts(path)
        if options.wrapped:  # a draft model need not be causal, as it may draft a block at once
            check_writes(self.facts)
        flash_attn = check_cache_types(
            self.facts, options.type_k, options.type_v, options.flash_attn
        )
        self._pooling = pooling_of(self.facts, options.pooling)
        n_ctx = options.n_ctx or trained_context(self.facts, options.rope)
        self.options = options = replace(options, n_ctx=n_ctx, flash_attn=flash_attn)
        self._closing = ExitStack()
        self._watch: Watch | None = None
        self._pending = Pending()
        self.row_complaint = ""  # why MTP layers or an EAGLE-3 file cannot draft, or ""
        self._load_mtp = self._loads_mtp()
        self.remote = self._open_remote(on_progress) if options.remote.is_used else None
        found = self._divided()
        self.choices, self._n_ubatch = found.parts, found.n_ubatch
        # The header without the layers of remote devices.
        self._local_facts = self.facts.part(self.choices[0][1].first, self.choices[-1][1].end)
        # The device for the draft model, or None if --device does not name it. An EAGLE-3 file
        # needs the output, so it is on the last device.
        self.draft_choice = found.draft if options.eagle is None else found.parts[-1][0]
        self.options = options = replace(options, streaming=found.limits(options.streaming))
        self.choice: DeviceChoice = self.choices[0][0]  # the first device
        if self.choice.sim is not None and self.choice.sim.disk_bytes_per_s is not None:
            held = replace(options.store, disk_bytes_per_s=self.choice.sim.disk_bytes_per_s)
            self.options = options = replace(options, store=held)
        # Sentences for the user, e.g. on features that the library's build lacks.
        self.notes: list[str] = [
            *(f"devices: {note}" for note in found.notes),
            *prepare(),
            *missing_in_build(has_gpu=has_gpu()),
        ]
        if self.remote is not None:
            self.notes.append(f"{self.remote.words}; layers are divided {self.remote.why}")
        elif options.tensor_split and not self.choice.wrapped:
            self.notes.append("--tensor-split: no effect, since there is one device, the CPU")
        self.numa: NumaPlan | None = None
        if options.numa is not None:
            self.numa = options.numa.in_mask_order(openmp=has_openmp())
        self.repacking = Repacking(True)
        self.host: HostBufferType | None = None
        self.plan: Plan | None = None
        self.store: Store | None = None
        self.placer: PagePlacer | None = None
        self.parts: tuple[Part, ...] = ()  # the streaming devices and their layers
        self.embedder: Embedder | None = None
        self.row_draft: RowDraft | None = None  # drafts with own layers or an EAGLE-3 file
        self.hybrid: Hybrid | None = None
        self.native_experts: NativeExperts | None = None  # set if libllama's CPU backend needs it
        # Recording is off at first, because tokens decoded while opening belong to no text.
        self.routing = RoutingRecorder()
        self._free_bytes = [choice.device.memory_bytes()[0] for choice, _ in self.choices]
        try:
            placement = self._place()
            if self.remote is not None:
                placement = self.remote.added_to(placement, self.facts)
            with opening(self.facts.path):
                try:
                    self._load(placement, on_progress)
                    if self.remote is not None:
                        self.remote.loaded()
                except BadModel as e:
                    if why := loading_complaint(self.facts, str(e)):
                        raise BadModel(f"{self.facts.path}: {why}") from e
                    raise
                in_full = replace(
                    options,
                    n_ubatch=self.options.n_ubatch,
                    n_batch=self._n_batch(),
                    n_rs_seq=self._snapshots(self.options.n_ubatch),
                )
                with self.taking(*IN_DECODES):
                    self._context = Context(self._model, in_full, self._pending)
                    self._closing.callback(self._context.close)
                    self.embedder = self._open_embedder(in_full)
                    row_context = self._open_row_context(in_full, placement)
            self.threads = self._open_threads(row_context)
            self.row_draft = self._open_row_draft(row_context)
            if options.streaming.warmup:
                on_workers = self.remote is not None
                with self.taking(*IN_DECODES):
                    size_slots(self.parts, options.streaming, self._warm_up, on_workers=on_workers)
            if self.parts:
                self.plan = self._joined([part.plan for part in self.parts])
            self._answer_natively()
        except BaseException:
            self.close()
            raise
        decode = decoder(
            self._context,
            self.threads,
            self.devices,
            self.options.n_ubatch,
            self.native_experts,
            self._expert_memory,
        )
        if self._watch is not None:
            self._watch.end()
            decode = self._watch.during(decode)
        self.sequences = Sequences(
            self._context,
            decode,
            architecture=self.facts.architecture,
            is_recurrent=self._model.is_recurrent or self.facts.keeps_compressed,
            is_hybrid=self._model.is_hybrid,
            n_sequences=options.n_sequences,
            n_outputs=options.n_outputs,
            # The library aborts if a state has several ranges of cells, as with sliding windows.
            device_checkpoints=self._model.is_recurrent
            and not self.facts.number("attention.sliding_window"),
            most_state_bytes=most_state_bytes(self.facts, self.options),
            n_swa=0
            if options.swa_full or self.facts.keeps_compressed
            else forgetting_window(self.facts),
            follower=self.row_draft,
            n_tree_leaves=options.n_tree_leaves,
        )

    # -- opening and closing --------------------------------------------------------------------

    def _loads_mtp(self) -> bool:
        """True if the options ask for layers for multi-token prediction and they are usable."""
        if self.options.mtp:
            why = mtp_complaint(self.facts)
            if not why and not library().has_nextn:
                why = "the installed library has no functions for it"
            self.row_complaint = why
        return self.options.mtp and not self.row_complaint

    def _open_remote(self, on_progress: OnProgress) -> RemotePart:
        """Connect to the workers, and choose the layers that they hold.

        A `specoffload worker` reads a target's layers from its own file. It gets a draft model's
        layers from here, because a draft model may be another file.
        """
        o = self.options
        self._watch = Watch(o.remote.workers, o.remote.patience_s)
        self._closing.callback(self._watch.close)
        self._watch.begin(LOAD_FACTOR)
        try:
            return open_remote(
                self.facts, o, o.remote, o.device, self._request() if o.wrapped else o.streaming,
                shares=o.tensor_split, measure_links=o.measure_links,
                pending=self._pending if o.wrapped else None, on_progress=on_progress,
            )  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _divided(self) -> Divided:
        """Return the local devices and their layers."""
        o = self.options
        if self.remote is not None:
            return Divided(self.remote.local, self.remote.local[0][0])
        request = self._request() if o.wrapped else None
        return divided(self.facts, o.device, o.tensor_split, request, o.measure_links)

    def _request(self) -> StreamingOptions:
        """Return the options of streaming, with those that the plan needs of the engine."""
        o = self.options
        return replace(
            o.streaming,
            mtp=self._load_mtp,
            stream_experts=o.stream_experts,
            context=o,
            most_ubatch=o.most_ubatch,
            host_bytes=None if o.store.keep_page_cache else o.store.room_bytes(),
        )

    def _place(self) -> ModelPlacement:
        load_mtp = self._load_mtp
        if not self.choice.wrapped:
            return replace(self._place_on_cpu(), load_mtp=load_mtp)
        if not self.options.wrapped:
            real = tuple(choice.device for choice, _ in self.choices if choice.on_gpu)
            return ModelPlacement(
                real, tensor_split=self._shares if len(real) > 1 else (),
                n_gpu_layers=999 if real else 0, use_extra_bufts=False, load_mtp=load_mtp,
            )  # fmt: skip
        if self.options.repack:
            kept = "the weights beside it keep the file's layout, in which they are copied"
            self.notes.append(f"--repack: no effect with {self.choice.name}: {kept}")
        o = self.options
        plans = plan_parts(
            self.facts, self.choices, self._request(), self.draft_choice, self._n_ubatch
        )
        self.plan = self._joined(plans)
        if self._limit_experts(self.plan):
            o = self.options
            plans = [plan.with_chunks("on") for plan in plans]  # devices have to take every batch
            self.plan = self._joined(plans)
        if load_mtp and self.plan.mtp is None:
            load_mtp = False
            self.row_complaint = "they do not fit the GPU"
        if o.most_ubatch is not None:
            self.options = o = replace(o, n_ubatch=self.plan.n_ubatch)
        self._make_store(self.plan)
        self.hybrid = self._hybrid(self.plan)
        self.parts = tuple(
            self._part(i, choice, plan)
            for i, ((choice, _), plan) in enumerate(zip(self.choices, plans, strict=True))
        )
        self.host = self.parts[0].host
        for device in self.devices:
            device.share_with([other for other in self.devices if other is not device])
        return ModelPlacement(
            devices=self.devices,
            tensor_split=self._shares,
            overrides=(
                *chain.from_iterable(part.overrides for part in self.parts),
                *((p, CpuBufferType()) for p in (self.plan.mtp.patterns if self.plan.mtp else ())),
            ),
            load_mtp=load_mtp,
            n_gpu_layers=999,
            # Repacked weights are not host memory in ggml's layout and cannot be streamed.
            use_extra_bufts=False,
            # With mapped files the store reads streamed weights, and libllama only resident ones.
            load_mode="mmap" if self.store is not None else "auto",
        )

    def _joined(self, plans: Sequence[Plan]) -> Plan:
        n_layers = self.facts.n_layers
        names = [f"{choice.name}, {layer_words(its, n_layers)}" for choice, its in self.choices]
        return joined(plans, names)

    @property
    def _shares(self) -> tuple[float, ...]:
        """The tensor_split that gives libllama the devices' ranges of layers."""
        if len(self.choices) == 1:
            return ()
        *ranges, last = [layers for _, layers in self.choices]
        # libllama counts layers for multi-token prediction, which are on the last device.
        last = replace(last, end=last.end + self.facts.n_mtp_layers)
        return shares_of([*ranges, last])

    def _part(self, nth: int, choice: DeviceChoice, plan: Plan) -> Part:
        """Make the `nth` device, with host buffers and executors for its plan."""
        o, hybrid = self.options, self.hybrid
        several = len(self.choices) > 1
        host = self._host_buffers(f"{_HOST_NAME}{nth or ''}")
        if hybrid is not None and several:
            hybrid = replace(hybrid, pace=Pace.of(choice.sim), nth=nth)
        streaming = o.streaming
        if several and streaming.each_device_bytes:
            streaming = replace(streaming, device_bytes=streaming.each_device_bytes[nth])
        if several and choice != self.draft_choice:
            streaming = replace(streaming, reserve_bytes=0)
        if several:
            streaming = replace(streaming, trace=o.streaming.trace.of_device(choice.name))
        builder = ExecutorBuilder(choice, streaming, self.notes, self.store, hybrid, self.routing)
        crossover = chosen_crossover(
            o.mla_crossover, self.facts, choice.device, token_major=o.flash_attn != "off"
        )
        if crossover.note:
            self.notes.append(f"{choice.name}: {crossover.note}" if several else crossover.note)
        device = StreamingDevice(
            choice,
            host,
            # libllama reserves memory by this threshold, so it must allow all later computations.
            MinBatch(1, 1) if self._may_be_native() else o.min_batch,
            self._pending,
            plan,
            builder.maker(plan),
            trace=o.streaming.trace,
            mla_crossover=crossover.n_tokens,
            hybrid=None if hybrid is None else hybrid.switch,
            nth=nth,
        )
        if several and choice.sim is not None:
            device.keep_apart()
        return Part(choice, plan, host, builder, device, self._free_bytes[nth])

    @property
    def devices(self) -> tuple[StreamingDevice, ...]:
        """The streaming devices, in the order of their layers."""
        return tuple(part.device for part in self.parts)

    @property
    def device(self) -> StreamingDevice | None:
        """The first streaming device, or None if no weights can stream."""
        return self.parts[0].device if self.parts else None

    def _limit_experts(self, plan: Plan) -> bool:
        """Limit the memory for experts if not all of them fit. Returns True if so."""
        o, facts = self.options, self._local_facts
        n_vocab = facts.header.lengths.get("tokenizer.ggml.tokens", 0)
        later_bytes = {
            DRAFT_MODEL: draft_bytes_in_ram(self.choice, o.streaming),
            ROUTERS: router_bytes(self.facts) if o.streaming.prefetch else 0,
            LOGITS: 2 * 4 * n_vocab * o.n_outputs,  # libllama's rows, and our copy of them
        }
        if self.choice.on_gpu:
            later_bytes |= {PINNED: RING_BYTES, DRIVER: DRIVER_BYTES}

        def bytes_in_ram(n_tokens: int) -> dict[str, int]:
            if self.choice.on_gpu:
                return later_bytes
            most = max(o.n_ubatch, o.most_ubatch or 0)
            n_ubatch = o.n_ubatch if self.choice.wrapped else min(n_tokens, most)
            context = replace(o, n_ubatch=n_ubatch)
            mtp_bytes = mtp_context_bytes(facts, context) if self._load_mtp else 0
            return later_bytes | {CONTEXT: context_memory(facts, context).total_bytes + mtp_bytes}

        limits = limits_of_experts(plan, self.choice, o.store, bytes_in_ram)
        if limits is None:
            return False
        self.options = replace(
            o,
            store=replace(o.store, expert_limits=limits),
            min_batch=replace(o.min_batch, experts=1, prefill_experts=None, swapped=frozenset()),
        )
        return True

    def _layouts(self, weights: Sequence[TensorEntry]) -> Repacking:
        """Choose the layouts of the weights that ggml's CPU backend loads."""
        o = self.options
        if o.repack is False:
            return Repacking(False)
        verdict = may_repack(self.facts.weights, o.trial_folder)
        if not verdict.works:
            return Repacking(False, notes=(verdict.sentence,))
        if o.repack or o.measure_layouts is None:
            return Repacking(True)
        return choose_layouts(weights, o.measure_layouts, workload_of(o.n_ctx, o.streaming.mix))

    def _place_on_cpu(self) -> ModelPlacement:
        """Return the placement for libllama's own CPU backend.

        If memory cannot hold all experts, they are read from the disk while the model runs.
        """
        facts = self._local_facts
        plan = make_plan(facts) if self.options.wrapped else None
        is_limited = plan is not None and self._limit_experts(plan)
        weights = [e for e in facts.loaded if not (is_limited and is_experts(e))]
        self.repacking = self._layouts(weights)
        self.notes += self.repacking.notes
        plain = plain_buffer_type()
        placement = ModelPlacement(
            use_extra_bufts=self.repacking.is_on,
            overrides=tuple((pattern, plain) for pattern in self.repacking.plain),
        )
        if plan is None or not is_limited:
            return placement
        o = self.options
        if o.most_ubatch is not None:  # each ubatch of a prompt reads all experts once
            self.options = replace(o, n_ubatch=self._ubatch_from_disk(plan))
        self._make_store(plan)
        self.host = self._host_buffers()
        recorder = self.routing if o.streaming.record_routing else None
        self.native_experts = NativeExperts(self.facts.n_experts, recorder)
        patterns = plan.patterns(experts=True)
        return replace(
            placement,
            overrides=(*((pattern, self.host) for pattern in patterns), *placement.overrides),
            load_mode="mmap",
            watch=ExpertWatch(self.host, self._pending, self.native_experts.need),
        )

    def _ubatch_from_disk(self, plan: Plan) -> int:
        """Return the largest ubatch whose buffers leave memory for a layer's experts and a half."""
        o, of_layer = self.options, Counter[int]()
        limits = o.store.expert_limits
        assert limits is not None
        for entry in filter(is_experts, plan.streamed):
            of_layer[layer_of(entry.name)] += entry.size_bytes
        most = min(o.most_ubatch or o.n_ubatch, o.n_ctx or self.facts.n_ctx_train)
        needed_bytes = 1.5 * max(of_layer.values())
        fitting = (n for n in _UBATCHES_FROM_DISK if limits.start_bytes(n) >= needed_bytes)
        return max(o.n_ubatch, min(most, next(fitting, o.n_ubatch)))

    def _hybrid(self, plan: Plan) -> Hybrid | None:
        """Return the objects that executors share to split layers, or None if no layer is split."""
        o = self.options
        if not (o.streaming.hybrid and any(map(is_experts, plan.streamed))):
            return None
        team = CpuTeam()
        self._closing.callback(team.close)
        switch = HybridSwitch(o.streaming.splitter or stay)
        return Hybrid(switch, team, Pace.of(self.choice.sim))

    def _make_store(self, plan: Plan) -> None:
        """Make the store of the streamed weights, if there are any."""
        if not plan.streamed:
            return
        o, on_gpu = self.options, self.choice.on_gpu
        if self.choice.wrapped and self.numa is not None and o.store.expert_limits is None:
            self.placer = PagePlacer(self.numa, plan.streamed)
        options = replace(o.store, pin_for=self.choice.device if on_gpu else None)
        facts = self.facts if self.remote is None else self.remote.read_here(self.facts)
        self.store = Store(facts, plan.streamed, options, place_pages=self.placer)
        self._closing.callback(self.store.close)

    def _host_buffers(self, name: str = _HOST_NAME) -> HostBufferType:
        """Make a buffer type over the store. libllama treats types with equal names as one."""
        if self.store is None:
            return HostBufferType(name, AnonymousMemory(), self._pending)
        return HostBufferType(name, self.store, self._pending, home=self.store)

    def _load(self, placement: ModelPlacement, on_progress: OnProgress) -> None:
        if self.store is None:
            reading = partial(on_progress, READING)
            elsewhere = self.remote is not None and self.remote.held
            with mapping_without_reading(self._pending) if elsewhere else nullcontext():
                self._model = Model(self.facts.path, placement, self._pending, reading)
            self._closing.callback(self._model.close)
            return
        with self.store.loading(self._pending):
            watching = self.store.watching(on_progress)
            self._model = Model(self.facts.path, placement, self._pending, watching)
            self._closing.callback(self._model.close)
        self.store.finish(on_progress)
        assert self.host is not None
        following, experts = None, self.store.experts
        if experts is not None and self.options.streaming.prefetch:
            with experts.taking(ROUTERS):
                following = NextExperts(
                    experts, read_routers(self.facts), self.facts.n_experts_used,
                    Embeddings.of(self.facts),
                )  # fmt: skip
        for host in [part.host for part in self.parts] or [self.host]:
            host.experts, host.next_experts = experts, following
        if self.native_experts is not None:
            self.native_experts.memory, self.native_experts.following = experts, following

    def _open_embedder(self, options: ContextOptions) -> Embedder | None:
        if self._pooling is None:
            return None
        embedder = Embedder(self._model, options, self._pooling, self._pending)
        self._closing.callback(embedder.close)
        memory = self._expert_memory
        if self.devices or memory is not None:
            embedder.compute = decoder(
                embedder, None, self.devices, embedder.n_most, self.native_experts, memory,
                embeds=True,
            )  # fmt: skip
        return embedder

    def _open_row_context(self, o: ContextOptions, placement: ModelPlacement) -> RowContext | None:
        """Open the context that drafts from rows, or note why it cannot be opened."""
        if not self._model.has_mtp and self.options.eagle is None:
            return None
        n_ubatch = min(o.n_ubatch, MTP_UBATCH) if self._model.has_mtp else eagle_ubatch(o)
        options = replace(
            o,
            # Drafts take cells in addition to the texts, which may fill the target's context.
            n_ctx=self._context.n_ctx + o.n_outputs * o.n_sequences,
            n_batch=n_ubatch,
            n_ubatch=n_ubatch,
            n_outputs=o.n_sequences if self._model.has_mtp else n_ubatch,
            n_rs_seq=0,
            swa_full=True,
        )
        known = [set(device.executors) for device in self.devices]
        context: RowContext
        try:
            if self.options.eagle is None:
                context = MtpContext(
                    self._model, options, self._pending, self._context, self.facts.architecture
                )
            else:
                context = open_eagle(
                    self.options.eagle, self.facts, self._model, self._context, options,
                    placement, self._pending, self._closing,
                )  # fmt: skip
        except (BadModel, DoesNotFit) as e:
            self.row_complaint = str(e)
            return None
        self._closing.callback(context.close)
        for device, before in zip(self.devices, known, strict=True):
            device.without_slots |= set(device.executors) - before
        return context

    def _open_row_draft(self, context: RowContext | None) -> RowDraft | None:
        if context is None:
            return None
        step = row_step(context, self.threads, self.devices)
        return RowDraft(context, step, self._context.n_ctx, self.options.n_sequences)

    def _n_batch(self) -> int:
        """Return the most tokens of a decode.

        Several devices compute a decode's ubatches at the same time. So they get several ubatches,
        if the plan has chosen ubatches that may be larger than `options.n_batch`.
        """
        o = self.options
        n = max(o.n_batch, o.n_outputs, o.n_ubatch)
        is_free = o.most_ubatch is not None and o.most_ubatch > o.n_batch
        return max(n, _UBATCHES * o.n_ubatch) if is_free and len(self.parts) > 1 else n

    def _snapshots(self, n_ubatch: int) -> int:
        """Return the number of snapshots of recurrent state: at most `n_ubatch` - 2.

        The library asserts n_ubatch > n_rs_seq + 1.
        """
        wanted, most = self.options.n_rs_seq, max(0, n_ubatch - 2)
        if wanted > most and self._model.is_recurrent:
            self.notes.append(
                f"{wanted} snapshots: with --ubatch-size {n_ubatch} there is room for "
                f"{most}, which are taken"
            )
        return min(wanted, most)

    def _warm_up(self) -> None:
        """Compute the largest ubatch once, so that kernels allocate all the memory they need."""
        o = self.options
        self.set_min_batch(MinBatch(1, 1))
        n = min(o.n_ubatch, self._context.n_ctx - 1)
        wanted = [i >= n - o.n_outputs for i in range(n)]
        try:
            self._context.decode([0] * n, range(n), [0] * n, wanted)
        finally:
            self.set_min_batch(o.min_batch)
        # Otherwise libllama would reuse this graph, split by another threshold, for equal batches.
        self._context.decode([0], [n], [0], [False])
        self._context.remove(0, 0)

    def _may_be_native(self) -> bool:
        o = self.options
        return self.choice.on_gpu and o.streaming.native and o.min_batch.experts < NEVER

    def _answer_natively(self) -> None:
        """Let libllama ask the backend directly which nodes it takes, if Python need not decide."""
        o = self.options
        if not self._may_be_native():
            return
        for part in self.parts:
            pools, device = part.plan.layout.pools, part.device
            device.min_batch = o.min_batch
            if device.chunks or all(pool.holds(o.n_ubatch) for pool in pools):
                device.answer_natively()

    def _open_threads(self, drafting: RowContext | None) -> EngineThreads:
        contexts: list[Context] = [self._context, *([drafting] if drafting is not None else [])]
        if self.embedder is not None:
            contexts.append(self.embedder)
        o, team = self.options, None if self.hybrid is None else self.hybrid.team
        threads = EngineThreads(contexts, o.n_threads, o.n_threads_batch, self.numa, team)
        self._closing.callback(threads.close)
        return threads

    @property
    def place(self) -> str:
        """The device that computes, as kept measurements of a draft model name it."""
        return self.choice.name if self.remote is None else self.remote.words

    @property
    def _expert_memory(self) -> ExpertMemory | None:
        """The memory for some of the experts, None if all are in memory."""
        return None if self.store is None else self.store.experts

    @property
    def reads_experts(self) -> bool:
        """True if not all experts fit memory, so that some are read from the disk when needed."""
        return self.options.store.expert_limits is not None

    @property
    def numa_notes(self) -> tuple[str, ...]:
        """Sentences on the places of threads and pages, and on refusals. () without a NumaPlan."""
        if self.numa is None:
            return ()
        placed = self.placer.notes if self.placer is not None else ()
        if self.numa.candidate is not None and not placed:
            placed = (NOT_OURS,)
        return (self.threads.sentence, *self.threads.notes, *placed)

    def close(self) -> None:
        """Free all resources. A second call does nothing."""
        self._closing.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- settings and counters --------------------------------------------------------------------

    @property
    def min_batch(self) -> MinBatch:
        """The thresholds from which streamed weights are computed on the device."""
        return self.device.min_batch if self.device is not None else self.options.min_batch

    def set_min_batch(self, value: MinBatch) -> None:
        """Set the thresholds from which streamed weights are computed on the device.

        They apply to graphs that are built from now on. libllama reuses the previous decode's graph
        while batches have the same number of tokens and the same number of rows of logits.
        """
        for device in self.devices:
            device.min_batch = value

    def build_anew(self, *, after_logits: bool = False) -> None:
        """Make the next decode build a new graph, whatever its size.

        Decodes 3 tokens in sequence 0 and removes them. Set `after_logits` if the previous decode
        returned logits: then one token without logits is enough. Does nothing if the context has no
        room for these tokens.
        """
        s, start = self.sequences, self.sequences.length(0)
        batches = (1,) if after_logits else (2, 1)
        if start + sum(batches) > self.n_ctx:
            return
        checkpoint = None if s.can_rewind or not start else s.checkpoint(0, lasting=True)
        with self.routing.paused():
            for n in batches:
                s.extend(0, [0] * n, n_logits=0)
                if checkpoint is None:
                    s.rewind(0, start)
                else:
                    s.restore(0, checkpoint)

    def try_out(self) -> None:
        """Tokenise a letter, decode one token, and remove it.

        If a file's vocabulary or weights make the library abort, it aborts here, while the file is
        being opened, instead of in the first request.
        """
        with opening(self.facts.path):
            tokens = self.tokenize("a") or [0]
            self._context.decode(tokens[:1], [0], [0], [True])
            self._context.remove(0, 0)

    def fill_slots(self, uses: Mapping[int, Sequence[int]] | None) -> Iterator[None]:
        """Return an iterator. Each of its steps copies one of the most used experts into a slot.

        If not all experts are in memory, further steps read more of them into memory. `uses`: by
        layer, the number of tokens that used each expert; None: unknown, so no slots are filled.
        A step raises DeviceFailed if a copy or a read failed. Drop the iterator before the next
        decode.
        """
        slots = chain.from_iterable(device.fill(uses or {}) for device in self.devices)
        memory = self._expert_memory
        return slots if memory is None else chain(slots, memory.fill(uses))

    def memory_for_prompts(self, asked_bytes: int | None) -> int | None:
        """Return the memory that prompts of earlier requests may take; None: no limit.

        It is `asked_bytes`. If experts are read from the disk, it is at most a part of the memory
        that they have, and is reserved.
        """
        memory = self._expert_memory
        if memory is None:
            return asked_bytes
        most_bytes = int(_PROMPT_SHARE * memory.capacity_bytes)
        granted_bytes = most_bytes if asked_bytes is None else min(asked_bytes, most_bytes)
        memory.reserve(PROMPTS, granted_bytes)
        return granted_bytes

    def taking(self, *purposes: str) -> AbstractContextManager[None]:
        """Count the memory that this process takes in the block as taken for these purposes.

        They are those of `offload/store/memory_budget.py`. Nothing is counted if all experts are in
        memory.
        """
        memory = self._expert_memory
        return nullcontext() if memory is None else memory.taking(*purposes)

    def settle(self) -> None:
        """Wait until no copy is under way. The trace then holds all counted copies."""
        for device in self.devices:
            device.settle()

    def counters(self) -> StreamCounters:
        """Return the counts of streaming since the engine was opened, all 0 if nothing streams."""
        return sum((part.device.counters() for part in self.parts), StreamCounters())

    def counters_by_device(self) -> dict[str, StreamCounters]:
        """Return the counts of streaming, by name of the device."""
        return {part.choice.name: part.device.counters() for part in self.parts}

    def disk_counters(self) -> dict[str, float]:
        """Return the counts of experts read from the disk, empty if all are in memory."""
        memory = self._expert_memory
        return {} if memory is None else memory.counters.as_dict()

    @property
    def n_vocab(self) -> int:
        return self._model.n_vocab

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self._context.n_ctx
