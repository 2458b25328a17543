"""Replaces value projections in a graph by their broadcast form (offload/mla decides which).

The graph that ggml hands over is not touched: a copy of its list of nodes gets other nodes, which
are tensors of ours with the addresses of the old results. So the graph stays one computation, and
whoever looks for cuts does so in the copy. Copies are kept by the uid of their original.
"""

from __future__ import annotations

import collections
import ctypes as C
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from offload.errors import DoesNotFit
from offload.ggml import tensor
from offload.ggml.library import abi
from offload.ggml.library.lib import op_number
from offload.ggml.mla_measure import measure_crossover
from offload.ggml.mla_nodes import graph_of, node_like
from offload.mla.decision import (
    Crossover,
    Form,
    Kept,
    Memory,
    MlaCounters,
    Shape,
    Timing,
    ValueProjection,
    choose_crossover,
    decide,
    is_value_projection,
    strides,
)

_KEPT_GRAPHS = 32
_OUTPUT = abi.GGML_TENSOR_FLAG_OUTPUT
# Ours never equal ggml's, which count from 1, and are never used twice: whoever remembers something
# about a copy by its uid cannot mistake a later copy at the same address for it.
_uids = itertools.count(1 << 63)


@dataclass(frozen=True, slots=True)
class Site:
    """A value projection, and the addresses of its tensors; valid as long as the graph is."""

    form: ValueProjection
    product_index: int  # positions in the graph's node order
    permuted_index: int
    output_index: int
    weight: int
    attended: int
    product: int
    permuted: int
    output: int


@dataclass(slots=True)
class _Rewritten:
    """A graph with its sites decided, and everything its copy refers to."""

    original: int
    counts: MlaCounters
    copy: Any = None  # None: nothing was replaced
    nodes: Any = None
    tensors: list[Any] | None = None

    @property
    def graph(self) -> int:
        return self.original if self.copy is None else tensor.address_of(self.copy)


class MlaSwitch:
    """The permute switch of one device (docs/mla.md)."""

    def __init__(
        self,
        buft: int,
        supports: Callable[[int], bool],
        streamed: Callable[[int], bool],
        crossover: Crossover = "heads",
    ) -> None:
        """`supports(node)` asks the real device, `streamed(weight)` whether a weight is streamed.

        `buft` is the device's buffer type, for the memory of the measurement of "auto".
        """
        self._buft, self._supports, self._streamed = buft, supports, streamed
        self.crossover: Crossover = crossover
        self.counters = MlaCounters()
        self.measured: dict[Shape, tuple[int, tuple[Timing, ...]]] = {}
        self.notes: list[str] = []  # what was not as asked for, in sentences
        self._kept: collections.OrderedDict[int, _Rewritten] = collections.OrderedDict()
        self._unkept: collections.deque[_Rewritten] = collections.deque(maxlen=2)
        self._mul_mat, self._cont = op_number("MUL_MAT"), op_number("CONT")
        self._permute, self._none = op_number("PERMUTE"), op_number("NONE")

    def apply(self, graph: int, backend: int) -> int:
        """The graph to compute in place of `graph` on the real backend `backend`.

        The same address as long as ggml's graph is the same one. Counts every site.
        """
        if self.crossover == 0:
            return graph
        uid = tensor.uid_of(graph)
        found = self._kept.get(uid) if uid else None
        if found is None or found.original != graph:
            found = self._rewrite(graph, backend)
            if uid:
                self._kept[uid] = found
                if len(self._kept) > _KEPT_GRAPHS:
                    self._kept.popitem(last=False)
            else:
                self._unkept.append(found)  # backends read nodes when they are submitted
        self.counters.add(found.counts)
        return found.graph

    # -- finding -------------------------------------------------------------------------------

    def sites(self, graph: int) -> list[Site]:
        """The value projections of a graph, in order."""
        nodes = tensor.node_addresses(graph)
        # One is looked for at its last node: few nodes are conts, hundreds are products.
        op_of, cont = tensor.op_of, self._cont
        outputs = [i for i, node in enumerate(nodes) if op_of(node) == cont]
        found = (self._site(graph, nodes, i) for i in outputs)
        return [site for site in found if site is not None]

    def _site(self, graph: int, nodes: list[int], index: int) -> Site | None:
        output = nodes[index]
        permuted = tensor.source(output, 0)
        if tensor.op_of(permuted) != self._permute:
            return None
        product = tensor.source(permuted, 0)
        if tensor.op_of(product) != self._mul_mat:
            return None
        weight, attended = tensor.source(product, 0), tensor.source(product, 1)
        if tensor.op_of(weight) != self._none:
            return None
        middle = _last(nodes, permuted, index)
        first = _last(nodes, product, middle)
        if first < 0:
            return None  # made in another part of the graph
        asked_for = (tensor.at(product).flags | tensor.at(permuted).flags) & _OUTPUT
        form = ValueProjection(
            weight_ne=_shape(tensor.at(weight).ne),
            attended=_memory(attended),
            product=_memory(product),
            permuted=_memory(permuted),
            output=_memory(output),
            adjacent=first + 2 == index,
            shared=bool(asked_for)
            or use_count(graph, product) != 1
            or use_count(graph, permuted) != 1,
            streamed=self._streamed(weight),
        )
        if not is_value_projection(form):
            return None
        return Site(form, first, middle, index, weight, attended, product, permuted, output)

    # -- rewriting -----------------------------------------------------------------------------

    def _rewrite(self, graph: int, backend: int) -> _Rewritten:
        decisions: list[Form | Kept] = []
        tensors: list[Any] = []
        placed: dict[int, Any] = {}  # position -> the node instead, None: nothing
        for site in self.sites(graph):
            decision = decide(site.form, self._crossover_of(site, graph, backend))
            if isinstance(decision, Form):
                vectors, *nodes = broadcast_nodes(site, decision)
                if all(self._supports(tensor.address_of(node)) for node in nodes):
                    tensors += [vectors, *nodes]
                    placed |= {site.product_index: nodes[0], site.permuted_index: None}
                    placed[site.output_index] = nodes[1] if len(nodes) > 1 else None
                else:
                    decision = Kept.UNSUPPORTED
            decisions.append(decision)
        counts = MlaCounters.of(decisions)
        if not tensors:
            return _Rewritten(graph, counts)
        addresses = tensor.node_addresses(graph)
        for index, node in placed.items():
            addresses[index] = 0 if node is None else tensor.address_of(node)
        copy, nodes_array = graph_of(graph, [address for address in addresses if address])
        copy.uid = next(_uids) if tensor.uid_of(graph) else 0
        return _Rewritten(graph, counts, copy, nodes_array, tensors)

    def _crossover_of(self, site: Site, graph: int, backend: int) -> int:
        if self.crossover == "heads":
            return site.form.n_head
        if self.crossover != "auto":
            return self.crossover
        if site.form.streamed:
            return site.form.n_head  # it is left alone anyway, and its memory is not the device's
        shape = site.form.weight_ne
        if shape not in self.measured:
            try:
                table = measure_crossover(
                    backend,
                    self._buft,
                    graph,
                    site.product,
                    self._supports,
                    token_major=site.form.token_major,
                )
            except DoesNotFit as e:
                self.notes.append(f"--mla-crossover auto: {e}; taking {site.form.n_head}, one per "
                                  "head")  # fmt: skip
                self.measured[shape] = site.form.n_head, ()
            else:
                self.measured[shape] = choose_crossover(table), table
        return self.measured[shape][0]


def broadcast_nodes(site: Site, form: Form) -> Sequence[Any]:
    """The attention output as vectors, and the one or two nodes that replace the site's three."""
    element_bytes = site.form.product.nb[0]
    vectors = node_like(site.attended, site.form.vectors_ne, site.form.vectors_nb)
    vectors.op, vectors.view_src = op_number("VIEW"), vectors.view_src or site.attended
    _set_sources(vectors, site.attended)
    into = site.output if form is Form.DIRECT else site.product
    product = node_like(into, site.form.product_ne, strides(site.form.product_ne, element_bytes))
    old = tensor.at(site.product)
    product.op, product.op_params = old.op, old.op_params
    _set_sources(product, site.weight, tensor.address_of(vectors))
    if form is Form.DIRECT:
        return vectors, product
    copy = tensor.copy_of(site.output)
    _set_sources(copy, tensor.address_of(product))
    return vectors, product, copy


def _set_sources(node: Any, *sources: int) -> None:
    node.src[:] = sources + (None,) * (len(node.src) - len(sources))


def _last(nodes: list[int], node: int, end: int) -> int:
    """The position of `node` among the first `end` nodes, -1 if it is not there."""
    at = end - 1
    while at >= 0 and nodes[at] != node:
        at -= 1
    return at


def use_count(graph: int, node: int) -> int:
    """The number of nodes of the whole graph, other devices' parts included, that read `node`.

    Parts of a graph share its table of uses, keyed by address (ggml_node_get_use_count); -1 when
    the table does not know the node.
    """
    g = tensor.GRAPH.from_address(graph)
    table = g.visited_hash_set
    if not table.size or not g.use_counts:
        return -1
    at = (node >> 4) % table.size
    for _ in range(table.size):
        word = C.c_uint32.from_address(table.used + 4 * (at >> 5)).value
        if not word >> (at & 31) & 1:
            return -1
        if C.c_size_t.from_address(table.keys + 8 * at).value == node:
            return C.c_int32.from_address(g.use_counts + 4 * at).value
        at = (at + 1) % table.size
    return -1


def _shape(values: Any) -> Shape:
    return int(values[0]), int(values[1]), int(values[2]), int(values[3])


def _memory(address: int) -> Memory:
    view = tensor.at(address)
    return Memory(_shape(view.ne), _shape(view.nb), view.data or 0)
