"""Copy engines. Each runs copies from host memory into slots in order, during the computation.

- `DeviceCopier` uses a second stream of the device and events between the streams. It serves CUDA,
  Vulkan and every other backend with `async` and `events`.
- `BounceCopier` does the same for host memory that is not pinned. The driver would copy such memory
  to its own pages first while the caller waits. Here threads copy it into a small ring of pinned
  memory, and the device copies from there while the next parts of the ring are filled. One thread
  copies 8 to 10 GB/s within host memory, which is less than half of a PCIe 4 link.
- `ThreadCopier` copies on a thread, for backends without events. `sim` can limit its rate.

A *ticket* is a point in the copy queue. A computation that waits for it starts after all copies up
to that point. A *fence* is a point in the computation. A copy with a fence starts after that point.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from offload.errors import DeviceFailed
from offload.ggml.backend import Device, Stream, StreamEvent, copy_now, fill_from
from offload.ggml.memory import HostRange
from offload.ggml.tensor import Buffer, Tensor, host_bytes
from offload.trace.trace import COPY, NO_TRACE, Trace

PART_BYTES = 2 << 20
_MOST_FILLERS = 6
_CPUS_PER_FILLER = 4  # the other CPUs compute


class Transfer(NamedTuple):
    """A copy of `size_bytes` from offset `source_bytes` of one tensor to `target_bytes` of another.

    The source is in host memory.
    """

    target: Tensor  # must live until the copy is done
    target_bytes: int
    source: Tensor
    source_bytes: int
    size_bytes: int
    name: str = ""
    args: Mapping[str, int | str] = MappingProxyType({})  # details for the trace


class Copier(ABC):
    """The interface of a copy engine."""

    bounced_bytes = 0  # bytes that went through the pinned ring
    reads = True  # False: copies do not read host memory
    tickets_survive = False  # True if tickets of earlier graphs may still be waited for

    @abstractmethod
    def begin(self) -> None:
        """Start a new graph. All work submitted for the last graph must be complete."""

    @abstractmethod
    def copy(self, transfers: Sequence[Transfer], after: Any) -> None:
        """Enqueue copies. They start after the fence `after`, unless that is None."""

    @abstractmethod
    def mark(self) -> Any:
        """Return a ticket for all copies enqueued so far."""

    def is_done(self, ticket: Any) -> bool:
        """True if all copies up to a ticket are known to have succeeded. Does not wait."""
        return False  # ggml cannot query an event without waiting

    @abstractmethod
    def finish(self, ticket: Any) -> None:
        """Block until host memory is no longer read by copies up to a ticket."""

    @abstractmethod
    def wait(self, tickets: Collection[Any]) -> None:
        """Make the computation wait for the tickets. Raises DeviceFailed if a copy failed."""

    @abstractmethod
    def fence(self) -> Any:
        """Return a fence after the computation submitted so far."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until every copy is done. Raises DeviceFailed if one failed."""

    def abandon(self) -> None:
        """After a failure, wait until no copy is under way, and forget the failure."""
        self.drain()

    @abstractmethod
    def close(self) -> None: ...


class GraphEvents:
    """The events of one device. They are recorded during a graph, and reused in the next one."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: list[StreamEvent] = []
        self._taken: list[StreamEvent] = []
        self._last: dict[int, StreamEvent] = {}  # last event of each stream, by the stream's id()

    def record(self, stream: Stream) -> StreamEvent:
        """Return an event that passes when the stream has done all its work so far.

        Raises DeviceFailed.
        """
        event = self._free.pop() if self._free else self._device.event()
        self._taken.append(event)
        stream.record(event)
        self._last[id(stream)] = event
        return event

    def recycle(self) -> None:
        """Wait until all events have passed, then make them reusable."""
        must_sync = self._taken if self._device.backend.events_hold_parts else self._last.values()
        for event in must_sync:
            event.synchronize()
        self._last.clear()
        self._free += self._taken
        self._taken.clear()

    def close(self) -> None:
        self.recycle()
        for event in self._free:
            event.close()
        self._free.clear()


class DeviceCopier(Copier):
    """Copies on a second stream of the device. Enqueuing and waiting for tickets do not block."""

    def __init__(self, compute: Stream, trace: Trace = NO_TRACE) -> None:
        """`compute` is the stream that computes."""
        self._compute = compute
        self._stream = compute.device.open()
        self._is_open = True
        self._events = GraphEvents(compute.device)
        self._timer = _CopyTimer(trace) if trace.is_on else None
        self._unmarked: list[tuple[Transfer, float]] = []
        self._kept: list[Any] = []  # structures that enqueued copies refer to

    def begin(self) -> None:
        if self._timer is not None:
            self._timer.drain()
        self._events.recycle()
        if self._compute.device.backend.events_hold_parts:
            # All copies are done, but only this call makes Vulkan's backend free 0.5 KB for each.
            self._stream.synchronize()
        self._kept.clear()

    def copy(self, transfers: Sequence[Transfer], after: Any) -> None:
        if after is not None:
            self._stream.wait(after)
        for transfer in transfers:
            self._kept.append(transfer.target)
            if self._timer is not None:
                self._unmarked.append((transfer, time.perf_counter()))
            self._stream.copy(*transfer[:5])

    def mark(self) -> StreamEvent:
        event = self._events.record(self._stream)
        if self._timer is not None:
            self._timer.watch(event, self._unmarked)
            self._unmarked = []
        return event

    def finish(self, ticket: StreamEvent) -> None:
        ticket.synchronize()

    def wait(self, tickets: Collection[StreamEvent]) -> None:
        for ticket in tickets:
            self._compute.wait(ticket)

    def fence(self) -> StreamEvent:
        return self._events.record(self._compute)

    def drain(self) -> None:
        if self._timer is not None and self._unmarked:
            self.mark()
        self._stream.synchronize()
        if self._timer is not None:
            self._timer.drain()

    def close(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        if self._timer is not None:
            self._timer.close()
        self._stream.synchronize()
        self._events.close()
        self._stream.close()


class _CopyTimer:
    """Waits for copies' events on its own thread, and adds the copies' times to the trace.

    A device does not report when a copy began. So the copies of one event count as begun when the
    first of them was enqueued or when the previous event was done, whichever is later. The time
    until their event is divided among them in proportion to their bytes.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._queue: queue.Queue[tuple[StreamEvent, list[tuple[Transfer, float]]] | None] = (
            queue.Queue()
        )
        self._thread = threading.Thread(target=self._run, name="copy trace", daemon=True)
        self._thread.start()

    def watch(self, event: StreamEvent, copies: list[tuple[Transfer, float]]) -> None:
        self._queue.put((event, copies))

    def drain(self) -> None:
        self._queue.join()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        free_s = 0.0
        while (item := self._queue.get()) is not None:
            event, copies = item
            event.synchronize()
            end_s = time.perf_counter()
            start_s = max([free_s, *(asked_s for _, asked_s in copies[:1])])
            per_byte_s = (end_s - start_s) / max(1, sum(t.size_bytes for t, _ in copies))
            for transfer, _ in copies:
                done_s = start_s + per_byte_s * transfer.size_bytes
                self._trace.add(
                    COPY, transfer.name, start_s, done_s, bytes=transfer.size_bytes,
                    **transfer.args,
                )  # fmt: skip
                start_s = done_s
            free_s = end_s
            self._queue.task_done()


class _ThreadedCopier(Copier):
    """A copier whose thread does work in order, and keeps the first failure for the caller."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._n_enqueued = self._n_done = 0
        self._progress = threading.Condition()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._n_enqueued += 1
        self._queue.put(work)

    def _until(self, number: int) -> None:
        """Wait until the first `number` works are done. Raises DeviceFailed if one failed."""
        if self._n_done < number:
            with self._progress:
                while self._n_done < number and self._failure is None:
                    self._progress.wait()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise DeviceFailed(f"copying weights failed: {failure}") from failure

    def abandon(self) -> None:
        with self._progress:
            while self._n_done < self._n_enqueued:
                self._progress.wait()
        self._failure = None

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            self._do(work)

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            self._failure = self._failure or e
        with self._progress:
            self._n_done += 1
            self._progress.notify_all()


@dataclass(frozen=True)
class LinkSpeed:
    """The speed of a simulated link, set by `sim:bw=,latency=`."""

    bandwidth_bytes_per_s: float | None = None  # None: as fast as memory
    latency_s: float = 0.0

    def duration_s(self, size_bytes: int) -> float:
        if self.bandwidth_bytes_per_s is None:
            return self.latency_s
        return self.latency_s + size_bytes / self.bandwidth_bytes_per_s


class ThreadCopier(_ThreadedCopier):
    """Copies on a thread, in order, no faster than `link` allows.

    On backends without events a computation has ended when its call returns. So fences are None,
    and waiting for a ticket blocks the host.
    """

    tickets_survive = True

    def __init__(self, link: LinkSpeed | None = None, trace: Trace = NO_TRACE) -> None:
        self._link = link or LinkSpeed()
        self._trace = trace
        self._link_free_s = 0.0
        super().__init__("copy engine")

    def begin(self) -> None:
        self._until(0)

    def copy(self, transfers: Sequence[Transfer], after: Any) -> None:
        self._enqueue(partial(self._carry_out, transfers, time.perf_counter()))

    def mark(self) -> int:
        return self._n_enqueued

    def is_done(self, ticket: int) -> bool:
        # `_run` sets the failure before it counts the work, so `_n_done` has to be read first.
        return self._n_done >= ticket and self._failure is None

    def finish(self, ticket: int) -> None:
        self._until(ticket)

    def wait(self, tickets: Collection[int]) -> None:
        self._until(max(tickets, default=0))

    def fence(self) -> None:
        return None

    def drain(self) -> None:
        self._until(self._n_enqueued)

    def _carry_out(self, transfers: Sequence[Transfer], enqueued_s: float) -> None:
        for transfer in transfers:
            began_s = time.perf_counter()  # later than `start_s` if the last sleep was too long
            start_s = max(self._link_free_s, enqueued_s)
            self._link_free_s = start_s + self._link.duration_s(transfer.size_bytes)
            try:
                self._copy(transfer)
            finally:
                if self._trace.is_on:
                    self._trace.add(
                        COPY, transfer.name, began_s, time.perf_counter(),
                        bytes=transfer.size_bytes, **transfer.args,
                    )  # fmt: skip

    def _copy(self, transfer: Transfer) -> None:
        copy_now(*transfer[:5])
        left_s = self._link_free_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)


class NoCopier(ThreadCopier):
    """A copier that copies nothing, so that a graph is computed with whatever the slots hold."""

    reads = False

    def copy(self, transfers: Sequence[Transfer], after: Any) -> None: ...


class _RingPart:
    """One part of the ring, and the event after the device's last copy from it."""

    def __init__(self, memory: HostRange) -> None:
        self.memory, self.tensor = memory, host_bytes(memory)
        self.copied: StreamEvent | None = None


class _RingCopy:
    """A copy that fits one part of the ring. The thread begins to fill the part before its turn."""

    def __init__(self, transfer: Transfer, after: StreamEvent | None) -> None:
        self.transfer, self.after = transfer, after

    def __call__(self) -> None:
        raise NotImplementedError("a piece is handed to the device by its copier")


class _RingStep(NamedTuple):
    """The rest of a work that was begun, and the thread that still fills its part of the ring."""

    rest: Callable[[], None]
    filling: Future[None] | None = None

    @property
    def is_full(self) -> bool:
        """True if the rest of the work would not wait for a thread that fills the ring."""
        return self.filling is None or self.filling.done()


class _Ticket:
    """A point in the queue. The thread sets its event when it has reached that point."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.event: StreamEvent | None = None


def n_fillers() -> int:
    """Return the number of threads that fill a ring of pinned memory on this machine."""
    n_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, min(_MOST_FILLERS, (n_cpus or 1) // _CPUS_PER_FILLER))


class BounceCopier(_ThreadedCopier):
    """Copies on a second stream of the device, from a pinned ring that threads fill.

    One thread hands full parts to the device, in order, and no other thread calls the device. The
    threads that fill the next parts meanwhile only copy within host memory. The host blocks only if
    it waits for a ticket whose copies were not yet handed to the device.
    """

    def __init__(
        self,
        compute: Stream,
        ring: Buffer,
        trace: Trace = NO_TRACE,
        part_bytes: int = PART_BYTES,
        *,
        fillers: int | None = None,
    ) -> None:
        """`compute` is the stream that computes. `ring` is pinned memory, which `close` frees.

        `fillers`: threads that fill the ring, `n_fillers()` by default. With one, the thread that
        hands parts to the device fills them too.
        """
        self._compute, self._ring = compute, ring
        self._inner = DeviceCopier(compute, trace)  # used by the thread alone within a graph
        self._fences = GraphEvents(compute.device)
        whole = ring.host_range
        n_parts = max(1, whole.size_bytes // part_bytes)
        size = min(part_bytes, whole.size_bytes)
        self._parts = [_RingPart(whole.part(i * size, size)) for i in range(n_parts)]
        self._next = 0
        self._n_held = 0  # parts with bytes that the device was not handed yet
        fillers = n_fillers() if fillers is None else fillers
        self._fillers = ThreadPoolExecutor(fillers, "ring filler") if fillers > 1 else None
        super().__init__("bounce ring")

    def begin(self) -> None:
        self._until(self._n_enqueued)
        self._inner.begin()
        self._fences.recycle()
        for part in self._parts:
            part.copied = None  # the event has passed and may be reused for other copies

    def copy(self, transfers: Sequence[Transfer], after: StreamEvent | None) -> None:
        step = self._parts[0].memory.size_bytes
        for transfer in transfers:
            for start in range(0, transfer.size_bytes, step):
                piece = transfer._replace(
                    target_bytes=transfer.target_bytes + start,
                    source_bytes=transfer.source_bytes + start,
                    size_bytes=min(step, transfer.size_bytes - start),
                )
                self._enqueue(_RingCopy(piece, after if start == 0 else None))

    def mark(self) -> _Ticket:
        ticket = _Ticket(self._n_enqueued + 1)

        def mark() -> None:
            ticket.event = self._inner.mark()

        self._enqueue(mark)
        return ticket

    def finish(self, ticket: _Ticket) -> None:
        self._until(ticket.number)

    def wait(self, tickets: Collection[_Ticket]) -> None:
        for ticket in tickets:
            self._until(ticket.number)
            assert ticket.event is not None
            self._compute.wait(ticket.event)

    def fence(self) -> StreamEvent:
        return self._fences.record(self._compute)

    def drain(self) -> None:
        self._until(self._n_enqueued)
        self._inner.drain()

    def abandon(self) -> None:
        super().abandon()
        self._inner.abandon()

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        super().close()
        if self._fillers is not None:
            self._fillers.shutdown()
        self._inner.close()
        self._fences.close()
        self._ring.close()

    def _run(self) -> None:
        """Begin works as early as parts of the ring are free, and end them in order."""
        begun: deque[_RingStep] = deque()
        is_open = True
        while is_open or begun:
            # A part that is full goes to the device at once. To begin another one may wait for the
            # device, which would have nothing to copy meanwhile.
            is_full = bool(begun) and begun[0].is_full
            may_begin = is_open and self._n_held < len(self._parts) and not is_full
            if may_begin and not (begun and self._queue.empty()):
                work = self._queue.get()
                if work is None:
                    is_open = False
                else:
                    begun.append(self._begun(work, is_alone=not begun and self._queue.empty()))
            else:
                self._do(begun.popleft().rest)

    def _begun(self, work: Callable[[], None], *, is_alone: bool) -> _RingStep:
        """Begin to fill a part of the ring if the work is a piece.

        If nothing else is to do, waking another thread would only take time.
        """
        if not isinstance(work, _RingCopy):
            return _RingStep(work)
        part = self._parts[self._next]
        self._next = (self._next + 1) % len(self._parts)
        self._n_held += 1
        transfer = work.transfer
        fill = partial(
            self._fill, part, transfer.source, transfer.source_bytes, transfer.size_bytes
        )
        try:
            if part.copied is not None:
                part.copied.synchronize()
            if self._fillers is None or is_alone:
                fill()
                filling = None
            else:
                filling = self._fillers.submit(fill)
        except BaseException as e:
            filling = Future()
            filling.set_exception(e)
        return _RingStep(partial(self._hand_over, work, part, filling), filling)

    @staticmethod
    def _fill(part: _RingPart, source: Tensor, source_bytes: int, size_bytes: int) -> None:
        fill_from(part.memory, source, source_bytes, size_bytes)

    def _hand_over(self, piece: _RingCopy, part: _RingPart, filling: Future[None] | None) -> None:
        """Let the device copy a part of the ring when it is full."""
        try:
            if filling is not None:
                filling.result()
            copy = piece.transfer._replace(source=part.tensor, source_bytes=0)
            self._inner.copy((copy,), piece.after)
            part.copied = self._inner.mark()
            self.bounced_bytes += piece.transfer.size_bytes
        finally:
            self._n_held -= 1
