"""Streamed weights the simple way: copy what a node needs, wait, compute, go on.

The slow twin of the scheduled path: no cache, no look-ahead, no overlap. Every other path is tested
to give the same bits as this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import numpy as np

from offload.ggml.backend import RouterIds, SlotIds, Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.tensor import Buffer, Redirect, Tensor
from offload.model import layer_of
from offload.streaming.copy import Copier, Transfer
from offload.streaming.counters import StreamCounters
from offload.streaming.layer_clock import LayerClock
from offload.streaming.prepared import Run
from offload.trace import COMPUTE, NO_TRACE, Trace


class SerialExecutor:
    """Runs graphs with cuts on one stream, through memory for one weight of each type."""

    def __init__(
        self, stream: Stream, copier: Copier | None = None, trace: Trace = NO_TRACE
    ) -> None:
        """`copier` holds the copies to a link; without one they go straight to the stream."""
        self._stream, self._copier, self._trace = stream, copier, trace
        # Kernels read past the last row: what lies there has to be of the same type.
        self._weights: dict[str, Buffer] = {}
        self._ids: Buffer | None = None
        self.counters = StreamCounters()
        self.clock: LayerClock | None = None

    def allocate(self) -> None:
        """Nothing: its memory is for the weights that a graph has."""

    @property
    def working_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self._weights.values())

    def fill(self, uses: Mapping[int, Sequence[int]]) -> Iterator[None]:
        """Nothing: it has no slots."""
        return iter(())

    def take_split(self) -> None:
        """Nothing: it splits no layers."""

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        for buffer in self._weights.values():
            buffer.close()
        self._weights.clear()
        if self._ids is not None:
            self._ids.close()
            self._ids = None

    def prepare(self, graph: Graph, products: Sequence[Product]) -> Run:
        for product in products:
            kind, size_bytes = product.weight.type, product.weight.size_bytes
            what = f"one {kind} weight"
            self._weights[kind] = self._at_least(self._weights.get(kind), size_bytes, what)
            if product.ids is not None:
                self._ids = self._at_least(self._ids, product.ids.size_bytes, "expert ids")
        return partial(self._compute, graph, products)

    def _at_least(self, buffer: Buffer | None, size_bytes: int, what: str) -> Buffer:
        if buffer is not None and size_bytes <= buffer.size_bytes:
            return buffer
        if buffer is not None:
            self._stream.synchronize()
            buffer.close()
        return self._stream.device.allocate(size_bytes, what)

    def _compute(self, graph: Graph, products: Sequence[Product]) -> int:
        self.counters.graphs += 1
        if self._copier is not None:
            self._copier.begin()
        done = 0
        for product in products:
            at = product.index
            status = self._run(graph, done, at)
            if self.clock is not None and not status:
                self._tell(self.clock, layer_of(product.weight.name))
            status = status or self._run_product(graph, product)
            if status:
                return status
            done = at + 1
        return self._run(graph, done, graph.n_nodes)

    def _tell(self, clock: LayerClock, layer: int) -> None:
        if clock.wants(layer):
            self._stream.synchronize()
            clock.reached(layer)

    def _run(self, graph: Graph, first: int, end: int) -> int:
        if first >= end:
            return 0
        start_s = time.perf_counter()
        status = self._stream.compute(graph.part(first, end))
        if self._trace:
            self._trace.add(COMPUTE, f"nodes {first}-{end}", start_s, time.perf_counter())
        return status

    def _run_product(self, graph: Graph, product: Product) -> int:
        # The memory is overwritten: nothing may still be reading what the cut before left there.
        self._stream.synchronize()
        self.counters.cuts += 1
        weight = product.weight
        buffer, matrix_bytes = self._weights[weight.type], weight.strides[2]
        if product.ids is None:
            slots = weight.alike(at=(buffer, 0))
            self._copy(slots, 0, weight, 0, weight.size_bytes)
            return self._run_redirected(graph, product, {0: slots})
        chosen = self._stream.read(RouterIds(product.ids, weight.shape[2]))
        experts, inverse = np.unique(chosen, return_inverse=True)
        n = len(experts)
        n_in, n_out, _, _ = weight.shape
        element, row, _, _ = weight.strides
        strides = element, row, matrix_bytes, matrix_bytes * n
        slots = weight.alike((n_in, n_out, n, 1), strides, at=(buffer, 0))
        for slot, expert in enumerate(experts.tolist()):
            self._copy(slots, slot * matrix_bytes, weight, expert * matrix_bytes, matrix_bytes)
        self.counters.streamed_experts += n
        self.counters.router_reads += 1
        assert self._ids is not None
        ids = SlotIds(product.ids, self._ids, 0, None)
        ids.values[:] = inverse.reshape(chosen.shape)
        self._stream.upload(ids)
        self._stream.synchronize()
        return self._run_redirected(graph, product, {0: slots, 2: ids.tensor})

    def settle(self) -> None:
        if self._copier is not None:
            self._copier.drain()

    def _copy(
        self, target: Tensor, target_bytes: int, source: Tensor, source_bytes: int, size_bytes: int
    ) -> None:
        if self._copier is not None:
            transfer = Transfer(
                target, target_bytes, source, source_bytes, size_bytes, *self._described(source)
            )
            self._copier.copy(transfer, None)
            self._copier.drain()
            self.counters.bounced_bytes = self._copier.bounced_bytes
        else:
            self._stream.copy(target, target_bytes, source, source_bytes, size_bytes)
            self._stream.synchronize()
        self.counters.copies += 1
        self.counters.streamed_bytes += size_bytes

    def _described(self, weight: Tensor) -> tuple[str, dict[str, int | str]]:
        """A copy's name and details, for the trace."""
        if not self._trace:
            return "", {}
        name = weight.name
        return name, {"layer": layer_of(name), "reason": "needed", "graph": self.counters.graphs}

    def _run_redirected(self, graph: Graph, product: Product, targets: dict[int, Tensor]) -> int:
        redirects = [Redirect(product.node, index) for index in targets]
        for redirect, target in zip(redirects, targets.values(), strict=True):
            redirect.to(target)
        try:
            status = self._run(graph, product.index, product.index + 1)
            self._stream.synchronize()  # `targets` end here
        finally:
            for redirect in redirects:
                redirect.back()
        return status
