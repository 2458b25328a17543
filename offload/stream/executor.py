"""Runs graphs from cut to cut while the next weights are being copied.

The schedule (offload/schedule) decides which pieces are copied, and the copy queue copies them. The
executor calls both while it runs a graph.

When a graph is first seen, `prepare` finds its cuts, its split layers and its layers in passes. It
also finds the *stops*, the nodes before which the executor has to act.

In each decode, the computation goes from stop to stop:

    first node of a cut    Enqueue the copies that may start now. If the router's choice is not
                           known, submit all earlier nodes, read the router's ids, and pass the
                           layer's need to the schedule. If some pieces are missing, submit all
                           earlier nodes, so that the device computes during the copies. Enter the
                           cut, upload slot numbers in place of the router's ids, and enqueue the
                           copies. The slot numbers come first, because a device has one engine for
                           copies from the host: behind an expert they would wait for megabytes.
    each node of a cut     Wait for the copies of the node's kind of weight, if there were any, and
                           let the node read its slots. Nodes are not submitted before a wait or a
                           read requires it.
    layer in passes        Submit all earlier nodes. Then the pass runner computes the layer's
                           experts (offload/stream/pass_runner.py).

The player (offload/stream/play.py) goes through graphs of small batches instead. It comes back for
the stops of other cuts, and for pieces that have to be copied.

Nodes are submitted in as few computations as possible, so that the backend can fuse neighbours.
Backends read a node's sources at submission, so the node gets its own sources back right after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH, Ubatches
from offload.ggml.backend import Stream
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.tensor import Relocation
from offload.plan.slot_layout import SlotLayout
from offload.routing.routing import RoutingGuess, RoutingRecorder
from offload.schedule.batch import slot_range
from offload.schedule.cache import Lrfu
from offload.schedule.schedule import Schedule
from offload.schedule.slots import CLOSED, FREE, IN_USE, Copy, CutNeed, Piece, StreamCounters
from offload.stream.copy_queue import CopyQueue
from offload.stream.copying import Copier
from offload.stream.cpu_side import SplitLayer
from offload.stream.cut_graph import CutGraph
from offload.stream.cuts import (
    CutStep,
    Stop,
    behind_of,
    find_steps,
    number_cuts,
    stops_of,
    waits_once,
)
from offload.stream.layer_clock import LayerClock
from offload.stream.lent_pool import LentPool
from offload.stream.nodes_ahead import Orderer
from offload.stream.options import StreamingOptions
from offload.stream.pass_runner import PassRunner
from offload.stream.passes import PassStep, find_passes
from offload.stream.play import GraphPlayer
from offload.stream.program import Likeliest, played_of
from offload.stream.prompt_side import PromptSide
from offload.stream.slot_ids import IdExchange
from offload.stream.slot_memory import SlotMemory
from offload.stream.split_measuring import SplitSides
from offload.stream.split_path import Hybrid, SplitPath
from offload.stream.stream_parts import RoutingParts, StreamParts
from offload.trace.trace import COMPUTE, NO_TRACE, Trace

_GUESSES = 20  # most guessed experts under way (docs/log.md)
# Copies begin before a prompt's graph is built, for the first cut and as many cuts after it. Few,
# because the graph's inputs are copied after them.
_PROMPT_AHEAD = 1
_MOST_LATEST = 8  # most batch sizes whose latest graph is remembered


class Executor:
    """Runs graphs with cuts on one stream of a device. It has the methods of `Stops`."""

    def __init__(
        self,
        stream: Stream,
        host: HostBufferType,
        layout: SlotLayout,
        options: StreamingOptions,
        copier: Copier,
        hybrid: Hybrid | None = None,
        recorder: RoutingRecorder | None = None,
        compute: ComputeBuffer | None = None,
        *,
        trace: Trace = NO_TRACE,
        most_tokens: int = 0,
        reads_pinned: bool = False,
    ) -> None:
        """`host` holds the weights that stream through the slots of `layout`.

        With `hybrid`, layers are split in the batches that `hybrid.ways` names. While `recorder`
        is on, it records the experts that routers choose for small batches. `compute` is the
        buffer in which the stream's graphs are computed, if slots may continue in it. `most_tokens`
        has the largest batch, for which memory is taken at once; 0: it is unknown. With
        `reads_pinned`, the device's kernels read and write rows of prompts in pinned host memory.
        """
        self._stream, self._host, self._layout = stream, host, layout
        self._prefetch, self._trace = options.prefetch, trace
        pools = layout.pools
        most = max((pool.n_experts for pool in pools), default=0)
        n_used = max((pool.n_used for pool in pools), default=1)
        rule = Lrfu.for_model(len(layout.groups), n_used, most)
        n_slots = {i: pool.n_slots for i, pool in enumerate(pools)}
        self.counters = StreamCounters()
        self.memories = [SlotMemory(stream.device, pool, compute) for pool in pools]
        n_lent = {i: memory.n_slots - n_slots[i] for i, memory in enumerate(self.memories)}
        self.schedule = schedule = Schedule(
            n_slots, rule, options.depth, _GUESSES, keeps=options.cache, counters=self.counters,
            n_experts=most, homes=layout.homes(), n_lent=n_lent,
        )  # fmt: skip
        self.clock: LayerClock | None = None  # clock to notify of reached layers
        self.copies = CopyQueue(
            self.memories, host, layout, schedule, copier, self.counters, self._trace
        )
        self.ids = IdExchange(stream, most, self.counters, self._trace)
        self.guess = RoutingGuess()
        self._recorder = recorder if options.record_routing else None
        self._split: SplitPath | None = None
        likeliest = Likeliest(len(layout.groups))
        parts = StreamParts(stream, host, schedule, self.copies, self.counters, self._trace)
        if hybrid is not None:
            self._split = SplitPath(hybrid, parts, likeliest)
        cpu = None
        if hybrid is not None and host.experts is None:
            cpu = PromptSide(hybrid, stream.device, self.counters)
        self._passes = PassRunner(
            parts, layout, self.ids, most_tokens, cpu, reads_pinned=reads_pinned
        )
        routing = RoutingParts(self.guess, self._recorder, likeliest, most, n_used)
        self.player = GraphPlayer(parts, routing, self._split)
        # A split layer of the last decode, to be timed; None: there is none.
        self.last_split: tuple[Graph, CutStep, SplitLayer] | None = None
        self._ubatches = Ubatches()  # those of the decode that is computed
        # True: copies of the next ubatch may begin early. Experts on a disk may not, because the
        # device would wait for the reads at the end of its graph.
        self.may_start_next = options.cache and options.depth > 0 and host.experts is None
        self._latest: dict[int, CutGraph] = {}  # latest graph by number of tokens
        self._early: CutGraph | None = None  # graph whose copies began before it was handed over
        self._lent: LentPool | None = None
        if compute is not None and any(n_lent.values()):
            lending = max(n_lent, key=n_lent.__getitem__)
            self._lent = LentPool(compute, self.memories[lending], lending, schedule, self.copies)
        is_foreign = hybrid is not None and hybrid.is_foreign
        self._orderer = Orderer(stream.device, is_foreign=is_foreign)

    def __repr__(self) -> str:
        return f"Executor({self._stream!r}, {self.schedule!r})"

    @property
    def is_alone(self) -> bool:
        """True if no other device computes parts of the same graph."""
        return self._passes.is_alone

    @is_alone.setter
    def is_alone(self, value: bool) -> None:
        self._passes.is_alone = value

    def close(self) -> None:
        for part in (self._split, self._orderer, self.copies, *self.memories, self._passes,
                     self.ids, self.player):  # fmt: skip
            if part is not None:
                part.close()

    @property
    def working_bytes(self) -> int:
        """Bytes of device memory that graphs took besides slots."""
        parts = (self._split, self._orderer, self._passes, self.ids, self.player)
        return sum(part.device_bytes for part in parts if part is not None)

    def allocate(self) -> None:
        """Allocate all slots' memory now instead of at first use. Raises DoesNotFit."""
        for memory in self.memories:
            memory.allocate()

    def settle(self) -> None:
        """Wait until no copy is under way. Raises DeviceFailed if one failed."""
        self.copies.settle()

    def fill(self, uses: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """Copy experts into slots between two graphs, as CopyQueue.fill does."""
        self._stream.synchronize()
        self._see_graph()
        yield from self.copies.fill(uses)

    # -- when a graph is first seen ----------------------------------------------------------------

    def prepare(self, graph: Graph, products: Sequence[Product]) -> Callable[[], int]:
        """Return a function that computes the graph and returns a ggml_status.

        All work that is the same for each computation is done here. Raises DoesNotFit. The returned
        function raises DeviceFailed if a copy failed.
        """
        n_tokens = max(product.n_tokens for product in products)
        split = {} if self._split is None else self._split.find(graph, products, self._layout)
        whole = [product for product in products if product.ids not in split]
        passes = find_passes(graph, whole, self._layout, self.memories, self._passes.should_share)
        if passes:
            graph = self._passes.prepare(graph, passes)
            products = tuple(graph.products(self._host))
        steps = find_steps(
            graph, products, self._layout, self.memories, split, either=self._split is not None
        )
        order = [(step.group, step.kinds) for step in steps]
        order += [(step.group, step.kinds) for step in passes]
        self.copies.prepare(steps, order)
        self.ids.prepare(steps)
        n_cuts = number_cuts(steps, passes)
        self._record(steps)
        relocation = Relocation()
        if split:
            ordered = self._orderer.order(graph, behind_of(steps, passes, graph.n_nodes))
            graph, relocation = ordered.graph, ordered.relocation
            for step, ahead in zip((s for s in steps if s.split), ordered.ahead, strict=True):
                step.ahead = ahead
        stops = stops_of(steps, passes)
        played = None
        if played_of(steps, stops):
            played = self.player.compile(graph, steps, stops)
        prepared = CutGraph(graph, steps, stops, n_cuts, relocation, played, n_tokens, passes)
        return partial(self._run, prepared)

    def _record(self, steps: Sequence[CutStep]) -> None:
        """Let these layers record their routing, if all of them compute the same small batch.

        The last layer may differ, since it computes only the tokens whose logits are wanted.
        """
        routed = [step for step in steps if step.ids is not None]
        sizes = {step.n_tokens for step in routed}
        if self._recorder is not None and len(sizes) == 1 and 0 < min(sizes) <= SMALL_BATCH:
            for step in routed:
                step.routing = self._recorder.layer(step.layer, step.n_used)

    # -- per decode --------------------------------------------------------------------------------

    @property
    def n_lent(self) -> int:
        """Number of slots that continue in the compute buffer."""
        return 0 if self._lent is None else self._lent.slots.n_lent

    @property
    def n_lent_open(self) -> int:
        """Number of these slots that may hold experts now."""
        return 0 if self._lent is None else self._lent.slots.n_open

    def planned_small(self) -> None:
        """Note that the scheduler has planned a small graph, so that slots may be opened."""
        if self._lent is not None:
            self._lent.planned_small()
            self.counters.n_small_plans += 1

    def expect(self, guessed: Sequence[int], ubatches: Ubatches) -> None:
        """Prepare for the graphs of a decode's ubatches.

        `guessed`: tokens whose experts are guessed. Prompts have none.
        """
        self.guess.expect(guessed)
        self._ubatches = ubatches
        self.forget_early()

    def _see_graph(self) -> None:
        """Close the lent slots that graphs have reached, before any slot is used."""
        if self._lent is not None:
            self._lent.see()

    def _run(self, running: CutGraph) -> int:
        self.counters.graphs += 1
        self._see_graph()
        if not self.is_alone or running.n_tokens > SMALL_BATCH:
            self._latest.pop(running.n_tokens, None)
            self._latest[running.n_tokens] = running
            if len(self._latest) > _MOST_LATEST:
                del self._latest[next(iter(self._latest))]
        try:
            early, self._early = self._early, None
            running.relocation.there()
            if early is None or not running.needs_as(early):
                self.copies.begin()
                self._announce(running)
            else:
                for step, known in zip(running.steps, early.steps, strict=True):
                    step.need, step.in_order = known.need, known.in_order
            status = self._compute(running)
            if status:
                self._recover(running)
            self.counters.bounced_bytes = self.copies.copier.bounced_bytes
            return status
        except BaseException:
            self._recover(running)
            raise
        finally:
            running.relocation.back()
            running.reset()

    def _compute(self, running: CutGraph) -> int:
        if running.played is None:
            return self.stop(running, running.stops)
        step = running.played.steps[-1]
        if step.split is not None:
            self.last_split = running.graph, step, step.split
        clocked = self.clock is not None
        return self.player.run(running.played, running, self, clocked=clocked)

    def _recover(self, running: CutGraph) -> None:
        self._early = None
        self._passes.abandon()
        self._restore(running)
        self._stream.synchronize()
        self.copies.abandon()

    def start_early(self, n_tokens: int, n_ahead: int | None = None) -> None:
        """Start the copies of the next graph while another device computes.

        The graph is expected to need what the latest graph with `n_tokens` tokens needed. If it
        needs something else, its own copies begin when it is handed over. Copies are for the
        first cut and the next `n_ahead` ones. None: for all cuts.
        """
        expected = self._latest.get(n_tokens)
        if expected is None or self._early is not None:
            return
        self._stream.synchronize()
        if self._lent is not None:
            self._lent.close_all()  # the next graph is a prompt's
        self.copies.begin()
        self._announce(expected)
        n_ahead = expected.n_cuts if n_ahead is None else n_ahead
        self.copies.enqueue(self.schedule.issue(0, n_ahead=n_ahead))
        self._early = expected
        self.counters.n_early += 1

    def start_prompt(self, n_tokens: int) -> None:
        """Start the first copies of a prompt's first ubatch, before libllama builds its graph.

        No graph may be under way. The graph is expected to need what the latest graph with
        `n_tokens` tokens needed.
        """
        if self._expected(n_tokens) is not None:
            self.start_early(n_tokens, _PROMPT_AHEAD)

    def forget_latest(self) -> None:
        """Forget which graphs ubatches had, so that nothing begins early until they come again."""
        self._latest.clear()

    def _expected(self, n_tokens: int) -> CutGraph | None:
        """Return the graph that an ubatch of `n_tokens` will be like, if its copies may begin."""
        latest = self._latest.get(n_tokens) if self.may_start_next else None
        if latest is None or latest.played is not None or self.clock is not None:
            return None
        return latest

    def _start_next(self) -> None:
        """Start the first copies of the next ubatch, before the end of this one is submitted.

        The link would otherwise be idle from this graph's last copy to the next graph. The next
        graph is expected to need what the latest graph with as many tokens needed.
        """
        expected = self._expected(self._ubatches.expected_tokens if self.is_alone else 0)
        if expected is None:
            return
        self._announce(expected, before_end=True)
        self.copies.enqueue(self.schedule.issue(0))
        self._early = expected
        self.counters.n_early += 1

    def forget_early(self) -> None:
        """Forget the graph that `start_early` expected, if it was not handed over."""
        if self._early is not None:
            self._early = None
            self.schedule.begin(0)

    def _announce(self, graph: CutGraph, *, before_end: bool = False) -> None:
        """Tell the schedule all needs and guesses that are known before the graph runs.

        `before_end`: the last nodes of the previous graph are not submitted yet.
        """
        schedule, played = self.schedule, graph.played
        schedule.begin(graph.n_cuts, before_end=before_end)
        if self._split is not None:
            self._split.see_arrivals()
        if played is not None and played.is_whole:
            guessed = played.guessed()
            if guessed and self._prefetch:
                self._guess(guessed)
                played.issue_before_layers()
        else:
            if self._split is not None:
                self._split.choose_order(graph.steps)
            for step in graph.steps:
                if step.need is not None:
                    schedule.need(step.need)
                elif self._prefetch and step.missed and step.split is None:
                    self._guess([step])
            if self._prefetch and self._host.experts is None:
                self._passes.announce(graph.passes)
        if played is not None and self._prefetch and self._split is not None:
            played.promote_at_first_layer()

    def _guess(self, steps: Sequence[CutStep]) -> None:
        for step in steps:
            experts = self.guess.predict(step.layer, step.n_tokens)
            if experts:
                is_there = partial(self.copies.is_there, step.layer)
                pieces = tuple((step.group, expert) for expert in experts if is_there(expert))
                if pieces:
                    self.schedule.predict(CutNeed(step.cut, step.pool, pieces))

    def stop(self, running: CutGraph, stops: Sequence[Stop]) -> int:
        for stop in stops:
            status = self._stop(running, stop)
            if status:
                return status
        if stops[-1] is not running.stops[-1]:
            return 0
        self._start_next()
        return self.submit(running, running.graph.n_nodes)

    def _stop(self, running: CutGraph, stop: Stop) -> int:
        step, status = stop.step, 0
        if stop.nth == 0 and self.clock is not None and self.clock.wants(step.layer):
            status = self.submit(running, stop.at)
            if not status:
                self.reach(step.layer)
        if isinstance(step, PassStep):
            return status or self._passes.compute(running, step, self.submit)
        if stop.nth == 0:
            step.is_free = self._is_free(running, step)
            if step.is_free:
                self._point(step, (0,))
                step.waits = []
            else:
                status = status or self._enter(running, step)
        return status or self._arrive(running, step, stop)

    def _is_free(self, running: CutGraph, step: CutStep) -> bool:
        """True if a layer computes only rows that nobody wants, and may read any slots for them.

        Reading the router's ids would wait for the whole ubatch. The device would then be idle
        until libllama has built the next ubatch's graph. So the ids are not read. They serve as
        slot numbers.
        """
        n_slots = self._layout.pools[step.pool].n_slots
        # The last layer of an ubatch without wanted logits still has one row. Context adds it, so
        # that all ubatches' graphs are alike.
        is_part = 0 < step.n_tokens < running.n_tokens == self._ubatches.unwanted_tokens
        return is_part and step.need is None and step.n_experts <= n_slots

    def reach(self, layer: int) -> None:
        """Tell the clock that all nodes before a layer are submitted, if it wants to know.

        Raises BrokenOff.
        """
        if self.clock is not None and self.clock.wants(layer):
            self._stream.synchronize()
            self.clock.reached(layer)

    def _enter(self, running: CutGraph, step: CutStep) -> int:
        """Give a cut's pieces slots, before the cut's first node. Return a ggml_status."""
        schedule, copies, first = self.schedule, self.copies, step.readers[0].index
        copies.enqueue(schedule.issue(step.cut))
        ids: NDArray[np.int32] | None = None
        experts: Sequence[int] = range(step.n_experts)
        if step.reads_ids:
            status = self.submit(running, first)
            if status:
                return status
            ids = self._read_ids(step)
            if step.need is None:
                experts = sorted(set(ids.ravel().tolist()))
                self._need(step, experts)
        issued: Sequence[Copy] = ()
        if not schedule.ready(step.cut):
            issued = schedule.issue(step.cut)
            if ids is None:
                copies.enqueue(issued)
                issued = ()
                status = self.submit(running, first)
                if status:
                    return status
        step.missed = False

        def send(slots: Sequence[int]) -> None:
            first = self._point(step, slots)
            if ids is None:
                return
            if step.need is None and step.missed:
                self.guess.observe(step.layer, np.bincount(ids.ravel()), ids)
            assert step.slot_ids is not None
            self.ids.send(step.slot_ids, ids, experts, [slot - first for slot in slots])

        self._take_slots(running, step, send, issued=issued)
        return 0

    def _read_ids(self, step: CutStep) -> NDArray[np.int32]:
        ids = self.ids.read(step)
        if step.routing is not None and self._recorder is not None and self._recorder.is_on:
            step.routing.add(ids)
            self.counters.n_recorded += len(ids)
        return ids

    def _need(self, step: CutStep, experts: Sequence[int]) -> None:
        pieces = tuple([(step.group, expert) for expert in experts])
        self.schedule.need(CutNeed(step.cut, step.pool, pieces))

    def take_slots(
        self, running: CutGraph, step: CutStep, experts: Sequence[int],
        elsewhere: Collection[Piece], send: Callable[[], None],
    ) -> None:  # fmt: skip
        self._need(step, experts)
        self._take_slots(running, step, lambda slots: send(), elsewhere)

    def _take_slots(
        self, running: CutGraph, step: CutStep, send: Callable[[Sequence[int]], None],
        elsewhere: Collection[Piece] = (), issued: Sequence[Copy] = (),
    ) -> None:  # fmt: skip
        """Enter the cut, upload its slot numbers by `send(slots)`, then enqueue its copies.

        `elsewhere`: pieces that the cut uses without slots. `issued`: copies that the schedule has
        issued before, and that are not enqueued yet.
        """
        entered = self.schedule.enter(step.cut, elsewhere)
        self.copies.last_use = step.use = entered.use  # the schedule has already counted this use
        step.missed |= entered.misses > 0 or bool(entered.waits)
        running.open.append(step)
        send(entered.slots)
        self.copies.enqueue([*issued, *entered.issued])
        step.waits = self.copies.tickets_of(entered.waits) if entered.waits else []
        self._trace_slots()

    def _point(self, step: CutStep, slots: Sequence[int]) -> int:
        """Choose the range of slots that the cut's nodes see. Return the range's first slot."""
        if not step.reads_ids:
            first, n = slots[0], max(1, step.n_experts)
        else:
            n_slots = self.schedule.pools[step.pool].n_slots
            first, n = 0, n_slots
            if slots and step.n_tokens > 1:
                first, n = step.slots_seen = slot_range(slots, n_slots, step.slots_seen)
            self.counters.bands += n < n_slots
        for reader in step.readers:
            for read in reader.reads:
                read.slots = read.views.of(first, n)
        return first

    def _arrive(self, running: CutGraph, step: CutStep, stop: Stop) -> int:
        """Wait for the copies of a node that reads slots, and let the node read these slots."""
        reader = step.readers[stop.nth]
        # Small batches compute so briefly that gate need not start before up has arrived. Then gate
        # and up are submitted together, whether or not an expert was missing.
        if step.waits:
            at_once = waits_once(step, self.schedule.depth)
            if stop.nth == 0 or not at_once:
                status = self.submit(running, stop.at)
                if status:
                    return status
                kinds = step.kinds if at_once else (reader.kind,)
                self.copies.wait(step.waits, kinds, step.layer)
        self.counters.cuts += 1
        redirected = running.redirected
        for read in reader.reads:
            assert read.slots is not None
            read.redirect.to(read.slots)
            redirected.append(read.redirect)
        if step.reads_ids:
            assert step.slot_ids is not None
            for redirect in reader.ids:
                redirect.to(step.slot_ids.tensor)
                redirected.append(redirect)
        return 0

    def _trace_slots(self) -> None:
        if self._trace.is_on:
            counts = self.schedule.n_slots_by_state()
            held = sum(counts) - counts[FREE] - counts[CLOSED]
            now_s = time.perf_counter()
            self._trace.sample("slots", now_s, **{"in use": counts[IN_USE], "held": held})

    # -- submitting --------------------------------------------------------------------------------

    def submit(self, running: CutGraph, end: int) -> int:
        status = 0
        if end > running.done:
            start_s = time.perf_counter()
            # The player's own redirections are not among these, so the part has no uid then.
            redirected = None if running.is_shifted else running.redirected
            part = running.graph.part(running.done, end, redirected)
            status = self._stream.compute(part)
            if self._trace.is_on:
                layer = running.open[-1].layer if running.open else -1
                self._trace.add(COMPUTE, f"nodes {running.done}-{end}", start_s,
                                time.perf_counter(), layer=layer)  # fmt: skip
            running.done = end
        self._restore(running)
        if running.open:
            self.leave(running)
        return status

    def leave(self, running: CutGraph) -> None:
        still = [step for step in running.open if step.last >= running.done]
        if len(still) < len(running.open):
            left = [step for step in running.open if step.last < running.done]
            running.open = still
            self.copies.fence([step.use for step in still])
            for step in left:
                self.schedule.leave(step.cut)
            self._trace_slots()

    def _restore(self, running: CutGraph) -> None:
        for redirect in running.redirected:
            redirect.back()
        running.redirected.clear()

    # -- split layers ------------------------------------------------------------------------------

    def take_split(self) -> SplitSides | None:
        """Return the last split layer, to be timed before the next graph is built, and forget it.

        Returns None if there is none.
        """
        if self.last_split is None or self._split is None:
            return None
        (graph, step, layer), self.last_split = self.last_split, None

        group = self._layout.groups[step.group]
        n_bytes = [group.matrix_bytes[kind] for kind in self.copies.kinds[step.group]]
        kinds = tuple(n / sum(n_bytes) for n in n_bytes)
        slots = self.schedule.pools[step.pool]
        return SplitSides(self._stream, self._split, self.copies, graph, step, layer, slots, kinds)
