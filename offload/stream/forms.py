"""Finds the nodes that compute a layer's experts, and copies them to compute any pairs.

The result of a pair (token, expert) depends only on the token's row and the expert's weights. Its
nodes are gate and up, the nodes that join them, and down. `find_form` finds these nodes by going
back from down, so their order in the graph does not matter.

ggml's product with experts cannot skip a pair. So pairs are gathered, each as one token that uses
one expert, and are computed with nodes like the model's own:

    rows [n_in, 1, P], ids [1, P] -> gate, up, joining nodes, down -> rows [n_out, 1, P]

The CPU (offload/stream/cpu_side.py) and the device (offload/stream/passes.py) both compute pairs
with the nodes that `PairNodes` makes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from offload.alignment import aligned
from offload.ggml.graph import Graph, Product
from offload.ggml.rewriting import SharedDim, is_any
from offload.ggml.tensor import Buffer, Redirect, Tensor
from offload.schedule.pair_rows import PairShape

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
    def pairs(self) -> PairShape:
        """The rows of one pair."""
        n_in, rows_per_token, _, _ = self.inputs.shape
        widths = tuple(node.shape[0] for node in self.nodes if not node.is_op("VIEW"))
        return PairShape(self.ids.shape[0], n_in, widths, rows_per_token, len(self.scales))

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


def single_form(product: Product) -> ExpertForm:
    """Return the form of one product by itself. Raises NoForm."""
    inputs = product.node.source(1)
    assert inputs is not None
    assert product.ids is not None
    if inputs.type != "f32" or not product.node.is_contiguous:
        raise NoForm(f"{product.weight.name}: its rows are not contiguous f32 numbers")
    return ExpertForm((product.node,), (product,), inputs, product.ids, (), ())


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
        source = factor.source(0)
        for _ in range(_MOST_SAME):
            if source is not None and is_any(source, _SAME):
                source = source.source(0)
        if source is None or not source.is_op("NONE") or source.type != "f32":
            return None
        return source


class PairNodes:
    """Copies (twins) of a form's nodes, which compute up to `most` pairs instead of a batch.

    `sources` are the sources of `nodes` that are weights of products, then those that are biases.
    Callers point them at a layer's weights, or at slots.
    """

    def __init__(
        self, form: ExpertForm, most: int, count: SharedDim, made: Mapping[Tensor, Tensor],
        at: tuple[Buffer, int], down_at: tuple[Buffer, int] | None = None,
        bias_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """`made`: the pairs' rows, ids and scales, by what they stand for in the form.

        `count`: the number of pairs, which the twins follow. `at`: memory for the nodes' results
        (`PairShape.nodes_bytes`). `down_at`: memory for the results of down; None: after the other
        results. `bias_ids`: ids for the nodes that add biases; None: the products' ids.
        """
        self._most, self._biased = most, bias_ids
        buffer, offset = at
        twins = dict(made)
        self.nodes: list[Tensor] = []
        for node in form.nodes:
            if node.is_op("VIEW"):
                twin = self._view(node, twins[node.sources[0]], buffer)
            else:
                is_last = node == form.down.node
                twin = self._twin(node, twins, down_at if is_last and down_at else (buffer, offset))
                offset += aligned(4 * node.shape[0] * most)
            twins[node] = count.follows(twin, 2)
            self.nodes.append(twin)
        self.down = twins[form.down.node]
        self.sources = [Redirect(twins[product.node], 0) for product in form.products]
        adds = [twins[node] for node in form.nodes if node.is_op("ADD_ID")]
        self.sources += [Redirect(add, 1) for add in adds]

    def _twin(self, node: Tensor, made: Mapping[Tensor, Tensor], at: tuple[Buffer, int]) -> Tensor:
        sources = [made.get(source, source) for source in node.sources]
        if self._biased is not None and node.is_op("ADD_ID"):
            sources[2] = self._biased
        row = 4 * node.shape[0]
        shape, strides = (node.shape[0], 1, self._most, 1), (4, row, row, row * self._most)
        return node.alike(shape, strides, at=at, sources=sources)

    def _view(self, node: Tensor, whole: Tensor, buffer: Buffer) -> Tensor:
        """Return a view of a part of each row of `whole`, the twin of the node's source."""
        offset = node.position - node.sources[0].position
        at = buffer, whole.position - buffer.base + offset
        shape = node.shape[0], 1, self._most, 1
        return node.alike(shape, whole.strides, at=at, sources=[whole])
