"""The store: host memory of the streamed weights, filled from the file by readers of its own.

Life of a store: `loading()` around the loading of the model, in which libllama asks where each
tensor lies (`place`) and the readers begin; then `finish()`. libllama itself reads only what is
resident. The memory goes back when libllama frees its buffer, or with `close()`.
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
from typing import Protocol

from numa.errors import PlacementRefused
from numa.memory import PlacedMemory
from offload.errors import BadModel, DoesNotFit
from offload.ggml.library.callback import Pending
from offload.ggml.library.unread_mapping import mapping_without_reading
from offload.ggml.memory import HostRange, ReservedAddresses
from offload.ggml.pinning import Pinner
from offload.ggml.tensor import HasAddress
from offload.model import ModelFacts, TensorEntry, WeightPlace
from offload.store.huge_pages import Collapsing, HugePages
from offload.store.layout import PAGE_BYTES, Layout, Run, cut_into_chunks, plan_layout
from offload.store.reading import OpenFile, ReadAhead, ReadCounters, Readers
from offload.store.room import check_room, room_now

READING = "reading weights"
OnProgress = Callable[[str, float], None]  # the step, and the fraction of it that is done


@dataclass(frozen=True)
class StoreOptions:
    """Options of keeping streamed weights. `chunk_bytes` must be a multiple of the page size."""

    keep_page_cache: bool = False  # --mmap: no memory of our own, for models larger than RAM
    direct: bool = True  # reads past the page cache
    huge_pages: bool = True
    pin_for: HasAddress | None = None  # the real device whose copies the memory serves
    drop_resident: bool = True  # off where resident weights are used in the page cache (CPU, sim)
    n_readers: int = 4
    chunk_bytes: int = 8 << 20


@dataclass(frozen=True)
class StoreReport:
    """The outcome of loading. Each `why_not_` is empty where the thing was done."""

    kept_in: str  # "memory" or "page cache"
    n_tensors: int
    weight_bytes: int
    seconds: float  # from the first read to the last byte, pinning included
    counters: ReadCounters
    why_not_direct: str
    huge: HugePages  # as they are now; without pinning they are made in the background
    why_not_pinned: str
    readahead_bytes: int  # resident weights, brought into the page cache for libllama
    n_mapped_unread: int  # files that libllama mapped without reading them
    reading_s: float = 0.0

    @property
    def gb_per_s(self) -> float:
        return self.weight_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def sentence(self) -> str:
        """One line for the start-up messages."""
        if self.kept_in == "page cache":
            return f"{self.weight_bytes / 2**30:.1f} GiB of streamed weights stay in the page cache"
        how = "directly" if not self.why_not_direct else f"not directly: {self.why_not_direct}"
        if self.counters.cached_bytes:
            how += f", {self.counters.cached_bytes / 2**30:.1f} GiB from the page cache"
        pinned = "pinned" if not self.why_not_pinned else f"not pinned: {self.why_not_pinned}"
        huge = f"huge pages: {self.huge.why_not or f'{self.huge.size_bytes / 2**30:.1f} GiB'}"
        return (
            f"{self.weight_bytes / 2**30:.1f} GiB of streamed weights read at {self.gb_per_s:.1f} "
            f"GB/s ({how}), {huge}, {pinned}"
        )


class PlacePages(Protocol):
    """Called with the memory before anything is read into it: decides on which node pages lie."""

    def __call__(self, memory: PlacedMemory, layout: Layout, /) -> None: ...


@dataclass
class _Held:
    """The memory that the store owns while it is open."""

    files: dict[Path, OpenFile] = field(default_factory=dict)
    mappings: dict[Path, mmap.mmap] = field(default_factory=dict)
    memory: PlacedMemory | None = None
    whole: HostRange | None = None  # the memory, while it is held
    pinner: Pinner | None = None
    readers: Readers | None = None
    ahead: ReadAhead | None = None
    collapsing: Collapsing | None = None


class Store:
    """Memory for `streamed` weights of a model; HostMemory and TensorHome of a HostBufferType."""

    def __init__(
        self,
        facts: ModelFacts,
        streamed: Sequence[TensorEntry],
        options: StoreOptions | None = None,
        make_memory: Callable[[int], PlacedMemory] = PlacedMemory,
        place_pages: PlacePages | None = None,
    ) -> None:
        """Touches nothing yet. `make_memory` gets a size in bytes."""
        self.options = options or StoreOptions()
        self.layout = plan_layout(facts.weights[entry.name] for entry in streamed)
        names = self.layout.spots
        self._resident = [p for name, p in facts.weights.items() if name not in names]
        self._make_memory, self._place_pages = make_memory, place_pages
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

    def allocate(self, size_bytes: int) -> HostRange:
        """Addresses that stand for the buffer; the tensors in it lie where `place` says."""
        return self._addresses.allocate(size_bytes)

    def free(self, memory: HostRange) -> None:
        """libllama gives the buffer back: nobody reads the weights any more."""
        self._addresses.free(memory)
        self.close()

    def place(self, name: str, size_bytes: int) -> HostRange:
        """Where a tensor's data lies. Raises BadModel for one that does not stream."""
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
        """True while a model is being loaded; the first question starts the readers."""
        if self._filling:
            self.start_reading()
        return self._filling

    # -- loading ---------------------------------------------------------------------------------

    @contextmanager
    def loading(self, pending: Pending) -> Iterator[Store]:
        """Around the loading of the model; give the memory back when that fails.

        Raises DoesNotFit before anything is read when there is not enough memory, BadModel when a
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
        """Start the readers, for the tensors placed so far; a second call does nothing.

        Not before libllama has placed them all: it may leave some out (layers that only draft).
        """
        with self._starting:
            held = self._held
            if held.readers is not None or held.whole is None:
                return
            runs = [run for run in self.layout.runs if self._is_wanted(run)]
            self._wanted_bytes = max(1, sum(run.end_bytes - run.start_bytes for run in runs))
            o = self.options
            target = held.whole.part(0, self.layout.size_bytes).array().data
            chunks = cut_into_chunks(runs, o.chunk_bytes)
            held.readers = Readers(held.files.values(), chunks, target, o.n_readers)
            self._began_s = time.perf_counter()
            held.readers.start()

    @property
    def fraction(self) -> float:
        """The share of the streamed weights that has been read, 0 to 1."""
        readers = self._held.readers
        if self.options.keep_page_cache or not self.layout.runs:
            return 1.0
        return min(1.0, readers.counters.read_bytes / self._wanted_bytes) if readers else 0.0

    def watching(self, on_progress: OnProgress) -> Callable[[float], None]:
        """A progress callback for libllama that tells ours instead, and starts the readers."""

        def progress(_: float) -> None:
            self.start_reading()
            on_progress(READING, self.fraction)

        return progress

    def finish(self, on_progress: OnProgress = lambda *_: None) -> StoreReport:
        """Wait for the readers, pin the memory, and drop the page cache's copies.

        Pages are made huge before they are pinned, else in the background from here on.
        `on_progress` is told the step and its fraction meanwhile. Raises BadModel for a file cut
        short, and whatever stopped a reader or what `on_progress` raises; the weights are then not
        usable and the store closed.
        """
        held = self._held

        def tell() -> None:
            on_progress(READING, self.fraction)

        try:
            self.start_reading()
            end_s = held.readers.wait(tell) if held.readers else 0.0
            reading_s = max(0.0, end_s - self._began_s)
            if held.ahead is not None:
                held.ahead.wait()
            self._drop_resident()
            tell()
            self._make_huge(partial(on_progress, "making huge pages"))
            why_not_pinned = self._pin(partial(on_progress, "pinning memory"))
        except BaseException:
            self.close()
            raise
        self._filling = False
        seconds = time.perf_counter() - self._began_s if self._began_s else 0.0
        self.report = self._reported(seconds, reading_s, why_not_pinned)
        self._close_files()
        return self.report

    def close(self) -> None:
        """Stop the readers and give everything back; the tensors' addresses are void. Idempotent.

        A buffer's reserved addresses stay until libllama frees the buffer.
        """
        held = self._held
        for worker in (held.readers, held.ahead, held.collapsing):
            if worker is not None:
                worker.stop()
        self._close_files()
        memory, whole = held.memory, held.whole
        held.memory = held.whole = held.collapsing = None
        if memory is not None and whole is not None:
            if held.pinner is not None:
                held.pinner.unpin(whole)
            memory.close()
        for mapping in held.mappings.values():
            mapping.close()
        held.mappings.clear()

    @property
    def is_pinned(self) -> bool:
        """True if a device copies from the weights by itself."""
        return self.report is not None and not self.report.why_not_pinned

    @property
    def memory(self) -> PlacedMemory | None:
        """The memory while it is held; None with --mmap."""
        return self._held.memory

    # -- steps -----------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._held.files:
            raise BadModel("this store is loading a model already")
        self._check_room()
        files = [run.file for run in self.layout.runs] + [p.file for p in self._resident]
        for file in dict.fromkeys(files):
            self._held.files[file] = OpenFile(file, direct=self.options.direct)
        self._check_sizes()
        if self.options.keep_page_cache:
            self._map_files()
        elif self.layout.runs:
            self._take_memory()
        self._read_ahead()

    def _check_room(self) -> None:
        if not self.options.keep_page_cache:
            check_room(self.layout.size_bytes, room_now())

    def _check_sizes(self) -> None:
        """A file that shrank since its header was read: libllama would die of it (SIGBUS)."""
        ends = [(run.file, run.end_bytes) for run in self.layout.runs]
        ends += [(file, stop) for file, _, stop in _ranges(self._resident)]
        for file, end in ends:
            size = file.stat().st_size
            if size < end:
                raise BadModel(
                    f"{file}: the file ends at byte {size} but weights reach to byte {end}; it was "
                    "cut short"
                )

    def _map_files(self) -> None:
        for file in {run.file for run in self.layout.runs}:
            descriptor = self._held.files[file].buffered
            self._held.mappings[file] = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def _take_memory(self) -> None:
        try:
            # A page more: kernels and copies may read a little past the last tensor's end.
            memory = self._make_memory(self.layout.size_bytes + PAGE_BYTES)
        except PlacementRefused as e:
            raise DoesNotFit(
                f"{self.layout.size_bytes / 2**30:.1f} GiB of host memory for streamed weights "
                f"could not be had ({e}); use --mmap to keep them in the page cache"
            ) from e
        self._held.memory, self._held.whole = memory, HostRange.of_placed(memory)
        if self.options.pin_for is not None:
            self._held.pinner = Pinner(self.options.pin_for)
        if self._place_pages is not None:
            self._place_pages(memory, self.layout)

    def _read_ahead(self) -> None:
        """Resident weights, and with --mmap the streamed ones where all of them fit."""
        ranges = _ranges(self._resident)
        if self.options.keep_page_cache:
            wanted = sum(stop - start for _, start, stop in ranges) + self.layout.size_bytes
            if wanted < room_now().available_bytes:
                ranges += [(run.file, run.start_bytes, run.end_bytes) for run in self.layout.runs]
        files = self._held.files
        self._held.ahead = ReadAhead([(files[f], start, stop) for f, start, stop in ranges])
        self._held.ahead.start()

    def _is_wanted(self, run: Run) -> bool:
        first, last = run.at_bytes, run.at_bytes + run.size_bytes
        return any(first <= self.layout.spots[name].at_bytes < last for name in self._placed)

    def _drop_resident(self) -> None:
        if self.options.drop_resident and not self.options.keep_page_cache:
            for file, start, stop in _ranges(self._resident):
                self._held.files[file].forget(start, stop - start)

    def _make_huge(self, on_progress: Callable[[float], None]) -> None:
        held = self._held
        if held.memory is not None and self.options.huge_pages:
            held.collapsing = Collapsing(held.memory)
            if held.pinner is not None and held.pinner.can_pin:
                held.collapsing.wait(on_progress)  # pinned pages cannot be moved together any more

    def huge_pages(self, *, wait: bool = False) -> HugePages:
        """The weights in huge pages by now; `wait` until all are made."""
        if self._held.collapsing is not None:
            made = self._held.collapsing
            return made.wait() if wait else made.so_far()
        if self.options.keep_page_cache:
            return HugePages(0, "none in the page cache")
        return HugePages(0, "nothing streams" if self.options.huge_pages else "switched off")

    def _pin(self, on_progress: Callable[[float], None]) -> str:
        whole = self._held.whole
        if whole is None:
            return "pages of --mmap may leave memory" if self.layout.runs else "nothing streams"
        if self._held.pinner is None:
            return "no device copies from it by itself"
        result = self._held.pinner.pin(whole, on_progress)
        return "" if result.ok else result.reason

    def _reported(self, seconds: float, reading_s: float, why_not_pinned: str) -> StoreReport:
        held = self._held
        streamed = {run.file for run in self.layout.runs}
        why = [held.files[f].why_not_direct for f in streamed if not held.files[f].is_direct]
        spots = self.layout.spots
        return StoreReport(
            kept_in="page cache" if self.options.keep_page_cache else "memory",
            n_tensors=len(self._placed),
            weight_bytes=sum(spots[name].size_bytes for name in self._placed),
            seconds=seconds,
            counters=held.readers.counters if held.readers else ReadCounters(),
            why_not_direct="; ".join(dict.fromkeys(why)),
            huge=self.huge_pages(),
            why_not_pinned=why_not_pinned,
            readahead_bytes=held.ahead.asked_bytes if held.ahead else 0,
            n_mapped_unread=self._n_mapped_unread,
            reading_s=reading_s,
        )

    def _close_files(self) -> None:
        for file in self._held.files.values():
            file.close()
        self._held.files.clear()


def _ranges(places: Sequence[WeightPlace]) -> list[tuple[Path, int, int]]:
    """(file, start, stop) in bytes of the weights, neighbours joined."""
    layout = plan_layout(places)
    return [(run.file, run.start_bytes, run.end_bytes) for run in layout.runs]
