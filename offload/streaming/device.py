"""The wrapped device through which weights are streamed.

`llama_decode` runs on our thread; during it the library calls `StreamingDevice.compute`, once per
part of the model that the device computes, also on this thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from offload.device import DeviceChoice
from offload.ggml.backend import Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.library.log import take_errors
from offload.ggml.pydevice import FAILED, PyDevice, WrappedStream
from offload.ggml.tensor import Tensor
from offload.mla.decision import MlaCounters
from offload.mla.switch import MlaSwitch
from offload.plan.min_batch import MinBatch
from offload.plan.slot_layout import SlotLayout, SlotPool
from offload.split.switch import HybridSwitch
from offload.streaming.executor import Executor
from offload.streaming.layer_clock import LayerClock
from offload.streaming.prepared import PreparedGraph, PreparedGraphs
from offload.trace import CPU, NO_TRACE, Trace

WRAPPED_NAME = "SPEC0"


MakeExecutor = Callable[[Stream, HostBufferType], Executor]


class StreamingDevice(PyDevice):
    """A real device that also takes products with weights that lie in our host memory."""

    def __init__(
        self,
        choice: DeviceChoice,
        host: HostBufferType,
        min_batch: MinBatch,
        pending: Pending,
        *,
        layout: SlotLayout,
        make_executor: MakeExecutor,
        vram_bytes: int | None = None,
        trace: Trace = NO_TRACE,
        mla_crossover: int | None = None,
        chunks: bool = False,
        hybrid: HybridSwitch | None = None,
    ) -> None:
        """`layout` limits what the device takes. `vram_bytes` is what it says it has.

        With `chunks` it takes batches of which not all experts have slots at once, and whatever
        their min-batch those whose layers `hybrid` splits.

        `mla_crossover`: see MlaSwitch. Changing `min_batch` later is for graphs that are built
        from then on; ggml builds one anew when the number of tokens changes.
        """
        super().__init__(choice.device, WRAPPED_NAME, pending, host)
        self.choice, self.min_batch, self.trace = choice, min_batch, trace
        self.chunks, self.hybrid = chunks, hybrid
        self.is_native = False
        self._is_offered = False  # the native backend may take streamed weights in this decode
        self._newest_uid = 0  # newest uid of a computed graph
        self.declined: Counter[str] = Counter()  # why products went to the CPU
        self._vram_bytes = vram_bytes
        self._stream_through(layout, make_executor)
        self._clock: LayerClock | None = None
        self._cpu_since_s: float | None = None  # inside a decode: since when the CPU computes
        self.mla = MlaSwitch(mla_crossover, self.inner.supports, host.holds)
        self.executors: dict[WrappedStream, Executor] = {}
        self._prepared = PreparedGraphs()
        self._not_kept: deque[PreparedGraph] = deque(maxlen=2)
        self.n_graphs = 0
        self.n_prepared = 0

    def _stream_through(self, layout: SlotLayout, make_executor: MakeExecutor) -> None:
        self._make_executor = make_executor
        self._pools = {
            name: layout.pools[layout.groups[group].pool]
            for name, (group, _) in layout.places().items()
        }
        self._pool_of_weight: dict[Tensor, SlotPool | None] = {}

    def release_slots(self) -> None:
        """Free the memory of all slots; `use_slots` must follow. Nothing may be under way."""
        self._prepared.clear()
        self._not_kept.clear()
        for stream, executor in self.executors.items():
            stream.inner.synchronize()
            executor.close()

    def use_slots(self, layout: SlotLayout, make_executor: MakeExecutor) -> None:
        """After `release_slots`: stream through these, whose memory is taken at once.

        Raises DoesNotFit, and has none then.
        """
        assert self.host is not None
        self._stream_through(layout, make_executor)
        for stream in self.executors:
            executor = self.executors[stream] = make_executor(stream.inner, self.host)
            try:
                executor.allocate()
            except BaseException:
                executor.close()
                raise

    def memory_bytes(self) -> tuple[int, int]:
        if self._vram_bytes is None:
            return super().memory_bytes()
        return self._vram_bytes, self._vram_bytes

    def opened(self, stream: WrappedStream) -> None:
        assert self.host is not None
        self.executors[stream] = self._make_executor(stream.inner, self.host)

    def closed(self, stream: WrappedStream) -> None:
        self._prepared.clear()
        self._not_kept.clear()
        self.executors.pop(stream).close()

    def answer_natively(self) -> bool:
        """Decide by whole decodes what is computed here, not by nodes (`expect`). False where some
        products stay with the CPU whatever the number of tokens, or the backend does not allow it.
        """
        self.is_native = not self.declined and super().answer_natively()
        return self.is_native

    def expect(self, n_tokens: int) -> None:
        """A decode in ubatches of so many tokens comes next."""
        if self.is_native:
            assert self.host is not None
            experts = self._streams(n_tokens, experts=True)
            dense = self._streams(n_tokens, experts=False)
            self.host.offer(experts=experts, dense=dense)
            self._is_offered = experts or dense

    # -- which products it takes -------------------------------------------------------------------

    def takes(self, product: Product) -> bool:
        """True if a product with a streamed weight runs here; what stands against it is counted."""
        experts = product.ids is not None
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
        return self.min_batch.streams(n_tokens, experts=experts) or (
            experts and self._splits(n_tokens)
        )

    def _splits(self, n_tokens: int) -> bool:
        return self.hybrid is not None and self.hybrid.splits(n_tokens)

    def _has_room(self, product: Product, pool: SlotPool) -> bool:
        """True if all experts that the batch may use fit the slots, at once or in chunks, or the
        CPU computes those that do not."""
        n_tokens = product.n_tokens
        if self.chunks or pool.holds(n_tokens) or self._splits(n_tokens):
            return True
        wanted = min(pool.n_experts, pool.n_used * n_tokens)
        self.declined[
            f"{n_tokens} tokens may use {wanted} experts, and --vram leaves {pool.n_slots} slots"
        ] += 1
        return False

    def _pool_of(self, weight: Tensor) -> SlotPool | None:
        """The slots that the weight streams through; None if it has none, read as it is here."""
        if weight not in self._pool_of_weight:
            pool = None if weight.is_view else self._pools.get(weight.name)
            self._pool_of_weight[weight] = pool
        return self._pool_of_weight[weight]

    # -- graphs ------------------------------------------------------------------------------------

    def compute(self, stream: WrappedStream, graph: Graph) -> int:
        self.n_graphs += 1
        if self.trace and self._cpu_since_s is not None:
            self.trace.add(CPU, "CPU part of the graph", self._cpu_since_s, time.perf_counter())
        try:
            if self.pending.first is not None:
                return FAILED  # a callback failed while this decode's graph was built
            prepared = self._of(stream, graph)
            self.mla.counters.add(prepared.mla)
            if self._clock is not None and not prepared.streams:
                self._tell(self._clock, stream, graph)
            return prepared.run()
        finally:
            self._cpu_since_s = time.perf_counter()

    @contextmanager
    def timing_layers(self, clock: LayerClock) -> Iterator[None]:
        """Decodes tell `clock` of the layers they reach, and end where it raises BrokenOff."""
        self._clock = clock
        for executor in self.executors.values():
            executor.clock = clock
        try:
            yield
        finally:
            self._clock = None
            for executor in self.executors.values():
                executor.clock = None
            take_errors()  # a decode that is broken off failed in the library's eyes

    def _tell(self, clock: LayerClock, stream: WrappedStream, graph: Graph) -> None:
        """Before a part without streamed weights: the CPU has computed those before it."""
        layer = graph.last_layer()
        if clock.wants(layer):
            stream.inner.synchronize()
            clock.reached(layer)

    def fill(self, uses: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """As Executor.fill, for the stream that was opened first: the one that generates."""
        for executor in [*self.executors.values()][:1]:
            yield from executor.fill(uses)

    def settle(self) -> None:
        """Return when nothing is under way; a trace knows of all copies that are counted."""
        for stream, executor in self.executors.items():
            stream.inner.synchronize()
            executor.settle()

    def decoding(self, active: bool) -> None:
        """A decode begins or has ended: between our graphs, libllama computes on the CPU."""
        if not active and self.trace and self._cpu_since_s is not None:
            self.trace.add(CPU, "CPU part of the graph", self._cpu_since_s, time.perf_counter())
        self._cpu_since_s = time.perf_counter() if active else None

    @property
    def n_recognised(self) -> int:
        """Graphs that ggml built anew, and that were not prepared again."""
        return self._prepared.n_recognised

    def _of(self, stream: WrappedStream, graph: Graph) -> PreparedGraph:
        """The prepared graph, kept if ggml keeps the graph: finding its cuts takes 3 us a node."""
        if graph.uid:
            return self._prepared.of(
                graph,
                lambda: self._as_built(stream, graph),
                lambda: self._circumstances(stream),
                lambda: self._prepare(stream, graph),
            )
        prepared = self._prepare(stream, graph)  # a view, which ggml may change
        self._not_kept.append(prepared)  # what was submitted may refer to it
        return prepared

    def _as_built(self, stream: WrappedStream, graph: Graph) -> PreparedGraph | None:
        """The graph without changes if it has no streamed weights and MLA is not switched.

        Small batches have such a graph for each layer whose experts the CPU computes.
        """
        assert self.host is not None
        if self.mla.crossover != 0:
            return None
        is_new, self._newest_uid = graph.uid > self._newest_uid, max(graph.uid, self._newest_uid)
        # A new graph was split in this decode, so the backend's native answers hold for it.
        may_stream = self._is_offered or not (self.is_native and is_new)
        if may_stream and next(graph.products(self.host), None) is not None:
            return None
        inner = stream.inner
        return PreparedGraph(graph.uid, lambda: inner.compute(graph), MlaCounters(), streams=False)

    def _circumstances(self, stream: WrappedStream) -> Hashable:
        """All that preparing depends on beside the graph, but for the slots (`release_slots`)."""
        assert self.host is not None
        hybrid = self.hybrid
        splits = hybrid and (hybrid.is_active, hybrid.declined, hybrid.unsplit)
        return stream, self.mla.crossover, splits, tuple(self.host.buffers)

    def _prepare(self, stream: WrappedStream, graph: Graph) -> PreparedGraph:
        assert self.host is not None
        self.n_prepared += 1
        computed, counts = self.mla.rewrite(graph)
        products = tuple(computed.products(self.host))
        if products:
            run = self.executors[stream].prepare(computed, products)
        else:
            inner = stream.inner
            run = partial(inner.compute, computed)
        return PreparedGraph(graph.uid, run, counts, bool(products))
