"""A layer's experts for some tokens at a time, where not all that a batch uses have slots.

What follows from the products with a layer's experts (gate, up, what joins them, down) is a *chain*
of nodes. It is taken out of the graph and computed in chunks of tokens: for each chunk every node
gets a twin that computes these tokens alone, once their experts have slots. From one chunk to the
next nothing is kept but what the last node wrote, so the twins of the others share scratch memory.

ggml's allocator lets the last node write over what only the first ones read. In chunks the second
would then read what the first has written: such an input is copied to scratch memory before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.ggml.graph import Graph, Product
from offload.ggml.tensor import Buffer, Tensor

_TOKENS = 2  # the dimension of tokens in products with experts, and in what joins them
_ALIGNMENT = 256
# Operations that a chain may have beside the products, and the dimension in which each of their
# sources has tokens; None: the same for all tokens.
_BETWEEN: Mapping[str, tuple[int | None, ...]] = {
    "ADD_ID": (2, None, 1),
    "GLU": (2, 2),
    "UNARY": (2,),
    "SCALE": (2,),
    "CLAMP": (2,),
    "MUL": (2, 2),
    "VIEW": (2,),
    "RESHAPE": (2,),
}
_PRODUCT = (None, 2, 1)
_MOVES_NOTHING = ("VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE")


@dataclass(frozen=True)
class Chain:
    """Nodes of one layer that are computed in chunks of tokens, in the graph's order."""

    nodes: tuple[Tensor, ...]
    positions: tuple[int, ...]  # in the graph
    kinds: Mapping[Tensor, str]  # of the products with experts
    ids: Tensor  # the router's choice [n_used, n_tokens]
    copied: Tensor | None = None  # an input that the last node writes over

    @property
    def end(self) -> int:
        """Where the chain is computed: in place of its last node."""
        return self.positions[-1]

    @property
    def n_tokens(self) -> int:
        return self.ids.shape[1]

    def scratch_bytes(self, most_tokens: int) -> int:
        """Memory for the twins of a chunk, and behind it for what is copied."""
        between = sum(_scratch_of(node, most_tokens) for node in self._kept_in_scratch)
        return between + (0 if self.copied is None else _aligned(self.copied.size_bytes))

    @property
    def _kept_in_scratch(self) -> list[Tensor]:
        return [node for node in self.nodes[:-1] if not _is_any(node, _MOVES_NOTHING)]

    def copy(self, scratch: Buffer, most_tokens: int) -> Tensor | None:
        """The node that copies the input that is written over, where there is one."""
        if self.copied is None:
            return None
        at = scratch, self.scratch_bytes(most_tokens) - _aligned(self.copied.size_bytes)
        return self.copied.computing("CONT", [self.copied]).alike(at=at)

    def twins(
        self, first: int, n: int, slots: Mapping[str, Tensor], ids: Tensor, scratch: Buffer,
        copy: Tensor | None, most_tokens: int,
    ) -> list[Tensor]:  # fmt: skip
        """Nodes that compute tokens [first, first + n), with the slots of each kind of weight.

        `ids` [n_used, n] mean slots.
        """
        made: dict[Tensor, Tensor] = {}
        offset = 0
        for node in self.nodes:
            sources: list[Tensor] = []
            for index, source in enumerate(node.sources):
                if node in self.kinds and index != 1:
                    sources.append(slots[self.kinds[node]] if index == 0 else ids)
                elif source in made:
                    sources.append(made[source])
                else:
                    dim = _dim(node, index, self)
                    whole = copy if copy is not None and source == self.copied else source
                    sources.append(whole if dim is None else whole.part(dim, first, n))
            if node is self.nodes[-1]:
                made[node] = node.part(_TOKENS, first, n, sources=sources)
            elif _is_any(node, _MOVES_NOTHING):
                seen = node.sources[0], sources[0]
                made[node] = node.part(_TOKENS, 0, n, sources=sources, seen_from=seen)
            else:
                made[node] = node.part(_TOKENS, 0, n, sources=sources, at=(scratch, offset))
                offset += _scratch_of(node, most_tokens)
        return list(made.values())


def chains_of(graph: Graph, members: Sequence[tuple[Product, str]]) -> list[Chain]:
    """The chains of the products with one layer's experts: one if all goes together, else each
    product by itself, whose experts are then copied again for each."""
    together = _together(graph, members)
    if together is not None:
        return [together]
    return [
        Chain((product.node,), (product.index,), {product.node: kind}, _ids(product))
        for product, kind in members
    ]


def _together(graph: Graph, members: Sequence[tuple[Product, str]]) -> Chain | None:
    first, last = members[0][0].index, members[-1][0].index
    kinds = {product.node: kind for product, kind in members}
    inside = graph.nodes()[first : last + 1]
    chain: dict[Tensor, int] = {}
    uses: dict[Tensor, int] = {}
    for position, node in enumerate(inside, first):
        sources = node.sources
        if node not in kinds and not any(source in chain for source in sources):
            continue
        if node not in kinds and not _can_go_between(node):
            return None
        for source in sources:
            uses[source] = uses.get(source, 0) + 1
        chain[node] = position
    nodes = tuple(chain)
    if any(
        node.is_output or uses.get(node, 0) != graph.use_count(node) or not _cuts_well(node)
        for node in nodes[:-1]
    ):
        return None  # somebody else reads it
    found = Chain(nodes, tuple(chain.values()), kinds, _ids(members[0][0]))
    return _guarded(found, [node for node in inside if node not in chain])


def _guarded(chain: Chain, others: Sequence[Tensor]) -> Chain | None:
    """The chain with what has to be copied before it; None where a copy does not do.

    `others` are computed before the chain, though the graph has some of them within it.
    """
    writes = [chain.nodes[-1], *(n for n in others if not _is_any(n, _MOVES_NOTHING))]
    inside = {*chain.nodes, *others}
    endangered: list[Tensor] = []
    for node in chain.nodes:
        for index, source in enumerate(node.sources):
            if source in chain.nodes or (node in chain.kinds and index != 1):
                continue
            if any(written.overlaps(source) for written in writes if written != source):
                can_copy = _dim(node, index, chain) == _TOKENS and source.is_contiguous
                if source in inside or not can_copy:
                    return None
                endangered.append(source)
    several = set(endangered)
    if len(several) > 1:
        return None
    return Chain(chain.nodes, chain.positions, chain.kinds, chain.ids, next(iter(several), None))


def _can_go_between(node: Tensor) -> bool:
    return _is_any(node, tuple(_BETWEEN)) and len(node.shape) > _TOKENS


def _cuts_well(node: Tensor) -> bool:
    """True if a chunk of the node is a node of the same form with fewer tokens."""
    return node.shape[3] == 1 and (node.is_contiguous or _is_any(node, ("VIEW",)))


def _dim(node: Tensor, index: int, chain: Chain) -> int | None:
    """The dimension of tokens in a source of one of the chain's nodes; None: it has none."""
    source = node.sources[index]
    if node in chain.kinds:
        return _PRODUCT[index]
    by_source = next(dims for op, dims in _BETWEEN.items() if node.is_op(op))
    dim = by_source[index]
    return None if dim is not None and source.shape[dim] == 1 else dim


def _ids(product: Product) -> Tensor:
    assert product.ids is not None
    return product.ids


def _is_any(node: Tensor, ops: Sequence[str]) -> bool:
    return any(node.is_op(op) for op in ops)


def _scratch_of(node: Tensor, n_tokens: int) -> int:
    return _aligned(node.strides[_TOKENS] * n_tokens)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
