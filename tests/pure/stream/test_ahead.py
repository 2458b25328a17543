"""Nodes moved ahead of others: every node still computes the same as in the graph's own order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from offload.stream.nodes_ahead import Access, ByteSpan, Chosen, nodes_ahead

_CELLS = 24  # cells of memory that random results share
_LATE = -1  # marks the arrival of the CPU's rows in an order


def span(first: int, n: int = 1, buffer: int = 0) -> ByteSpan:
    return ByteSpan(buffer, first, first + n)


@dataclass
class Layer:
    """Nodes, and the tensors that they make and read. `spans` and `roots` are indexed by tensor."""

    nodes: list[Access]
    spans: list[ByteSpan]
    roots: list[int]
    kept: Sequence[int] = ()  # results read by nodes outside the list

    def found(self, late: ByteSpan) -> Chosen:
        return nodes_ahead(late, self.nodes, self.roots, self.spans)


@dataclass
class Machine:
    """Memory in which results overlap. Each cell holds a hash that identifies its writer."""

    layer: Layer
    late: ByteSpan
    moved: Sequence[int] = ()  # results that were moved to another buffer
    cells: dict[tuple[int, int], object] = field(default_factory=dict)

    def run(self, order: Sequence[int]) -> dict[int, int]:
        """Run the nodes in this order.

        Returns the hash of each node's result by node number. The final hash of each kept tensor t
        has the key -1 - t.
        """
        made = {}
        for i in order:
            if i == _LATE:
                self._write(self.late, "late")
                continue
            node = self.layer.nodes[i]
            if node.computes:
                made[i] = hash((i, tuple(self._read(self._place(t)) for t in node.reads)))
                self._write(self._place(node.tensor), made[i])
        return made | {-1 - t: hash(self._read(self.layer.spans[t])) for t in self.layer.kept}

    def _place(self, tensor: int) -> ByteSpan:
        where, root = self.layer.spans[tensor], self.layer.roots[tensor]
        if root not in self.moved:
            return where
        start = self.layer.spans[root].first
        return ByteSpan(1 + root, where.first - start, where.end - start)

    def _read(self, where: ByteSpan) -> object:
        cells = range(where.first, where.end)
        return tuple(self.cells.get((where.buffer, c), ("old", where.buffer, c)) for c in cells)

    def _write(self, where: ByteSpan, value: object) -> None:
        for c in range(where.first, where.end):
            self.cells[where.buffer, c] = value, c - where.first


def assert_same(late: ByteSpan, layer: Layer, found: Chosen) -> None:
    n = len(layer.nodes)
    expected = Machine(layer, late).run([_LATE, *range(n)])
    moved = [layer.nodes[i].tensor for i in found.elsewhere]
    order, k = found.order(n), len(found.first)
    assert sorted(order) == list(range(n))
    assert Machine(layer, late, moved).run([*order[:k], _LATE, *order[k:]]) == expected


spans = st.builds(
    lambda first, n: span(first, min(n, _CELLS - first)),
    st.integers(0, _CELLS - 1),
    st.integers(1, 4),
)


@st.composite
def any_memory(draw: st.DrawFn) -> tuple[ByteSpan, Layer]:
    """Random nodes, whose reads and writes may overlap in any way."""
    nodes: list[Access] = []
    where: list[ByteSpan] = []
    for _ in range(draw(st.integers(0, 10))):
        reads = draw(st.lists(spans, max_size=3))
        numbers = tuple(range(len(where), len(where) + len(reads)))
        where += [*reads, draw(spans)]
        nodes.append(Access(len(where) - 1, numbers))
    everything = [*where, span(0, _CELLS)]
    return draw(spans), Layer(nodes, everything, list(range(len(everything))), [len(where)])


@given(any_memory())
def test_whatever_aliases_the_order_changes_no_node_s_result(case: tuple[ByteSpan, Layer]) -> None:
    late, layer = case
    assert_same(late, layer, layer.found(late))


@dataclass
class _Allocator:
    """Gives results the first free cells, or those of a source (in place), as ggml does."""

    owner: dict[int, int] = field(default_factory=dict)  # cell -> result in it

    def take(self, result: int, n: int) -> ByteSpan:
        first = 0
        while any(first + k in self.owner for k in range(n)):
            first += 1
        return self.hand_over(result, span(first, n))

    def hand_over(self, result: int, where: ByteSpan) -> ByteSpan:
        for c in range(where.first, where.end):
            self.owner[c] = result
        return where

    def free(self, result: int) -> None:
        self.owner = {c: owner for c, owner in self.owner.items() if owner != result}


@st.composite
def allocated(draw: st.DrawFn) -> tuple[ByteSpan, Layer]:
    """A random graph whose results share memory as with ggml's allocator, some of them in place.

    The late rows go into the first result. Results that nodes outside the list read may not move.
    """
    n = draw(st.integers(1, 12))
    sizes = [draw(st.integers(1, 4)) for _ in range(n + 2)]
    sources = [
        draw(st.lists(st.integers(0, i - 1), min_size=1, max_size=2, unique=True))
        for i in range(2, n + 2)
    ]
    kept = draw(st.sets(st.integers(0, n + 1)))
    last = {s: i for i, of in enumerate(sources, 2) for s in of}
    memory = _Allocator()
    where = [memory.take(0, sizes[0]), memory.take(1, sizes[1])]  # `late`, and an input
    nodes = []
    for i, of in enumerate(sources, 2):
        ends = [s for s in of if last[s] == i and s not in kept]
        same = [s for s in ends if sizes[s] == sizes[i]]
        in_place = draw(st.booleans())
        if same and in_place:
            where.append(memory.hand_over(i, where[same[0]]))
        else:
            where.append(memory.take(i, sizes[i]))
        nodes.append(Access(i, tuple(of), can_lie_elsewhere=i not in kept))
        for s in (*ends, *([i] if i not in last and i not in kept else [])):
            memory.free(s)
    return where[0], Layer(nodes, where, list(range(n + 2)), sorted(kept))


@given(allocated())
def test_results_that_lie_elsewhere_are_what_they_were(case: tuple[ByteSpan, Layer]) -> None:
    late, layer = case
    found = layer.found(late)
    assert_same(late, layer, found)
    depends = {0}
    for node in layer.nodes:
        if not depends.isdisjoint(node.reads):
            depends.add(node.tensor)
    first = {layer.nodes[i].tensor for i in found.first}
    assert not first & depends
    if not layer.kept:
        assert first == {node.tensor for node in layer.nodes} - depends, "all that can go first do"


DOWN, WEIGHTED, GATE, UP, GATE_VIEW, GLU, SHARED, SUM, WEIGHTS, ROW = range(10)
