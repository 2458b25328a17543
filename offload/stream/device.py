"""A wrapper around a real device that streams weights to it.

`llama_decode` runs on our thread. On the same thread, the library calls `StreamingDevice.compute`
once for each part of the graph that the device computes.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from offload.decode import SMALL_BATCH, Batch, Ubatches
from offload.device import DeviceChoice
from offload.errors import NotSupported
from offload.ggml.backend import Stream
from offload.ggml.compute_buffer import ComputeBuffer
from offload.ggml.deferred import Deferred, detached
from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.log import take_errors
from offload.ggml.pydevice import FAILED, PyDevice, WrappedStream
from offload.ggml.tensor import Tensor
from offload.mla import MlaSwitch
from offload.model import layer_of
from offload.plan.placement import Plan
from offload.plan.slot_layout import SlotPool
from offload.schedule.cached_choice import RouteOptions
from offload.schedule.slots import StreamCounters
from offload.stream.cache_ahead import CacheAhead
from offload.stream.cached_routing import CachedRouting, RoutedGraph
from offload.stream.executor import Executor
from offload.stream.layer_clock import LayerClock
from offload.stream.prepared import PreparedGraph, PreparedGraphs
from offload.stream.ways_in_use import WaysInUse
from offload.times.min_batch import MinBatch
from offload.trace.trace import CPU, NO_TRACE, Trace

_CPU_PART = "CPU part of the graph"
MakeExecutor = Callable[[Stream, HostBufferType, ComputeBuffer | None], Executor]


@dataclass(frozen=True)
class BatchRules:
    """How a device computes batches of a size.

    `ways` are those of all devices of the engine, and are replaced between decodes.
    `mla_crossover`: see MlaSwitch.
    """

    ways: WaysInUse
    mla_crossover: int | None = None
    route: RouteOptions = RouteOptions()


class ModelDevices:
    """The streaming devices of one model, in the order of their layers.

    Each adds itself when it is made. All are made before the model is loaded.
    """

    def __init__(self, n_devices: int = 1) -> None:
        self.n_devices = n_devices
        self._made: list[StreamingDevice] = []

    def add(self, device: StreamingDevice) -> int:
        """Add the next device. Returns its number among the model's devices."""
        self._made.append(device)
        return len(self._made) - 1

    def others(self, nth: int) -> Sequence[StreamingDevice]:
        """Return all devices except the `nth` one."""
        return [*self._made[:nth], *self._made[nth + 1 :]]


class StreamingDevice(PyDevice):
    """A real device that also computes products with weights in our host memory."""

    def __init__(
        self,
        choice: DeviceChoice,
        host: HostBufferType,
        plan: Plan,
        make_executor: MakeExecutor,
        rules: BatchRules,
        *,
        trace: Trace = NO_TRACE,
        devices: ModelDevices | None = None,
    ) -> None:
        """`host` holds the weights that stream through the slots of `plan`.

        `make_executor` makes a stream's executor for these slots, whose number limits the products
        that the device takes. `devices`: those of the model, to which this one adds itself; None:
        it is the only one. Each of several devices copies early, and the last one computes prompts
        on a thread.

        If `rules.ways` change later, graphs that are built from then on use the new ways. ggml
        builds a graph anew when the number of tokens changes.
        """
        self._devices = devices or ModelDevices()
        self.nth = self._devices.add(self)
        self._is_alone = self._devices.n_devices == 1
        super().__init__(choice.device, f"SPEC{self.nth}", host.pending, host)
        self.choice, self.ways, self.trace = choice, rules.ways, trace
        self._ubatches = Ubatches()
        self._deferred: dict[WrappedStream, Deferred] = {}  # threads of the last device, by stream
        self._is_idle = False  # True if all work of earlier decodes is known to be complete
        self.is_native = False
        # True for experts and for dense weights if the backend may take them in this decode.
        self._offered = (False, False)
        self._newest_uid = 0  # newest uid of a computed graph
        self.declined: Counter[str] = Counter()  # reasons for which products went to the CPU
        self._stream_through(plan, make_executor)
        self._clock: LayerClock | None = None
        self.mla = MlaSwitch(rules.mla_crossover, self.inner.supports, host.holds)
        # The first stream's routers prefer cached experts; None: they choose as the model does.
        self.routing: CachedRouting | None = None
        if rules.route.is_on:
            self.routing = CachedRouting(rules.route, choice.device, self.inner.supports)
        self.executors: dict[WrappedStream, Executor] = {}
        self._slotless: set[WrappedStream] = set()  # streams whose graphs stream no weights
        self._ahead: dict[WrappedStream, CacheAhead] = {}  # copies of caches in RAM
        self._prepared = PreparedGraphs()
        self._not_kept: deque[PreparedGraph] = deque(maxlen=2)
        self._n_seen = 0  # graphs that `compute` was called for
        self.n_prepared = 0

    def __repr__(self) -> str:
        return f"StreamingDevice({self.choice.name}, {self.n_graphs} graphs, {self.min_batch})"

    @property
    def min_batch(self) -> MinBatch:
        """The thresholds from which this device computes with streamed weights."""
        return self.ways.now.min_batch_of(self.nth)

    def _stream_through(
        self, plan: Plan, make_executor: MakeExecutor, *, takes_all: bool = False
    ) -> None:
        layout, self._make_executor = plan.layout, make_executor
        self._layout = layout
        # True if batches may use more experts than have slots.
        self.passes = takes_all or plan.pass_experts > 0
        self._pools = {
            name: layout.pools[layout.groups[group].pool]
            for name, (group, _) in layout.places().items()
        }
        self._pool_of_weight: dict[Tensor, SlotPool | None] = {}
        self._answered: Hashable = None  # what the answers of `takes` depended on

    @contextmanager
    def without_slots(self) -> Iterator[None]:
        """Give no slots to the streams that begin in this block. Their graphs stream no weights."""
        before = set(self.executors)
        yield
        self._slotless |= set(self.executors) - before

    def release_slots(self) -> None:
        """Free the memory of all slots. No decode may run, and `use_slots` must follow."""
        self._prepared.clear()
        self._not_kept.clear()
        for stream, executor in self.executors.items():
            stream.inner.synchronize()
            executor.close()

    def use_slots(
        self, plan: Plan, make_executor: MakeExecutor, *, takes_all: bool = False
    ) -> None:
        """Stream through new slots, and allocate their memory now. Call after `release_slots`.

        With `takes_all`, the device takes every batch, in passes if need be, for a warm-up. Raises
        DoesNotFit, and then the device has no slots.
        """
        self._stream_through(plan, make_executor, takes_all=takes_all)
        for stream in self.executors:
            executor = self._new_executor(stream)
            if stream in self._slotless:
                continue
            try:
                executor.allocate()
            except BaseException:
                executor.close()
                raise

    def memory_bytes(self) -> tuple[int, int]:
        sim = self.choice.sim
        if sim is None or not sim.vram_bytes:
            return super().memory_bytes()
        return sim.vram_bytes, sim.vram_bytes

    def opened(self, stream: WrappedStream) -> None:
        self._new_executor(stream)
        if not self._is_alone and self.nth == self._devices.n_devices - 1:
            self._deferred[stream] = Deferred(stream, self.pending, self._waited)

    def _new_executor(self, stream: WrappedStream) -> Executor:
        assert self.host is not None
        is_first = not self.executors or next(iter(self.executors)) is stream
        compute = self.compute_buffer if is_first else None
        executor = self._make_executor(stream.inner, self.host, compute)
        self.executors[stream] = executor
        executor.is_alone = self._is_alone
        return executor

    def copy_caches_ahead(self, most_bytes: int) -> None:
        """Copy each layer's cache in RAM while the first stream computes the layer before.

        `most_bytes`: keys and values of the largest layer. Raises DoesNotFit.
        """
        stream = next(iter(self.executors))
        ahead = CacheAhead(stream.inner, most_bytes, lambda: self.executors[stream].counters)
        self._ahead[stream] = ahead
        self.copy_caches(stream, ahead.copy)

    def closed(self, stream: WrappedStream) -> None:
        if stream in self._ahead:
            self._ahead.pop(stream).close()
        if stream in self._deferred:
            self._deferred.pop(stream).close()
        self._prepared.clear()
        self._not_kept.clear()
        if next(iter(self.executors)) is stream:
            if self.compute_buffer is not None:
                self.compute_buffer.forget()
            if self.routing is not None:
                self.routing.close()
        self.executors.pop(stream).close()

    def _waited(self, start_s: float, end_s: float) -> None:
        """Trace the CPU's time before libllama waited for the thread, but not the wait."""
        trace = self.trace
        if trace.is_on and trace.cpu_since_s is not None:
            trace.add(CPU, _CPU_PART, trace.cpu_since_s, start_s)
            trace.cpu_since_s = end_s

    @property
    def n_lent(self) -> int:
        """Number of slots that continue in the compute buffer of the first stream."""
        first = next(iter(self.executors.values()), None)
        return 0 if first is None else first.n_lent

    @property
    def n_lent_open(self) -> int:
        """Number of these slots that may hold experts now."""
        first = next(iter(self.executors.values()), None)
        return 0 if first is None else first.n_lent_open

    def planned_small(self) -> None:
        """Note that the scheduler of the first stream has planned a small graph."""
        for executor in [*self.executors.values()][:1]:
            executor.planned_small()

    def answer_natively(self) -> bool:
        """Let the backend itself answer which nodes the device computes.

        From then on, `decode` decides once for each decode instead of `takes` for each node.
        Returns False if some products were declined, or if the backend does not allow it.
        """
        self.is_native = not self.declined and super().answer_natively()
        self._offered = (False, False)  # `pass_for` ends with it
        return self.is_native

    # -- a decode ----------------------------------------------------------------------------------

    @contextmanager
    def decode(self, batch: Batch) -> Iterator[None]:
        """Prepare for the decode of `batch`, and end it. libllama decodes inside the context."""
        self._begin(batch)
        # Time between the graphs of all devices is traced as the CPU's: libllama computes there.
        trace = self.trace if self.nth == 0 and not batch.is_draft else NO_TRACE
        if trace.is_on:
            trace.cpu_since_s = time.perf_counter()
        try:
            yield
            if self.routing is not None and not batch.is_draft:
                self.routing.finish(next(iter(self.executors)).inner)
        finally:
            if self._ubatches.have_several_graphs and self._is_alone:
                for executor in self.executors.values():
                    executor.forget_latest()
            self.remember_answers(on=False)
            self.compute_directly(on=False)
            if trace.is_on and trace.cpu_since_s is not None:
                trace.add(CPU, _CPU_PART, trace.cpu_since_s, time.perf_counter())
            if trace.is_on:
                trace.cpu_since_s = None
        if not (self._is_alone or batch.is_draft):
            self._is_idle = True in batch.wanted  # logits were read, so all work is complete

    def _begin(self, batch: Batch) -> None:
        """ggml gets the answers of `takes` for equal products of earlier decodes from here on."""
        self._repeat_answers()
        for ahead in self._ahead.values():
            ahead.forget()
        # Small batches have a graph without streamed weights for each layer that the CPU computes.
        is_watched = self.trace.is_on or self._clock is not None or not self._is_alone
        self.compute_directly(on=not is_watched and self.mla.crossover == 0)
        ubatches = self._ubatches = Ubatches(batch.n_ubatch, batch.n_unwanted_ubatches)
        for executor in self.executors.values():
            if not batch.is_draft:
                executor.last_split = None  # libllama may free its graph
            executor.expect(batch.small_tokens, ubatches)
        if not self._is_alone or not batch.small_tokens:
            ubatches.announce(batch.n_tokens)
            for deferred in self._deferred.values():
                deferred.take_status()  # drops the status of a failed decode
        if self.is_native:
            assert self.host is not None
            experts = self._streams(batch.n_at_once, experts=True)
            dense = self._streams(batch.n_at_once, experts=False)
            if self._offered != (experts, dense):
                self.host.offer(experts=experts, dense=dense)
                self._offered = experts, dense
        if self.routing is not None and not batch.is_draft:
            stream, executor = next(iter(self.executors.items()))
            self.routing.begin(
                executor.schedule, self._layout, stream.inner, is_small=bool(batch.small_tokens)
            )
        if self._is_alone and not batch.is_draft:
            self._start_prompt()

    def _start_prompt(self) -> None:
        """Begin the first copies of the batch, if it is a prompt.

        libllama first builds the prompt's graph and computes its embeddings. The link would be idle
        during that time.
        """
        n_tokens = self._ubatches.next_tokens
        if n_tokens and self._streams(n_tokens, experts=True):
            for executor in [*self.executors.values()][:1]:  # the target's stream is the first
                executor.start_prompt(n_tokens)

    # -- products that the device takes ------------------------------------------------------------

    def _repeat_answers(self) -> None:
        """Let ggml get earlier answers of `takes`, if they still hold."""
        depends_on = self.min_batch, self.ways.now.graph_key, self.passes, self._reads_experts
        if depends_on != self._answered:
            self._answered = depends_on
            self.forget_answers()
        self.remember_answers(on=True)

    def takes(self, product: Product) -> bool:
        """True if a product with a streamed weight runs on the device.

        Counts the reason if the product could have run there but is declined. Raises NotSupported
        if such a product needs experts that may not be in memory.
        """
        taken = self._takes(product)
        if not taken and product.ids is not None and self._reads_experts:
            raise NotSupported(
                f"{product.weight.name} cannot be computed on {self.choice.name}, so this model "
                "has to fit memory; use --mmap to keep its weights in the page cache"
            )
        return taken

    def _takes(self, product: Product) -> bool:
        experts = product.ids is not None
        if not product.n_tokens:
            return self.inner.supports(product.node)  # nothing is computed, nor copied
        if not self._streams(product.n_tokens, experts=experts):
            return False
        pool = self._pool_of(product.weight)
        if pool is None:
            name = product.weight.name
            self.declined[f"{name}: the graph reads it in a layout that has no slots"] += 1
            return False
        if experts and not self._has_room(product, pool):
            return False
        if not self.inner.supports(product.node):
            self.declined[f"{self.choice.name} cannot multiply {product.weight.type} weights"] += 1
            return False
        return True

    def _streams(self, n_tokens: int, *, experts: bool) -> bool:
        if experts and self._reads_experts:
            return True  # the CPU's products do not say which experts they are about to read
        return self.min_batch.streams(n_tokens, experts=experts) or (
            experts and self._splits(n_tokens)
        )

    @property
    def _reads_experts(self) -> bool:
        """True if not all experts are in memory."""
        return self.host is not None and self.host.experts is not None

    def _splits(self, n_tokens: int) -> bool:
        ways = self.ways.now
        return ways.splits(n_tokens) or (self._is_alone and ways.shares_prompts(n_tokens))

    def _has_room(self, product: Product, pool: SlotPool) -> bool:
        """True if the slots suffice for the product's batch.

        They suffice if all experts that the batch may use fit at once or in passes, or if the
        batch's layers are split.
        """
        n_tokens = product.n_tokens
        if self.passes or pool.holds(n_tokens) or self._splits(n_tokens):
            return True
        wanted = min(pool.n_experts, pool.n_used * n_tokens)
        self.declined[
            f"{n_tokens} tokens may use {wanted} experts, and --vram leaves {pool.n_slots} slots"
        ] += 1
        return False

    def _pool_of(self, weight: Tensor) -> SlotPool | None:
        """Return the slots that the weight streams through, or None. Views have no slots."""
        if weight not in self._pool_of_weight:
            pool = None if weight.is_view else self._pools.get(weight.name)
            self._pool_of_weight[weight] = pool
        return self._pool_of_weight[weight]

    # -- graphs ------------------------------------------------------------------------------------

    def _start_early(self, nth: int) -> None:
        """Start the copies of the `nth` stream for the next ubatch, once for each ubatch.

        Does nothing while the device may still compute an earlier ubatch. A device that computes
        asynchronously gets its next graph during that time, and begins the copies with that graph.
        """
        idle = self._is_idle or not self.inner.has_async_and_events
        executors = list(self.executors.values())
        if idle and self._ubatches.is_due and nth < len(executors):
            executors[nth].start_early(self._ubatches.take())

    def compute(self, stream: WrappedStream, graph: Graph) -> int:
        self._n_seen += 1
        nth = 0 if self._is_alone else list(self.executors).index(stream)
        for device in self._devices.others(self.nth):
            if not any(deferred.is_busy for deferred in device._deferred.values()):
                device._start_early(nth)
        deferred = self._deferred.get(stream)
        if deferred is not None and (status := deferred.take_status()):
            return status
        if self.trace.is_on and self.trace.cpu_since_s is not None:
            self.trace.add(CPU, _CPU_PART, self.trace.cpu_since_s, time.perf_counter())
        try:
            if self.pending.first is not None:
                return FAILED  # a callback failed while this decode's graph was built
            prepared = self._of(stream, graph)
            if prepared.mla:
                self.mla.outcomes.update(prepared.mla)
            if self._clock is not None and not prepared.streams:
                self._tell(self._clock, stream, graph)
            ubatches = self._ubatches
            may_begin = prepared.streams and (not self._is_alone or ubatches.n_to_come)
            if may_begin and ubatches.begin(prepared.layer):
                self._is_idle = False
            is_last = not ubatches.n_to_come or self._clock is not None
            if deferred is not None and prepared.is_detached and not is_last:
                self.executors[stream].counters.n_deferred += 1
                deferred.start(partial(self._run_deferred, prepared, nth))
                return 0
            return prepared.run()
        finally:
            if self.trace.is_on:
                self.trace.cpu_since_s = time.perf_counter()

    def _run_deferred(self, prepared: PreparedGraph, nth: int) -> int:
        """Compute a graph of the `nth` stream, then start the next ubatch's copies."""
        status = prepared.run()
        if not status:
            self._start_early(nth)
        return status

    @contextmanager
    def timing_layers(self, clock: LayerClock) -> Iterator[None]:
        """Report to `clock` the layers that decodes reach. A decode ends if it raises BrokenOff."""
        self._clock = clock
        for executor in self.executors.values():
            executor.clock = clock
        try:
            yield
        finally:
            self._clock = None
            for executor in self.executors.values():
                executor.clock = None
            take_errors()  # drops the errors that the library logs for a stopped decode

    def _tell(self, clock: LayerClock, stream: WrappedStream, graph: Graph) -> None:
        """Report a layer to `clock` before a graph without streamed weights is computed.

        By then the CPU has computed the streamed products of earlier layers.
        """
        layer = graph.last_layer()
        if clock.wants(layer):
            stream.inner.synchronize()
            clock.reached(layer)

    def fill(self, uses: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """Run `Executor.fill` for the stream that was opened first. It belongs to the target."""
        for executor in [*self.executors.values()][:1]:
            executor.forget_early()
            yield from executor.fill(uses)

    def counters(self) -> StreamCounters:
        """Return the sums of all streams' counts."""
        of_routing = StreamCounters() if self.routing is None else self.routing.counters
        return sum((each.counters for each in self.executors.values()), of_routing)

    def settle(self) -> None:
        """Wait until no computation or copy is under way. A trace then has all counted copies."""
        for stream, executor in self.executors.items():
            stream.inner.synchronize()
            executor.settle()

    @property
    def n_graphs(self) -> int:
        """Number of graphs that the device has computed."""
        return self._n_seen + self.n_direct

    @property
    def n_recognised(self) -> int:
        """Number of graphs that ggml built anew but that did not have to be prepared again."""
        return self._prepared.n_recognised

    def _of(self, stream: WrappedStream, graph: Graph) -> PreparedGraph:
        """Return the prepared graph. It is kept for reuse if ggml keeps the graph."""
        if graph.uid:
            return self._prepared.of(
                graph,
                lambda: self._as_built(stream, graph),
                lambda: self._circumstances(stream),
                lambda: self._prepare(stream, graph),
            )
        # This graph is a view of another one, which ggml may change, so it is not reused. The last
        # two prepared graphs are held, because submitted work may refer to them.
        prepared = self._prepare(stream, graph)
        self._not_kept.append(prepared)
        return prepared

    def _as_built(self, stream: WrappedStream, graph: Graph) -> PreparedGraph | None:
        """Return the unchanged graph if it has no streamed weights and MLA is not switched.

        Otherwise return None. Small batches have such a graph for each layer whose experts the CPU
        computes, so this case has to be fast.
        """
        assert self.host is not None
        if self.mla.crossover != 0:
            return None
        is_new, self._newest_uid = graph.uid > self._newest_uid, max(graph.uid, self._newest_uid)
        # ggml has split a new graph in this decode. The backend answered then which nodes it takes,
        # so a new graph has streamed weights only if they were offered.
        may_stream = True in self._offered or not (self.is_native and is_new)
        if may_stream and graph.has_products(self.host):
            return None
        inner = stream.inner
        return PreparedGraph(graph.uid, lambda: inner.compute(graph), Counter(), streams=False)

    def _circumstances(self, stream: WrappedStream) -> Hashable:
        """Return the state that preparing depends on, except the graph and the slots.

        `release_slots` drops the graphs that were prepared for the slots.
        """
        assert self.host is not None
        return stream, self.mla.crossover, self.ways.now.graph_key, tuple(self.host.buffers)

    def _prepare(self, stream: WrappedStream, graph: Graph) -> PreparedGraph:
        assert self.host is not None
        self.n_prepared += 1
        is_detached = bool(graph.uid) and stream in self._deferred and self._may_defer(graph)
        computed, counts = self.mla.rewrite(detached(graph) if is_detached else graph)
        products = tuple(computed.products(self.host))
        routed = None
        if self.routing is not None and products and next(iter(self.executors)) is stream:
            computed, routed = self.routing.rewrite(computed, products, self._layout)
            products = tuple(computed.products(self.host))
        if products:
            run = self.executors[stream].prepare(computed, products)
            if routed is not None:
                run = partial(self._run_routed, routed, stream, run)
        else:
            inner = stream.inner
            run = partial(inner.compute, computed)
        layer = layer_of(products[0].weight.name) if products else -1
        return PreparedGraph(graph.uid, run, counts, bool(products), layer, is_detached)

    def _run_routed(
        self, routed: RoutedGraph, stream: WrappedStream, run: Callable[[], int]
    ) -> int:
        """Compute a graph whose routers prefer cached experts."""
        assert self.routing is not None
        self.routing.computing(routed, stream.inner)
        return run()

    def _may_defer(self, graph: Graph) -> bool:
        """True if the graph is a prompt's and streams weights.

        Graphs of smaller batches may have split layers. Experts from the disk are read for one
        layer at a time.
        """
        assert self.host is not None
        n_tokens = max((product.n_tokens for product in graph.products(self.host)), default=0)
        return n_tokens > SMALL_BATCH and not self._reads_experts
