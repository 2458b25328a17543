"""The nodes between a layer's router and the rows of its experts, if the CPU can repeat them.

What a pair (token, expert) computes depends on nothing but its token's row and its expert's
weights: gate and up, what joins them, down. Those nodes are found by going back from down, so the
order in which a graph has them does not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from offload.ggml.graph import Graph, Product
from offload.ggml.tensor import Tensor

_JOINING = ("GLU", "UNARY", "SCALE", "CLAMP", "SQR", "MUL", "ADD")
_SAME = ("RESHAPE", "REPEAT", "VIEW", "CONT")  # on the way from a scale to its weight
_MOST_SAME = 3  # longest chain of such nodes; Graph.state covers no longer one


class NoForm(Exception):
    """A layer is not of a form that is known, for the reason that the text gives."""


@dataclass(frozen=True)
class Form:
    """The nodes that compute a layer's rows, each behind those it reads; down comes last."""

    nodes: tuple[Tensor, ...]
    products: tuple[Product, ...]  # those of `nodes`, in the graph's order; the last is down
    inputs: Tensor  # that gate and up read: [n_in, 1 or n_used, n_tokens]
    ids: Tensor
    biases: tuple[Tensor, ...]  # of experts, that the ADD_ID among `nodes` add, in order
    scales: tuple[tuple[Tensor, Tensor], ...]  # what a MUL reads, and the weight behind it

    @property
    def down(self) -> Product:
        return self.products[-1]

    @property
    def key(self) -> Hashable:
        """The same for layers that differ in nothing but their weights."""
        return (
            self.inputs.shape[:2],
            tuple((node.operation, node.shape[0], node.parameters) for node in self.nodes),
        )


def find_form(graph: Graph, products: Sequence[Product]) -> Form:
    """The form of a layer with these products, in the graph's order. Raises NoForm."""
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
        raise NoForm("its rows are not f32 numbers one after the other")
    for node, n_uses in finder.uses.items():
        if node.is_output or graph.use_count(node) not in (n_uses, -1):
            raise NoForm(f"others read {node.name or 'what is between its products'}")
    return Form(
        (*finder.nodes, down.node),
        tuple(products),
        inputs,
        finder.ids,
        tuple(node.sources[1] for node in finder.nodes if node.is_op("ADD_ID")),
        tuple(finder.scales),
    )


class _Finder:
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
            for source in self._read_by(node):
                self.visit(source)
        self.nodes.append(node)

    def _read_by(self, node: Tensor) -> list[Tensor]:
        """Sources that are computed for each pair; what else the node reads is noted."""
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
        if not any(node.is_op(op) for op in _JOINING):
            raise NoForm(f"{node.name or 'a node'} between its products does something unknown")
        return sources

    def _scale(self, factor: Tensor) -> Tensor | None:
        """The weight with a number for each expert behind a factor, if that is what it is."""
        if not factor.is_op("GET_ROWS") or factor.source(1) != self.ids or factor.shape[0] != 1:
            return None
        found = factor.source(0)
        for _ in range(_MOST_SAME):
            if found is not None and any(found.is_op(op) for op in _SAME):
                found = found.source(0)
        if found is None or not found.is_op("NONE") or found.type != "f32":
            return None
        return found
