"""Keeps some experts in memory and reads the others from the file when a layer needs them.

Addresses are reserved for all experts, so kernels, copies and ids are the same as for a model that
is wholly in memory. An expert has pages only while it is in memory. `need` reads a layer's missing
experts, all at once, by direct reads of several threads. `Residency` decides which experts leave.
Their pages are moved to experts that enter (offload/store/expert_pages.py).

While a batch uses half of a layer or more, as prompts do, the next layer is read ahead. A thread
watches the machine's free memory: if other programs need memory, fewer experts are kept.
"""

from __future__ import annotations

import bisect
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain

from offload.decode import SMALL_BATCH
from offload.errors import DeviceFailed, DoesNotFit, ModelChanged
from offload.ggml.memory import HostRange
from offload.plan.store_layout import ExpertMatrices, Spot, largest_experts
from offload.store.expert_pages import ExpertPages, Leave
from offload.store.expert_reading import ExpertReaders, ExpertReads
from offload.store.memory_budget import MemoryBudget, MemoryLimits
from offload.store.reading import OpenFile, ReadCounters, Workers
from offload.store.residency import LayerExpert, Residency, bytes_of
from offload.times.context_memory import DEFAULT_UBATCH
from offload.times.machine import TYPICAL

N_READERS = 8
_LEAST_TIMED_BYTES = 64 << 20  # bytes read from which their rate counts as measured
_CHUNK_BYTES = 2 << 20
_TOGETHER_BYTES = N_READERS * _CHUNK_BYTES  # bytes of a group of experts that is read for a prompt
_WATCH_S = 0.1  # seconds between two looks at free memory
_MOST_STALL_S = 60.0  # seconds without a byte after which all requests fail
_FILLED_AT_ONCE = 8  # experts that are read in a step of filling memory
_MOST_COPYING = 64  # most copies that are remembered because they may still run
_SILENT_S = 5.0  # seconds without a byte after which a line says so
_TOLD_SHARE = 0.9  # share of the size in the last line, below which a new line is logged

log = logging.getLogger("offload.experts")


@dataclass
class DiskCounters:
    """Counts of the experts that layers needed, and the time that decodes waited for the disk."""

    n_needed: int = 0
    n_read: int = 0  # needed experts that were not in memory
    n_read_ahead: int = 0  # experts that were read before a layer needed them
    n_unused: int = 0  # those of them that the layer did not need
    n_filled: int = 0  # experts that were read before the first request
    moved_bytes: int = 0  # bytes of pages that experts got from evicted experts
    waited_s: float = 0.0
    reads: ReadCounters = field(default_factory=ReadCounters)

    def as_dict(self) -> dict[str, float]:
        """Return the counts by name, for /metrics."""
        return {
            "experts_needed": self.n_needed,
            "experts_read": self.n_read,
            "experts_read_ahead": self.n_read_ahead,
            "experts_unused": self.n_unused,
            "experts_filled": self.n_filled,
            "disk_bytes": self.reads.read_bytes,
            "disk_moved_bytes": self.moved_bytes,
            "disk_wait_s": self.waited_s,
            "disk_busy_s": self.reads.busy_s,
        }


@dataclass(frozen=True)
class ExpertPlaces:
    """The address space of a model's experts.

    `layers`: the experts' places in `memory`, by layer. `others`: weights that stay in it. A layer
    has `n_experts` experts, and a token uses `n_used`.
    """

    memory: HostRange
    layers: Mapping[int, Sequence[ExpertMatrices]]
    n_experts: int
    n_used: int
    others: Iterable[Spot] = ()


class ExpertMemory:
    """Memory for some of a model's experts, read from files. Close it when nothing computes."""

    def __init__(
        self,
        files: Iterable[OpenFile],
        places: ExpertPlaces,
        limits: MemoryLimits,
        *,
        leave: Leave = HostRange.give_back,
        n_readers: int = N_READERS,
        held_to: float | None = None,
    ) -> None:
        """`held_to`: bytes/s of a simulated disk, None for the real one.

        Raises DoesNotFit if the limits do not allow the experts of the largest layer.
        """
        layers, n_experts = places.layers, places.n_experts
        self._layers, self._n_experts, self._limits = layers, n_experts, limits
        self.layers = sorted(layers)
        sizes = largest_experts(layers, n_experts)
        self.least_bytes = n_experts * max(sizes.values())
        self.all_bytes = n_experts * sum(sizes.values())
        self._most_tokens = DEFAULT_UBATCH  # tokens of the largest batch with reserved memory
        self._budget = MemoryBudget(
            limits, self._most_tokens, self.least_bytes, self.all_bytes, time.monotonic
        )
        capacity_bytes = self._budget.capacity_bytes
        if capacity_bytes < self.least_bytes:
            raise DoesNotFit(
                limits.too_little(self._most_tokens, self.least_bytes),
                least_bytes=self.least_bytes + limits.others_bytes,
            )
        self._residency = Residency(sizes, n_experts, places.n_used, capacity_bytes)
        self._pages = ExpertPages(places.memory, layers, n_experts, places.others, leave)
        self._reading: dict[LayerExpert, ExpertReads] = {}
        self._read_error: BaseException | None = None  # error of the last read that failed
        self._told_bytes = capacity_bytes  # capacity that the user was told of
        self._held: set[LayerExpert] = set()  # experts that the current layer computes with
        self._held_layer = -1
        self._expected: dict[int, set[LayerExpert]] = {}  # needed soon perhaps, by layer
        self._ahead: dict[int, set[LayerExpert]] = {}  # those of them that were read, by layer
        self._n_prompt_tokens = 1  # tokens of the decode if most are a prompt's, otherwise 0
        self._copying: deque[tuple[frozenset[LayerExpert], Callable[[], None]]] = deque()
        self._lock = threading.RLock()
        self._done = threading.Condition()
        self.counters = DiskCounters()
        self._readers = ExpertReaders(
            files, places.memory.array().data, n_readers, self._done, held_to
        )
        self._assumed_bytes_per_s = held_to or TYPICAL.disk_bytes_per_s
        self.counters.reads = self._readers.counters
        self._readers.start()
        self._stopping = threading.Event()
        self._watcher = Workers("memory watch", self._watch)
        if limits.available is not None:
            self._watcher.start()

    def close(self) -> None:
        """Stop all threads. A second call does nothing."""
        self._stopping.set()
        self._watcher.stop()
        self._readers.stop()

    def __repr__(self) -> str:
        return (
            f"ExpertMemory({self.used_bytes >> 20} of {self.capacity_bytes >> 20} MiB used, "
            f"all experts have {self.all_bytes >> 20} MiB)"
        )

    @property
    def capacity_bytes(self) -> int:
        """Bytes that experts may take now."""
        return self._residency.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._residency.used_bytes

    # -- for computation and copies ----------------------------------------------------------------

    @property
    def bytes_per_s(self) -> float:
        """The disk's rate while it was busy, or a typical one before enough was read."""
        reads = self.counters.reads
        if reads.read_bytes < _LEAST_TIMED_BYTES or not reads.busy_s:
            return self._assumed_bytes_per_s
        return reads.read_bytes / reads.busy_s

    def read_s(self, layer: int) -> float:
        """Return the seconds that the disk takes for one expert of a layer."""
        return self._residency.sizes[layer] / self.bytes_per_s

    def expect(self, n_tokens: int, n_wanted: int) -> None:
        """Prepare for a decode of `n_tokens` tokens. The logits of `n_wanted` of them are wanted.

        A prompt needs few of its logits. Drafts, and tokens of several sequences, need all.
        """
        is_prompt = n_tokens > SMALL_BATCH or 2 * n_wanted < n_tokens
        self._n_prompt_tokens = n_tokens if is_prompt else 0

    def need(self, layer: int, experts: Iterable[int]) -> None:
        """Wait until these experts of a layer are in memory.

        They stay there until an expert of another layer is needed. Raises DeviceFailed if the file
        cannot be read or other programs left no memory, and DoesNotFit if `capacity_bytes` is too
        small for them.
        """
        self.wait(layer, chain.from_iterable(self.begin(layer, experts)))

    def begin(self, layer: int, experts: Iterable[int]) -> list[list[int]]:
        """Begin to read these experts of a layer.

        Returns the experts that are not in memory yet, in groups that are read together, in the
        order of reading. Call `wait` for a group before it is used. Raises the errors of `need`.
        """
        if layer not in self._layers:
            return []
        pieces = [(layer, expert) for expert in sorted(set(experts))]
        with self._changing():
            if layer != self._held_layer:
                self._held.clear()
                self._held_layer = layer
            self._held.update(pieces)
            self._end_batches()
            are_many = self._residency.are_many(len(pieces))
            n_prompt_tokens = self._n_prompt_tokens
            is_scan = n_prompt_tokens > SMALL_BATCH or (n_prompt_tokens > 0 and are_many)
            if is_scan or are_many:
                self._cancel_unneeded(layer, set(pieces))
            missing = self._residency.touch(pieces, is_scan=is_scan)
            self.counters.n_needed += len(pieces)
            self.counters.n_read += len(missing)
            self._start(missing, ahead=False, together=are_many or is_scan)
            self._check_read(pieces)
            batches = dict.fromkeys(self._reading[p] for p in pieces if p in self._reading)
            if batches:
                self._readers.hurry(batches)
            if is_scan or are_many:
                self._read_next_layer(layer, len(pieces))
        wanted = set(pieces)
        return [[expert for _, expert in batch.pieces if (layer, expert) in wanted]
                for batch in batches]  # fmt: skip

    def decided(self, layer: int, experts: Iterable[int]) -> None:
        """Note that a layer uses these experts. Cancels reads ahead of its other experts."""
        with self._lock:
            self._cancel_unneeded(layer, {(layer, expert) for expert in experts})

    def check_files(self) -> None:
        """Raise ModelChanged if another program wrote to a file of the model since it was opened.

        Weights in the page cache may have changed too, so call it before results are used.
        """
        self._readers.check_unchanged()

    def wait(self, layer: int, experts: Iterable[int]) -> None:
        """Wait until these experts of a layer, which `begin` has returned, are in memory.

        Raises DeviceFailed if the file cannot be read.
        """
        pieces = [(layer, expert) for expert in experts]
        with self._lock:
            self._check_read(pieces)
            batches = {self._reading[piece] for piece in pieces if piece in self._reading}
        if batches:
            self._wait(batches)

    def is_there(self, layer: int, expert: int) -> bool:
        """True if an expert is in memory, or if all experts of its layer always are."""
        batch, piece = self._reading.get((layer, expert)), (layer, expert)
        if layer not in self._layers:
            return True
        return piece in self._residency and (batch is None or not (batch.n_left or batch.error))

    def layer_after(self, layer: int) -> int | None:
        """Return the next layer with experts here, None after the last one."""
        at = bisect.bisect_right(self.layers, layer)
        return self.layers[at] if at < len(self.layers) else None

    def read_ahead(self, layer: int, experts: Iterable[int]) -> None:
        """Begin to read experts that a layer may need next, as far as there is room.

        The first ones are read first. They stay until the layer has `decided`.
        """
        with self._changing():
            self._start_ahead(layer, [(layer, expert) for expert in experts])

    def copying(self, layer: int, experts: Iterable[int], finish: Callable[[], None]) -> None:
        """Keep needed experts in memory until `finish` has returned.

        `finish` waits for their copies. It is called if other experts need the memory.
        """
        if layer not in self._layers:
            return
        with self._lock:
            self._copying.append((frozenset((layer, expert) for expert in experts), finish))
            if len(self._copying) > _MOST_COPYING:
                self._copying.popleft()[1]()

    def fill(self, uses: Mapping[int, Sequence[int]] | None) -> Iterator[None]:
        """Read experts while there is room, the most used first, some in each step.

        `uses`: by layer, the number of tokens that used each expert; None: unknown, so those of the
        first layers are read, which a prompt needs first. Raises DeviceFailed if the file cannot be
        read. Drop the iterator before the next decode.
        """
        residency = self._residency
        if uses is None:
            uses = dict.fromkeys(self.layers, [1] * self._n_experts)
        ranked = [
            (-n, (layer, expert))
            for layer in self.layers
            for expert, n in enumerate(uses.get(layer, ())[: self._n_experts])
            if n
        ]
        pieces = [piece for _, piece in sorted(ranked) if piece not in residency]
        least_size = min(residency.sizes.values())
        pieces = pieces[: max(0, self.capacity_bytes - self.used_bytes) // least_size]
        residency.expect(pieces)
        for start in range(0, len(pieces), _FILLED_AT_ONCE):
            batches: set[ExpertReads] = set()
            with self._changing():
                for piece in pieces[start : start + _FILLED_AT_ONCE]:
                    if piece not in residency and residency.fits(piece):
                        self._start([piece], ahead=True)
                        if piece in self._reading:  # otherwise others have taken the memory
                            batches.add(self._reading[piece])
            if not batches:
                return
            self._wait(batches)
            self.counters.n_filled += sum(self.is_there(*b.pieces[0]) for b in batches)
            yield

    def finish_copies(self) -> None:
        """Wait for all copies from this memory, before their copy engines are closed."""
        with self._lock:
            while self._copying:
                with suppress(DeviceFailed):  # a failed copy is over, too
                    self._copying.popleft()[1]()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock. Pages that no expert has taken go back to the kernel at the end."""
        with self._lock:
            try:
                yield
            finally:
                self._pages.give_back()
                self.counters.moved_bytes = self._pages.moved_bytes

    # -- reading -----------------------------------------------------------------------------------

    def _start(self, pieces: Sequence[LayerExpert], *, ahead: bool, together: bool = True) -> None:
        """Make room for pieces of one layer and begin to read them.

        With `ahead`, pieces for which there is no room are skipped; otherwise they raise
        DoesNotFit. With `together`, small experts are read in larger groups.
        """
        if not pieces:
            return
        layer = pieces[0][0]
        needed_bytes = bytes_of(self._residency.sizes, pieces)
        self._make_room(needed_bytes, wait=not ahead)
        if self.used_bytes + needed_bytes > self._budget.checked_bytes:
            self._admit(layer, needed_bytes, ahead=ahead)
        if not ahead and self.used_bytes + needed_bytes > self.capacity_bytes:
            raise DoesNotFit(
                f"experts may take {self.capacity_bytes / 2**30:.2f} GiB of memory, which is "
                f"too little for what layer {layer} needs at once; raise --ram, free memory, "
                "or lower --ubatch-size"
            )
        started = []
        for piece in pieces:
            if not self._residency.fits(piece):
                break
            self._residency.add(piece)
            started.append(piece)
        if not started:
            return
        size = max(1, _TOGETHER_BYTES // self._residency.sizes[layer]) if together else 1
        for some in (started[i : i + size] for i in range(0, len(started), size)):
            experts = [expert for _, expert in some]
            chunks = [c for m in self._layers[layer] for c in m.chunks(experts, _CHUNK_BYTES)]
            batch = ExpertReads(some, chunks, sum(self._pages.enter(piece) for piece in some))
            self._reading.update(dict.fromkeys(some, batch))
            self._readers.enqueue(batch, ahead=ahead)

    def _read_next_layer(self, layer: int, n: int) -> None:
        """Begin to read `n` experts of the layer after `layer`, as far as there is room."""
        following = self.layer_after(layer)
        if following is not None:
            self._start_ahead(following, self._residency.likely(following, n))

    def _start_ahead(self, layer: int, pieces: Sequence[LayerExpert]) -> None:
        """Begin to read pieces of one layer, the first ones first."""
        missing = [piece for piece in pieces if piece not in self._residency]
        together = len(missing) >= self._n_experts // 2
        self._expected.setdefault(layer, set()).update(pieces)
        self._start(sorted(missing) if together else missing, ahead=True, together=together)
        started = [piece for piece in missing if piece in self._residency]
        self.counters.n_read_ahead += len(started)
        self._ahead.setdefault(layer, set()).update(started)

    def _check_read(self, pieces: Iterable[LayerExpert]) -> None:
        """Raise DeviceFailed if needed pieces have left, because their reads failed.

        A thread that makes room forgets failed batches, even if another thread is about to wait
        for them.
        """
        if any(piece not in self._residency for piece in pieces):
            raise _unread(self._read_error) from self._read_error

    def _wait(self, batches: Collection[ExpertReads]) -> None:
        """Wait until the batches have been read. Raises DeviceFailed if one failed."""
        start_s = time.perf_counter()
        self._wait_for_disk(batches)
        self.counters.waited_s += time.perf_counter() - start_s
        with self._changing():
            failed = [error for batch in batches if (error := self._end(batch)) is not None]
        if failed:
            raise _unread(failed[0]) from failed[0]

    def _wait_for_disk(self, batches: Collection[ExpertReads]) -> None:
        """Wait until the batches have been read, have failed, or were cancelled.

        Raises DeviceFailed if the disk returns nothing for too long. Seconds count from the first
        read that waits, so a stalled disk fails later requests at once.
        """
        start_s, is_told = time.perf_counter(), False
        with self._done:
            while any(batch.n_left for batch in batches):
                self._done.wait(1.0)
                silent_s = self._readers.silent_s(start_s)
                if silent_s > _SILENT_S and not is_told:
                    is_told = True
                    log.warning(
                        "the disk has returned nothing for %.0f s; waiting for it", silent_s
                    )
                if silent_s > _MOST_STALL_S:
                    raise DeviceFailed(
                        f"the disk has returned nothing for {silent_s:.0f} s while experts were "
                        "read; the request is lost"
                    )

    def _admit(self, layer: int, needed_bytes: int, *, ahead: bool) -> None:
        """Look at free memory before experts of a layer take more of it.

        Raises DeviceFailed if not even what a layer needs is free.
        """
        if self._limits.available is None:
            return
        before_bytes = self.used_bytes
        self._look()
        self._make_room(needed_bytes, wait=not ahead)
        free_bytes = self._budget.available_bytes + before_bytes - self.used_bytes
        if not ahead and free_bytes < needed_bytes:
            raise DeviceFailed(
                f"layer {layer} needs {needed_bytes / 2**20:.1f} MiB for experts, but other "
                f"programs left {max(0, free_bytes) / 2**20:.1f} MiB of memory; stop some of them, "
                "or give the control group more"
            )

    def _cancel_unneeded(self, layer: int, needed: Set[LayerExpert]) -> None:
        """Cancel reads ahead of this layer's experts that turn out not to be needed.

        Counts those that were read.
        """
        batches = {b for piece, b in self._reading.items() if piece[0] == layer}
        self._cancel([b for b in batches if needed.isdisjoint(b.pieces)])
        self._expected.pop(layer, None)
        self.counters.n_unused += len(self._ahead.pop(layer, set()) - needed)

    def _cancel(self, batches: Collection[ExpertReads]) -> None:
        """Cancel those of the batches that are read ahead and have not begun."""
        cancelled = self._readers.cancel(batches)
        for batch in cancelled:
            counted = self._ahead.get(batch.layer, set())  # not those of `fill`
            self.counters.n_read_ahead -= len(counted.intersection(batch.pieces))
            counted.difference_update(batch.pieces)
            for piece in batch.pieces:
                self._lose(piece)
        if cancelled:
            with self._done:  # `fill` may wait for them
                for batch in cancelled:
                    batch.n_left = 0
                self._done.notify_all()

    def _end_batches(self) -> None:
        """Forget all batches that have been read."""
        for batch in {b for b in self._reading.values() if not b.n_left}:
            self._end(batch)

    def _end(self, batch: ExpertReads) -> BaseException | None:
        """Forget a batch that has been read. If it failed, its experts leave."""
        for piece in batch.pieces:
            if self._reading.get(piece) is not batch:
                continue
            if batch.error is None:
                del self._reading[piece]
            else:
                self._read_error = batch.error
                self._lose(piece)
        return batch.error

    def _lose(self, piece: LayerExpert) -> None:
        """Take away a piece that was not read. `is_there`, which takes no lock, never sees it."""
        self._residency.remove(piece)
        self._pages.leave(piece)
        del self._reading[piece]

    # -- leaving -----------------------------------------------------------------------------------

    def _make_room(self, needed_bytes: int, *, wait: bool) -> None:
        """Evict experts until `needed_bytes` more fit, or no more may be evicted.

        With `wait`, waits for copies and for unneeded reads, whose experts cannot be evicted yet.
        """
        while True:
            self._end_batches()
            copying = [pieces for pieces, _ in self._copying]
            kept = [self._held, self._reading, *copying, *self._expected.values()]
            for piece in self._residency.victims(needed_bytes, kept):
                self._pages.leave(piece)
            if not wait or self.used_bytes + needed_bytes <= self.capacity_bytes:
                return
            if self._copying:
                self._copying.popleft()[1]()
            elif ahead := {b for p, b in self._reading.items() if p[0] != self._held_layer}:
                self._expected.clear()
                self._wait_for_disk(ahead)
            elif self._expected:
                self._expected.clear()
            else:
                return

    # -- memory that others need -------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._stopping.wait(_WATCH_S):
            with suppress(OSError):  # no file can be opened just now to look at free memory
                self.adapt()

    def adapt(self) -> None:
        """Give memory back if too little is free, or take more if there is enough.

        If programs wait for memory, at least `free_bytes` of the limits are given back, however
        much is free.
        """
        with self._changing():
            self._look(grow=True)
            self._tell_less()

    def expect_batch(self, n_tokens: int) -> None:
        """Leave memory for the buffers of a batch of this size before it is computed."""
        if n_tokens > self._most_tokens:
            self._most_tokens = n_tokens
            for purpose, n_bytes in self._limits.later_bytes(n_tokens).items():
                self.reserve(purpose, n_bytes)

    @contextmanager
    def taking(self, *purposes: str) -> Iterator[None]:
        """Count the memory that this process takes in the block as taken for these purposes."""
        before_bytes = self._others_bytes() if self._lacks(purposes) else None
        try:
            yield
        finally:
            if before_bytes is not None:
                with self._lock:
                    after_bytes = self._others_bytes()
                    assert after_bytes is not None
                    self._budget.took(purposes, before_bytes, after_bytes)

    def _lacks(self, purposes: Iterable[str]) -> bool:
        return any(self._budget.untaken_bytes(purpose) for purpose in purposes)

    def _others_bytes(self) -> int | None:
        """The memory of this process besides experts; None if it is not known."""
        with self._lock:
            return self._budget.others_bytes(self.used_bytes - self._readers.absent_bytes)

    def reserve(self, purpose: str, n_bytes: int) -> None:
        """Keep `n_bytes` in all free for a purpose of this process, until it has taken them."""
        with self._changing():
            self._budget.reserve(purpose, n_bytes)
            self._look()
            # This process took the memory, so no line shall say that other programs did.
            self._told_bytes = min(self._told_bytes, self.capacity_bytes)

    def _look(self, *, grow: bool = False) -> None:
        """Adapt to the memory that is free. Experts leave if it is too little."""
        if self._limits.available is None:
            return
        must_leave = self._budget.look(self.used_bytes, self._readers.absent_bytes, grow=grow)
        self._residency.capacity_bytes = self._budget.capacity_bytes
        if must_leave:
            self._cancel({b for p, b in self._reading.items() if p[0] != self._held_layer})
            self._expected.clear()
            self._make_room(0, wait=False)

    def _tell_less(self) -> None:
        """Log that other programs need memory, if much of it was given back since the last line."""
        if self.capacity_bytes < _TOLD_SHARE * self._told_bytes:
            self._told_bytes = self.capacity_bytes
            gib = self.capacity_bytes / 2**30
            log.warning("other programs need memory: up to %.2f GiB of experts are kept now", gib)


def _unread(error: BaseException | None) -> DeviceFailed:
    """Return the error of a layer whose experts could not be read because of `error`."""
    words = f"experts could not be read: {error}"
    return (
        ModelChanged(words, error.path) if isinstance(error, ModelChanged) else DeviceFailed(words)
    )
