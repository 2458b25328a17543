"""A layer's experts on the CPU, in place: ggml's own kernels, a pair (token, expert) for a token.

ggml's product with experts has no way to leave a pair out. So the pairs that the CPU computes are
put together: each is one token that uses one expert,

    rows [n_in, 1, P], ids [1, P] -> gate, up, what joins them, down -> rows [n_out, 1, P]

with nodes like the model's own and their parameters. Layers of one form share one graph; the
weights and the number of pairs are written into it before it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.memory import HostRange
from offload.ggml.pairs import Count, HostRows, host_copy, of_array
from offload.ggml.tensor import Buffer, Redirect, Tensor
from offload.ggml.threads import check, cpu_device
from offload.split.form import Form

_ALIGNMENT = 256


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """Weights and scales: all that differs from layer to layer of one form."""

    layer: int
    sources: tuple[Tensor, ...]  # weights of the products, then biases
    scales: tuple[NDArray[np.float32], ...]  # [n_experts] each
    copies: tuple[NDArray[np.float32], ...]  # the memory of sources that were read back


def layer_weights(form: Form, layer: int) -> LayerWeights:
    """Of the layer whose form this is. What lies on a device is read back, once."""
    copies: list[NDArray[np.float32]] = []
    sources = [product.weight for product in form.products]
    for bias in form.biases:
        if bias.is_on_host:
            sources.append(bias)
            continue
        copies.append(host_copy(bias))
        sources.append(of_array(copies[-1], bias))
    scales = tuple(host_copy(weight) for _, weight in form.scales)
    return LayerWeights(layer, tuple(sources), scales, tuple(copies))


class HostGraph:
    """Computes up to `most` pairs of any layer of one form.

    `results`: the places of the rows in the batch and, behind `header_bytes`, the rows themselves.
    """

    def __init__(self, form: Form, most: int, device: Device) -> None:
        """Rows that go to `device` or come from it lie in memory that it copies directly, where
        there is such. Raises DoesNotFit."""
        cpu = cpu_device()
        self.most = most
        self.n_out = form.down.node.shape[0]
        n_in, self._rows_per_token, _, _ = form.inputs.shape
        self._count = Count()
        self.header_bytes = _aligned(4 * most)
        inputs_at = self.header_bytes + _aligned(4 * self.n_out * most)
        size_bytes = inputs_at + 4 * n_in * most
        pinned = device.pinned_memory(size_bytes)
        self.results = pinned or cpu.allocate(size_bytes, "rows of experts")
        self._places = HostRows(self.results, 0, most, 0, "i32").array
        self._inputs = HostRows(self.results, inputs_at, most, n_in, "f32")
        sizes = [4 * n_in * most, 4 * most, *[4 * most for _ in form.scales]]
        sizes += [4 * node.shape[0] * most for node in form.nodes]
        offsets = np.cumsum([0, *map(_aligned, sizes)]).tolist()
        self._memory = cpu.allocate(offsets[-1], "rows of experts")
        self._rows = HostRows(self._memory, offsets[0], most, n_in, "f32")
        self._ids = HostRows(self._memory, offsets[1], most, 0, "i32")
        n = 2 + len(form.scales)
        self._scales = [HostRows(self._memory, at, most, 1, "f32") for at in offsets[2:n]]
        self._build(form, offsets[n:])

    def _build(self, form: Form, offsets: Sequence[int]) -> None:
        """Twins of the form's nodes, each of them at one of the offsets."""
        count = self._count
        count.follows(self._ids.tensor, 1)
        made = {form.inputs: count.follows(self._rows.tensor, 2), form.ids: self._ids.tensor}
        for (factor, _), scale in zip(form.scales, self._scales, strict=True):
            made[factor] = count.follows(scale.tensor, 2)
        for node, at in zip(form.nodes, offsets[:-1], strict=True):
            if node.is_op("VIEW"):
                twin = self._view(node, made[node.sources[0]])
            elif node == form.down.node:
                twin = self._twin(node, made, (self.results, self.header_bytes))
            else:
                twin = self._twin(node, made, (self._memory, at))
            made[node] = count.follows(twin, 2)
        self.graph = Graph.of([made[node] for node in form.nodes])
        self._sources = [Redirect(made[product.node], 0) for product in form.products]
        adds = [made[node] for node in form.nodes if node.is_op("ADD_ID")]
        self._sources += [Redirect(add, 1) for add in adds]

    def _twin(self, node: Tensor, made: dict[Tensor, Tensor], at: tuple[Buffer, int]) -> Tensor:
        sources = [made.get(source, source) for source in node.sources]
        row = 4 * node.shape[0]
        shape, strides = (node.shape[0], 1, self.most, 1), (4, row, row, row * self.most)
        return node.alike(shape, strides, at=at, sources=sources)

    def _view(self, node: Tensor, whole: Tensor) -> Tensor:
        """A part of each row of `whole`, the twin of what the node sees."""
        offset = node.position - node.sources[0].position
        at = self._memory, whole.position - self._memory.base + offset
        shape = node.shape[0], 1, self.most, 1
        return node.alike(shape, whole.strides, at=at, sources=[whole])

    def inputs_of(self, n_tokens: int) -> HostRange:
        """Memory for the rows that the layer's products read."""
        return self._inputs.first(n_tokens * self._rows_per_token)

    def fill(self, weights: LayerWeights, ids: NDArray[np.int32], pairs: NDArray[np.intp]) -> None:
        """Have these pairs computed next, counted through `ids` [n_tokens, n_used]."""
        n = len(pairs)
        self._count.set(n)
        experts = ids.ravel()[pairs]
        self._ids.array[:n] = experts
        self._places[:n] = pairs
        rows = pairs if self._rows_per_token > 1 else pairs // ids.shape[1]
        self._inputs.array.take(rows, axis=0, out=self._rows.array[:n], mode="clip")
        for table, scale in zip(weights.scales, self._scales, strict=True):
            scale.array[:n, 0] = table[experts]
        for redirect, source in zip(self._sources, weights.sources, strict=True):
            redirect.to(source)

    def compute(self, stream: Stream, layer: int) -> int:
        """Compute what was filled in; a ggml_status. Raises DeviceFailed."""
        status = stream.compute(self.graph)  # the CPU's streams compute before they return
        return check(status, f"computing experts of layer {layer} on the CPU")

    def close(self) -> None:
        self.results.close()
        self._memory.close()


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
