"""Computes the CPU's experts of a split layer in place, with ggml's own kernels.

The CPU's pairs are gathered and computed with copies of the layer's nodes (forms.py).
Layers of one form share a `HostGraph`. The weights and the number of pairs are written into it
before it is computed. `RowPlacer` copies the resulting rows and their places to the device. There
one SET_ROWS writes the rows into the output of down before any node reads it. So it does not matter
how a model weights and sums its experts. Where kernels use pinned memory, those of layers with a
doorbell (bell_rows.py) and of prompts (prompt_side.py) read `results` without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.alignment import aligned
from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.memory import HostRange
from offload.ggml.rewriting import HostRows, SharedDim, host_copy, of_array
from offload.ggml.tensor import Tensor, new_tensor
from offload.ggml.threads import check, cpu_device
from offload.stream.entries import HostEntry, WeightsEntry
from offload.stream.forms import ExpertForm, NoForm, PairNodes


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

    `results` holds the rows' places in the batch in its first `header_bytes`, then the rows. The
    tokens' rows follow from `inputs_at` on, and for prompts numbers of rows from `wanted_at` on.
    `entry` describes the graph to the player, which chooses the pairs.
    """

    def __init__(
        self, form: ExpertForm, most: int, device: Device, n_rows: int | None = None
    ) -> None:
        """Make the graph, with pinned memory for `device` if there is any. Raises DoesNotFit.

        The rows of a batch's tokens are put into `inputs_of`. `n_rows`: most rows of a prompt, from
        which the graph gathers those of the pairs; None: at most `most`, and the player does it.
        """
        cpu = cpu_device()
        self.most, self.n_rows = most, n_rows or most
        self.n_out = form.down.node.shape[0]
        n_in, self._rows_per_token, _, _ = form.inputs.shape
        self.row_bytes = 4 * n_in  # of a token's row
        self.header_bytes = aligned(4 * most)
        self.inputs_at = inputs_at = form.pairs.placed_bytes(most)
        size_bytes, others_bytes = form.pairs.host_bytes(most, n_rows)
        pinned = device.pinned_memory(size_bytes)
        self.is_pinned = pinned is not None
        self.results = pinned or cpu.allocate(size_bytes, "rows of experts")
        self._inputs = HostRows(self.results, inputs_at, n_rows or most, n_in, "f32")
        self.wanted_at = inputs_at + self._inputs.memory.size_bytes
        sizes = [4 * n_in * most, *[4 * most for _ in (0, *form.scales)]]
        sizes += [] if n_rows is None else [4 * most]
        offsets = np.cumsum([0, *map(aligned, sizes)]).tolist()
        self._memory = cpu.allocate(others_bytes, "rows of experts")
        self._rows = HostRows(self._memory, offsets[0], most, n_in, "f32")
        self._ids = HostRows(self._memory, offsets[1], most, 0, "i32")
        scales = [
            HostRows(self._memory, at, most, 1, "f32") for at in offsets[2 : 2 + len(form.scales)]
        ]
        self._scales = scales
        self._count = count = SharedDim()
        count.follows(self._ids.tensor, 1)
        made = {form.inputs: count.follows(self._rows.tensor, 2), form.ids: self._ids.tensor}
        for (factor, _), scale in zip(form.scales, scales, strict=True):
            made[factor] = count.follows(scale.tensor, 2)
        twins = PairNodes(
            form, most, count, made, (self._memory, offsets[-1]), (self.results, self.header_bytes)
        )
        self._row_numbers: HostRows | None = None  # each pair's row among those of the tokens
        gathering: list[Tensor] = []
        if n_rows is not None:
            self._wanted = HostRows(self.results, self.wanted_at, n_rows, 0, "i32")
            self._row_numbers = HostRows(self._memory, offsets[-2], most, 0, "i32")
            rows = new_tensor("f32", (n_in, n_rows, 1, 1), (self.results, inputs_at))
            numbers = new_tensor("i32", (most, 1, 1, 1), (self._memory, offsets[-2]))
            at = self._memory, offsets[0]
            node = new_tensor("f32", (n_in, most, 1, 1), at, "GET_ROWS", [rows, numbers])
            count.follows(numbers, 0)
            gathering = [count.follows(node, 1)]
        self.graph = Graph.of([*gathering, *twins.nodes])
        self._sources, self._down = twins.sources, twins.down
        self._places = HostRows(self.results, 0, most, 0, "i32")
        self.entry = HostEntry(
            self.graph, count, twins.sources, scales, self._ids, self._places, self._inputs,
            self._rows, self._rows_per_token, twins.down,
        )  # fmt: skip

    def inputs_of(self, n_tokens: int) -> HostRange:
        """Return memory for the rows that the layer's products read."""
        return self._inputs.first(n_tokens * self._rows_per_token)

    def want(self, rows: NDArray[np.int32]) -> None:
        """Write the numbers of the prompt's rows that a kernel is to gather into `inputs_of`.

        The device may read them until it has gathered the rows.
        """
        self._wanted.array[: len(rows)] = rows

    def fill(self, weights: LayerWeights, ids: NDArray[np.int32], pairs: NDArray[np.intp]) -> None:
        """Choose the pairs to compute next. `pairs`: indices into `ids` [n_tokens, n_used]."""
        self.entry.fill(weights.entry, ids, pairs)

    def choose(
        self,
        weights: LayerWeights,
        experts: NDArray[np.int32],
        rows: NDArray[np.int32],
        first: int = 0,
    ) -> None:
        """Choose a prompt's pairs to compute next: each one's expert, and number of its row.

        Their results come after those of `first` other pairs.
        """
        assert self._row_numbers is not None, "the player chooses the pairs of small batches"
        n = len(experts)
        self._ids.array[:n] = experts
        self._row_numbers.array[:n] = rows
        for scale, values in zip(self._scales, weights.scales, strict=True):
            scale.array[:n, 0] = values[experts]
        for source, weight in zip(self._sources, weights.sources, strict=True):
            source.to(weight)
        self._count.set(n)
        self._down.lie_from(self.results, self.header_bytes + 4 * self.n_out * first)

    def place(self, pairs: NDArray[np.int32]) -> None:
        """Write the places of the results into the header. `pairs`: indices into the batch's ids.

        The device may read it until it has placed the results.
        """
        self._places.array[: len(pairs)] = pairs

    def results_of(self, first: int, n: int) -> HostRange:
        """Return the memory of `n` pairs' results."""
        row_bytes = 4 * self.n_out
        memory = self.results.host_range
        return memory.part(self.header_bytes + first * row_bytes, n * row_bytes)

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
        n_rows, n_into = SharedDim(), SharedDim()
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
    may_repeat: bool  # True if a token may name a slot twice (offload/stream/slot_ids.py)
