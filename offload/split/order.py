"""The order of a graph in which a split layer's device has work while the CPU computes.

llama.cpp builds a layer's shared expert behind the weighting and the sum of the others, which wait
for the CPU's rows; yet it reads nothing of theirs. Directly behind the layer's last product it is
computed meanwhile, as is whatever else may go there (offload/split/ahead.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.library.lib import op_number
from offload.ggml.tensor import (
    Buffer,
    Relocation,
    Tensor,
    buffer_at,
    data_at,
    op_at,
    root_at,
    size_at,
    source_at,
)
from offload.split.ahead import Access, Chosen, Span, nodes_ahead

_BESIDE = 20  # nodes behind a layer's last product, beside a view and a sum for each expert
_ALIGNMENT = 256
_INTEGERS = ("i8", "i16", "i32", "i64")
_MOVES_NOTHING = ("NONE", "RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE")


class Behind(NamedTuple):
    """A layer's last product and the nodes behind it that may change places."""

    group: int  # the layer's, of weights
    at: int  # the product's position in the graph
    end: int  # of the next node that has to stay where it is
    n_used: int  # experts by a token


class Ahead(NamedTuple):
    """Numbers of nodes directly behind a product that do not wait for the rows of its layer."""

    n_nodes: int = 0
    n_computing: int = 0  # of them, that are no views
    n_repeatable: int = 0  # the first of them, that may be computed again at any time


@dataclass(frozen=True)
class Ordered:
    """A graph to be computed in place of another: the same nodes, and memory for some of them."""

    graph: Graph
    ahead: Sequence[Ahead]  # of each layer
    relocations: Sequence[Relocation]  # in force while the graph is submitted


@dataclass(frozen=True)
class _Form:
    """The nodes behind a layer's last product, up to the last that may go ahead.

    Tensors are numbers: the product is 0, the nodes follow, then what they read from elsewhere.
    """

    nodes: tuple[Access, ...]
    roots: tuple[int, ...]  # by number
    outside: tuple[tuple[int, int], ...]  # a node's number, and which of its sources
    n_uses: tuple[int, ...]  # by number, of the product and the nodes
    views: dict[int, tuple[int, ...]]  # of a result, as far from the product as the next cut
    repeatable: tuple[bool, ...]  # of each node


class Orderer:
    """Orders the graphs of one device. Results that need memory of their own share its scratch."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._scratch: list[Buffer] = []  # the last is the largest; graphs refer to all
        self._forms: dict[tuple[int, tuple[int, ...]], _Form] = {}  # by group and operations
        self._moves_nothing = frozenset(map(op_number, _MOVES_NOTHING))

    @property
    def device_bytes(self) -> int:
        return sum(buffer.size_bytes for buffer in self._scratch)

    def close(self) -> None:
        for buffer in self._scratch:
            buffer.close()
        self._scratch.clear()

    def order(self, graph: Graph, layers: Sequence[Behind]) -> Ordered:
        """The graph with what does not wait for the CPU's rows behind each layer's last product.

        Raises DoesNotFit.
        """
        addresses = graph.addresses()
        order = addresses.copy()
        ahead: list[Ahead] = []
        moves: list[_Move] = []
        for layer in layers:
            reach = layer.at + 1 + 2 * layer.n_used + _BESIDE
            near = addresses[layer.at : min(layer.end, reach)]
            form, found, spans = self._choose(graph, layer.group, near)
            ahead.append(_counted(form, found))
            for to, i in enumerate(found.order(len(form.nodes)) if found.first else (), 1):
                order[layer.at + to] = near[1 + i]
            moves += _moves(form, near, spans, found.elsewhere)
        changed = any(of_layer.n_nodes for of_layer in ahead)
        graph = graph.reordered(order) if changed else graph
        return Ordered(graph, ahead, self._relocations(moves))

    def _choose(
        self, graph: Graph, group: int, near: Sequence[int]
    ) -> tuple[_Form, Chosen, Sequence[Span]]:
        """The nodes that go ahead in a layer whose last product is the first of those at `near`."""
        key = group, tuple(map(op_at, near))
        known = self._forms.get(key)
        if known is not None:
            found, spans = _found(known, near)
            if self._is_used_alike(graph, known, near, found.elsewhere):
                return known, found, spans
        form = self._forms[key] = self._learn(graph, near)
        return form, *_found(form, near)

    def _is_used_alike(
        self, graph: Graph, form: _Form, near: Sequence[int], chosen: Sequence[int]
    ) -> bool:
        """True if in this graph, too, nobody else reads what is to lie elsewhere."""
        results = [1 + i for i in chosen]
        seen = [view for result in results for view in form.views.get(result, ())]
        return all(graph.use_count(Tensor(near[n])) == form.n_uses[n] for n in (*results, *seen))

    def _learn(self, graph: Graph, near: Sequence[int]) -> _Form:
        """The form of a layer whose last product is the first of the nodes at `near`."""
        numbers = {address: n for n, address in enumerate(near)}
        n_uses = [0] * len(near)
        views: dict[int, list[int]] = {}
        depends, taken = {0}, set[int]()  # on the product; results that others write into
        last = 0
        for n, address in enumerate(near[1:], 1):
            sources = [numbers[s] for s in _sources(address) if s in numbers]
            for source in sources:
                n_uses[source] += 1
            if not depends.isdisjoint(sources):
                depends.add(n)
            root = numbers.get(root_at(address), -1)
            if op_at(address) in self._moves_nothing:
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
            and not Tensor(near[n]).is_output
            and all(graph.use_count(Tensor(near[k])) == n_uses[k] for k in (n, *views.get(n, ())))
        }
        return self._formed(near[: last + 1], alone, n_uses, views)

    def _formed(
        self, near: Sequence[int], alone: set[int], n_uses: Sequence[int],
        views: dict[int, list[int]],
    ) -> _Form:  # fmt: skip
        numbers = {address: n for n, address in enumerate(near)}
        outside: dict[int, tuple[int, int]] = {}  # by address
        nodes, repeatable = [], []
        for n, address in enumerate(near[1:], 1):
            computes = op_at(address) not in self._moves_nothing
            for i, source in enumerate(_sources(address)):
                if source not in numbers:
                    outside.setdefault(source, (n, i))
                    numbers[source] = len(near) + len(outside) - 1
            reads = tuple(numbers[source] for source in _sources(address))
            nodes.append(Access(n, reads, computes, n in alone))
            repeatable.append(not computes or _is_repeatable(address))
        tensors = [*near, *outside]
        roots = [numbers.get(root_at(address), -1) for address in tensors]
        seen = {result: tuple(of) for result, of in views.items()}
        return _Form(
            tuple(nodes), tuple(roots), tuple(outside.values()), tuple(n_uses), seen,
            tuple(repeatable),
        )  # fmt: skip

    def _relocations(self, moves: Sequence[_Move]) -> list[Relocation]:
        if not moves:
            return []
        size_bytes = max(move.offset_bytes + move.size_bytes for move in moves)
        largest = self._scratch[-1].size_bytes if self._scratch else 0
        if size_bytes > largest:
            size_bytes = max(size_bytes, 2 * largest)
            self._scratch.append(self._device.allocate(size_bytes, "results of shared experts"))
        scratch = self._scratch[-1]
        return [Relocation(move.addresses, scratch, move.offset_bytes) for move in moves]


def _found(form: _Form, near: Sequence[int]) -> tuple[Chosen, Sequence[Span]]:
    """The nodes that go ahead, and where tensors lie in this graph, by number."""
    outside = [source_at(near[n], i) for n, i in form.outside]
    spans = [_span(address) for address in (*near[: 1 + len(form.nodes)], *outside)]
    return nodes_ahead(spans[0], form.nodes, form.roots, spans), spans


def _counted(form: _Form, found: Chosen) -> Ahead:
    n_computing = sum(form.nodes[i].computes for i in found.first)
    repeated = itertools.takewhile(lambda i: form.repeatable[i], found.first)
    return Ahead(len(found.first), n_computing, sum(1 for _ in repeated))


def _is_repeatable(address: int) -> bool:
    """True if the node harms nothing when it finds other numbers than it should.

    Indices out of range end the process; what is written through a view may be kept, as a cache is.
    """
    sources = (Tensor(source).type for source in _sources(address))
    return root_at(address) == address and not any(kind in _INTEGERS for kind in sources)


class _Move(NamedTuple):
    """A result and the views of it, to lie at an offset of the scratch."""

    addresses: Sequence[int]
    offset_bytes: int
    size_bytes: int


def _moves(
    form: _Form, near: Sequence[int], spans: Sequence[Span], chosen: Sequence[int]
) -> list[_Move]:
    """Of the nodes chosen, one behind the other; the next layer's begin at the start again."""
    moves, offset_bytes = list[_Move](), 0
    for number in (1 + i for i in chosen):
        _, first, end = spans[number]
        together = [near[n] for n in (number, *form.views.get(number, ()))]
        moves.append(_Move(together, offset_bytes, end - first))
        offset_bytes += -(-(end - first) // _ALIGNMENT) * _ALIGNMENT
    return moves


def _sources(address: int) -> Iterable[int]:
    index = 0
    while source := source_at(address, index):
        yield source
        index += 1


def _span(address: int) -> Span:
    first = data_at(address)
    return Span(buffer_at(address), first, first + size_at(address))
