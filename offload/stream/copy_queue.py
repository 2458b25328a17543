"""Enqueues the copies that the schedule issues, and makes the computation wait for them."""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.tensor import Tensor
from offload.plan.slot_layout import SlotLayout, bias_of
from offload.schedule.schedule import Schedule
from offload.schedule.slots import NEEDED, PROMOTED, Copy, Piece, Span, StreamCounters, coalesce
from offload.stream.copying import Copier, Transfer
from offload.stream.cuts import CutStep, Tickets
from offload.stream.slot_memory import HostBias, SlotMemory
from offload.trace.trace import COMPUTE, Trace

_NO_DETAILS: Mapping[str, int | str] = {}


class _StreamedWeight(NamedTuple):
    """A weight in host memory whose experts are copied into slots."""

    target: Tensor  # all slots of the kind
    stride_bytes: int  # from slot to slot
    weight: Tensor
    size_bytes: int  # bytes of an expert


class CopyQueue:
    """Copies pieces into the slots of one executor, and orders copies and computation."""

    def __init__(
        self,
        memories: Sequence[SlotMemory],
        host: HostBufferType,
        layout: SlotLayout,
        schedule: Schedule,
        copier: Copier,
        counters: StreamCounters,
        trace: Trace,
    ) -> None:
        """`host` holds the weights that stream through the slots of `layout`."""
        self.memories, self._host, self._layout = memories, host, layout
        self._schedule, self.copier = schedule, copier
        self._counters, self._trace = counters, trace
        self.kinds = [  # kinds of weight of each group, in the order of copying
            tuple(kind for kind, name in group.names.items() if name in host.weights)
            for group in layout.groups
        ]
        self.expert_groups = {  # (group, pool) of each layer with experts, by layer
            group.layer: (number, group.pool)
            for number, group in sorted(enumerate(layout.groups), key=lambda one: one[1].layer)
            if layout.pools[group.pool].n_experts
        }
        self._biases: dict[tuple[int, str], HostBias] = {}  # biases by group and kind of weight
        self._tickets: dict[Piece, Tickets] = {}
        self._fences: list[Any] = []
        self._fence_uses: list[int] = []  # each fence covers all uses up to this number
        # What is copied of each kind of weight, by group. Found when a group is first copied.
        self._found: dict[int, list[tuple[str, list[_StreamedWeight]]]] = {}
        self.last_use = 0
        self._first_use = 1  # first use of this graph; earlier graphs are complete
        self._behind: Any = None  # fence for all copies while some uses are not counted

    def close(self) -> None:
        if self._host.experts is not None:
            self._host.experts.finish_copies()
        self.copier.close()
        for bias in self._biases.values():
            bias.close()

    # -- when a graph is first seen ----------------------------------------------------------------

    def prepare(
        self, steps: Iterable[CutStep], order: Iterable[tuple[int, tuple[str, ...]]]
    ) -> None:
        """Prepare for a graph that uses the kinds of weight of each group in this `order`.

        `order` is (group, kinds). Copies follow it from now on. Biases that the graph reads from
        slots are fetched to host memory. From there they are copied into the slots of experts that
        were cached before.
        """
        for group, kinds in order:
            # Another graph may read kinds that this graph does not read.
            ordered = tuple(dict.fromkeys([*kinds, *self.kinds[group]]))
            if ordered != self.kinds[group]:
                self.kinds[group] = ordered
                self._found.pop(group, None)
        for step in steps:
            for kind, tensor in step.biases.items():
                if (step.group, kind) in self._biases:
                    continue
                self._found.clear()
                bias = HostBias(tensor, self.memories[step.pool].device)
                self._biases[step.group, kind] = bias
                for (group, expert), slot in self._schedule.pools[step.pool].where.items():
                    if group == step.group:
                        span = Span(step.pool, slot, group, expert, 1, None)
                        source = self._source(step.pool, bias_of(kind), bias.tensor, bias.row_bytes)
                        self._copy_span(span, None, [source], step.layer, NEEDED)
                self.settle()

    # -- per decode --------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start a graph. Raises DeviceFailed if a copy failed that the last graph did not use."""
        self.copier.begin()
        if not self.copier.tickets_survive:
            self._tickets.clear()
        self._fences.clear()
        self._fence_uses.clear()
        self._first_use, self._behind = self.last_use + 1, None

    def enqueue(self, copies: Sequence[Copy]) -> None:
        for (cut, _), of_cut in itertools.groupby(copies, self._batch_of):
            batch = list(of_cut)
            tickets = self.copy(batch) if cut >= 0 else self._copy_promoted(batch)
            for copy in batch:
                self._tickets[copy.piece] = tickets

    def _batch_of(self, copy: Copy) -> tuple[int, str]:
        """Return a copy's cut and reason. Promoted copies have cut -1 unless a disk may be read."""
        has_none = copy.reason == PROMOTED and self._host.experts is None
        return -1 if has_none else copy.cut, copy.reason

    def _copy_promoted(self, batch: Sequence[Copy]) -> Tickets:
        """Enqueue copies of experts for later graphs. They share one ticket."""
        kinds: set[str] = set()
        for span in coalesce(batch):
            of_kinds = self._found.get(span.group) or self._find(span.group, span.pool)
            sources = [source for _, of_kind in of_kinds for source in of_kind]
            layer = self._layout.groups[span.group].layer
            self._copy_span(span, self._fence_after(span.after), sources, layer, PROMOTED)
            kinds.update(self.kinds[span.group])
        return dict.fromkeys(kinds, self.copier.mark())

    def copy(self, batch: Sequence[Copy]) -> Tickets:
        """Enqueue the copies of one cut, one kind of weight after the other.

        Experts that are not in memory are copied as soon as they have been read, after the others.
        """
        group = self._layout.groups[batch[0].piece[0]]
        provider = self._host.experts if self._layout.pools[group.pool].n_experts else None
        if provider is None or not self.copier.reads:
            return self._copy_spans(batch)
        experts = {copy.piece[1]: copy for copy in batch}
        groups = provider.begin(group.layer, experts)
        late = {expert for of_group in groups for expert in of_group}
        tickets: Tickets = {}
        if there := [copy for copy in batch if copy.piece[1] not in late]:
            tickets = self._copy_spans(there)
        for of_group in groups:
            provider.wait(group.layer, of_group)
            tickets = self._copy_spans([experts[expert] for expert in of_group])
        last = next(reversed(tickets.values()))
        provider.copying(group.layer, experts, partial(self.copier.finish, last))
        # Copies are done in order, so a kind's last ticket stands for those of all groups.
        return tickets

    def _copy_spans(self, batch: Sequence[Copy]) -> Tickets:
        """Enqueue the copies of experts in memory, one kind of weight after the other."""
        number, _ = batch[0].piece
        layer, reason, tickets = self._layout.groups[number].layer, batch[0].reason, Tickets()
        fenced = [(span, self._fence_after(span.after)) for span in coalesce(batch)]
        for kind, sources in self._found.get(number) or self._find(number, batch[0].pool):
            for span, after in fenced:
                self._copy_span(span, after, sources, layer, reason)
            tickets[kind] = self.copier.mark()
        return tickets

    def read(self, layer: int, experts: Sequence[int]) -> None:
        """Make sure that these experts are in memory."""
        if self._host.experts is not None:
            self._host.experts.need(layer, experts)

    def is_there(self, layer: int, expert: int) -> bool:
        """True if an expert can be copied without reading it from the disk first."""
        return self._host.experts is None or self._host.experts.is_there(layer, expert)

    def _find(self, number: int, pool: int) -> list[tuple[str, list[_StreamedWeight]]]:
        """Return what is copied of each kind of weight of a group, in the order of copying."""
        group, by_kind = self._layout.groups[number], []
        for kind in self.kinds[number]:
            weight, bias = self._host.weights[group.names[kind]], self._biases.get((number, kind))
            sources = [self._source(pool, kind, weight, group.matrix_bytes[kind])]
            if bias is not None:
                sources.append(self._source(pool, bias_of(kind), bias.tensor, bias.row_bytes))
            by_kind.append((kind, sources))
        self._found[number] = by_kind
        return by_kind

    def _source(self, pool: int, kind: str, weight: Tensor, size_bytes: int) -> _StreamedWeight:
        memory = self.memories[pool]
        return _StreamedWeight(memory.bytes(kind), memory.stride_bytes(kind), weight, size_bytes)

    def _copy_span(
        self, span: Span, after: Any, sources: Sequence[_StreamedWeight], layer: int, reason: str
    ) -> None:
        """Enqueue copies into a span's slots, which start after the fence `after`."""
        _, slot, _, expert, n_experts, _ = span
        transfers = []
        for target, stride_bytes, weight, size_bytes in sources:
            # Padded slots are not contiguous on the device, so matrices are copied one by one.
            n = n_experts if size_bytes == stride_bytes else 1
            for i in range(0, n_experts, n):
                name, details = "", _NO_DETAILS
                if self._trace.is_on:
                    first = expert + i
                    piece = f"{first}" if n == 1 else f"{first}-{first + n - 1}"
                    name = f"{weight.name} {piece}"
                    details = {"layer": layer, "piece": piece, "reason": reason,
                               "graph": self._counters.graphs}  # fmt: skip
                transfers.append(Transfer(
                    target, (slot + i) * stride_bytes, weight, (expert + i) * size_bytes,
                    n * size_bytes, name, details,
                ))  # fmt: skip
            self._counters.streamed_bytes += n_experts * size_bytes
        self._counters.copies += len(transfers)
        self.copier.copy(transfers, after)

    def tickets_of(self, pieces: Sequence[Piece]) -> list[Tickets]:
        """Return the tickets of the pieces' copies, without duplicates."""
        each = (self._tickets.get(piece) for piece in pieces)
        return list({id(tickets): tickets for tickets in each if tickets is not None}.values())

    def wait(self, waits: Sequence[Tickets], kinds: Sequence[str], layer: int) -> None:
        """Make the computation wait for the copies of these kinds. Raises DeviceFailed."""
        start_s = time.perf_counter()
        self.copier.wait([tickets[kind] for tickets in waits for kind in kinds])
        if self._trace.is_on:
            self._trace.add(COMPUTE, "wait for copies", start_s, time.perf_counter(),
                            layer=layer, kind=", ".join(kinds), cause="copy")  # fmt: skip

    def has_arrived(self, piece: Piece) -> bool:
        """True if the last copy of a piece is known to be complete. Does not wait."""
        tickets = self._tickets.get(piece)
        if tickets is None:
            return True
        last = next(reversed(tickets.values()))  # copies end in order
        if not self.copier.is_done(last):
            return False
        del self._tickets[piece]
        return True

    def see_arrivals(self, pool: int, group: int) -> int:
        """Let computations use the experts of a group whose copies are known to be complete.

        Returns their number.
        """
        loading = self._schedule.pools[pool].loading.get(group, ())
        arrived = [(group, e) for e in tuple(loading) if self.has_arrived((group, e))]
        for piece in arrived:
            self._schedule.arrived(pool, piece)
        return len(arrived)

    def computed(self) -> None:
        """Note that all uses so far are complete, so that copies need not wait for them."""
        self._first_use, self._behind = self.last_use + 1, None

    def fence_all(self) -> None:
        """Make copies wait for the last `fence`, until `computed` or the next `fence` is called."""
        self._behind = self._fences[-1]

    def fence(self, open_uses: Sequence[int]) -> None:
        """Put a fence after the submitted uses. It covers those before the first of `open_uses`."""
        self._behind = None
        self._fences.append(self.copier.fence())
        self._fence_uses.append(min(open_uses) - 1 if open_uses else self.last_use)

    def _fence_after(self, use: int | None) -> Any:
        """Return a fence after a use, or None if the use is of an earlier, complete graph."""
        if self._behind is not None:
            return self._behind
        if use is None or use < self._first_use:
            return None
        # A slot gets another piece only after its use was submitted and fenced. So if no fence is
        # known to cover the use, the last one does.
        at = bisect.bisect_left(self._fence_uses, use)
        return self._fences[min(at, len(self._fences) - 1)]

    def settle(self) -> None:
        """Wait until no copy is under way. Raises DeviceFailed if one failed."""
        try:
            self.copier.drain()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Wait until no copy is under way, and free the slots of unfinished copies."""
        self._schedule.abort()
        self.copier.abandon()

    # -- between two graphs ------------------------------------------------------------------------

    def fill(self, uses: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """Copy experts into slots, the most used first, one in each step of the iterator.

        `uses`: by layer, the number of tokens that used each expert. Raises DeviceFailed if a copy
        failed. Drop the iterator before the next graph is computed.
        """
        by_pool: dict[int, list[tuple[int, Piece]]] = {}  # (uses, piece) by pool
        for number, group in enumerate(self._layout.groups):
            of_layer = uses.get(group.layer, ())
            if self.kinds[number] and len(of_layer) == self._layout.pools[group.pool].n_experts:
                used = [(n, (number, expert)) for expert, n in enumerate(of_layer) if n]
                by_pool.setdefault(group.pool, []).extend(used)
        for pool, pieces in by_pool.items():
            pieces.sort(key=lambda one: (-one[0], one[1]))
            for copies in self._schedule.fill(pool, [piece for _, piece in pieces]):
                self.begin()
                self.enqueue(copies)
                self.settle()
                for copy in copies:
                    self._schedule.arrived(pool, copy.piece)
                    del self._tickets[copy.piece]
                self._counters.n_filled += len(copies)
                yield
