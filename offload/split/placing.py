"""Rows that the CPU computed, put into the output of a layer's last product on the device.

They cross the link in one copy with their places, and one SET_ROWS puts them there before anything
reads that output. So how a model weights and sums its experts does not matter.
"""

from __future__ import annotations

from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.pairs import Count, Place, Stamp
from offload.ggml.tensor import Tensor, new_tensor
from offload.ggml.threads import check
from offload.split.form import NoForm
from offload.split.host_graph import HostGraph


class RowPlacer:
    """Places rows that one host graph computed. Its structures are read when they are submitted."""

    def __init__(self, host: HostGraph, device: Device) -> None:
        """Raises DoesNotFit, NoForm where the device cannot set rows."""
        most, n_out, header_bytes = host.most, host.n_out, host.header_bytes
        self._row_bytes, self._header_bytes = 4 * n_out, header_bytes
        size_bytes = header_bytes + self._row_bytes * most
        self._staging = device.allocate(size_bytes, "rows of experts from the CPU")
        self._source = new_tensor("i8", (size_bytes, 1, 1, 1), (host.results, 0))
        self._target = new_tensor("i8", (size_bytes, 1, 1, 1), (self._staging, 0))
        places = new_tensor("i32", (most, 1, 1, 1), (self._staging, 0))
        rows = new_tensor("f32", (n_out, most, 1, 1), (self._staging, header_bytes))
        into = new_tensor("f32", (n_out, most, 1, 1), (self._staging, header_bytes))
        node = into.computing("SET_ROWS", [rows, places, into])
        self._n, self._n_into = Count(), Count()
        self._n.follows(places, 0)
        self._n.follows(rows, 1)
        self._n_into.follows(into, 1)
        self._n_into.follows(node, 1)
        self._where = Place(into), Place(node)
        self._stamp = Stamp(node)
        self._graph = Graph.of([node])
        if not device.supports(node):
            self.close()
            raise NoForm(f"{device.name} cannot put rows into a product's output")

    @property
    def size_bytes(self) -> int:
        return self._staging.size_bytes

    def place(self, stream: Stream, n: int, output: Tensor, layer: int) -> int:
        """Enqueue it for the first `n` rows; a ggml_status. `output`: [n_out, n_used, n_tokens].

        Raises DeviceFailed.
        """
        size_bytes = self._header_bytes + n * self._row_bytes
        stream.copy(self._target, 0, self._source, 0, size_bytes)
        _, n_used, n_tokens, _ = output.shape
        self._n.set(n)
        self._n_into.set(n_used * n_tokens)
        for place in self._where:
            place.of(output)
        self._stamp.change()
        return check(stream.compute(self._graph), f"placing experts' rows of layer {layer}")

    def close(self) -> None:
        self._staging.close()
