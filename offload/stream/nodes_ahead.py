"""Finds nodes that the device can compute before the CPU's rows of a split layer arrive.

In llama.cpp's graph, a layer's shared expert comes after the weighting and the sum of the other
experts. These two wait for the CPU's rows. The shared expert does not read those rows, so the
device can compute it directly after the layer's last product, while the CPU works.

ggml assigns memory by node order, so two nodes may write the same bytes at different times. A node
may go before others only if it reads nothing that they write, and writes nothing that they read or
write. If only the address of its result is in conflict, the result gets other memory, provided that
all nodes that read the result are known.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.alignment import aligned
from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.library.lib import op_number
from offload.ggml.rewriting import VIEWS, Scratch
from offload.ggml.tensor import (
    Relocation,
    Tensor,
    buffer_at,
    data_at,
    op_at,
    root_at,
    size_at,
    source_at,
    sources_at,
)

_BESIDE = 20  # nodes searched after the last product, besides a view and a sum for each expert
_INTEGERS = ("i8", "i16", "i32", "i64")


class ByteSpan(NamedTuple):
    """Bytes [first, end) of a buffer."""

    buffer: int
    first: int
    end: int


class Access(NamedTuple):
    """The numbers of the tensors that a node writes and reads."""

    tensor: int  # the node's result
    reads: tuple[int, ...]  # the node's sources
    computes: bool = True  # False: the node is a view and computes nothing
    can_lie_elsewhere: bool = False  # True if only nodes of the list read the result or its views


class Chosen(NamedTuple):
    """Positions in a list of nodes."""

    first: tuple[int, ...]  # nodes computed before all others, in this order
    elsewhere: tuple[int, ...]  # those of them whose results need other memory

    def order(self, n: int) -> list[int]:
        """Return the positions of all `n` nodes in the order in which they are computed."""
        chosen = set(self.first)
        return [*self.first, *(i for i in range(n) if i not in chosen)]


def nodes_ahead(
    late: ByteSpan, nodes: Sequence[Access], roots: Sequence[int], spans: Sequence[ByteSpan]
) -> Chosen:
    """Return the nodes that may be computed before `late` is written and before all other nodes.

    The nodes that go first keep their order, and so do the others. All results stay the same.
    `roots[t]` is the tensor whose memory tensor t uses, or t itself if t is no view. `spans[t]` is
    the range of bytes of tensor t.
    """
    first: list[int] = []
    elsewhere: list[int] = []
    read: list[ByteSpan] = []  # bytes read by nodes that do not go ahead
    written = [late]
    results: set[int] = set()  # results of nodes that go first
    moved: set[int] = set()  # results with other memory, whose bytes no longer count
    for position, node in enumerate(nodes):
        if not node.computes:
            if roots[node.tensor] in results:
                first.append(position)
            continue
        reads = [spans[tensor] for tensor in node.reads if roots[tensor] not in moved]
        goes = not _overlap(reads, written)
        if goes and _overlap((spans[node.tensor],), [*read, *written]):
            goes = node.can_lie_elsewhere
            if goes:
                elsewhere.append(position)
                moved.add(node.tensor)
        if goes:
            first.append(position)
            results.add(node.tensor)
        else:
            read += reads
            written.append(spans[node.tensor])
    return Chosen(tuple(first), tuple(elsewhere))


def _overlap(some: Iterable[ByteSpan], others: Sequence[ByteSpan]) -> bool:
    for buffer, first, end in some:
        for other, its_first, its_end in others:
            if buffer == other and first < its_end and its_first < end:
                return True
    return False


class Behind(NamedTuple):
    """A layer's last product, and the end of the nodes after it that may be reordered."""

    group: int  # the layer's group of weights
    at: int  # the product's position in the graph
    end: int  # position of the next node that must not be moved
    n_used: int  # experts that a token uses


class NodesAhead(NamedTuple):
    """Counts of the nodes after a layer's last product that need not wait for the CPU's rows."""

    n_nodes: int = 0
    n_computing: int = 0  # nodes that compute: all except views
    n_repeatable: int = 0  # leading nodes that may be computed again at any time


@dataclass(frozen=True)
class Ordered:
    """A reordered copy of a graph, in which some results have other memory."""

    graph: Graph
    ahead: Sequence[NodesAhead]  # one for each layer
    relocation: Relocation  # results that get other memory while the graph is submitted


@dataclass(frozen=True)
class _Nodes:
    """The nodes after a layer's last product, up to the last one that may go ahead.

    Tensors are numbered: the product is 0, then come the nodes, then other tensors that they read.
    """

    nodes: tuple[Access, ...]
    roots: tuple[int, ...]  # roots by tensor number
    outside: tuple[tuple[int, int], ...]  # (node's number, source's index) of each other tensor
    n_uses: tuple[int, ...]  # uses of the product and the nodes, by tensor number
    views: dict[int, tuple[int, ...]]  # views of a result, up to the next cut
    repeatable: tuple[bool, ...]  # by node: True if it may be computed again at any time


class _Move(NamedTuple):
    """The addresses of a result and its views, and the result's place in the scratch memory."""

    addresses: Sequence[int]
    offset_bytes: int
    size_bytes: int


class Orderer:
    """Reorders the graphs of one device."""

    def __init__(self, device: Device, *, is_foreign: bool = False) -> None:
        """`is_foreign`: graphs come from clients. Equal operations may read other tensors there."""
        self._is_foreign = is_foreign
        self._scratch = Scratch(device, "results of shared experts")
        self._known: dict[tuple[int, tuple[int, ...]], _Nodes] = {}  # nodes by group and operations
        self._views = frozenset(map(op_number, VIEWS))

    @property
    def device_bytes(self) -> int:
        return self._scratch.device_bytes

    def close(self) -> None:
        self._scratch.close()

    def order(self, graph: Graph, layers: Sequence[Behind]) -> Ordered:
        """Return the graph with its nodes moved so that the device waits less for the CPU's rows.

        Nodes that do not read the rows come directly after their layer's last product. Raises
        DoesNotFit if there is no memory for moved results.
        """
        addresses = graph.addresses()
        order = addresses.copy()
        ahead: list[NodesAhead] = []
        moves: list[_Move] = []
        for layer in layers:
            reach = layer.at + 1 + 2 * layer.n_used + _BESIDE
            near = addresses[layer.at : min(layer.end, reach)]
            known, chosen, spans = self._choose(graph, layer.group, near)
            n_computing = sum(known.nodes[i].computes for i in chosen.first)
            repeatable = [known.repeatable[i] for i in chosen.first]
            n_repeatable = sum(1 for _ in itertools.takewhile(bool, repeatable))
            ahead.append(NodesAhead(len(chosen.first), n_computing, n_repeatable))
            for to, i in enumerate(chosen.order(len(known.nodes)) if chosen.first else (), 1):
                order[layer.at + to] = near[1 + i]
            offset_bytes = 0  # each layer uses the scratch memory from its start
            for number in (1 + i for i in chosen.elsewhere):
                _, first, end = spans[number]
                together = [near[n] for n in (number, *known.views.get(number, ()))]
                moves.append(_Move(together, offset_bytes, end - first))
                offset_bytes += aligned(end - first)
        if any(of_layer.n_nodes for of_layer in ahead):
            graph = graph.reordered(order)
        relocation = Relocation()
        if moves:
            size_bytes = max(move.offset_bytes + move.size_bytes for move in moves)
            scratch = self._scratch.reserve(size_bytes)
            relocation = Relocation([(m.addresses, m.offset_bytes) for m in moves], scratch)
        return Ordered(graph, ahead, relocation)

    def _choose(
        self, graph: Graph, group: int, near: Sequence[int]
    ) -> tuple[_Nodes, Chosen, Sequence[ByteSpan]]:
        """Choose the nodes of a layer that go ahead, and return them with all tensors' bytes.

        `near`: addresses of the layer's last product and of the nodes after it.
        """
        key = group, tuple(map(op_at, near))
        known = None if self._is_foreign else self._known.get(key)
        if known is not None:
            chosen, spans = _found(known, near)
            results = [1 + i for i in chosen.elsewhere]
            seen = [view for result in results for view in known.views.get(result, ())]
            # No unknown node of this graph may read a result that gets other memory.
            if all(graph.use_count(Tensor(near[n])) == known.n_uses[n] for n in (*results, *seen)):
                return known, chosen, spans
        known = self._learn(graph, near)
        if not self._is_foreign:
            self._known[key] = known
        return known, *_found(known, near)

    def _learn(self, graph: Graph, near: Sequence[int]) -> _Nodes:
        """Analyse a layer's nodes. `near`: addresses of its last product and the nodes after it."""
        numbers = {address: n for n, address in enumerate(near)}
        n_uses = [0] * len(near)
        views: dict[int, list[int]] = {}
        # `depends`: nodes that depend on the product. `taken`: nodes whose memory a later node
        # writes through a view.
        depends, taken = {0}, set[int]()
        last = 0
        for n, address in enumerate(near[1:], 1):
            sources = [numbers[s] for s in sources_at(address) if s in numbers]
            for source in sources:
                n_uses[source] += 1
            if not depends.isdisjoint(sources):
                depends.add(n)
            root = numbers.get(root_at(address), -1)
            if op_at(address) in self._views:
                views.setdefault(root, []).append(n)
                continue
            if root != n:
                taken.add(root)
            if n not in depends:
                last = n
        alone = {
            n
            for n in range(1, last + 1)
            if n not in depends | taken
            and root_at(near[n]) == near[n]  # a write through a view is meant for that memory
            and not Tensor(near[n]).is_output
            and all(graph.use_count(Tensor(near[k])) == n_uses[k] for k in (n, *views.get(n, ())))
        }
        return self._numbered(near[: last + 1], alone, n_uses, views)

    def _numbered(
        self, near: Sequence[int], alone: set[int], n_uses: Sequence[int],
        views: dict[int, list[int]],
    ) -> _Nodes:  # fmt: skip
        numbers = {address: n for n, address in enumerate(near)}
        outside: dict[int, tuple[int, int]] = {}  # (node's number, source's index) by address
        nodes, repeatable = [], []
        for n, address in enumerate(near[1:], 1):
            computes = op_at(address) not in self._views
            for i, source in enumerate(sources_at(address)):
                if source not in numbers:
                    outside.setdefault(source, (n, i))
                    numbers[source] = len(near) + len(outside) - 1
            reads = tuple(numbers[source] for source in sources_at(address))
            nodes.append(Access(n, reads, computes, n in alone))
            repeatable.append(not computes or _is_repeatable(address))
        roots = [numbers.get(root_at(address), -1) for address in (*near, *outside)]
        seen = {result: tuple(of) for result, of in views.items()}
        return _Nodes(
            tuple(nodes), tuple(roots), tuple(outside.values()), tuple(n_uses), seen,
            tuple(repeatable),
        )  # fmt: skip


def _found(known: _Nodes, near: Sequence[int]) -> tuple[Chosen, Sequence[ByteSpan]]:
    """Return the nodes that go ahead, and the byte ranges of this graph's tensors by number."""
    outside = [source_at(near[n], i) for n, i in known.outside]
    spans = []
    for address in (*near[: 1 + len(known.nodes)], *outside):
        first = data_at(address)
        spans.append(ByteSpan(buffer_at(address), first, first + size_at(address)))
    return nodes_ahead(spans[0], known.nodes, known.roots, spans), spans


def _is_repeatable(address: int) -> bool:
    """True if the node does no harm when its sources hold wrong values.

    Wrong integers may be indices out of range, which end the process. A write through a view may
    change data that outlasts the graph, such as the KV cache.
    """
    sources = (Tensor(source).type for source in sources_at(address))
    return root_at(address) == address and not any(kind in _INTEGERS for kind in sources)
