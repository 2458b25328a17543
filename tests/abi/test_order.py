"""In handmade graphs, nodes that do not need the rows computed by the CPU are computed first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from offload.ggml.backend import Device, Stream
from offload.ggml.graph import Graph
from offload.ggml.tensor import Buffer, Relocation, Tensor, new_tensor
from offload.ggml.threads import cpu_device
from offload.stream.nodes_ahead import Behind, Ordered, Orderer

_N = 8
_ROW_BYTES = 256


class Memory:
    """Rows of numbers, and nodes that compute in them."""

    def __init__(self, device: Device) -> None:
        self.buffer: Buffer = device.allocate(16 * _ROW_BYTES, "rows")

    def leaf(self, row: int) -> Tensor:
        return new_tensor("f32", (_N, 1, 1, 1), (self.buffer, row * _ROW_BYTES))

    def sum(self, row: int, *of: Tensor) -> Tensor:
        return self.leaf(row).computing("ADD", of)

    def numbers(self) -> NDArray[np.float32]:
        numbers = self.buffer.host_range.array().view(np.float32)
        return numbers[: 16 * _ROW_BYTES // 4].reshape(16, -1)[:, :_N]


@pytest.fixture
def memory() -> Iterator[Memory]:
    made = Memory(cpu_device())
    made.numbers()[:] = 1 + np.arange(16)[:, None]
    yield made
    made.buffer.close()


@pytest.fixture
def orderer() -> Iterator[Orderer]:
    made = Orderer(cpu_device())
    yield made
    made.close()


def count_uses(patch: pytest.MonkeyPatch, nodes: Sequence[Tensor]) -> None:
    """Make `Graph.use_count` answer as if ggml had built a graph of these nodes."""
    uses = Counter(source for node in nodes for source in node.sources)
    patch.setattr(Graph, "use_count", lambda _, node: uses[node])


def computed(stream: Stream, memory: Memory, ordered: Ordered, row: int) -> NDArray[np.float32]:
    ordered.relocation.there()
    try:
        assert stream.compute(ordered.graph) == 0
        stream.synchronize()
    finally:
        ordered.relocation.back()
    return memory.numbers()[row].copy()


@pytest.mark.parametrize("written_through", [False, True])
def test_a_view_of_a_result_lies_elsewhere_with_it(
    memory: Memory, orderer: Orderer, monkeypatch: pytest.MonkeyPatch, written_through: bool
) -> None:
    """`result` reads only row 0, but is written to the memory that `after` still reads.

    So `result` is computed before `after`, into other memory, and its view moves with it. If
    another node writes into `result` through the view, `result` keeps its memory and its place.
    """
    one = memory.leaf(0)
    product = memory.sum(1, one, memory.leaf(3))
    after = memory.sum(1, product, memory.leaf(2))
    result = memory.sum(2, one, one)
    view = result.viewed(result.shape, result.strides)
    nodes = [product, after, result, view]
    if written_through:
        target = view.computing("CPY", [memory.leaf(5), view])
        target._struct.view_src = result.address
        nodes.append(target)
    nodes.append(memory.sum(6, view, view))
    nodes.append(memory.sum(7, after, nodes[-1]))
    count_uses(monkeypatch, nodes)
    stream = cpu_device().open()
    try:
        before = memory.numbers().copy()
        expected = computed(stream, memory, Ordered(Graph.of(nodes), (), Relocation()), 7)
        memory.numbers()[:] = before
        ordered = orderer.order(Graph.of(nodes), [Behind(0, 0, len(nodes), 1)])
        assert np.array_equal(computed(stream, memory, ordered, 7), expected)
        if written_through:
            assert ordered.ahead[0].n_nodes == 0
            assert not ordered.relocation.n_pointers
        else:
            assert ordered.graph.nodes() == [product, result, view, nodes[4], after, nodes[5]]
            assert ordered.ahead[0] == (3, 2, 3)
            assert orderer.device_bytes > 0
        assert [node.position for node in nodes[2:4]] == [memory.leaf(2).position] * 2
    finally:
        stream.close()


def test_what_reads_indices_or_writes_through_a_view_is_not_computed_again(
    memory: Memory, orderer: Orderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a node would read other values the second time. The node itself still goes ahead."""
    one, index = memory.leaf(0), new_tensor("i32", (1, 1, 1, 1), (memory.buffer, 9 * _ROW_BYTES))
    product = memory.sum(1, one, one)
    after = memory.sum(1, product, one)
    result = memory.sum(2, one, one)
    row = memory.leaf(4).computing("GET_ROWS", [one, index])
    kept = memory.leaf(5).viewed((_N, 1, 1, 1), one.strides)
    stored = kept.computing("CPY", [one, kept])
    for last, n_repeatable in ((row, 1), (stored, 1), (memory.sum(6, one, result), 2)):
        nodes = [product, after, result, last, memory.sum(7, after, last)]
        count_uses(monkeypatch, nodes)
        ordered = orderer.order(Graph.of(nodes), [Behind(0, 0, len(nodes), 1)])
        assert ordered.graph.nodes() == [product, result, last, after, nodes[4]]
        assert ordered.ahead[0] == (2, 2, n_repeatable)


@pytest.mark.parametrize("last_reads", [False, True])
def test_a_client_s_graph_is_ordered_by_its_own_sources(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, last_reads: bool
) -> None:
    """A worker's next graph may have the same operations, which read other tensors, or none."""
    orderer = Orderer(cpu_device(), is_foreign=True)
    one = memory.leaf(0)
    product = memory.sum(1, one, one)
    after, alone = memory.sum(1, product, one), memory.sum(2, one, one)
    for reads in (not last_reads, last_reads):
        sources = [one, product if reads else one]
        last = memory.leaf(4).computing("ADD", sources)
        nodes = [product, after, alone, last, memory.sum(7, after, last)]
        count_uses(monkeypatch, nodes)
        ordered = orderer.order(Graph.of(nodes), [Behind(0, 0, len(nodes), 1)])
        ahead = [alone] if reads else [alone, last]
        behind = [after, last] if reads else [after]
        assert ordered.graph.nodes() == [product, *ahead, *behind, nodes[4]]
    orderer.close()
