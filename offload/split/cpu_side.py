"""Computes the CPU's experts of a split layer in place, with ggml's own kernels.

The result of a pair (token, expert) depends only on the token's row and the expert's weights. Its
nodes are gate and up, the nodes that join them, and down. `find_form` finds these nodes by going
back from down, so their order in the graph does not matter.

ggml's product with experts cannot skip a pair. So the CPU's P pairs are gathered, each as one token
that uses one expert, and are computed with nodes like the model's own:

    rows [n_in, 1, P], ids [1, P] -> gate, up, joining nodes, down -> rows [n_out, 1, P]

Layers of one form share a `HostGraph`. The weights and the number of pairs are written into it
before it is computed. `RowPlacer` copies the resulting rows and their places to the device. There
one SET_ROWS writes the rows into the output of down before any node reads it. So it does not matter
how a model weights and sums its experts.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.memory import HostRange
from offload.ggml.rewriting import Count, HostRows, aligned, host_copy, is_any, of_array
from offload.ggml.tensor import Buffer, Redirect, Tensor, new_tensor
from offload.ggml.threads import check, cpu_device
from offload.player.entries import HostEntry, WeightsEntry

_JOINING = ("GLU", "UNARY", "SCALE", "CLAMP", "SQR", "MUL", "ADD")
_SAME = ("RESHAPE", "REPEAT", "VIEW", "CONT")  # operations between a scale and its weight
_MOST_SAME = 3  # longest chain of `_SAME` nodes, because Graph.state covers no longer one


class NoForm(Exception):
    """A layer cannot be split. The message gives the reason."""


@dataclass(frozen=True)
class ExpertForm:
    """The nodes that compute a layer's rows. Each comes after those it reads, and down is last."""

    nodes: tuple[Tensor, ...]
    products: tuple[Product, ...]  # in the graph's order; the last is down
    inputs: Tensor  # rows that gate and up read: [n_in, 1 or n_used, n_tokens]
    ids: Tensor
    biases: tuple[Tensor, ...]  # biases that the ADD_ID nodes of `nodes` add, in order
    scales: tuple[tuple[Tensor, Tensor], ...]  # each factor that a MUL reads, and its weight

    @property
    def down(self) -> Product:
        return self.products[-1]

    @property
    def key(self) -> Hashable:
        """A key that is equal for layers that differ only in their weights."""
        number = {self.inputs: -1, self.ids: -2}
        number |= {factor: -3 - i for i, (factor, _) in enumerate(self.scales)}
        number |= {node: i for i, node in enumerate(self.nodes)}
        return (
            self.inputs.shape[:2],
            tuple(number[product.node] for product in self.products),
            tuple(
                (
                    node.operation, node.type, node.shape[0], node.parameters,
                    tuple(number.get(source) for source in node.sources),
                    node.position - node.sources[0].position if node.is_op("VIEW") else 0,
                )
                for node in self.nodes
            ),
        )  # fmt: skip


def find_form(graph: Graph, products: Sequence[Product]) -> ExpertForm:
    """Return the form of a layer. `products` are in the graph's order. Raises NoForm."""
    finder = _Finder(products)
    down = products[-1]
    joined = down.node.source(1)
    if len(products) < 2 or joined is None:
        raise NoForm("it has one product with experts")
    finder.visit(joined)
    missing = [p.weight.name for p in products[:-1] if p.node not in finder.uses]
    if missing:
        raise NoForm(f"its last product does not read what {missing[0]} computes")
    inputs = products[0].node.source(1)
    assert inputs is not None
    if any(p.node.source(1) != inputs for p in products[:-1]):
        raise NoForm("its first products read different rows")
    if inputs.type != "f32" or not inputs.is_contiguous or not down.node.is_contiguous:
        raise NoForm("its rows are not contiguous f32 numbers")
    for node, n_uses in finder.uses.items():
        if node.is_output or graph.use_count(node) not in (n_uses, -1):
            raise NoForm(f"others read {node.name or 'what is between its products'}")
    return ExpertForm(
        (*finder.nodes, down.node),
        tuple(products),
        inputs,
        finder.ids,
        tuple(node.sources[1] for node in finder.nodes if node.is_op("ADD_ID")),
        tuple(finder.scales),
    )


class _Finder:
    """Collects the nodes between a layer's products, going back from down."""

    def __init__(self, products: Sequence[Product]) -> None:
        self._products = {product.node for product in products[:-1]}
        ids = products[0].ids
        assert ids is not None
        self.ids = ids
        self.nodes: list[Tensor] = []
        self.uses: dict[Tensor, int] = {}
        self.scales: list[tuple[Tensor, Tensor]] = []

    def visit(self, node: Tensor) -> None:
        self.uses[node] = self.uses.get(node, 0) + 1
        if self.uses[node] > 1:
            return
        if node not in self._products:
            for source in self._sources_by_pair(node):
                self.visit(source)
        self.nodes.append(node)

    def _sources_by_pair(self, node: Tensor) -> list[Tensor]:
        """Return the sources that are computed for each pair, and note biases and scales."""
        sources = node.sources
        if node.is_op("ADD_ID"):
            values, bias, ids = sources
            if ids != self.ids or bias.type != "f32" or not bias.is_contiguous:
                raise NoForm(f"{node.name} adds something else than a bias of each expert")
            return [values]
        if node.is_op("VIEW"):
            if node.strides[1:3] != sources[0].strides[1:3]:
                raise NoForm(f"{node.name} is a view across rows")
            return sources
        if node.is_op("MUL") and (weight := self._scale(sources[1])) is not None:
            self.scales.append((sources[1], weight))
            return [sources[0]]
        if not is_any(node, _JOINING):
            raise NoForm(f"{node.name or 'a node'} between its products does something unknown")
        return sources

    def _scale(self, factor: Tensor) -> Tensor | None:
        """Return the weight [n_experts] from which a MUL's factor is taken, or None."""
        if not factor.is_op("GET_ROWS") or factor.source(1) != self.ids or factor.shape[0] != 1:
            return None
        found = factor.source(0)
        for _ in range(_MOST_SAME):
            if found is not None and is_any(found, _SAME):
                found = found.source(0)
        if found is None or not found.is_op("NONE") or found.type != "f32":
            return None
        return found


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights and scales of a layer. Layers of one form differ only in these."""

    layer: int
    sources: tuple[Tensor, ...]  # weights of the products, then biases
    scales: tuple[NDArray[np.float32], ...]  # [n_experts] each
    copies: tuple[NDArray[np.float32], ...]  # memory of sources that were read back
    entry: WeightsEntry


def layer_weights(form: ExpertForm, layer: int) -> LayerWeights:
    """Return the weights of a layer of this form. Reads back those that are on a device."""
    copies: list[NDArray[np.float32]] = []
    sources = [product.weight for product in form.products]
    for bias in form.biases:
        if bias.is_on_host:
            sources.append(bias)
            continue
        copies.append(host_copy(bias))
        sources.append(of_array(copies[-1], bias))
    scales = tuple(host_copy(weight) for _, weight in form.scales)
    return LayerWeights(layer, tuple(sources), scales, tuple(copies), WeightsEntry(sources, scales))


class HostGraph:
    """Computes up to `most` pairs of any layer of one form.

    `results` holds the rows' places in the batch in its first `header_bytes`, then the rows.
    `entry` describes the graph to the player, which chooses the pairs.
    """

    def __init__(self, form: ExpertForm, most: int, device: Device) -> None:
        """Make the graph, with pinned memory for `device` if there is any. Raises DoesNotFit."""
        cpu = cpu_device()
        self.most = most
        self.n_out = form.down.node.shape[0]
        n_in, self._rows_per_token, _, _ = form.inputs.shape
        self._count = Count()
        self.header_bytes = aligned(4 * most)
        inputs_at = self.header_bytes + aligned(4 * self.n_out * most)
        size_bytes = inputs_at + 4 * n_in * most
        pinned = device.pinned_memory(size_bytes)
        self.results = pinned or cpu.allocate(size_bytes, "rows of experts")
        self._inputs = HostRows(self.results, inputs_at, most, n_in, "f32")
        sizes = [4 * n_in * most, 4 * most, *[4 * most for _ in form.scales]]
        sizes += [4 * node.shape[0] * most for node in form.nodes]
        offsets = np.cumsum([0, *map(aligned, sizes)]).tolist()
        self._memory = cpu.allocate(offsets[-1], "rows of experts")
        self._rows = HostRows(self._memory, offsets[0], most, n_in, "f32")
        self._ids = HostRows(self._memory, offsets[1], most, 0, "i32")
        n = 2 + len(form.scales)
        self._scales = [HostRows(self._memory, at, most, 1, "f32") for at in offsets[2:n]]
        self._build(form, offsets[n:])
        self.entry = HostEntry(
            self.graph, self._count, self._sources, self._scales, self._ids,
            HostRows(self.results, 0, most, 0, "i32"), self._inputs, self._rows,
            self._rows_per_token, self._down,
        )  # fmt: skip

    def _build(self, form: ExpertForm, offsets: Sequence[int]) -> None:
        """Make a copy (twin) of each node of the form, with its result at one of the offsets."""
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
        self._down = made[form.down.node]
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
        """Return a view of a part of each row of `whole`, the twin of the node's source."""
        offset = node.position - node.sources[0].position
        at = self._memory, whole.position - self._memory.base + offset
        shape = node.shape[0], 1, self.most, 1
        return node.alike(shape, whole.strides, at=at, sources=[whole])

    def inputs_of(self, n_tokens: int) -> HostRange:
        """Return memory for the rows that the layer's products read."""
        return self._inputs.first(n_tokens * self._rows_per_token)

    def fill(self, weights: LayerWeights, ids: NDArray[np.int32], pairs: NDArray[np.intp]) -> None:
        """Choose the pairs to compute next. `pairs`: indices into `ids` [n_tokens, n_used]."""
        self.entry.fill(weights.entry, ids, pairs)

    def compute(self, stream: Stream, layer: int) -> int:
        """Compute the chosen pairs. Return a ggml_status. Raises DeviceFailed."""
        status = stream.compute(self.graph)  # the CPU's streams compute before they return
        return check(status, f"computing experts of layer {layer} on the CPU")

    def close(self) -> None:
        self.results.close()
        self._memory.close()


class RowPlacer:
    """Memory and a graph to write the rows of one host graph into the output of a layer.

    The player copies the first rows, and computes the graph.
    """

    def __init__(self, host: HostGraph, device: Device) -> None:
        """Raises DoesNotFit, and NoForm if the device cannot set rows."""
        most, n_out, header_bytes = host.most, host.n_out, host.header_bytes
        size_bytes = header_bytes + 4 * n_out * most
        self._staging = device.allocate(size_bytes, "rows of experts from the CPU")
        staging = new_tensor("i8", (size_bytes, 1, 1, 1), (self._staging, 0))
        places = new_tensor("i32", (most, 1, 1, 1), (self._staging, 0))
        rows = new_tensor("f32", (n_out, most, 1, 1), (self._staging, header_bytes))
        into = new_tensor("f32", (n_out, most, 1, 1), (self._staging, header_bytes))
        node = into.computing("SET_ROWS", [rows, places, into])
        if not device.supports(node):
            self.close()
            raise NoForm(f"{device.name} cannot put rows into a product's output")
        n_rows, n_into = Count(), Count()
        n_rows.follows(places, 0)
        n_rows.follows(rows, 1)
        n_into.follows(into, 1)
        n_into.follows(node, 1)
        graph = Graph.of([node])
        host.entry.place_by(
            graph, staging, host.results, header_bytes, 4 * n_out, n_rows, n_into, into, node
        )

    @property
    def size_bytes(self) -> int:
        return self._staging.size_bytes

    def close(self) -> None:
        self._staging.close()


@dataclass(slots=True)
class SplitLayer:
    """A layer of one graph that is split each time the graph is computed."""

    weights: LayerWeights
    host: HostGraph
    inputs: Tensor
    read_to: HostRange  # memory that the inputs are fetched to
    output: Tensor
    n_tokens: int
    shares: tuple[float, ...]  # each product's share of an expert's bytes
    may_repeat: bool  # True if a token may name a slot twice (offload/streaming/slot_ids.py)
    ends_s: float = 0.0  # clock time at which the device's products end, if it has a pace
