"""Copies the KV cache in RAM of the next layer to a device while it computes this one.

Before the graph of a layer, ggml's scheduler asks for a copy of the layer's keys and values to its
compute buffer. The device would wait for it. So a second stream copies them during the layer
before, to one of two halves of our memory in turn. The scheduler's tensors for the copies point
there. The CPU has written the batch's own rows by then. They are copied again.

A layer has the same place in every pass, even if nothing was copied ahead, because CUDA's backend
replays the pointers of a graph that libllama uses again.

Ownership: the memory and the second stream are freed by `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from offload.ggml.backend import Stream, StreamEvent
from offload.ggml.memory import HostRange
from offload.ggml.ram_cache import written_rows
from offload.ggml.tensor import Tensor, host_bytes, new_tensor
from offload.model import layer_of_cache
from offload.schedule.cache_order import CacheOrder, CachePart, stale_bytes
from offload.schedule.slots import StreamCounters
from offload.stream.copying import GraphEvents

LEAST_BYTES = 8 << 20  # smaller copies take less time than foreseeing them
_ALIGNMENT = 256  # of kernels' sources
_PIECE_BYTES = 8 << 20  # copies of experts get their turn on the link between pieces of a cache


@dataclass(frozen=True)
class _Staged:
    """A part of a cache that is copied ahead, and the event after its copy."""

    part: CachePart
    event: StreamEvent


class _CachePlaces:
    """Places of a layer's caches, in one half of the memory. Each has room for the whole cache."""

    def __init__(self, start_bytes: int, half_bytes: int) -> None:
        self._next, self._end = start_bytes, start_bytes + half_bytes
        self._known: dict[Tensor, int] = {}

    def of(self, cache: Tensor, start_bytes: int) -> int | None:
        """Return the offset of a part that begins in `cache` there, None if there is no room."""
        if cache not in self._known:  # MLA reads one cache as keys and as values
            size_bytes = cache.size_bytes - start_bytes
            if self._next + size_bytes > self._end:
                return None
            self._known[cache] = self._next
            self._next += -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        return self._known[cache]


class CacheAhead:
    """Copies the caches of one stream's graphs. The host memory of the caches is pinned."""

    def __init__(
        self, stream: Stream, most_bytes: int, counters: Callable[[], StreamCounters]
    ) -> None:
        """`most_bytes`: keys and values of the largest layer. Raises DoesNotFit."""
        self._stream, self._counters = stream, counters
        self._half_bytes = (-(-most_bytes // _ALIGNMENT) + 2) * _ALIGNMENT
        self._memory = stream.device.allocate(2 * self._half_bytes, "the KV cache of two layers")
        self._link = stream.device.open()
        self._events = GraphEvents(stream.device)
        self._order = CacheOrder()
        self._staged: dict[Hashable, _Staged] = {}
        self._half = 1  # the half in which the newest layer's caches are
        self._layer = -1
        self._places = self._places_in(0)
        self._newest: StreamEvent | None = None  # after all copies ahead in this pass

    def close(self) -> None:
        self._link.synchronize()
        self._stream.synchronize()
        self._events.close()
        self._link.close()
        self._memory.close()

    def forget(self) -> None:
        """Forget what was copied ahead. Caches may change before the next copy."""
        self._staged.clear()

    def copy(self, source: Tensor, target: Tensor) -> bool:
        """Enqueue a copy of `source`, a part of a cache in RAM, to `target`.

        Then start copies of the next layer's caches, if this was the layer's last one. Returns
        False for a small part, which is left to the scheduler.
        """
        if source.size_bytes < LEAST_BYTES:
            return False
        cache = source.root
        start_bytes, layer = source.position - cache.position, layer_of_cache(cache.name)
        part = CachePart(cache, layer, start_bytes, source.size_bytes)
        if self._order.begins(part):
            self._begin_pass()
        if part.layer != self._layer:
            self._layer, self._half = part.layer, 1 - self._half
            self._places = self._places_in(self._half)
        offset_bytes = self._places.of(cache, start_bytes)
        if offset_bytes is None:
            return False
        missing = [range(part.start_bytes, part.end_bytes)]
        staged, rows = self._staged.get(part.cache), written_rows(cache)
        if staged is not None and rows is not None and staged.part.start_bytes == part.start_bytes:
            self._stream.wait(staged.event)
            missing = stale_bytes(staged.part, part, rows, cache.strides[1])
            self._counters().cache_ahead_bytes += part.size_bytes - sum(map(len, missing))
        elif self._newest is not None:  # it may have copied something else to this place
            self._stream.wait(self._newest)
        target.lie_from(self._memory, offset_bytes)
        for run in missing:
            self._stream.copy(target, run.start - part.start_bytes, cache, run.start, len(run))
            self._counters().cache_bytes += len(run)
        self._begin_next()
        return True

    def _places_in(self, half: int) -> _CachePlaces:
        return _CachePlaces(half * self._half_bytes, self._half_bytes)

    def _begin_pass(self) -> None:
        """Wait until copies ahead of the last pass have ended, if any were not used."""
        self.forget()
        self._events.recycle()  # the scheduler has waited for the stream
        self._layer, self._half, self._newest = -1, 1, None

    def _begin_next(self) -> None:
        wanted: dict[Hashable, CachePart] = {}
        for part in self._order.after():
            known = wanted.get(part.cache, part)
            wanted[part.cache] = known if known.size_bytes >= part.size_bytes else part
        if not wanted:
            return
        # Enqueued behind all readers of that half: those of the layer before this one.
        self._link.wait(self._events.record(self._stream))
        places, copied = self._places_in(1 - self._half), []
        for part in wanted.values():
            cache = part.cache
            assert isinstance(cache, Tensor)
            offset_bytes = places.of(cache, part.start_bytes)
            if offset_bytes is None:
                break
            memory = HostRange(cache.position + part.start_bytes, part.size_bytes)
            ours = new_tensor("i8", (part.size_bytes, 1, 1, 1), (self._memory, offset_bytes))
            for start in range(0, part.size_bytes, _PIECE_BYTES):
                n_bytes = min(_PIECE_BYTES, part.size_bytes - start)
                self._link.copy(ours, start, host_bytes(memory), start, n_bytes)
            self._counters().cache_bytes += part.size_bytes
            copied.append(part)
        self._newest = self._events.record(self._link)
        self._staged.update((part.cache, _Staged(part, self._newest)) for part in copied)
