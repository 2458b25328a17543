"""The engine: opens a model file on a device, with a KV cache and the sequences in it.

During a call of `llama_decode` the library calls `StreamingDevice` on the same thread, several
times per token. `Sequences.extend` re-raises an exception that such a callback raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path

from offload.device import DeviceChoice, has_gpu
from offload.errors import BadModel, DoesNotFit, NotSupported
from offload.ggml.context import Context, Embedder
from offload.ggml.expert_watch import ExpertWatch
from offload.ggml.hostbuffer import (
    CpuBufferType,
    HostBufferType,
    mapping_without_reading,
    plain_buffer_type,
)
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import mtmd_binding, prepare
from offload.ggml.library.log import opening, spare_cells
from offload.ggml.memory import AnonymousMemory
from offload.ggml.model import Model, ModelPlacement
from offload.ggml.native_build import may_repack, missing_in_build
from offload.ggml.ram_cache import RamCache
from offload.ggml.row_context import MtpContext, RowContext
from offload.ggml.threads import CpuTeam, has_openmp
from offload.images.building import ImageLibrary, image_library
from offload.images.decoding import NO_IMAGES, Bitmap, decoded_files
from offload.images.mtmd import ImagePrompt, Projector
from offload.mla import chosen_crossover
from offload.model import ModelFacts, TensorEntry, is_experts
from offload.model_file import check_writes, model_hash, read_facts
from offload.notes import Note, NoteKind
from offload.options import EngineOptions
from offload.plan.decision import decide
from offload.plan.devices import joined
from offload.plan.host import DRAFT_MODEL, PROMPTS, ROUTERS
from offload.plan.layout import DeviceLayout, Layout
from offload.plan.placement import Plan, workload_of
from offload.plan.ranges import shares_of
from offload.plan.repacking import Repacking, choose_layouts
from offload.plan.row_draft import eagle_ubatch, loading_complaint
from offload.plan.tables import lookup_tables
from offload.probe import Here, probe
from offload.remote.devices import RemotePart, open_remote
from offload.remote.watch import Watch, watching
from offload.routing.next_experts import Embeddings, NextExperts, read_routers
from offload.routing.routing import RoutingRecorder
from offload.schedule.slots import StreamCounters
from offload.schedule.switch import HybridSwitch, stay
from offload.sequences.decoding import NativeExperts, decoder, image_decoder, row_step
from offload.sequences.eagle import open_eagle
from offload.sequences.row_draft import RowDraft
from offload.sequences.sequences import MemoryTraits, Sequences
from offload.sequences.text import ModelText
from offload.store.expert_memory import ExpertMemory
from offload.store.memory_budget import IN_DECODES
from offload.store.store import READING, OnProgress, Store
from offload.store.table_rows import TableRows
from offload.stream.building import ExecutorBuilder
from offload.stream.device import BatchRules, ModelDevices, StreamingDevice
from offload.stream.parts import Part, lend_buffers, size_slots
from offload.stream.split_path import Hybrid, Pace
from offload.threads.engine_threads import EngineThreads
from offload.threads.numa_plan import NOT_OURS, NumaPlan, PagePlacer
from offload.times.context import (
    MTP_UBATCH,
    ContextOptions,
    forgetting_window,
    most_state_bytes,
    pooling_of,
)
from offload.times.min_batch import NEVER, MinBatch, by_device

__all__ = ["Engine", "EngineOptions"]
_HOST_NAME = "SPEC_HOST"
_TRIAL_PX = 64  # width and height of the image that is tried out
_READING_PROJECTOR = "the projector for images is read"
_PROMPT_SHARE = 1 / 16  # largest share of the experts' memory that kept prompts may take


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
        self._pooling = pooling_of(self.facts, options.pooling)
        self._closing = ExitStack()
        self._images: ImageLibrary | None = None
        if options.projector is not None:  # before the model, because it may compile libmtmd
            self._images = image_library(on_progress)
        self._watch: Watch | None = None
        self._pending = Pending()
        here, self.layout = self._decide(options)
        layout = self.layout
        self.options = options = options.opened_as(layout)
        self.row_complaint = layout.row_complaint  # why MTP layers or an EAGLE-3 file cannot draft
        # The local devices with their layers.
        self.choices = tuple((here.choice(its.name), its.layers) for its in layout.local)
        self.choice: DeviceChoice = self.choices[0][0]  # the first device
        # The device for the draft model, or None if --device does not name it.
        self.draft_choice = None if layout.draft_on is None else here.choice(layout.draft_on)
        # Sentences for the user, e.g. on features that the library's build lacks.
        self.notes: list[str] = [
            *(
                Note(NoteKind.DEVICE, f"devices: {reason}")
                for reason in layout.reasons
                if not layout.remote
            ),
            *prepare(),
            *missing_in_build(has_gpu=has_gpu()),
        ]
        self.remote: RemotePart | None = None
        self.numa: NumaPlan | None = None
        if options.numa is not None:
            self.numa = options.numa.in_mask_order(openmp=has_openmp())
        self.repacking = Repacking(True)
        self.host: HostBufferType | None = None
        # The plan of our devices. Slots are sized anew after a warm-up.
        self.plan: Plan | None = layout.plan if self.choice.wrapped and options.wrapped else None
        self.store: Store | None = None
        self.placer: PagePlacer | None = None
        self.parts: tuple[Part, ...] = ()  # the streaming devices and their layers
        self._min_batch: MinBatch | None = None
        self.tables: TableRows | None = None  # tables on the disk, whose rows are read ahead
        self.embedder: Embedder | None = None
        self.projector: Projector | None = None  # makes rows of images
        self.row_draft: RowDraft | None = None  # drafts with MTP layers or an EAGLE-3 file
        self.hybrid: Hybrid | None = None
        self.ram_cache: RamCache | None = None  # memory of a KV cache in RAM
        self.native_experts: NativeExperts | None = None  # set if the CPU reads experts from disk
        # Recording is off at first, because tokens decoded while opening belong to no text.
        self.routing = RoutingRecorder()
        try:
            if layout.remote:
                pending = self._pending if options.wrapped else None
                self.remote = open_remote(
                    layout, here.choice, here.offer, pending=pending, on_progress=on_progress
                )
                words = f"{self.remote.words}; layers are divided {self.remote.why}"
                self.notes.append(Note(NoteKind.DEVICE, words))
            self.notes += layout.notes
            if layout.on_disk and layout.tables is not None:
                self.notes.append(Note(NoteKind.WEIGHTS, f"weights: {layout.tables.words}"))
                self.tables = TableRows(lookup_tables(self.facts), layout.context.n_batch)
                self._closing.callback(self.tables.close)
            placement = self._placement()
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
                with self.taking(*IN_DECODES):
                    self.ram_cache = self._place_cache()
                    self._context = Context(
                        self._model, layout.context, self._pending, ram_cache=self.ram_cache
                    )
                    self._closing.callback(self._context.close)
                    # Asynchronous devices can then compute ahead (`Context._reserve`).
                    self._context.keeps_graphs = bool(self.parts)
                    self._context.tenant = self.device
                    self.embedder = self._open_embedder(layout.context)
                    row_context = self._open_row_context(layout.context, placement)
            self._open_projector(on_progress)
            self.threads = self._open_threads(row_context)
            self.row_draft = self._open_row_draft(row_context)
            if options.streaming.warmup:
                on_workers = self.remote is not None
                with self.taking(*IN_DECODES):
                    size_slots(self.parts, options.streaming, self._warm_up, on_workers=on_workers)
            lend_buffers(self.parts, self.notes)
            if self.parts:
                names = [layout.named(its) for its in layout.local]
                self.plan = joined([part.plan for part in self.parts], names)
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
            self.tables,
        )
        if self._watch is not None:
            self._watch.end()
            decode = self._watch.during(decode)
        self.sequences = Sequences(
            self._context,
            decode,
            self._memory_traits(),
            n_sequences=options.n_sequences,
            n_outputs=options.n_outputs,
            n_tree_leaves=options.n_tree_leaves,
            n_devices=len(self.devices),
            follower=self.row_draft,
            on_text=None if self.tables is None else self.tables.foresee,
        )
        if self.projector is not None:
            self.sequences.decode_image = image_decoder(
                self.projector, self._context, self.threads, self.devices, self.options.n_ubatch,
                self.native_experts, self._expert_memory,
            )  # fmt: skip

    def _open_projector(self, on_progress: OnProgress) -> None:
        """Open the projector for images, if there is one. Raises BadModel."""
        asked, library = self.options.projector, self._images
        if asked is None or library is None:
            return
        with self.taking(DRAFT_MODEL):
            self.projector = Projector(
                asked.path,
                mtmd_binding(library.folder),
                self._model,
                self._pending,
                device=None if asked.why_on_cpu else self.choice.device,
                n_threads=self.options.n_threads_batch,
                least_tokens=asked.least_tokens,
                most_tokens=asked.most_tokens,
                on_progress=partial(on_progress, _READING_PROJECTOR),
            )
        self._closing.callback(self.projector.close)
        place = f"the CPU, because {asked.why_on_cpu}" if asked.why_on_cpu else self.choice.name
        words = f"images: read with {asked.path.name}, computed by {place}"
        self.notes.append(Note(NoteKind.DEVICE, words))

    def image_prompt(self, parts: Sequence[str | bytes], *, add_special: bool) -> ImagePrompt:
        """Return the tokens of texts and image files in turn, for a prompt.

        Raises BadRequest for a file that is no image, and NotSupported without a projector.
        """
        if self.projector is None or self._images is None:
            raise NotSupported(NO_IMAGES)
        files = [part for part in parts if isinstance(part, bytes)]
        bitmaps = iter(decoded_files(files, self._images.decoder))
        return self.projector.prompt(
            [part if isinstance(part, str) else next(bitmaps) for part in parts],
            self.options.n_ubatch,
            add_special=add_special,
        )

    def _memory_traits(self) -> MemoryTraits:
        facts, model = self.facts, self._model
        forgets = not (self.options.swa_full or facts.keeps_compressed)
        return MemoryTraits(
            facts.architecture,
            is_recurrent=model.is_recurrent or facts.keeps_compressed,
            is_hybrid=model.is_hybrid,
            # The library aborts if a state has several ranges of cells, as with sliding windows.
            device_checkpoints=model.is_recurrent and not facts.number("attention.sliding_window"),
            most_state_bytes=most_state_bytes(facts, self.options),
            n_swa=forgetting_window(facts) if forgets else 0,
            made_by=self._made_by,
        )

    def _made_by(self) -> dict[str, str]:
        """The settings that a saved state depends on and does not show (`Sequences.made_by`)."""
        rope = [f"{name}={value}" for name, value in asdict(self.options.rope).items() if value]
        return {
            "model (hash)": model_hash(self.facts),
            "rope setting": ", ".join(rope) or "the file's own",
            "type of cached keys": self.options.type_k,
            "type of cached values": self.options.type_v or self.options.type_k,
        }

    # -- opening and closing --------------------------------------------------------------------

    def _decide(self, options: EngineOptions) -> tuple[Here, Layout]:
        """Look at the machine, and decide the layout. Workers may be silent for a limited time."""
        try:
            self._watch = self._closing.enter_context(watching(options.remote))
            here = probe(self.facts, options.asked)
            return here, decide(self.facts, here.found, options.wanted)
        except BaseException:
            self.close()
            raise

    def _placement(self) -> ModelPlacement:
        """Make the store and the streaming devices, and return the places of all weights."""
        o, layout = self.options, self.layout
        if not self.choice.wrapped:
            return replace(self._placement_on_cpu(), load_mtp=layout.loads_mtp)
        if not o.wrapped:
            real = tuple(choice.device for choice, _ in self.choices if choice.on_gpu)
            return ModelPlacement(
                real, tensor_split=self._shares if len(real) > 1 else (),
                n_gpu_layers=999 if real else 0, use_extra_bufts=False, load_mtp=layout.loads_mtp,
            )  # fmt: skip
        plan = layout.plan
        assert plan is not None
        self._make_store(plan.streamed)
        self.hybrid = self._hybrid(plan)
        devices = ModelDevices(len(layout.local))
        self.parts = tuple(self._part(nth, its, devices) for nth, its in enumerate(layout.local))
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
        local = self.layout.local
        if len(local) == 1:
            return ()
        *ranges, last = [its.layers for its in local]
        # libllama counts layers for multi-token prediction, which are on the last device.
        last = replace(last, end=last.end + self.facts.n_mtp_layers)
        return shares_of([*ranges, last])

    def _part(self, nth: int, its: DeviceLayout, devices: ModelDevices) -> Part:
        """Make the `nth` of the model's `devices`, with host buffers and executors for its plan."""
        o, hybrid, plan, choice = self.options, self.hybrid, its.plan, self.choices[nth][0]
        assert plan is not None
        several = len(self.choices) > 1
        host = self._host_buffers(f"{_HOST_NAME}{nth or ''}")
        if hybrid is not None and several:
            hybrid = replace(hybrid, pace=Pace.of(choice.sim), nth=nth)
        streaming = replace(
            o.streaming,
            device_bytes=its.asked_bytes,
            reserve_bytes=its.reserve_bytes,
            most_tokens=min(o.n_ubatch, o.n_ctx or o.n_ubatch),
        )
        if several:
            streaming = replace(streaming, trace=o.streaming.trace.of_device(choice.name))
        plan, why_not = plan.lending()
        builder = ExecutorBuilder(choice, streaming, self.notes, self.store, hybrid, self.routing)
        crossover = chosen_crossover(
            o.mla_crossover, self.facts, choice.device, token_major=o.flash_attn != "off"
        )
        if crossover.note:
            self.notes.append(f"{choice.name}: {crossover.note}" if several else crossover.note)
        rules = BatchRules(
            # libllama reserves memory by this threshold, so it must allow all later computations.
            MinBatch(1, 1) if self._may_be_native() else o.min_batch,
            None if hybrid is None else hybrid.switch,
            crossover.n_tokens,
        )
        device = StreamingDevice(
            choice, host, builder.slots(plan), rules, trace=o.streaming.trace, devices=devices
        )
        if (several or not o.kv_offload) and choice.sim is not None:
            device.keep_apart()
        if not o.kv_offload:
            device.attend_from(plan.attention_batch or NEVER)
        if why_not:
            self.notes.append(f"{choice.name}: no experts in the compute buffer: {why_not}")
        else:
            device.share_buffer()
        return Part(choice, plan, host, builder, device, its.device.free_bytes)

    @property
    def devices(self) -> tuple[StreamingDevice, ...]:
        """The streaming devices, in the order of their layers."""
        return tuple(part.device for part in self.parts)

    @property
    def device(self) -> StreamingDevice | None:
        """The first streaming device, or None if no weights can stream."""
        return self.parts[0].device if self.parts else None

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

    def _placement_on_cpu(self) -> ModelPlacement:
        """Return the placement for libllama's own CPU backend.

        If memory cannot hold all experts, they are read from the disk while the model runs.
        """
        o, layout, plan = self.options, self.layout, self.layout.plan
        is_limited = layout.reads_disk
        facts = layout.local_facts
        weights = [e for e in facts.loaded if not (is_limited and is_experts(e))]
        self.repacking = self._layouts(weights)
        self.notes += self.repacking.notes
        plain = plain_buffer_type()
        placement = ModelPlacement(
            use_extra_bufts=self.repacking.is_on,
            overrides=tuple((pattern, plain) for pattern in self.repacking.plain),
        )
        if plan is None or not (is_limited or layout.on_disk):
            return placement
        self._make_store(plan.streamed if is_limited else ())
        if not is_limited:
            return replace(placement, load_mode="mmap")
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

    def _hybrid(self, plan: Plan) -> Hybrid | None:
        """Return the objects that executors share to split layers, or None if no layer is split."""
        o = self.options
        if not (o.streaming.hybrid and any(map(is_experts, plan.streamed))):
            return None
        team = CpuTeam()
        self._closing.callback(team.close)
        switch = HybridSwitch(o.streaming.splitter or stay, rings=o.streaming.doorbell)
        return Hybrid(switch, team, Pace.of(self.choice.sim))

    def _make_store(self, streamed: Sequence[TensorEntry]) -> None:
        """Make the store, if weights are streamed or loading must not read tables on the disk."""
        if not (streamed or self.layout.on_disk):
            return
        o, on_gpu = self.options, self.choice.on_gpu
        places = self.choice.wrapped and bool(streamed) and not self.layout.reads_disk
        if places and self.numa is not None:
            self.placer = PagePlacer(self.numa, streamed)
        options = replace(o.store, pin_for=self.choice.device if on_gpu else None)
        sim = self.choice.sim
        if sim is not None and sim.disk_bytes_per_s is not None:
            options = replace(options, disk_bytes_per_s=sim.disk_bytes_per_s)
        facts = self.facts if self.remote is None else self.remote.read_here(self.facts)
        self.store = Store(facts, streamed, options, place_pages=self.placer)
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
        following, experts = None, self.store.experts
        if experts is not None and self.options.streaming.prefetch:
            with experts.taking(ROUTERS):
                following = NextExperts(
                    experts, read_routers(self.facts), self.facts.n_experts_used,
                    Embeddings.of(self.facts),
                )  # fmt: skip
        hosts = [host for host in (self.host, *(p.host for p in self.parts)) if host is not None]
        for host in hosts:
            host.experts, host.next_experts = experts, following
        if self.native_experts is not None:
            self.native_experts.memory, self.native_experts.following = experts, following

    def _place_cache(self) -> RamCache | None:
        """Return what places a KV cache in RAM, None if it is in device memory."""
        if self.options.kv_offload or not self.parts:
            return None
        layers_of = [its.layers for its in self.layout.local]
        ranges = [*zip(layers_of, self.devices, strict=True)]

        def device_of(layer: int) -> StreamingDevice:
            return next(device for layers, device in ranges if layer in layers)

        pin_for = self.choice.device if self.choice.on_gpu else None
        return RamCache(device_of, pin_for, self._pending)

    def _open_embedder(self, options: ContextOptions) -> Embedder | None:
        if self._pooling is None:
            return None
        embedder = Embedder(self._model, options, self._pooling, self._pending)
        self._closing.callback(embedder.close)
        memory = self._expert_memory
        if self.devices or memory is not None or self.tables is not None:
            embedder.compute = decoder(
                embedder, None, self.devices, embedder.n_most, self.native_experts, memory,
                self.tables, embeds=True,
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
            kv_offload=True,  # the cache of a layer that drafts is small
            n_tree_leaves=0,  # MTP layers and EAGLE-3 files draft chains, not trees
        )
        known = [set(device.executors) for device in self.devices]
        context: RowContext
        try:
            with spare_cells(self._context.n_ctx, self.facts.n_ctx_train):
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
        # Decode another batch. Otherwise libllama would reuse the graph above for equal batches,
        # although that graph was split by another threshold.
        self._context.decode([0], [n], [0], [False])
        self._context.remove(0, 0)

    def _may_be_native(self) -> bool:
        o = self.options
        may = self.choice.on_gpu and o.streaming.native and o.min_batch.experts < NEVER
        return may and o.kv_offload  # the backend would take all attention over a cache in RAM

    def _answer_natively(self) -> None:
        """Let libllama ask the backend directly which nodes it takes, if Python need not decide."""
        o = self.options
        if not self._may_be_native():
            return
        for part in self.parts:
            pools, device = part.plan.layout.pools, part.device
            device.min_batch = o.min_batch
            if device.passes or all(pool.holds(o.n_ubatch) for pool in pools):
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
        """Name of the computing device in kept measurements of a draft model."""
        return self.choice.name if self.remote is None else self.remote.words

    @property
    def _expert_memory(self) -> ExpertMemory | None:
        """The memory for some of the experts, None if all are in memory."""
        return None if self.store is None else self.store.experts

    @property
    def reads_experts(self) -> bool:
        """True if not all experts fit memory, so that some are read from the disk when needed."""
        return self.layout.reads_disk

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
        """The thresholds from which streamed weights are computed on the device.

        With several devices, they are for all devices together. `min_batches` has those of each.
        """
        return self._min_batch or self.options.min_batch

    @property
    def min_batches(self) -> dict[str, MinBatch]:
        """The thresholds of each device, by its name."""
        return {part.choice.name: part.device.min_batch for part in self.parts}

    def min_batch_words(self, kinds: Sequence[str]) -> str:
        """Return a clause on who computes which batches, such as "the GPU computes ..."."""
        found = self.min_batches
        if len(set(found.values())) < 2:
            return f"the GPU computes {self.min_batch.words(kinds)}"
        return "; ".join(f"{name} computes {its.words(kinds)}" for name, its in found.items())

    def set_min_batch(self, value: MinBatch, *, is_measured: bool = False) -> None:
        """Set the thresholds from which streamed weights are computed on the device.

        If `is_measured`, `value` comes from decodes on all devices, and each device gets thresholds
        of its own (`offload.times.min_batch.by_device`).

        Thresholds apply to graphs built from now on. libllama reuses the previous decode's graph
        while batches have the same number of tokens and the same number of rows of logits.
        """
        self._min_batch = value
        values = [value] * len(self.parts)
        plans = [part.plan for part in self.parts]
        if is_measured and len(plans) > 1:
            values = by_device(
                value, [plan.min_batch for plan in plans], [plan.streamed_bytes for plan in plans]
            )
        for part, its in zip(self.parts, values, strict=True):
            part.device.min_batch = its

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
        """Tokenise a letter, decode one token, and remove it. Then do so with a small image.

        If a file's vocabulary or weights make the library abort, it aborts here, while the file is
        being opened, instead of in the first request. It aborts for some models without images.
        """
        with opening(self.facts.path):
            tokens = self.tokenize("a") or [0]
            self._context.decode(tokens[:1], [0], [0], [True])
            self._context.remove(0, 0)
            if self.projector is not None:
                with suppress(DoesNotFit):  # a request with an image gets the error
                    self._try_out_image(self.projector)

    def _try_out_image(self, projector: Projector) -> None:
        grey = Bitmap(_TRIAL_PX, _TRIAL_PX, b"\x80" * (3 * _TRIAL_PX**2), b"trial")
        prompt = projector.prompt(["a", grey], self.options.n_ubatch, add_special=False)
        with self.routing.paused():
            for image in prompt.images:
                self.sequences.extend_batch([(0, image.tokens, 0)])
                self.sequences.rewind(0, 0)

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

        Returns `asked_bytes` if all experts are in memory. If experts are read from the disk, the
        result is at most a share of the experts' memory, and is reserved in it.
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

        `purposes` are constants of `offload/store/memory_budget.py`. Nothing is counted if all
        experts are in memory.
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
        """Return the counts of experts and of tables' rows read from the disk.

        Has no counts of experts if all are in memory, and none of rows if the tables are.
        """
        memory, tables = self._expert_memory, self.tables
        experts = {} if memory is None else memory.counters.as_dict()
        return experts if tables is None else experts | asdict(tables.counters)

    @property
    def n_vocab(self) -> int:
        return self._model.n_vocab

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self._context.n_ctx
