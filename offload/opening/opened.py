"""Opens what a `Start` says: weights, devices, contexts and sequences, in the order they need.

A failure frees what was opened before it. Nothing is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, replace
from functools import partial

from offload.decode import Batch
from offload.device import has_gpu
from offload.errors import BadModel, DoesNotFit
from offload.ggml.block_context import BlockContext
from offload.ggml.context import Context, Embedder
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import mtmd_binding, prepare
from offload.ggml.library.log import opening, spare_cells
from offload.ggml.native_build import missing_in_build
from offload.ggml.ram_cache import RamCache
from offload.ggml.row_context import MtpContext, RowContext
from offload.images.building import ImageLibrary, image_library
from offload.images.mtmd import Projector
from offload.kv_overrides import FLAG, words_of
from offload.model_file import model_hash
from offload.notes import Note, NoteKind, OnProgress
from offload.opening.placing import PlacedWeights
from offload.opening.start import Start
from offload.plan.host import PROJECTOR
from offload.plan.placement import Plan
from offload.plan.row_draft import loading_reason
from offload.plan.tables import lookup_tables
from offload.plan.warm_up import WarmedUp
from offload.remote.devices import RemotePart, open_remote
from offload.remote.watch import ConnectionWatch, watching
from offload.routing.routing import RoutingRecorder
from offload.sequences.block_draft import BlockDraft
from offload.sequences.decoding import decoder, image_decoder, row_step
from offload.sequences.row_draft import RowDraft
from offload.sequences.row_file import open_row_file
from offload.sequences.sequences import Decode, MemoryTraits, Sequences
from offload.store.expert_memory import ExpertMemory
from offload.store.memory_budget import IN_DECODES
from offload.store.table_rows import TableRows
from offload.stream.building import lend_buffers, size_slots, warm_up
from offload.stream.device import StreamingDevice
from offload.threads.engine_threads import EngineThreads
from offload.times.context_memory import (
    MTP_UBATCH,
    ContextOptions,
    forgetting_window,
    most_state_bytes,
)
from offload.times.min_batch import MinBatch

_READING_PROJECTOR = "the projector for images is read"


class PlannedAgain(Exception):
    """A warm-up took more memory than the header promised. `start` leaves that much free."""

    def __init__(self, start: Start) -> None:
        super().__init__("the model has to be opened again, by another plan")
        self.start = start


def open_start(start: Start, on_progress: OnProgress) -> Opening:
    """Open what `start` says, or what is planned again after its warm-up, at most once.

    Raises what `Opening` raises.
    """
    try:
        return Opening(start, on_progress)
    except PlannedAgain as e:
        again = e.start
    return Opening(again, on_progress)


class Opening:
    """All parts of an open model. `closing` frees them."""

    def __init__(self, start: Start, on_progress: OnProgress) -> None:
        """Open it. Raises BadModel, DoesNotFit, DeviceFailed, DeviceUnavailable or PlannedAgain."""
        self.start, self.closing = start, ExitStack()
        self.facts, self.options, self.layout = start.facts, start.options, start.layout
        self.shape = start.context  # the options of the context, as decided
        self.choice = start.choice  # the first device
        self.pending = Pending()
        self.notes: list[str] = []  # sentences for the user, e.g. on what the library's build lacks
        self.images: ImageLibrary | None = None
        self.remote: RemotePart | None = None
        # The plan of our devices. Slots are sized anew after a warm-up.
        self.plan: Plan | None = self.layout.plan if start.streams else None
        self.tables: TableRows | None = None  # tables on the disk, whose rows are read ahead
        self.projector: Projector | None = None  # makes rows of images
        # Why MTP layers or a file that drafts from rows cannot draft.
        self.no_rows_reason = self.layout.no_rows_reason
        # Recording is off at first, because tokens decoded while opening belong to no text.
        self.routing = RoutingRecorder()
        try:
            self._open(on_progress)
        except BaseException:
            self.closing.close()
            raise

    def _open(self, on_progress: OnProgress) -> None:
        if self.options.projector is not None:  # before the model, because it may compile libmtmd
            self.images = image_library(on_progress)
        watch = self.closing.enter_context(watching(self.options.remote))
        unused = (Note(NoteKind.UNUSED, reason) for reason in missing_in_build(has_gpu=has_gpu()))
        self.notes += (*self._device_notes(), *prepare(), *unused)
        self._open_remote(on_progress)
        self.notes += self.layout.notes
        self._open_tables()
        self.weights = PlacedWeights(
            self.start, self.remote, self.pending, self.notes, self.routing, self.closing
        )
        with opening(self.facts.path):
            self._open_model(on_progress)
            with self.taking(*IN_DECODES):
                row_context = self._open_contexts()
        self._open_projector(on_progress)
        self.threads = self._open_threads(row_context)
        self.row_draft = self._open_row_draft(row_context)
        self._fill_devices()
        self.sequences = self._open_sequences(watch)

    def _device_notes(self) -> list[Note]:
        reasons = () if self.layout.remote else self.layout.reasons
        return [Note(NoteKind.DEVICE, f"devices: {reason}") for reason in reasons]

    def _open_remote(self, on_progress: OnProgress) -> None:
        if not self.layout.remote:
            return
        here, pending = self.start.here, self.pending if self.options.wanted.wrapped else None
        self.remote = open_remote(
            self.layout, here.choice, here.offer, pending=pending, on_progress=on_progress
        )
        words = f"{self.remote.words}; layers are divided {', '.join(self.layout.reasons)}"
        self.notes.append(Note(NoteKind.DEVICE, words))

    def _open_tables(self) -> None:
        layout = self.layout
        if layout.on_disk and layout.tables is not None:
            self.notes.append(Note(NoteKind.WEIGHTS, f"weights: {layout.tables.words}"))
            self.tables = TableRows(lookup_tables(self.facts), layout.context.n_batch)
            self.closing.callback(self.tables.close)

    def _open_model(self, on_progress: OnProgress) -> None:
        try:
            self.model = self.weights.load(on_progress)
            if self.remote is not None:
                self.remote.loaded()
        except BadModel as e:
            if reason := loading_reason(self.facts, str(e)):
                raise BadModel(f"{self.facts.path}: {reason}") from e
            raise

    def _open_contexts(self) -> RowContext | None:
        """Open the context and the embedder. Returns the context that drafts from rows, if any."""
        options = self.shape
        self.ram_cache = self._place_cache()
        # Asynchronous devices can compute ahead, since a tenant's graphs are kept.
        self.context = Context(
            self.model, options, self.pending, ram_cache=self.ram_cache,
            tenant=self.devices[0] if self.devices else None,
        )  # fmt: skip
        self.closing.callback(self.context.close)
        self._copy_caches_ahead()
        self.embedder = self._open_embedder(options)
        return self._open_row_context(options)

    def _fill_devices(self) -> None:
        """Give slots their memory, and let the backend decide alone where Python need not."""
        if self.options.streaming.warmup:
            on_workers = self.remote is not None
            with self.taking(*IN_DECODES):
                warmed = warm_up(self.weights.parts, self._warm_up, on_workers=on_workers)
                self._plan_again(warmed)
                size_slots(self.weights.parts, warmed)
        lend_buffers(self.weights.parts, self.notes)
        if self.weights.parts:
            self.plan = self.layout.with_devices(part.planned for part in self.weights.parts).plan
        self._answer_natively()

    def _plan_again(self, warmed: Sequence[WarmedUp | None]) -> None:
        """Raise PlannedAgain if slots do not fit what a warm-up left, and fit another plan."""
        known = [memory for memory in warmed if memory is not None]
        if all(memory.fits for memory in known):
            return
        if (again := self.start.after(known)) is not None:
            raise PlannedAgain(again)

    def _open_sequences(self, watch: ConnectionWatch | None) -> Sequences:
        options = self.shape
        decode = decoder(
            self.context, self.threads, self.devices, self.weights.native_experts,
            self.experts, self.tables,
        )  # fmt: skip
        if watch is not None:
            watch.end()
            decode = watch.during(decode)
        decode_image = None
        if self.projector is not None:
            decode_image = image_decoder(
                self.projector, self.context, self.threads, self.devices,
                self.weights.native_experts, self.experts,
            )  # fmt: skip
        return Sequences(
            self.context,
            decode,
            self._memory_traits(),
            n_sequences=options.n_sequences,
            n_outputs=options.n_outputs,
            n_tree_leaves=options.n_tree_leaves,
            n_devices=len(self.devices),
            follower=self.row_draft,
            on_text=None if self.tables is None else self.tables.foresee,
            decode_image=decode_image,
        )

    @property
    def experts(self) -> ExpertMemory | None:
        """The memory for some of the experts, None if all are in memory."""
        return None if self.weights.store is None else self.weights.store.experts

    @property
    def devices(self) -> tuple[StreamingDevice, ...]:
        """The streaming devices, in the order of their layers."""
        return self.weights.devices

    def taking(self, *purposes: str) -> AbstractContextManager[None]:
        """Count the memory that this process takes in the block as taken for these purposes.

        `purposes` are constants of `offload/store/memory_budget.py`. Nothing is counted if all
        experts are in memory.
        """
        return nullcontext() if self.experts is None else self.experts.taking(*purposes)

    def _open_projector(self, on_progress: OnProgress) -> None:
        """Open the projector for images, if there is one. Raises BadModel."""
        asked, library = self.options.projector, self.images
        if asked is None or library is None:
            return
        with self.taking(PROJECTOR):
            self.projector = Projector(
                asked.path,
                mtmd_binding(library.folder),
                self.model,
                self.pending,
                device=None if asked.on_cpu_reason else self.choice.device,
                n_threads=self.shape.n_threads_batch,
                least_tokens=asked.least_tokens,
                most_tokens=asked.most_tokens,
                on_progress=partial(on_progress, _READING_PROJECTOR),
            )
        self.closing.callback(self.projector.close)
        reason = asked.on_cpu_reason
        place = f"the CPU, because {reason}" if reason else self.choice.name
        words = f"images: read with {asked.path.name}, computed by {place}"
        self.notes.append(Note(NoteKind.DEVICE, words))

    def _memory_traits(self) -> MemoryTraits:
        facts, model = self.facts, self.model
        window = 0 if facts.keeps_compressed else forgetting_window(facts)
        is_recurrent = model.is_recurrent or facts.keeps_compressed
        return MemoryTraits(
            facts.architecture,
            is_recurrent=is_recurrent,
            is_hybrid=model.is_hybrid,
            # The library aborts if a state has several ranges of cells, as with sliding windows.
            device_checkpoints=model.is_recurrent and not facts.number("attention.sliding_window"),
            most_state_bytes=most_state_bytes(facts, self.shape),
            n_swa=0 if self.shape.swa_full else window,
            window=window,
            # A stream of one sequence lends it to no other one.
            # Without flash attention values lie transposed. Each part then takes a copy per value,
            # each of which waits for a GPU.
            saves_parts=not (is_recurrent or window)
            and self.shape.kv_unified
            and (
                self.shape.flash_attn != "off" or not (self.choice.on_gpu and self.shape.kv_offload)
            ),
            made_by=self._made_by,
        )

    def _made_by(self) -> dict[str, str]:
        """The settings that a saved state depends on and does not show (`Sequences.made_by`)."""
        rope = [f"{name}={value}" for name, value in asdict(self.shape.rope).items() if value]
        replaced = {FLAG: words_of(self.facts.overrides)} if self.facts.overrides else {}
        route = self.options.streaming.route
        if route.is_on:
            replaced["--route-cached"] = f"{route.strength:g}, --route-keep {route.n_kept}"
        return replaced | {
            "model (hash)": model_hash(self.facts),
            "rope setting": ", ".join(rope) or "the file's own",
            **self._made_in_streams(),
            "type of cached keys": self.shape.type_k,
            "type of cached values": self.shape.type_v or self.shape.type_k,
        }

    def _made_in_streams(self) -> dict[str, str]:
        """The library writes the number of streams into a state, and reads no other number."""
        n_streams = self.context.n_streams
        return {"--no-kv-unified": f"{n_streams} slots"} if n_streams > 1 else {}

    # -- opening and closing --------------------------------------------------------------------

    def _place_cache(self) -> RamCache | None:
        """Return what places a KV cache in RAM, None if it is in device memory."""
        if self.shape.kv_offload or not self.weights.parts:
            return None
        layers_of = [planned.layers for planned in self.layout.local]
        ranges = [*zip(layers_of, self.devices, strict=True)]

        def device_of(layer: int) -> StreamingDevice | None:
            return next((device for layers, device in ranges if layer in layers), None)

        is_copied = self.choice.on_gpu and not self.layout.cpu_attention_reason
        pin_for = self.choice.device if is_copied else None
        return RamCache(device_of, pin_for, self.pending)

    def _copy_caches_ahead(self) -> None:
        """Let devices copy a cache in RAM layer by layer, ahead of its use, where they can."""
        cache = self.ram_cache
        if cache is None or not cache.is_pinned or not self.options.streaming.depth:
            return
        for part in self.weights.parts:
            if part.plan.attention_batch and part.choice.device.has_async_and_events:
                part.device.copy_caches_ahead(cache.largest_layer_bytes)

    def _open_embedder(self, options: ContextOptions) -> Embedder | None:
        if self.start.pooling is None:
            return None

        def decoder_of(embedder: Embedder) -> Decode:
            return decoder(
                embedder, None, self.devices, self.weights.native_experts, self.experts,
                self.tables, embeds=True,
            )  # fmt: skip

        is_plain = not (self.devices or self.experts is not None or self.tables is not None)
        embedder = Embedder(
            self.model, options, self.start.pooling, self.pending, None if is_plain else decoder_of
        )
        self.closing.callback(embedder.close)
        return embedder

    def _open_row_context(self, o: ContextOptions) -> RowContext | None:
        """Open the context that drafts from rows, or note why it cannot be opened."""
        file = self.options.row_file
        if not self.model.has_mtp and file is None:
            return None
        n_ubatch = o.n_ubatch if file is not None else min(o.n_ubatch, MTP_UBATCH)
        options = replace(
            o,
            # Drafts take cells in addition to the texts, which may fill the target's context.
            n_ctx=self.context.n_ctx + o.n_outputs * o.n_sequences,
            n_batch=n_ubatch,
            n_ubatch=n_ubatch,
            n_outputs=o.n_sequences,
            n_rs_seq=0,
            swa_full=True,
            kv_offload=True,  # the cache of a layer that drafts is small
            kv_unified=True,  # so all sequences may share its cells
            most_each=0,
            n_tree_leaves=0,  # drafts from rows are chains, not trees
        )
        context: RowContext
        try:
            with ExitStack() as without_slots:
                without_slots.enter_context(spare_cells(self.context.n_ctx, self.facts.n_ctx_train))
                for device in self.devices:
                    without_slots.enter_context(device.without_slots())
                if file is None:
                    context = MtpContext(
                        self.model, options, self.pending, self.context, self.facts.architecture
                    )
                else:
                    context = open_row_file(
                        file, self.facts, self.model, self.context, options,
                        self.weights.placement, self.pending, self.closing,
                    )  # fmt: skip
        except (BadModel, DoesNotFit) as e:
            self.no_rows_reason = str(e)
            return None
        self.closing.callback(context.close)
        return context

    def _open_row_draft(self, context: RowContext | None) -> RowDraft | None:
        if context is None:
            return None
        step = row_step(context, self.threads, self.devices)
        if isinstance(context, BlockContext):
            return BlockDraft(context, step, self.context.n_ctx_each, self.shape.n_sequences)
        return RowDraft(context, step, self.context.n_ctx_each, self.shape.n_sequences)

    def _warm_up(self) -> None:
        """Compute the largest ubatch once, so that kernels allocate all the memory they need.

        It has texts of as many sequences as it takes. A limit of tokens for each text
        (`most_each`) does not count, because several texts share an ubatch.
        """
        o, context = self.shape, self.context
        most = context.n_ctx // context.n_streams - 1  # one cell is left for the second decode
        n_texts = -(-min(o.n_ubatch, context.n_streams * most) // most)
        n_each = min(o.n_ubatch // n_texts, most)  # equal, so that one ubatch takes them all
        n = n_texts * n_each
        texts, positions = [i // n_each for i in range(n)], [i % n_each for i in range(n)]
        wanted = [i >= n - o.n_outputs for i in range(n)]
        with self.weights.ways.trying(replace(self.weights.ways.now, min_batch=MinBatch(1, 1))):
            context.decode(Batch([0] * n, positions, texts, wanted, o.n_ubatch))
        self.weights.ways.change(min_batch=self.layout.min_batch)
        # Decode another batch. Otherwise libllama would reuse the graph above for equal batches,
        # although that graph was split by another threshold.
        context.decode(Batch([0], [n_each], [0], [False], o.n_ubatch))
        for text in range(n_texts):
            context.remove(text, 0)

    def _answer_natively(self) -> None:
        """Let libllama ask the backend directly which nodes it takes, if Python need not decide."""
        if not self.weights.may_be_native:
            return
        ways, n_ubatch = self.weights.ways, self.shape.n_ubatch
        ways.change(min_batch=self.layout.min_batch)
        for part in self.weights.parts:
            pools, device = part.plan.layout.pools, part.device
            if device.passes or all(pool.holds(n_ubatch) for pool in pools):
                device.answer_natively()

    def _open_threads(self, drafting: RowContext | None) -> EngineThreads:
        contexts: list[Context] = [self.context, *([drafting] if drafting is not None else [])]
        if self.embedder is not None:
            contexts.append(self.embedder)
        o, team = self.shape, None if self.weights.hybrid is None else self.weights.hybrid.team
        threads = EngineThreads(
            contexts,
            o.n_threads,
            o.n_threads_batch,
            self.weights.numa,
            team,
            self.options.decode_on,
            self.options.batch_on,
        )
        self.closing.callback(threads.close)
        return threads
