"""Replaces value projections in a graph by their broadcast form, as decision.py decides.

ggml's graph is not changed. In a copy of its list of nodes our tensors replace the old nodes, and
write to the addresses of the old results. So the graph remains one computation, and later steps
look for their nodes in the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offload.ggml.graph import Graph
from offload.ggml.tensor import Tensor
from offload.mla.decision import (
    Form,
    LeftAlone,
    Memory,
    MlaCounters,
    ValueProjection,
    decide,
    is_value_projection,
    strides,
)


@dataclass(frozen=True, slots=True)
class Site:
    """A value projection and its tensors, valid as long as the graph."""

    form: ValueProjection
    product_index: int  # positions in the graph's node order
    permuted_index: int
    output_index: int
    weight: Tensor
    attended: Tensor
    product: Tensor
    permuted: Tensor
    output: Tensor


class MlaSwitch:
    """The permute switch of one device (docs/mla.md)."""

    def __init__(
        self,
        crossover: int | None,
        supports: Callable[[Tensor], bool],
        is_streamed: Callable[[Tensor], bool],
    ) -> None:
        """`crossover`: most tokens of a batch that is replaced; None: the model's number of heads.

        `supports(node)` says if the device computes a node; `is_streamed(weight)` says if a weight
        has no fixed place on it.
        """
        self.crossover = crossover
        self._supports, self._is_streamed = supports, is_streamed
        self.counters = MlaCounters()

    def rewrite(self, graph: Graph) -> tuple[Graph, MlaCounters]:
        """Return the graph to compute in place of `graph`, and what each computation counts."""
        if self.crossover == 0:
            return graph, MlaCounters()
        decisions: list[Form | LeftAlone] = []
        placed: dict[int, Tensor] = {}
        without: set[int] = set()
        for site in self.sites(graph):
            crossover = site.form.n_head if self.crossover is None else self.crossover
            decision = decide(site.form, crossover)
            if isinstance(decision, Form):
                nodes = broadcast_nodes(site, decision)
                if all(self._supports(node) for node in nodes):
                    placed[site.product_index] = nodes[0]
                    without |= {site.permuted_index, site.output_index}
                    if len(nodes) > 1:
                        placed[site.output_index] = nodes[1]
                        without.discard(site.output_index)
                else:
                    decision = LeftAlone.UNSUPPORTED
            decisions.append(decision)
        counts = MlaCounters.of(decisions)
        return (graph.replacing(placed, without) if placed else graph), counts

    def sites(self, graph: Graph) -> list[Site]:
        """Return the value projections of a graph, in order."""
        # They are found by their last node: few nodes are conts, hundreds are products.
        outputs, index_of = graph.find("CONT"), graph.positions()
        found = (self._site(graph, output, index, index_of) for index, output in outputs)
        return [site for site in found if site is not None]

    def _site(
        self, graph: Graph, output: Tensor, index: int, index_of: Callable[[Tensor], int | None]
    ) -> Site | None:
        """Return the value projection that ends at node `output`, or None."""
        permuted = _source(output, 0, "PERMUTE")
        product = permuted and _source(permuted, 0, "MUL_MAT")
        weight = product and _source(product, 0, "NONE")
        attended = product and product.source(1)
        if not (permuted and product and weight and attended):
            return None
        middle, first = index_of(permuted), index_of(product)
        if middle is None or first is None:
            return None  # made in another part of the graph
        form = ValueProjection(
            weight_ne=weight.shape,
            attended=_memory(attended),
            product=_memory(product),
            permuted=_memory(permuted),
            output=_memory(output),
            adjacent=first + 2 == index,
            shared=any(
                node.is_output or graph.use_count(node) != 1 for node in (product, permuted)
            ),
            streamed=self._is_streamed(weight),
        )
        if not is_value_projection(form):
            return None
        return Site(form, first, middle, index, weight, attended, product, permuted, output)


def broadcast_nodes(site: Site, form: Form) -> tuple[Tensor, ...]:
    """Return the one or two nodes that replace the site's three."""
    element_bytes = site.form.product.nb[0]
    vectors = site.attended.viewed(site.form.vectors_ne, site.form.vectors_nb)
    into = site.output if form is Form.DIRECT else site.product
    shape = site.form.product_ne
    product = into.computing(
        "MUL_MAT",
        [site.weight, vectors],
        shape=shape,
        strides=strides(shape, element_bytes),
        like=site.product,
    )
    if form is Form.DIRECT:
        return (product,)
    return product, site.output.computing("CONT", [product])


def _source(node: Tensor, index: int, op: str) -> Tensor | None:
    """Return the node's source if it computes that operation."""
    source = node.source(index)
    return source if source is not None and source.is_op(op) else None


def _memory(tensor: Tensor) -> Memory:
    return Memory(tensor.shape, tensor.strides, tensor.position)
