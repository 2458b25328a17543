"""The store: host memory of the streamed weights, filled from the file by its own threads.

Load the model inside `loading()`. libllama then asks for each tensor's memory (`place`), and the
readers begin. Afterwards `finish()` waits for the readers. libllama itself reads only resident
weights. The memory is freed when libllama frees its buffer, or by `close()`.

If memory cannot hold all experts (`StoreOptions.expert_limits`), only other streamed weights are
read at loading. Experts are read when layers need them (`Store.experts`).

Pages are made huge after the reading. If huge pages were requested before (MADV_HUGEPAGE), reads
would wait for the kernel to find and clear 2 MiB at a time. Loading then took two to three times as
long if memory was fragmented or, in a virtual machine, not yet backed (docs/background.md,
pinning).
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from numa.errors import PlacementRefused
from numa.machine import MemoryStalls, read_limits
from numa.memory import PlacedMemory
from offload.errors import BadModel, DoesNotFit
from offload.ggml.hostbuffer import OnDemand, mapping_without_reading
from offload.ggml.library.callback import Pending
from offload.ggml.memory import HasAddress, HostRange, Pinner, ReservedAddresses
from offload.model import LOOKED_UP, ModelFacts, TensorEntry, WeightPlace, is_experts
from offload.notes import OnProgress
from offload.plan.host import ROUTERS, ExpertLimits
from offload.plan.store_layout import (
    PAGE_BYTES,
    Run,
    Spot,
    StoreLayout,
    cut_into_chunks,
    expert_matrices,
    plan_layout,
)
from offload.routing.next_experts import NextExperts
from offload.store.expert_memory import ExpertMemory, ExpertPlaces
from offload.store.expert_pages import Leave
from offload.store.memory_budget import MemoryLimits
from offload.store.reading import OpenFile, ReadAhead, ReadCounters, Readers, Workers
from offload.units import size_words

READING = "reading weights"
PlacePages = Callable[[PlacedMemory, StoreLayout], None]  # places each page on a memory node
MakeNextExperts = Callable[[ExpertMemory], NextExperts]
_N_READERS = 4
_CHUNK_BYTES = 8 << 20  # a multiple of the page size
_HUGE_STEP_BYTES = 32 << 20


@dataclass(frozen=True)
class StoreOptions:
    """The options of the store."""

    keep_page_cache: bool = False  # --mmap: weights stay in the page cache
    expert_limits: MemoryLimits | None = None  # limits if not all experts fit memory; None: all do
    on_disk: frozenset[str] = frozenset()  # resident weights that are not read at the start
    leave: Leave = HostRange.give_back  # takes pages of an expert away
    disk_bytes_per_s: float | None = None  # rate of a simulated disk; None: the real one
    pin_for: HasAddress | None = None  # GPU that copies from the memory; None for the CPU and sim


@dataclass(frozen=True)
class HostRoom:
    """Anonymous memory that this process may still take, and the limit's name in words."""

    available_bytes: int
    limited_by: str


def room_now(root: Path = Path("/")) -> HostRoom:
    """Return the memory available on the machine or in the control group, whichever is less.

    The page cache counts against the group's limit too, but the kernel drops it when memory is
    needed. If the kernel does not tell what the group uses, this process's memory is subtracted.
    """
    machine = HostRoom(psutil.virtual_memory().available, "free memory")
    limits = read_limits(root)
    limit = limits.memory_bytes
    if limit is None:
        return machine
    left = max(0, limit - max(own_bytes(), limits.kept_bytes))
    group = HostRoom(left, f"the control group's limit of {limit / 2**30:.1f} GiB")
    return min(machine, group, key=lambda room: room.available_bytes)


def own_bytes() -> int:
    """Return the anonymous memory of this process."""
    used = psutil.Process().memory_info()
    return int(used.rss - used.shared)


def check_room(needed_bytes: int, room: HostRoom) -> None:
    """Raise DoesNotFit if the streamed weights need more memory than `room` has."""
    if needed_bytes > room.available_bytes:
        raise DoesNotFit(
            f"the streamed weights need {needed_bytes / 2**30:.2f} GiB of memory, but "
            f"{room.available_bytes / 2**30:.2f} GiB are available ({room.limited_by}); use --mmap "
            "to keep them in the page cache"
        )


def watched(limits: ExpertLimits) -> MemoryLimits:
    """Return the limits together with what watches this machine's memory while experts are read."""
    return MemoryLimits(
        limits.most_bytes,
        limits.others_bytes,
        limits.free_bytes,
        limits.later_bytes,
        lambda: room_now().available_bytes,
        own_bytes,
        MemoryStalls(),
    )


@dataclass(frozen=True)
class HugePages:
    """Bytes in huge pages, and the reason why there are not more."""

    size_bytes: int
    reason: str


class HugePageMaker(Workers):
    """A thread that makes pages huge while other threads may use their contents."""

    def __init__(self, memory: PlacedMemory) -> None:
        super().__init__("huge-pages", self._make)
        self._memory, self._reason = memory, ""
        self.done = 0.0  # share of the memory that was processed
        self.start()

    def so_far(self) -> HugePages:
        reason = "being made" if self.is_working else self._reason
        return HugePages(self._memory.huge_bytes(), reason)

    def _make(self) -> None:
        if self._memory.placement is not None:
            self._reason = "; ".join(self._memory.collapse(self._goes_on))
            return
        total_bytes = self._memory.mapped_bytes
        try:
            for start in range(0, total_bytes, _HUGE_STEP_BYTES):
                if not self._goes_on(start, total_bytes):
                    break
                self._memory.make_huge(start, _HUGE_STEP_BYTES)
        except PlacementRefused as refusal:
            self._reason = str(refusal)

    def _goes_on(self, done_bytes: int, total_bytes: int) -> bool:
        self.done = done_bytes / total_bytes
        return not self.is_stopping


@dataclass(frozen=True)
class StoreReport:
    """The result of loading. Each `why_not_...` is the reason for a skipped step, or ""."""

    kept_in: str  # "memory" or "page cache"
    n_tensors: int
    weight_bytes: int
    seconds: float  # from the first read to the last byte, pinning included
    counters: ReadCounters
    not_direct_reason: str
    huge: HugePages  # state at the end of loading; without pinning, more may be made later
    not_pinned_reason: str
    n_mapped_unread: int  # files that libllama mapped without reading them
    in_memory_bytes: int | None = None  # most bytes of experts in memory; None: all of them

    def sentence(self) -> str:
        """Return one line for the start-up messages."""
        gib = self.weight_bytes / 2**30
        if self.kept_in == "page cache":
            return f"{size_words(self.weight_bytes)} of streamed weights stay in the page cache"
        if self.in_memory_bytes is not None:
            return (
                f"{gib:.2f} GiB of streamed weights do not fit memory: up to "
                f"{self.in_memory_bytes / 2**30:.2f} GiB of experts are kept there, others are "
                "read from the disk when they are needed"
            )
        reason = self.not_direct_reason
        how = f"not directly: {reason}" if reason else "directly"
        if self.counters.cached_bytes:
            how += f", {size_words(self.counters.cached_bytes)} from the page cache"
        pinned = "pinned" if not self.not_pinned_reason else f"not pinned: {self.not_pinned_reason}"
        huge = f"huge pages: {self.huge.reason or size_words(self.huge.size_bytes)}"
        rate = self.weight_bytes / self.seconds / 1e9 if self.seconds else 0.0
        return (
            f"{size_words(self.weight_bytes)} of streamed weights read at {rate:.1f} GB/s ({how}), "
            f"{huge}, {pinned}"
        )


@dataclass
class _Held:
    """The resources of an open store."""

    files: dict[Path, OpenFile] = field(default_factory=dict)
    mappings: dict[Path, mmap.mmap] = field(default_factory=dict)
    memory: PlacedMemory | None = None
    whole: HostRange | None = None  # all of the memory
    pinner: Pinner | None = None
    readers: Readers | None = None
    ahead: ReadAhead | None = None
    huge: HugePageMaker | None = None
    experts: ExpertMemory | None = None
    next_experts: NextExperts | None = None


class Store:
    """Memory of a model's streamed weights; a HostMemory and TensorPlacer of a HostBufferType."""

    def __init__(
        self,
        facts: ModelFacts,
        streamed: Sequence[TensorEntry],
        options: StoreOptions | None = None,
        make_memory: Callable[[int], PlacedMemory] = PlacedMemory,
        place_pages: PlacePages | None = None,
        read_ahead: MakeNextExperts | None = None,
    ) -> None:
        """Make a store without opening files or taking memory, which `loading` does.

        `make_memory` gets a size in bytes. `place_pages` gets the memory before anything is read
        into it. `read_ahead` finds the experts to read ahead, if not all are in memory.
        """
        self.options = options or StoreOptions()
        self.layout = plan_layout(facts.weights[entry.name] for entry in streamed)
        self._facts, self._streamed = facts, streamed
        names = self.layout.spots
        self._resident = [p for name, p in facts.weights.items() if name not in names]
        self._make_memory, self._place_pages = make_memory, place_pages
        self._read_ahead = read_ahead
        self._addresses = ReservedAddresses()
        self._held = _Held()
        self._placed: set[str] = set()
        self._filling = False
        self._starting = threading.Lock()
        self._wanted_bytes = 1
        self._n_mapped_unread = 0
        self._began_s = 0.0
        self.report: StoreReport | None = None

    # -- for libllama ----------------------------------------------------------------------------

    def __repr__(self) -> str:
        layout = self.layout
        return f"Store({len(self._streamed)} streamed weights, {layout.size_bytes >> 20} MiB)"

    def allocate(self, size_bytes: int) -> HostRange:
        """Return reserved addresses that stand for the buffer. `place` returns tensors' memory."""
        return self._addresses.allocate(size_bytes)

    def free(self, memory: HostRange) -> None:
        """Free the buffer and close the store. Called when libllama no longer reads the weights."""
        self._addresses.free(memory)
        self.close()

    def place(self, name: str, size_bytes: int) -> HostRange:
        """Return the memory of a tensor's data. Raises BadModel if the tensor does not stream."""
        spot = self.layout.spots.get(name)
        if spot is None or spot.size_bytes != size_bytes:
            known = "is not known" if spot is None else f"has {spot.size_bytes} bytes in the file"
            raise BadModel(
                f"libllama wants to stream tensor {name} of {size_bytes} bytes, which {known}"
            )
        self._placed.add(name)
        if self.options.keep_page_cache:
            mapped = HostRange.of_mapping(self._held.mappings[spot.file])
            return mapped.part(spot.offset_bytes, size_bytes)
        if self._held.whole is None:
            raise BadModel(f"tensor {name} was placed outside of loading")
        return self._held.whole.part(spot.at_bytes, size_bytes)

    def is_filling(self) -> bool:
        """True while a model is being loaded. The first such call starts the readers."""
        if self._filling:
            self.start_reading()
        return self._filling

    # -- loading ---------------------------------------------------------------------------------

    @contextmanager
    def loading(self, pending: Pending) -> Iterator[Store]:
        """Open the store while the model is loaded inside the context. Close it if that fails.

        Raises DoesNotFit before anything is read if there is not enough memory, and BadModel if a
        file cannot be opened or is shorter than its header says.
        """
        try:
            self._open()
            with mapping_without_reading(pending) as asked:
                self._filling = True
                yield self
            self._n_mapped_unread = asked.times
        except BaseException:
            self.close()
            raise

    def start_reading(self) -> None:
        """Start the readers for the tensors placed so far. Later calls do nothing.

        Call it when libllama has placed all tensors that it uses. libllama may leave some out, for
        example those of layers that only draft.
        """
        with self._starting:
            held = self._held
            if held.readers is not None or held.whole is None:
                return
            runs = self._runs_to_read()
            self._wanted_bytes = max(1, sum(run.end_bytes - run.start_bytes for run in runs))
            target = held.whole.part(0, self.layout.size_bytes).array().data
            chunks = cut_into_chunks(runs, _CHUNK_BYTES)
            held.readers = Readers(held.files.values(), chunks, target, _N_READERS)
            self._began_s = time.perf_counter()
            held.readers.start()

    def _runs_to_read(self) -> list[Run]:
        """Return the runs to read at loading. Without experts if not all of them fit memory."""
        spots = [self.layout.spots[name] for name in self._placed]
        if self.options.expert_limits is not None:
            return [self.layout.run_of(spot) for spot in self._others()]
        starts = [spot.at_bytes for spot in spots]
        return [
            run
            for run in self.layout.runs
            if any(0 <= at - run.at_bytes < run.size_bytes for at in starts)
        ]

    def _others(self) -> list[Spot]:
        """Return the places of streamed weights that are not experts."""
        names = [e.name for e in self._streamed if not is_experts(e) and e.name in self._placed]
        return [self.layout.spots[name] for name in names]

    @property
    def on_demand(self) -> OnDemand:
        """The parts that read experts while the model computes, complete once it is loaded."""
        return self._held

    @property
    def experts(self) -> ExpertMemory | None:
        """The experts in memory, once loading has finished; None if all are always there."""
        return self._held.experts

    @property
    def fraction(self) -> float:
        """Share of the streamed weights that has been read, 0 to 1."""
        readers = self._held.readers
        if self.options.keep_page_cache or not self.layout.runs:
            return 1.0
        return min(1.0, readers.counters.read_bytes / self._wanted_bytes) if readers else 0.0

    def watching(self, on_progress: OnProgress) -> Callable[[float], None]:
        """Return a progress callback for libllama, which starts the readers.

        The callback passes the readers' progress to `on_progress`.
        """

        def progress(_: float) -> None:
            self.start_reading()
            on_progress(READING, self.fraction)

        return progress

    def finish(self, on_progress: OnProgress = lambda *_: None) -> StoreReport:
        """Wait for the readers, pin the memory, and drop the page cache's copies.

        If the memory is pinned, its pages are made huge first. Otherwise they are made huge in the
        background from here on. `on_progress` gets the step and its fraction.

        Raises BadModel for a file that was cut short, and any exception of a reader or of
        `on_progress`. After an exception the store is closed.
        """
        held = self._held

        def tell() -> None:
            on_progress(READING, self.fraction)

        try:
            self.start_reading()
            if held.readers is not None:
                held.readers.wait(tell)
            if held.ahead is not None:
                held.ahead.wait()
            if self.options.pin_for is not None and not self.options.keep_page_cache:
                # The GPU has a copy of resident weights. The CPU and sim read them from the cache,
                # and so does the CPU beside a GPU with those that are looked up.
                copied = [p for p in self._resident if p.entry.name not in LOOKED_UP]
                for file, start, stop in _ranges(copied):
                    held.files[file].forget(start, stop - start)
            tell()
            if held.memory is not None and self.options.expert_limits is not None:
                self._open_experts(self.options.expert_limits)
            elif held.memory is not None:
                held.huge = HugePageMaker(held.memory)
                if held.pinner is not None and held.pinner.can_pin:
                    huge = held.huge  # pages of pinned memory cannot be made huge
                    huge.wait(lambda: on_progress("making huge pages", huge.done))
            not_pinned_reason = self._pin(partial(on_progress, "pinning memory"))
        except BaseException:
            self.close()
            raise
        self._filling = False
        self.report = self._reported(not_pinned_reason)
        if held.experts is None:
            self._close_files()
        return self.report

    def _open_experts(self, limits: MemoryLimits) -> None:
        held, facts = self._held, self._facts
        assert held.whole is not None
        placed = [e for e in self._streamed if is_experts(e) and e.name in self._placed]
        matrices = expert_matrices(self.layout, placed)
        places = ExpertPlaces(
            held.whole.part(0, self.layout.size_bytes), matrices,
            facts.n_experts, facts.n_experts_used, self._others(),
        )  # fmt: skip
        held.experts = ExpertMemory(
            held.files.values(), places, limits, leave=self.options.leave,
            held_to=self.options.disk_bytes_per_s,
        )  # fmt: skip
        if self._read_ahead is not None:
            with held.experts.taking(ROUTERS):
                held.next_experts = self._read_ahead(held.experts)

    def _pin(self, on_progress: Callable[[float], None]) -> str:
        """Pin the memory. Return the reason if that was not possible, otherwise ""."""
        whole = self._held.whole
        if whole is None:
            return "pages of --mmap may leave memory" if self.layout.runs else "nothing streams"
        if self._held.experts is not None:
            return "experts come and go"
        if self._held.pinner is None:
            return "no device copies from it by itself"
        result = self._held.pinner.pin(whole, on_progress)
        return "" if result.ok else result.reason

    def _reported(self, not_pinned_reason: str) -> StoreReport:
        held, spots = self._held, self.layout.spots
        streamed = {run.file for run in self.layout.runs}
        reasons = [held.files[f].not_direct_reason for f in streamed if not held.files[f].is_direct]
        return StoreReport(
            kept_in="page cache" if self.options.keep_page_cache else "memory",
            n_tensors=len(self._placed),
            weight_bytes=sum(spots[name].size_bytes for name in self._placed),
            seconds=time.perf_counter() - self._began_s if self._began_s else 0.0,
            counters=held.readers.counters if held.readers else ReadCounters(),
            not_direct_reason="; ".join(dict.fromkeys(reasons)),
            huge=self.huge_pages(),
            not_pinned_reason=not_pinned_reason,
            n_mapped_unread=self._n_mapped_unread,
            in_memory_bytes=None if held.experts is None else held.experts.capacity_bytes,
        )

    def huge_pages(self, *, wait: bool = False) -> HugePages:
        """Return the bytes in huge pages now, or with `wait` after all of them were made."""
        maker = self._held.huge
        if maker is not None:
            if wait:
                maker.wait()
            return maker.so_far()
        where = "none in the page cache" if self.options.keep_page_cache else "nothing streams"
        if self._held.experts is not None:
            where = "none, because experts come and go"
        return HugePages(0, where)

    def close(self) -> None:
        """Stop the readers and free all memory and files. Tensors' addresses become invalid.

        A second call does nothing. A buffer's addresses stay reserved until libllama frees it.
        """
        held = self._held
        if held.experts is not None:
            held.experts.close()
        for worker in (held.readers, held.ahead, held.huge):
            if worker is not None:
                worker.stop()
        self._close_files()
        memory, whole = held.memory, held.whole
        held.memory = held.whole = held.huge = held.experts = None
        if memory is not None and whole is not None:
            if held.pinner is not None:
                held.pinner.unpin(whole)
            memory.close()
        for mapping in held.mappings.values():
            mapping.close()
        held.mappings.clear()

    def _close_files(self) -> None:
        for file in self._held.files.values():
            file.close()
        self._held.files.clear()

    @property
    def is_pinned(self) -> bool:
        """True if a device copies directly from the weights."""
        return self.report is not None and not self.report.not_pinned_reason

    @property
    def memory(self) -> PlacedMemory | None:
        """The memory while it is held; None with --mmap."""
        return self._held.memory

    # -- opening ---------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._held.files:
            raise BadModel("this store is loading a model already")
        keeps_cache = self.options.keep_page_cache
        if not keeps_cache and self.options.expert_limits is None:
            check_room(self.layout.size_bytes, room_now())
        files = [run.file for run in self.layout.runs] + [p.file for p in self._resident]
        for file in dict.fromkeys(files):
            self._held.files[file] = OpenFile(file)
        self._check_sizes()
        if keeps_cache:
            for file in {run.file for run in self.layout.runs}:
                descriptor = self._held.files[file].buffered
                self._held.mappings[file] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        elif self.layout.runs:
            self._take_memory()
        on_disk = self.options.on_disk
        ranges = _ranges([p for p in self._resident if p.entry.name not in on_disk])
        if keeps_cache:  # prefetch the streamed weights into the cache, too, if all of them fit
            wanted = sum(stop - start for _, start, stop in ranges) + self.layout.size_bytes
            if wanted < room_now().available_bytes:
                ranges += [(run.file, run.start_bytes, run.end_bytes) for run in self.layout.runs]
        opened = self._held.files
        self._held.ahead = ReadAhead([(opened[f], start, stop) for f, start, stop in ranges])
        self._held.ahead.start()

    def _check_sizes(self) -> None:
        """Raise BadModel for a file that shrank since its header was read.

        Otherwise SIGBUS would end the process when libllama reads the missing pages.
        """
        ends = [(run.file, run.end_bytes) for run in self.layout.runs]
        ends += [(file, stop) for file, _, stop in _ranges(self._resident)]
        for file, end in ends:
            size = file.stat().st_size
            if size < end:
                raise BadModel(
                    f"{file}: the file ends at byte {size} but weights reach to byte {end}; it was "
                    "cut short"
                )

    def _take_memory(self) -> None:
        try:
            # One more page, because kernels and copies may read past the last tensor's end.
            memory = self._make_memory(self.layout.size_bytes + PAGE_BYTES)
        except PlacementRefused as e:
            raise DoesNotFit(
                f"{self.layout.size_bytes / 2**30:.1f} GiB of host memory for streamed weights "
                f"could not be had ({e}); use --mmap to keep them in the page cache"
            ) from e
        self._held.memory, self._held.whole = memory, HostRange.of_placed(memory)
        if self.options.pin_for is not None:
            self._held.pinner = Pinner(self.options.pin_for)
        if self._place_pages is not None and self.options.expert_limits is None:
            self._place_pages(memory, self.layout)


def _ranges(places: Sequence[WeightPlace]) -> list[tuple[Path, int, int]]:
    """Return (file, start, stop) of the weights' bytes, with neighbours joined."""
    return [(run.file, run.start_bytes, run.end_bytes) for run in plan_layout(places).runs]
