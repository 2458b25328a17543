"""Executes the schedule: runs a graph between its cuts while the next weights are being copied.

The schedule decides (offload/schedule), a copier copies (offload/streaming/copy.py), and this
file drives both through one graph:

    first node of a cut:  issue what may be copied now
                          experts that the router has yet to choose: compute up to here, read its
                          ids, tell the schedule what the layer needs
                          not all there yet? compute up to here meanwhile
                          enter the cut, and upload the ids that mean its slots; of a layer
                          that is split, of the device's experts alone
    every node of it:     wait for the copies of its own kind of weight, if there were any
                          point it at its slots; go on without submitting while the next is ready
    behind a split layer: submit it and what does not read its result, compute the CPU's experts
                          meanwhile, put their rows in place

Nodes are submitted in as few computations as that allows, so that the backend can fuse neighbours.
A node's sources are restored as soon as its part was submitted: backends read them at submission.
"""

from __future__ import annotations

import bisect
import itertools
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import SlotIds, Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.tensor import Buffer, Redirect, Relocation, Tensor
from offload.plan.slot_layout import SlotLayout, bias_of
from offload.routing.recording import MOST_TOKENS, RoutingRecorder
from offload.schedule.band import band
from offload.schedule.chunks import chunks_of
from offload.schedule.coalesce import Span, coalesce
from offload.schedule.commands import NEEDED, PROMOTED, Command, Copy, Need
from offload.schedule.predict import Routing
from offload.schedule.schedule import Schedule
from offload.schedule.slots import FREE, IN_USE, NOWHERE, Piece
from offload.split.layers import Hybrid, HybridExecutor, HybridLayer
from offload.split.order import Orderer
from offload.split.spare import NO_SLOT, fill_in, other_slots
from offload.split.split import HOST
from offload.streaming.copy import Copier, Transfer
from offload.streaming.counters import StreamCounters
from offload.streaming.layer_clock import LayerClock
from offload.streaming.prepared import Run
from offload.streaming.slot_memory import HostBias, SlotMemory
from offload.streaming.split_sides import SplitSides
from offload.streaming.steps import (
    IDS_ALIGNMENT,
    ChunkedStep,
    Step,
    Stop,
    Tickets,
    behind_of,
    find_biases,
    find_chunked,
    find_steps,
    number_cuts,
    stops_of,
    without_chains,
)
from offload.trace import COMPUTE, CPU, NO_TRACE, Trace

Experts = Sequence[int] | NDArray[np.intp]

_LEAST_BYTES = 1 << 20
_RECURS = 1.01  # tokens that chose an expert lately, which is then worth another's slot
_WAIT_ONCE_TOKENS = 8  # largest batch whose layers wait once for all their copies
_PINNED_BYTES = 1 << 20  # for the ids of batches of a few tokens; those of large ones are pageable
_CHUNK_TOKENS = 128  # at most: what a chunk's nodes pass on takes scratch memory


@dataclass(slots=True)
class _Running:
    """Where the computation of one graph stands."""

    graph: Graph
    done: int = 0  # nodes submitted
    open: list[Step] = field(default_factory=list)  # entered and not left
    redirected: list[Redirect] = field(default_factory=list)
    chunks: list[Any] = field(default_factory=list)  # what was submitted of them refers to it


class ScheduledExecutor:
    """Runs graphs with cuts on one stream, copies overlapped with computation."""

    def __init__(
        self,
        stream: Stream,
        host: HostBufferType,
        layout: SlotLayout,
        schedule: Schedule,
        copier: Copier,
        trace: Trace = NO_TRACE,
        *,
        prefetch: bool = True,
        band: bool = True,
        vector_tokens: int = 0,
        hybrid: Hybrid | None = None,
        recorder: RoutingRecorder | None = None,
        ahead: bool = True,
    ) -> None:
        """`host` holds the weights that stream through the slots of `layout`.

        With `hybrid` layers of batches that it names are split between the CPU and the device; with
        `ahead` the device is given what it can compute without the CPU's rows before them. What
        routers choose for small batches is told to `recorder`, while it is on.
        `band`: show kernels the slots between which a batch's experts lie, not all. With
        `vector_tokens` batches of up to 100 tokens go in chunks of so many.
        """
        self._stream, self._host, self._layout = stream, host, layout
        self.schedule, self.copier, self._trace = schedule, copier, trace
        self._prefetch, self._band, self._vector_tokens = prefetch, band, vector_tokens
        self._kinds = [  # of each group, those that were loaded
            tuple(kind for kind, name in group.names.items() if name in host.weights)
            for group in layout.groups
        ]
        self.memories = [SlotMemory(stream.device, pool) for pool in layout.pools]
        self._routing = Routing()
        self._ids_buffer: Buffer | None = None
        self._pinned: Buffer | None = None  # for ids on their way, at other places for each layer
        self._may_pin = True
        self._scratch: list[Buffer] = []  # the last is the largest; graphs refer to all
        self._biases: dict[tuple[int, str], HostBias] = {}  # by group and kind of product
        self._tickets: dict[Piece, Tickets] = {}
        self._fences: list[Any] = []
        self._fence_uses: list[int] = []  # up to which use each fence covers everything
        self._last_use = 0
        self._first_use = 1  # of this graph: what was used before is complete
        most = max((pool.n_experts for pool in layout.pools), default=0)
        self._slot_of = np.zeros(most, np.int32)  # by expert, of the cut that is being entered
        self.counters = StreamCounters()
        self.clock: LayerClock | None = None
        self._recorder = recorder
        self._hybrid: HybridExecutor | None = None
        self._last_split: tuple[Graph, Step, HybridLayer] | None = None
        if hybrid is not None:
            self._hybrid = HybridExecutor(hybrid, stream.device, self.counters)
        self.orderer = Orderer(stream.device) if ahead else None

    def close(self) -> None:
        if self._hybrid is not None:
            self._hybrid.close()
        if self.orderer is not None:
            self.orderer.close()
        self.copier.close()
        for memory in self.memories:
            memory.close()
        for bias in self._biases.values():
            bias.close()
        for buffer in self._scratch:
            buffer.close()
        for ids in (self._ids_buffer, self._pinned):
            if ids is not None:
                ids.close()

    def settle(self) -> None:
        try:
            self.copier.drain()
        except BaseException:
            self._forget_copies()
            raise

    @property
    def working_bytes(self) -> int:
        ids = [] if self._ids_buffer is None else [self._ids_buffer]
        rows = self._hybrid.device_bytes if self._hybrid is not None else 0
        rows += self.orderer.device_bytes if self.orderer is not None else 0
        return rows + sum(buffer.size_bytes for buffer in (*self._scratch, *ids))

    def allocate(self) -> None:
        for memory in self.memories:
            memory.allocate()

    # -- one graph -------------------------------------------------------------------------------

    def prepare(self, graph: Graph, products: Sequence[Product]) -> Run:
        hybrids: dict[Tensor, HybridLayer] = {}
        if self._hybrid is not None:
            hybrids = self._hybrid.layers_of(graph, products, self._layout)
        others = [product for product in products if product.ids not in hybrids]
        chunked = find_chunked(
            graph, others, self._layout, self.memories, _CHUNK_TOKENS, self._vector_tokens
        )
        if chunked:
            graph, products = self._take_out(graph, chunked)
        steps = find_steps(
            products, self._layout, self.memories, hybrids, find_biases(graph, products),
            either=self._hybrid is not None,
        )  # fmt: skip
        self._keep_biases(steps)
        ids_bytes = 0
        both: list[Step | ChunkedStep] = [*steps, *chunked]
        for step in both:  # room for its ids: none is used twice within a graph
            step.ids_offset = ids_bytes
            ids_bytes += -(-step.ids_bytes // IDS_ALIGNMENT) * IDS_ALIGNMENT
            # Copied in the order of use; what this graph does not read, another may.
            used = dict.fromkeys([*step.kinds, *self._kinds[step.group]])
            self._kinds[step.group] = tuple(used)
        self._reserve_ids(ids_bytes)
        self._use_pinned([step for step in steps if step.ids is not None])
        n_cuts = number_cuts(steps, chunked)
        self._record(steps)
        graph, relocations = self._order(graph, steps, chunked)
        stops = stops_of(steps, chunked)
        return partial(self._compute, graph, steps, stops, n_cuts, relocations)

    def _keep_biases(self, steps: Sequence[Step]) -> None:
        """Copy the biases that are to be read from slots to host memory, and from there into the
        slots of experts that are there already."""
        for step in steps:
            for reader in step.readers:
                if reader.bias is None or (step.group, reader.kind) in self._biases:
                    continue
                bias = HostBias(reader.bias.bias, self._stream.device)
                self._biases[step.group, reader.kind] = bias
                for (group, expert), slot in self.schedule.table.pools[step.pool].where.items():
                    if group == step.group:
                        span = Span(step.pool, slot, group, expert, 1, None)
                        self._copy_span(span, bias_of(reader.kind), bias.tensor, bias.row_bytes,
                                        step.layer, NEEDED)  # fmt: skip
                self.settle()

    def _order(
        self, graph: Graph, steps: Sequence[Step], chunked: Sequence[ChunkedStep]
    ) -> tuple[Graph, Sequence[Relocation]]:
        """The graph with what need not wait for the CPU's rows before what does, cuts where they
        were. Tells each step what goes ahead of its rows."""
        split = [step for step in steps if step.hybrid is not None]
        if self.orderer is None or not split:
            return graph, ()
        ordered = self.orderer.order(graph, behind_of(steps, chunked, graph.n_nodes))
        for step, ahead in zip(split, ordered.ahead, strict=True):
            step.ahead = ahead
        return ordered.graph, ordered.relocations

    def _record(self, steps: Sequence[Step]) -> None:
        """Have the routing of these layers recorded, if they compute the same small batch.

        Of a prompt the last layer computes fewer tokens, those whose logits are wanted.
        """
        routed = [step for step in steps if step.ids is not None]
        sizes = {step.n_tokens for step in routed}
        if self._recorder is None or len(sizes) != 1 or not 0 < min(sizes) <= MOST_TOKENS:
            return
        for step in routed:
            assert step.ids is not None
            step.routing = self._recorder.layer(step.layer, step.ids.values.shape[-1])

    def _take_out(
        self, graph: Graph, chunked: Sequence[ChunkedStep]
    ) -> tuple[Graph, Sequence[Product]]:
        """The graph without what is computed in chunks, and its products."""
        size_bytes = max(step.scratch_bytes for step in chunked)
        largest = self._scratch[-1].size_bytes if self._scratch else 0
        if size_bytes > largest or not self._scratch:
            size_bytes = max(size_bytes, 2 * largest, _LEAST_BYTES)
            self._scratch.append(self._stream.device.allocate(size_bytes, "chunks of tokens"))
        graph = without_chains(graph, chunked, self._scratch[-1])
        return graph, tuple(graph.products(self._host))

    def _compute(
        self, graph: Graph, steps: Sequence[Step], stops: Sequence[Stop], n_cuts: int,
        relocations: Sequence[Relocation],
    ) -> int:  # fmt: skip
        """Run the whole graph; a ggml_status. Raises DeviceFailed when a copy failed."""
        self.counters.graphs += 1
        running = _Running(graph)
        try:
            self._begin()
            for relocation in relocations:
                relocation.there()
            self._announce(steps, n_cuts)
            status = 0
            for stop in stops:
                status = self._stop(running, stop)
                if status:
                    break
            else:
                status = self._submit(running, graph.n_nodes)
            if status:
                self._recover(running)
            self._count()
            return status
        except BaseException:
            self._recover(running)
            raise
        finally:
            for relocation in relocations:
                relocation.back()

    def _begin(self) -> None:
        """Raises DeviceFailed when a copy failed that the graph before did not wait for."""
        self.copier.begin()
        if not self.copier.tickets_survive:
            self._tickets.clear()
        self._fences.clear()
        self._fence_uses.clear()
        self._first_use = self._last_use + 1

    def _stop(self, running: _Running, stop: Stop) -> int:
        status = self._tell(running, stop) if stop.nth == 0 else 0
        if isinstance(stop.step, ChunkedStep):
            return status or self._compute_chunks(running, stop.step)
        hybrid = stop.step.hybrid
        if hybrid is not None and stop.nth == len(stop.step.readers):
            return self._end_split(running, stop.step, hybrid)
        if stop.nth == 0 and hybrid is not None:
            status = status or self._enter_split(running, stop.step, hybrid)
        elif stop.nth == 0:
            status = status or self._enter(running, stop.step)
        return status or self._arrive(running, stop.step, stop)

    def _count(self) -> None:
        decided = self.schedule.counters
        for name in ("hits", "misses", "evictions", "prefetched_used", "prefetched_wasted"):
            setattr(self.counters, name, getattr(decided, name))
        self.counters.bounced_bytes = self.copier.bounced_bytes

    def _recover(self, running: _Running) -> None:
        if self._hybrid is not None:
            self._hybrid.abandon()
        self._restore(running)
        self._stream.synchronize()
        self._forget_copies()

    def _forget_copies(self) -> None:
        """Return when none is under way; what they brought, whole or not, has no slot any more."""
        self.schedule.abort()
        self.copier.abandon()

    def _announce(self, steps: Sequence[Step], n_cuts: int) -> None:
        """Tell the schedule what is known and what is guessed before anything runs."""
        schedule = self.schedule
        schedule.begin(n_cuts)
        if self._hybrid is not None:
            self._choose_order(steps)
        for step in steps:
            if step.need is not None:
                schedule.need(step.need)
            elif self._prefetch and step.missed and step.hybrid is None:
                guess = self._routing.predict(step.layer, step.n_tokens)
                if guess:
                    pieces = tuple((step.group, expert) for expert in guess)
                    schedule.predict(Need(step.cut, step.pool, pieces))
        if self._prefetch and self._hybrid is not None:
            self._promote(self._hybrid, steps)

    def _choose_order(self, steps: Sequence[Step]) -> None:
        """Have whole layers read from wherever their experts lie, where that saves copies.

        In order they would take slots that hold experts of split layers.
        """
        by_pool: dict[int, list[Step]] = {}
        for step in steps:
            if step.either:
                by_pool.setdefault(step.pool, []).append(step)
        for pool, whole in by_pool.items():
            groups = {step.group for step in whole}
            in_order = not self.schedule.saves_out_of_order(pool, groups, whole[0].n_experts)
            for step in whole:
                assert step.need is not None
                step.in_order = in_order
                step.need = step.need._replace(contiguous=in_order)
            self.counters.layers_out_of_order += 0 if in_order else len(whole)

    def _promote(self, hybrid: HybridExecutor, steps: Sequence[Step]) -> None:
        """Have experts of split layers copied that the CPU would else compute again.

        Of a layer that lacked some the likeliest of those that recur, or any as slots are free; of
        all layers the likeliest, as the link has time for them: none where it copies for this
        graph already.
        """
        missed = [step for step in steps if step.hybrid is not None and step.missed]
        if not missed:
            return
        most, schedule = hybrid.most_promotions(), self.schedule
        if not most or any(s.need is not None and not schedule.ready(s.cut) for s in steps):
            return
        found: list[tuple[float, int, Step]] = []
        for step in missed:
            slots = schedule.table.pools[step.pool]
            there = slots.of_group(step.group, step.n_experts) != NOWHERE
            expert, score = self._routing.likeliest(step.layer, there)
            if score > (0.0 if slots.counts[FREE] else _RECURS / step.n_tokens):
                found.append((score, expert, step))
        found.sort(key=lambda one: -one[0])
        promotions = [
            Need(step.cut, step.pool, ((step.group, expert),)) for _, expert, step in found[:most]
        ]
        hybrid.promoted(len(promotions))
        schedule.promote(promotions)

    def _tell(self, running: _Running, stop: Stop) -> int:
        """Before a cut's first node: a clock that waits for its layer hears of it."""
        clock, layer = self.clock, stop.step.layer
        if clock is None or not clock.wants(layer):
            return 0
        status = self._submit(running, stop.at)
        if not status:
            self._stream.synchronize()
            clock.reached(layer)
        return status

    # -- one cut ---------------------------------------------------------------------------------

    def _enter(self, running: _Running, step: Step) -> int:
        """Before a cut's first node: its slots are known and on their way. A ggml_status."""
        schedule, first = self.schedule, step.readers[0].index
        self._enqueue(schedule.issue(step.cut))
        ids: NDArray[np.int32] | None = None
        experts: Sequence[int] = range(step.n_experts)
        if step.reads_ids:
            status = self._submit(running, first)
            if status:
                return status
            ids = self._read_ids(step)
            self._note(step, ids)
            if step.need is None:
                experts = sorted(set(ids.ravel().tolist()))
                self._need(step, experts)
        if not schedule.ready(step.cut):
            self._enqueue(schedule.issue(step.cut))
            status = self._submit(running, first)
            if status:
                return status
        step.missed = False
        slots = self._take_slots(running, step)
        first = self._point(step, slots)
        if ids is not None:
            if step.need is None and step.missed:
                self._routing.observe(step.layer, ids)
            self._upload(step, ids, experts, [slot - first for slot in slots])
        return 0

    def _need(self, step: Step, experts: Sequence[int]) -> None:
        pieces = tuple([(step.group, expert) for expert in experts])
        self.schedule.need(Need(step.cut, step.pool, pieces))

    def _take_slots(
        self, running: _Running, step: Step, elsewhere: Collection[Piece] = ()
    ) -> Sequence[int]:
        """Enter the cut, whose need is known, and which uses other pieces `elsewhere`: its slots,
        in the order of the need."""
        entered = self.schedule.enter(step.cut, elsewhere)
        self._last_use = step.use = entered.use  # counted by the schedule, whatever happens now
        self._enqueue(entered.issued)
        step.waits = self._tickets_of(entered.waits) if entered.waits else []
        step.missed |= entered.misses > 0 or bool(entered.waits)
        running.open.append(step)
        self._trace_slots()
        return entered.slots

    def _tickets_of(self, pieces: Sequence[Piece]) -> list[Tickets]:
        """The tickets of the pieces' copies, of all graphs whose tickets still count."""
        found = (self._tickets.get(piece) for piece in pieces)
        return list({id(tickets): tickets for tickets in found if tickets is not None}.values())

    def _arrive(self, running: _Running, step: Step, stop: Stop) -> int:
        """Before a node that reads slots: what it reads is there, and it reads that."""
        reader = step.readers[stop.nth]
        # A few tokens take so little time that gate need not go ahead of up. Such a layer is not
        # cut in two, so that it is the same graph whether or not an expert was missing.
        at_once = step.n_tokens <= _WAIT_ONCE_TOKENS
        if step.waits and (stop.nth == 0 or not at_once):
            status = self._submit(running, stop.at)
            if status:
                return status
            self._wait(step, step.kinds if at_once else (reader.kind,))
        if step.hybrid is not None:
            assert self._hybrid is not None
            self._hybrid.began(step.hybrid, stop.nth)
        self.counters.cuts += 1
        assert reader.slots is not None
        reader.reads_weight.to(reader.slots)
        running.redirected.append(reader.reads_weight)
        if reader.reads_ids is not None and step.reads_ids:
            assert step.slot_ids is not None
            reader.reads_ids.to(step.slot_ids.tensor)
            running.redirected.append(reader.reads_ids)
            if (bias := reader.bias) is not None:
                assert bias.slots is not None
                bias.reads_bias.to(bias.slots)
                bias.reads_ids.to(step.slot_ids.tensor)
                running.redirected += [bias.reads_bias, bias.reads_ids]
        return 0

    def _point(self, step: Step, slots: Sequence[int]) -> int:
        """Choose what the cut's nodes read: neighbouring slots, or those between which all that ids
        choose lie. The first of them."""
        if not step.reads_ids:
            first, n = slots[0], max(1, step.n_experts)
        else:
            n_slots = self._layout.pools[step.pool].n_slots
            first, n = 0, n_slots
            if slots and self._band and step.n_tokens > 1:
                first, n = step.band = band(slots, n_slots, step.band)
            self.counters.bands += n < n_slots
        for reader in step.readers:
            reader.slots = reader.views.of(first, n)
            if reader.bias is not None and step.reads_ids:
                reader.bias.slots = reader.bias.views.of(first, n)
        return first

    # -- layers that are split between the CPU and the device --------------------------------------

    def _enter_split(self, running: _Running, step: Step, layer: HybridLayer) -> int:
        """Before the first node of a split layer: each expert has its side. A ggml_status."""
        assert self._hybrid is not None
        self._enqueue(self.schedule.issue(step.cut))
        status = self._submit(running, step.at)
        if status:
            return status
        ids = np.ascontiguousarray(self._read_ids(step, layer))  # all that follows flattens them
        self._note(step, ids)
        rows = np.bincount(ids.ravel(), minlength=step.n_experts)
        used = rows.nonzero()[0]
        resident = self._residents(step)
        n_slots = self._layout.pools[step.pool].n_slots
        kinds = self._hybrid.split(ids, rows, resident, n_slots)
        there, host = resident.take(used), kinds.take(used) == HOST
        on_device, on_host = used[~host], used[host]
        n_device, n_host = len(on_device), len(on_host)
        self._hybrid.begin(layer, ids, rows, used[there > host], kinds, n_device, n_host)
        elsewhere = [(step.group, expert) for expert in on_host.tolist()]
        slots: Sequence[int] = ()
        step.waits = []
        if n_device:
            self._need(step, on_device.tolist())
            slots = self._take_slots(running, step, elsewhere)
        elif elsewhere:
            self.schedule.used_elsewhere(elsewhere)
        step.missed = bool(np.count_nonzero(host > there))
        if step.missed:
            self._routing.observe_rows(step.layer, rows, *ids.shape)
        # The device computes the CPU's pairs too, with some expert; what it finds is written over.
        if layer.may_repeat:
            others = [slots[0] if slots else 0] * n_host
        else:
            others = other_slots(slots, min(n_host, step.n_used), n_slots) if n_host else []
        first = self._point(step, [*slots, *others])
        others = [slot - first for slot in others]
        if n_host:
            self._slot_of[on_host] = others if len(others) == n_host else NO_SLOT
        to_fill = others if len(others) < n_host else None
        self._upload(step, ids, on_device, [slot - first for slot in slots], to_fill)
        self._last_split = running.graph, step, layer
        return 0

    def take_split(self) -> SplitSides | None:
        if self._last_split is None or self._hybrid is None:
            return None
        (graph, step, layer), self._last_split = self._last_split, None

        def copy(experts: Sequence[tuple[int, int]]) -> object:
            pool, group = step.pool, step.group
            found = [(slot, (group, expert)) for expert, slot in experts]
            return self._copy([Copy(pool, *one, step.cut, NEEDED, None) for one in found])

        slots, kinds = self.schedule.table.pools[step.pool], self._kinds[step.group]
        n_bytes = [self._layout.groups[step.group].matrix_bytes[kind] for kind in kinds]
        return SplitSides(
            self._stream, self._hybrid, graph, step, layer, slots, self.copier, self.settle, copy,
            tuple(n / sum(n_bytes) for n in n_bytes),
        )  # fmt: skip

    def _residents(self, step: Step) -> NDArray[np.bool_]:
        """[n_experts], True for those whose slots hold them by now."""
        slots, group = self.schedule.table.pools[step.pool], step.group
        resident: NDArray[np.bool_] = slots.of_group(group, step.n_experts) != NOWHERE
        for expert in tuple(slots.loading.get(group, ())):
            if self._has_arrived((group, expert)):
                self.schedule.arrived(step.pool, (group, expert))
            else:
                resident[expert] = False
        return resident

    def _has_arrived(self, piece: Piece) -> bool:
        """True if a copy that no computation was ordered behind is complete, as far as is known."""
        tickets = self._tickets.get(piece)
        if tickets is None:
            return True
        for ticket in tickets.values():
            if not self.copier.is_done(ticket):
                return False
        del self._tickets[piece]  # nobody has to wait for it any more
        return True

    def _end_split(self, running: _Running, step: Step, layer: HybridLayer) -> int:
        """Behind the last product of a split layer and what goes ahead of the CPU's rows: they are
        in its output."""
        assert self._hybrid is not None
        if not self._hybrid.has_to_end(layer):
            return 0
        status = self._submit(running, step.end)
        self.counters.n_nodes_ahead += step.ahead.n_computing
        start_s = time.perf_counter()
        status = status or self._hybrid.finish(layer, self._stream)
        if self._trace:
            self._trace.add(CPU, f"experts of {layer.n_pairs} pairs", start_s, time.perf_counter(),
                            layer=layer.weights.layer)  # fmt: skip
        return status

    # -- chunks of tokens ------------------------------------------------------------------------

    def _compute_chunks(self, running: _Running, step: ChunkedStep) -> int:
        """Compute a layer's experts for as many tokens at a time as have theirs in slots."""
        self._enqueue(self.schedule.issue(step.cut))
        status = self._submit(running, step.at)
        if status:
            return status
        ids = self._read_ids(step).copy()
        offset = step.ids_offset
        chunks = chunks_of(ids.tolist(), step.n_slots, step.most_tokens)
        for cut, (first, end, experts) in enumerate(chunks, step.cut):
            slots = self._enter_chunk(step, cut, experts)
            slot_ids = self._remapped(step, ids[first:end], experts, slots, offset)
            offset += -(-slot_ids.size_bytes // IDS_ALIGNMENT) * IDS_ALIGNMENT
            status = self._submit_chunk(running, step, first, slot_ids)
            if status:
                return status
            self._fence(running)
            self.schedule.leave(cut)
            self._trace_slots()
        return 0

    def _enter_chunk(self, step: ChunkedStep, cut: int, experts: Sequence[int]) -> Sequence[int]:
        """The slots of a chunk's experts, which the computation waits for from here on."""
        schedule = self.schedule
        pieces = tuple([(step.group, expert) for expert in experts])
        schedule.need(Need(cut, step.pool, pieces))
        self._enqueue(schedule.issue(cut))
        entered = schedule.enter(cut)
        self._last_use = entered.use
        self._enqueue(entered.issued)
        start_s = time.perf_counter()
        for kind in step.kinds:
            self.copier.wait([tickets[kind] for tickets in self._tickets_of(entered.waits)])
        self._trace_wait(start_s, step.layer, "all")
        self._trace_slots()
        self.counters.cuts += 1
        self.counters.chunks += 1
        return entered.slots

    def _submit_chunk(self, running: _Running, step: ChunkedStep, first: int, ids: SlotIds) -> int:
        n = ids.values.shape[0]
        graph = Graph.of(step.twins(first, n, ids.tensor))
        running.chunks.append((graph, ids))
        start_s = time.perf_counter()
        status = self._stream.compute(graph)
        if self._trace:
            self._trace.add(COMPUTE, f"tokens {first}-{first + n}", start_s, time.perf_counter(),
                            layer=step.layer)  # fmt: skip
        return status

    # -- between two graphs ----------------------------------------------------------------------

    def fill(self, uses: Mapping[int, Sequence[int]]) -> Iterator[None]:
        self._stream.synchronize()
        for pool, pieces in self._most_used(uses).items():
            for commands in self.schedule.fill(pool, pieces):
                self._begin()
                self._enqueue(commands)
                self.settle()
                (piece,) = [command.piece for command in commands if isinstance(command, Copy)]
                self.schedule.arrived(pool, piece)
                del self._tickets[piece]
                self.counters.n_filled += 1
                self._count()
                yield

    def _most_used(self, uses: Mapping[int, Sequence[int]]) -> Mapping[int, Sequence[Piece]]:
        """The experts that were used at all, by pool, those used most first."""
        found: dict[int, list[tuple[int, Piece]]] = {}
        for number, group in enumerate(self._layout.groups):
            of_layer = uses.get(group.layer, ())
            if self._kinds[number] and len(of_layer) == self._layout.pools[group.pool].n_experts:
                used = [(n, (number, expert)) for expert, n in enumerate(of_layer) if n]
                found.setdefault(group.pool, []).extend(used)
        return {
            pool: [piece for _, piece in sorted(used, key=lambda one: (-one[0], one[1]))]
            for pool, used in found.items()
        }

    # -- copies ----------------------------------------------------------------------------------

    def _enqueue(self, commands: Sequence[Command]) -> None:
        if not commands:
            return
        copies = [command for command in commands if isinstance(command, Copy)]
        for _, of_cut in itertools.groupby(copies, key=lambda copy: (copy.cut, copy.reason)):
            batch = list(of_cut)
            tickets = self._copy(batch)
            for copy in batch:
                self._tickets[copy.piece] = tickets
            if batch[0].reason == PROMOTED:
                self.counters.n_promoted += len(batch)

    def _copy(self, batch: Sequence[Copy]) -> Tickets:
        """Enqueue the copies of a cut, one kind of weight after the other."""
        number, _ = batch[0].piece
        group = self._layout.groups[number]
        spans, reason = coalesce(batch), batch[0].reason
        tickets: Tickets = {}
        for kind in self._kinds[number]:
            weight, bias = self._host.weights[group.names[kind]], self._biases.get((number, kind))
            for span in spans:
                self._copy_span(span, kind, weight, group.matrix_bytes[kind], group.layer, reason)
                if bias is not None:
                    self._copy_span(
                        span, bias_of(kind), bias.tensor, bias.row_bytes, group.layer, reason
                    )
            tickets[kind] = self.copier.mark()
        self.counters.streamed_experts += len(batch)
        return tickets

    def _copy_span(
        self, span: Span, kind: str, weight: Tensor, size_bytes: int, layer: int, reason: str
    ) -> None:
        """Enqueue copies of `size_bytes` of a weight in host memory for each of some experts."""
        memory, after = self.memories[span.pool], self._fence_after(span.after)
        stride_bytes = memory.stride_bytes(kind)
        # Matrices that leave room in their slots are neighbours in host memory, and not there.
        n = span.n if size_bytes == stride_bytes else 1
        for i in range(0, span.n, n):
            transfer = Transfer(
                memory.bytes(kind),
                (span.slot + i) * stride_bytes,
                weight,
                (span.expert + i) * size_bytes,
                n * size_bytes,
                *self._described(weight, layer, span.expert + i, n, reason),
            )
            self.copier.copy(transfer, after)
            self.counters.copies += 1
            self.counters.streamed_bytes += transfer.size_bytes

    def _described(
        self, weight: Tensor, layer: int, expert: int, n: int, reason: str
    ) -> tuple[str, dict[str, int | str]]:
        """A transfer's name and details for the trace."""
        if not self._trace:
            return "", {}
        piece = f"{expert}" if n == 1 else f"{expert}-{expert + n - 1}"
        details: dict[str, int | str] = {
            "layer": layer,
            "piece": piece,
            "reason": reason,
            "graph": self.counters.graphs,
        }
        return f"{weight.name} {piece}", details

    def _fence_after(self, use: int | None) -> Any:
        """A fence of this graph behind the use `use`; earlier graphs are complete."""
        if use is None or use < self._first_use:
            return None
        # Slots that are let go of were submitted, so at least the last fence is behind their use.
        at = bisect.bisect_left(self._fence_uses, use)
        return self._fences[min(at, len(self._fences) - 1)]

    def _wait(self, step: Step, kinds: Sequence[str]) -> None:
        start_s = time.perf_counter()
        self.copier.wait([tickets[kind] for tickets in step.waits for kind in kinds])
        self._trace_wait(start_s, step.layer, ", ".join(kinds))

    def _trace_wait(self, start_s: float, layer: int, kind: str) -> None:
        if self._trace:
            self._trace.add(COMPUTE, "wait for copies", start_s, time.perf_counter(),
                            layer=layer, kind=kind, cause="copy")  # fmt: skip

    def _trace_slots(self) -> None:
        if self._trace:
            counts = self.schedule.table.counts()
            held = sum(counts) - counts[FREE]
            now_s = time.perf_counter()
            self._trace.sample("slots", now_s, **{"in use": counts[IN_USE], "held": held})

    # -- computation -----------------------------------------------------------------------------

    def _submit(self, running: _Running, end: int) -> int:
        """Submit the nodes up to `end`, then let go of what none of the others reads."""
        status = 0
        if end > running.done:
            start_s = time.perf_counter()
            part = running.graph.part(running.done, end, running.redirected)
            status = self._stream.compute(part)
            if self._trace:
                layer = running.open[-1].layer if running.open else -1
                self._trace.add(COMPUTE, f"nodes {running.done}-{end}", start_s,
                                time.perf_counter(), layer=layer)  # fmt: skip
            running.done = end
        self._restore(running)
        if running.open:
            self._leave(running, end)
        return status

    def _leave(self, running: _Running, end: int) -> None:
        """Leave the cuts whose last node was submitted, behind a fence."""
        still = [step for step in running.open if step.last >= end]
        if len(still) == len(running.open):
            return
        left = [step for step in running.open if step.last < end]
        running.open = still
        self._fence(running)
        for step in left:
            self.schedule.leave(step.cut)
        self._trace_slots()

    def _fence(self, running: _Running) -> None:
        """A fence behind all uses but those of cuts that are still open."""
        self._fences.append(self.copier.fence())
        # What is still open may have been entered before what is left.
        still = [step.use - 1 for step in running.open]
        self._fence_uses.append(min(still, default=self._last_use))

    def _restore(self, running: _Running) -> None:
        for redirect in running.redirected:
            redirect.back()
        running.redirected.clear()

    # -- the router's ids ------------------------------------------------------------------------

    def _read_ids(
        self, step: Step | ChunkedStep, hybrid: HybridLayer | None = None
    ) -> NDArray[np.int32]:
        """The experts that a layer's router chose, when everything submitted is complete.

        Of a layer that is split, the rows that they read come along.
        """
        assert step.ids is not None
        start_s = time.perf_counter()
        if hybrid is None:
            ids = self._stream.read(step.ids)
        else:
            ids = self._stream.read(step.ids, hybrid.inputs, hybrid.read_to)
        self.counters.router_reads += 1
        if self._trace:
            self._trace.add(COMPUTE, "read router ids", start_s, time.perf_counter(),
                            layer=step.layer, cause="ids")  # fmt: skip
        return ids

    def _note(self, step: Step, ids: NDArray[np.int32]) -> None:
        routing = step.routing
        if routing is not None and self._recorder is not None and self._recorder.is_on:
            routing.add(ids)
            self.counters.n_recorded += len(ids)

    def _upload(
        self, step: Step, ids: NDArray[np.int32], experts: Experts, slots: Sequence[int],
        others: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Give the cut's nodes ids that mean the experts' slots; with `others` there are experts
        that have NO_SLOT, and may have any (offload/split/spare.py)."""
        slot_ids = step.slot_ids
        if slot_ids is None or step.ids_buffer is not self._ids_buffer:
            assert step.ids is not None
            assert self._ids_buffer is not None
            step.ids_buffer = self._ids_buffer
            slot_ids = SlotIds(
                step.ids.tensor, self._ids_buffer, step.ids_offset, step.slot_ids_memory
            )
            step.slot_ids = slot_ids
        # Copies of earlier values are complete: the router's ids were read since then.
        self._send(slot_ids, ids, experts, slots, others)

    def _remapped(
        self, step: ChunkedStep, ids: NDArray[np.int32], experts: Sequence[int],
        slots: Sequence[int], offset: int,
    ) -> SlotIds:  # fmt: skip
        """Ids of one chunk that mean the experts' slots, at an offset of their buffer."""
        assert self._ids_buffer is not None
        like = step.ids.tensor.part(1, 0, len(ids))
        # Not pinned: pageable values may be changed as soon as the copy was asked for.
        slot_ids = SlotIds(like, self._ids_buffer, offset, None)
        self._send(slot_ids, ids, experts, slots)
        return slot_ids

    def _send(
        self, slot_ids: SlotIds, ids: NDArray[np.int32], experts: Experts, slots: Sequence[int],
        others: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        slot_of = self._slot_of
        slot_of[experts] = slots
        slot_of.take(ids, out=slot_ids.values, mode="clip")
        if others is not None:
            fill_in(slot_ids.values, slots, others)
        self._stream.upload(slot_ids)

    def _use_pinned(self, steps: Sequence[Step]) -> None:
        """Have ids copied from and to pinned memory, as far as it goes.

        The caller waits for each copy from or to other memory. All graphs share the memory: reading
        a layer's ids waits for everything that was copied before.
        """
        if self._pinned is None and self._may_pin and steps:
            self._pinned = self._stream.device.pinned_memory(_PINNED_BYTES)
            self._may_pin = self._pinned is not None
        if self._pinned is None:
            return
        memory, at = self._pinned.host_range.array(), 0
        for step in steps:
            assert step.ids is not None
            n_read, n_sent = step.ids.needed_bytes, step.ids_bytes
            if at + n_read + n_sent > _PINNED_BYTES:
                return
            step.ids.lie_in(memory[at : at + n_read])
            step.slot_ids_memory = memory[at + n_read : at + n_read + n_sent]
            at += n_read + n_sent

    def _reserve_ids(self, size_bytes: int) -> None:
        """Device memory for the ids of one graph; what pointed into less of it is made anew."""
        if size_bytes <= (self._ids_buffer.size_bytes if self._ids_buffer else 0):
            return
        if self._ids_buffer is not None:
            self._stream.synchronize()
            self._ids_buffer.close()
        size_bytes = max(size_bytes, _LEAST_BYTES)
        self._ids_buffer = self._stream.device.allocate(size_bytes, "expert ids")
