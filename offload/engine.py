"""The engine: a model file open on a device, with a KV cache and the sequences in it.

During a call of `llama_decode` the library calls `StreamingDevice` on the same thread, several
times per token. `Sequences.extend` re-raises an exception that such a callback raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from offload.decode import Batch
from offload.errors import DoesNotFit, NotSupported
from offload.ggml.library.log import opening
from offload.images.decoding import NO_IMAGES, Bitmap, decoded_files
from offload.images.mtmd import ImagePrompt, Projector
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.notes import OnProgress
from offload.opening.opened import open_start
from offload.opening.start import Start, decide_start
from offload.options import EngineOptions
from offload.plan.host import PROMPTS
from offload.plan.layout import Layout
from offload.schedule.slots import StreamCounters
from offload.sequences.sequences import Sequences
from offload.sequences.text import ModelText
from offload.stream.device import StreamingDevice
from offload.threads.numa_plan import NOT_OURS
from offload.times.min_batch import MinBatch, by_device

__all__ = ["Engine", "EngineOptions", "open_engine"]
_TRIAL_PX = 64  # width and height of the image that is tried out
_PROMPT_SHARE = 1 / 16  # largest share of the experts' memory that kept prompts may take


def open_engine(
    path: str | Path,
    options: EngineOptions | None = None,
    on_progress: OnProgress = lambda *_: None,
) -> Engine:
    """Decide how the model is opened on this machine, and open it.

    `on_progress` gets the step of loading and the fraction that is done. Raises what
    `decide_start` and `Engine` raise.
    """
    start = decide_start(read_facts(path), options or EngineOptions())
    return Engine(start, on_progress)


class Engine(ModelText):
    """Evaluates tokens with a model file that it opens. Close it, or use it with `with`."""

    def __init__(self, start: Start, on_progress: OnProgress = lambda *_: None) -> None:
        """Open what `start` says. `on_progress` gets the step and the fraction that is done.

        Raises BadModel, DoesNotFit, DeviceFailed or DeviceUnavailable.
        """
        # The open parts. `opened.start` is another one than `start` if it was planned again.
        self.opened = open_start(start, on_progress)
        self._model = self.opened.model

    def __repr__(self) -> str:
        on = self.start.choice.name
        return f"Engine({self.facts.path.name} on {on}, {self.sequences.n_cells} cells)"

    @property
    def start(self) -> Start:
        """The decision how the model was opened."""
        return self.opened.start

    @property
    def facts(self) -> ModelFacts:
        """The facts in the file's header."""
        return self.start.facts

    @property
    def layout(self) -> Layout:
        """The places of the weights, and who computes them."""
        return self.start.layout

    @property
    def sequences(self) -> Sequences:
        """The texts in the KV cache."""
        return self.opened.sequences

    @property
    def image_decoder(self) -> Path | None:
        """The program that decodes image files, None without a projector."""
        images, projector = self.opened.images, self.opened.projector
        return None if images is None or projector is None else images.decoder

    def image_prompt(
        self, parts: Sequence[str | bytes | Bitmap], *, add_special: bool
    ) -> ImagePrompt:
        """Return the tokens of texts and images in turn, for a prompt.

        Images are files, which are decoded here, or bitmaps. With a bitmap without pixels, the
        tokens can only be counted. Raises BadRequest for a file that is no image, and NotSupported
        without a projector.
        """
        projector = self.opened.projector
        if projector is None or self.image_decoder is None:
            raise NotSupported(NO_IMAGES)
        files = [part for part in parts if isinstance(part, bytes)]
        bitmaps = iter(decoded_files(files, self.image_decoder) if files else ())
        return projector.prompt(
            [next(bitmaps) if isinstance(part, bytes) else part for part in parts],
            self.layout.context.n_ubatch,
            add_special=add_special,
        )

    @property
    def device(self) -> StreamingDevice | None:
        """The first streaming device, or None if no weights can stream."""
        parts = self.opened.weights.parts
        return parts[0].device if parts else None

    @property
    def place(self) -> str:
        """Name of the computing device in kept measurements of a draft model."""
        remote = self.opened.remote
        return self.start.choice.name if remote is None else remote.words

    @property
    def reads_experts(self) -> bool:
        """True if not all experts fit memory, so that some are read from the disk when needed."""
        return self.layout.reads_disk

    @property
    def numa_notes(self) -> tuple[str, ...]:
        """Sentences on the places of threads and pages, and on refusals. () if none is chosen."""
        weights, threads = self.opened.weights, self.opened.threads
        if weights.numa is None:
            return (threads.sentence, *threads.notes) if threads.is_bound else ()
        placed = weights.placer.notes if weights.placer is not None else ()
        if weights.numa.candidate is not None and not placed:
            placed = (NOT_OURS,)
        return (threads.sentence, *threads.notes, *placed)

    def close(self) -> None:
        """Free all resources. A second call does nothing."""
        self.opened.closing.close()

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
        return self.opened.weights.ways.now.min_batch

    @property
    def min_batches(self) -> dict[str, MinBatch]:
        """The thresholds of each device, by its name."""
        return {part.choice.name: part.device.min_batch for part in self.opened.weights.parts}

    def min_batch_words(self, kinds: Sequence[str]) -> str:
        """Return a clause on who computes which batches, such as "the GPU computes ..."."""
        by_device = self.min_batches
        if len(set(by_device.values())) < 2:
            return f"the GPU computes {self.min_batch.words(kinds)}"
        return "; ".join(
            f"{name} computes {min_batch.words(kinds)}" for name, min_batch in by_device.items()
        )

    def set_min_batch(self, value: MinBatch, *, is_measured: bool = False) -> None:
        """Set the thresholds from which streamed weights are computed on the device.

        If `is_measured`, `value` comes from decodes on all devices, and each device gets thresholds
        of its own (`min_batches_of`).

        Thresholds apply to graphs built from now on. libllama reuses the previous decode's graph
        while batches have the same number of tokens and the same number of rows of logits.
        """
        each = self.min_batches_of(value) if is_measured else ()
        self.opened.weights.ways.change(min_batch=value, min_batches=each)

    def min_batches_of(self, value: MinBatch) -> tuple[MinBatch, ...]:
        """Return the thresholds of each device, if `value` comes from decodes on all devices.

        Returns () if there is at most one device.
        """
        plans = [part.plan for part in self.opened.weights.parts]
        if len(plans) < 2:
            return ()
        crossovers = [plan.min_batch for plan in plans]
        return tuple(by_device(value, crossovers, [plan.streamed_bytes for plan in plans]))

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
        with self.opened.routing.paused():
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
            context, n_ubatch = self.opened.context, self.layout.context.n_ubatch
            context.decode(Batch(tokens[:1], [0], [0], [True], n_ubatch))
            context.remove(0, 0)
            if (projector := self.opened.projector) is not None:
                with suppress(DoesNotFit):  # a request with an image gets the error
                    self._try_out_image(projector)

    def _try_out_image(self, projector: Projector) -> None:
        grey = Bitmap(_TRIAL_PX, _TRIAL_PX, b"\x80" * (3 * _TRIAL_PX**2), b"trial")
        prompt = projector.prompt(["a", grey], self.layout.context.n_ubatch, add_special=False)
        with self.opened.routing.paused():
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
        slots = chain.from_iterable(device.fill(uses or {}) for device in self.opened.devices)
        memory = self.opened.experts
        return slots if memory is None else chain(slots, memory.fill(uses))

    def memory_for_prompts(self, asked_bytes: int | None) -> int | None:
        """Return the memory that prompts of earlier requests may take; None: no limit.

        Returns `asked_bytes` if all experts are in memory. If experts are read from the disk, the
        result is at most a share of the experts' memory, and is reserved in it.
        """
        memory = self.opened.experts
        if memory is None:
            return asked_bytes
        most_bytes = int(_PROMPT_SHARE * memory.capacity_bytes)
        granted_bytes = most_bytes if asked_bytes is None else min(asked_bytes, most_bytes)
        memory.reserve(PROMPTS, granted_bytes)
        return granted_bytes

    def settle(self) -> None:
        """Wait until no copy is under way. The trace then holds all counted copies."""
        for device in self.opened.devices:
            device.settle()

    def prefer_cached(self) -> bool:
        """Let routers of small batches prefer experts in slots, as `streaming.route` says.

        Returns False if that was not asked for, or if no experts stream through slots. Call it when
        nothing more is measured, because measurements are those of the model's own routing.
        """
        routings = [device.routing for device in self.opened.devices if device.routing is not None]
        for routing in routings if self.layout.plan.layout.pools else ():
            routing.turn_on()
        return any(routing.is_on for routing in routings)

    def counters(self) -> StreamCounters:
        """Return the counts of streaming since the engine was opened, all 0 if nothing streams."""
        return sum((part.device.counters() for part in self.opened.weights.parts), StreamCounters())

    def counters_by_device(self) -> dict[str, StreamCounters]:
        """Return the counts of streaming, by name of the device."""
        return {part.choice.name: part.device.counters() for part in self.opened.weights.parts}

    def disk_counters(self) -> dict[str, float]:
        """Return the counts of experts and of tables' rows read from the disk.

        Has no counts of experts if all are in memory, and none of rows if the tables are.
        """
        memory, tables = self.opened.experts, self.opened.tables
        experts = {} if memory is None else memory.counters.as_dict()
        return experts if tables is None else experts | asdict(tables.counters)

    @property
    def n_vocab(self) -> int:
        return self._model.n_vocab

    @property
    def n_ctx(self) -> int:
        """Tokens that one sequence can hold."""
        return self.opened.context.n_ctx_each

    @property
    def n_cells(self) -> int:
        """Tokens that all sequences together can hold."""
        return self.opened.context.n_ctx
