"""Computes a layer's experts in chunks of tokens, if a batch uses more experts than have slots.

The products with a layer's experts (gate, up, down) and the nodes between them are a *chain*. It is
taken out of the graph and computed in chunks of tokens. For each chunk, every node gets a *twin*, a
copy that computes these tokens only. The twins are computed after the tokens' experts got slots.
Only the last node's results are kept from one chunk to the next. So in all chunks the twins of the
other nodes use the same scratch memory.

ggml's allocator lets the last node overwrite an input that only the first nodes read. The second
chunk would then read results of the first. So such an input is copied to scratch memory first.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.ggml.backend import RouterIds
from offload.ggml.graph import Graph, Product
from offload.ggml.rewriting import VIEWS, aligned, is_any
from offload.ggml.tensor import Buffer, Tensor
from offload.plan.slot_layout import SlotLayout
from offload.schedule.batch import most_chunks
from offload.streaming.slot_memory import SlotMemory, SlotViews

_MOST_TOKENS = 128  # most tokens of a chunk, to limit the scratch memory of its results
_TOKENS = 2  # the dimension of tokens in products with experts and the nodes between them
# Operations allowed between the products, and the dimension of tokens in each of their sources.
# None: the source is the same for all tokens.
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


@dataclass(frozen=True)
class Chain:
    """Nodes of one layer that are computed in chunks of tokens, in the graph's order."""

    nodes: tuple[Tensor, ...]
    positions: tuple[int, ...]  # positions of the nodes in the graph
    kinds: Mapping[Tensor, str]  # kind of weight by product
    ids: Tensor  # the router's choice [n_used, n_tokens]
    copied: Tensor | None = None  # an input that the last node overwrites

    @property
    def end(self) -> int:
        """Position of the last node. The chain is computed in its place."""
        return self.positions[-1]

    def scratch_bytes(self, most_tokens: int) -> int:
        """Return the bytes of scratch memory for a chunk's twins and for the copied input."""
        kept = [node for node in self.nodes[:-1] if not is_any(node, VIEWS)]
        between = sum(_scratch_bytes(node, most_tokens) for node in kept)
        return between + (0 if self.copied is None else aligned(self.copied.size_bytes))

    def copy(self, scratch: Buffer, most_tokens: int) -> Tensor | None:
        """Return a node that copies the input that the last node overwrites, or None."""
        if self.copied is None:
            return None
        at = scratch, self.scratch_bytes(most_tokens) - aligned(self.copied.size_bytes)
        return self.copied.computing("CONT", [self.copied]).alike(at=at)

    def twins(
        self, first: int, n: int, slots: Mapping[str, Tensor], ids: Tensor, scratch: Buffer,
        copy: Tensor | None, most_tokens: int,
    ) -> list[Tensor]:  # fmt: skip
        """Return nodes that compute tokens [first, first + n).

        `slots`: slots by kind of weight. `ids` [n_used, n]: slot numbers. `copy`: the node that
        copies an input, or None.
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
                    dim = self.token_dim(node, index)
                    whole = copy if copy is not None and source == self.copied else source
                    sources.append(whole if dim is None else whole.part(dim, first, n))
            if node is self.nodes[-1]:
                made[node] = node.part(_TOKENS, first, n, sources=sources)
            elif is_any(node, VIEWS):
                seen = node.sources[0], sources[0]
                made[node] = node.part(_TOKENS, 0, n, sources=sources, seen_from=seen)
            else:
                made[node] = node.part(_TOKENS, 0, n, sources=sources, at=(scratch, offset))
                offset += _scratch_bytes(node, most_tokens)
        return list(made.values())

    def token_dim(self, node: Tensor, index: int) -> int | None:
        """Return the dimension of tokens in source `index` of a node, or None if it has none."""
        if node in self.kinds:
            return _PRODUCT[index]
        dim = next(dims for op, dims in _BETWEEN.items() if node.is_op(op))[index]
        return None if dim is not None and node.sources[index].shape[dim] == 1 else dim


@dataclass(slots=True)
class ChunkedStep:
    """A chain to compute in chunks. Its cuts are numbered from `cut` on, one for each chunk."""

    cut: int
    n_cuts: int  # most cuts, one for each chunk
    at: int  # position in the graph without chains; the chain is computed before that node
    group: int
    pool: int
    layer: int
    chain: Chain
    views: Mapping[str, SlotViews]  # views by kind of weight
    ids: RouterIds
    n_slots: int
    most_tokens: int  # most tokens of a chunk
    ids_at: tuple[Buffer, int] | None = None  # place for the chunks' slot ids
    scratch: Buffer | None = None
    copy: Tensor | None = None  # node that copies an input, before the chain

    def begin_at(self, cut: int) -> None:
        """Set the number of the first cut."""
        self.cut = cut

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of weight in the order of their use."""
        return tuple(self.chain.kinds.values())

    @property
    def ids_bytes(self) -> int:
        """Bytes of device memory for the slot ids of all chunks. Each chunk's ids are aligned."""
        return self.ids.values.size * 4 + self.n_cuts * aligned(1)

    def twins(self, first: int, n: int, ids: Tensor) -> list[Tensor]:
        """Return nodes that compute tokens [first, first + n). `ids`: slot numbers."""
        assert self.scratch is not None
        slots = {kind: views.of(0, self.n_slots) for kind, views in self.views.items()}
        return self.chain.twins(first, n, slots, ids, self.scratch, self.copy, self.most_tokens)


def find_chunked(
    graph: Graph,
    products: Sequence[Product],
    layout: SlotLayout,
    memories: Sequence[SlotMemory],
) -> list[ChunkedStep]:
    """Return steps for the layers that may use more experts than have slots.

    The steps' cuts are not numbered yet.
    """
    places = layout.places()
    members: dict[tuple[int, Tensor], list[tuple[Product, str]]] = {}
    for product in products:
        number, kind = places[product.weight.name]
        pool = layout.pools[layout.groups[number].pool]
        if product.ids is not None and not pool.holds(product.n_tokens):
            members.setdefault((number, product.ids), []).append((product, kind))
    found = []
    for (number, ids), of_layer in members.items():
        group = layout.groups[number]
        pool, memory = layout.pools[group.pool], memories[group.pool]
        n_used, n_tokens, _, _ = ids.shape
        weights = {kind: product.weight for product, kind in of_layer}
        for chain in chains_of(graph, of_layer):
            step = ChunkedStep(
                cut=0,
                n_cuts=most_chunks(n_tokens, n_used, pool.n_slots, _MOST_TOKENS),
                at=chain.end,
                group=number,
                pool=group.pool,
                layer=group.layer,
                chain=chain,
                views={kind: memory.views(kind, weights[kind]) for kind in chain.kinds.values()},
                ids=RouterIds(ids, pool.n_experts),
                n_slots=pool.n_slots,
                most_tokens=_MOST_TOKENS,
            )
            found.append(step)
    return found


def without_chains(graph: Graph, chunked: Sequence[ChunkedStep], scratch: Buffer) -> Graph:
    """Return the graph without the chains, but with the nodes that copy the chains' inputs.

    Sets each step's position in the new graph.
    """
    gone = sorted(position for step in chunked for position in step.chain.positions)
    copies: dict[int, Tensor] = {}
    for step in chunked:
        step.scratch, step.copy = scratch, step.chain.copy(scratch, step.most_tokens)
        if step.copy is not None:
            copies[step.chain.positions[0]] = step.copy
    kept = [position for position in gone if position in copies]
    for step in chunked:
        end = step.chain.end
        step.at = end - bisect.bisect_left(gone, end) + bisect.bisect_left(kept, end)
    return graph.replacing(copies, gone)


def chains_of(graph: Graph, members: Sequence[tuple[Product, str]]) -> list[Chain]:
    """Return the chains of one layer's products: a single one if the nodes between allow it.

    Otherwise each product is a chain of its own, and experts are copied again for each chain.
    """
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
        if node not in kinds and not (is_any(node, tuple(_BETWEEN)) and len(node.shape) > _TOKENS):
            return None
        for source in sources:
            uses[source] = uses.get(source, 0) + 1
        chain[node] = position
    nodes = tuple(chain)
    if any(
        node.is_output or uses.get(node, 0) != graph.use_count(node) or not _can_be_cut(node)
        for node in nodes[:-1]
    ):
        return None  # a node outside the chain reads a result, or a node cannot be cut
    found = Chain(nodes, tuple(chain.values()), kinds, _ids(members[0][0]))
    return _guarded(found, [node for node in inside if node not in chain])


def _guarded(chain: Chain, others: Sequence[Tensor]) -> Chain | None:
    """Return the chain, with the input to copy if there is one.

    Returns None if one copy does not suffice. `others`: nodes between those of the chain. They are
    computed before the chain.
    """
    writes = [chain.nodes[-1], *(n for n in others if not is_any(n, VIEWS))]
    inside = {*chain.nodes, *others}
    overwritten: set[Tensor] = set()
    for node in chain.nodes:
        for index, source in enumerate(node.sources):
            if source in chain.nodes or (node in chain.kinds and index != 1):
                continue
            if any(written.overlaps(source) for written in writes if written != source):
                can_copy = chain.token_dim(node, index) == _TOKENS and source.is_contiguous
                if source in inside or not can_copy:
                    return None
                overwritten.add(source)
    if len(overwritten) > 1:
        return None
    copied = next(iter(overwritten), None)
    return Chain(chain.nodes, chain.positions, chain.kinds, chain.ids, copied)


def _can_be_cut(node: Tensor) -> bool:
    """True if a chunk of the node is a node of the same form with fewer tokens."""
    return node.shape[3] == 1 and (node.is_contiguous or node.is_op("VIEW"))


def _ids(product: Product) -> Tensor:
    assert product.ids is not None
    return product.ids


def _scratch_bytes(node: Tensor, n_tokens: int) -> int:
    return aligned(node.strides[_TOKENS] * n_tokens)
