"""The cuts of a graph and the nodes that read slots: the same every time it is computed.

A *cut* is one need of the schedule: a layer's experts, whose products all read the same slots, or
one dense weight; or of a layer in chunks, those of one chunk.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offload.ggml.backend import RouterIds, SlotIds
from offload.ggml.graph import Graph, Product
from offload.ggml.tensor import Buffer, Redirect, Tensor
from offload.plan.slot_layout import SlotLayout, SlotPool, bias_of
from offload.routing.recording import LayerRouting
from offload.schedule.band import most_shown
from offload.schedule.chunks import most_chunks
from offload.schedule.commands import Need
from offload.schedule.predict import Fetch, fetch_of
from offload.split.layers import HybridLayer
from offload.split.order import Ahead, Behind
from offload.streaming.chains import Chain, chains_of
from offload.streaming.slot_memory import SlotMemory, SlotViews

IDS_ALIGNMENT = 256
_MOST_BY_VECTORS = 100  # tokens: for more, a matrix kernel reads each expert far less often
Tickets = dict[str, Any]  # of the copies of some pieces, by kind: gate need not wait for down


@dataclass(slots=True)
class BiasReader:
    """A node that adds each expert's bias to what a product computes, and reads the bias's slots.

    It then has the same ids as the product. CUDA's backend fuses gate, bias, up, bias and GLU into
    one kernel only if all four have the same ids tensor (ggml_cuda_should_fuse_mul_mat).
    """

    bias: Tensor  # [n_out, n_experts], on the device
    reads_bias: Redirect
    reads_ids: Redirect
    views: SlotViews
    slots: Tensor | None = None  # what it reads


@dataclass(slots=True)
class Reader:
    """A node that reads slots instead of its weight."""

    index: int  # in the graph's node order
    kind: str
    reads_weight: Redirect
    reads_ids: Redirect | None  # where the ids have to mean slots
    views: SlotViews  # of the slots, as weights like this one
    bias: BiasReader | None = None
    slots: Tensor | None = None  # what it reads


@dataclass(slots=True)
class Step:
    """A cut and the nodes that read what it needs, in node order."""

    cut: int
    group: int
    pool: int
    layer: int
    readers: tuple[Reader, ...]
    need: Need | None  # known before the graph runs: dense weights, and experts fetched all
    ids: RouterIds | None  # the router's choice, where it may have to be read back
    n_experts: int  # 0: dense
    n_tokens: int  # 0: dense
    ids_offset: int = 0  # of the remapped ids in their buffer
    ids_buffer: Buffer | None = None
    slot_ids: SlotIds | None = None  # the remapped ids, in that buffer
    slot_ids_memory: NDArray[np.uint8] | None = None  # pinned memory for them, if there is any
    in_order: bool = False  # this time: all experts lie in order, so that the router's ids hold
    either: bool = False  # they may lie in order, or anywhere
    band: tuple[int, int] = (0, 0)  # first and number of the slots that the nodes were shown last
    missed: bool = True  # something had to be copied for it the last time
    use: int = 0  # the number of its use of the slots, the last time
    waits: list[Tickets] = field(default_factory=list)  # of copies that its readers wait for
    hybrid: HybridLayer | None = None  # where the CPU computes some of its experts
    routing: LayerRouting | None = None  # where what its router chooses may be recorded
    ahead: Ahead = Ahead()  # behind its last reader, and computed before the CPU's rows are there
    last: int = field(init=False)  # the node after which its slots are read no more

    def __post_init__(self) -> None:
        self.last = self.readers[-1].index

    @property
    def at(self) -> int:
        return self.readers[0].index

    @property
    def n_used(self) -> int:
        """Experts by a token, where the router's choice is read back."""
        return 0 if self.ids is None else self.ids.tensor.shape[0]

    @property
    def end(self) -> int:
        """Before which node the rows of the CPU are put in place, where it has some."""
        return self.last + 1 + self.ahead.n_nodes

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of weight, in the order of their use."""
        return tuple(reader.kind for reader in self.readers)

    @property
    def n_cuts(self) -> int:
        return 1

    @property
    def reads_ids(self) -> bool:
        """True if the router's ids are read back this time."""
        return self.ids is not None and not self.in_order

    def begin_at(self, cut: int) -> None:
        """Number the cut."""
        self.cut = cut
        self.need = None if self.need is None else self.need._replace(cut=cut)

    @property
    def ids_bytes(self) -> int:
        return 0 if self.ids is None else self.ids.values.size * 4


@dataclass(slots=True)
class ChunkedStep:
    """A layer's experts whose products are computed in chunks of tokens (offload/streaming/chains).

    Its cuts are numbered from `cut` on, one for each chunk.
    """

    cut: int
    n_cuts: int  # at most
    at: int  # before which node of the graph without the chains
    group: int
    pool: int
    layer: int
    chain: Chain
    views: Mapping[str, SlotViews]  # by kind
    ids: RouterIds
    n_slots: int
    most_tokens: int  # in a chunk
    ids_offset: int = 0
    scratch: Buffer | None = None
    copy: Tensor | None = None  # what is copied before, when it is computed

    def begin_at(self, cut: int) -> None:
        """Number the first cut."""
        self.cut = cut

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of weight, in the order of their use."""
        return tuple(self.chain.kinds.values())

    @property
    def ids_bytes(self) -> int:
        """Room for the ids of all chunks, each of which begins aligned."""
        return self.ids.values.size * 4 + self.n_cuts * IDS_ALIGNMENT

    @property
    def scratch_bytes(self) -> int:
        return self.chain.scratch_bytes(self.most_tokens)

    def twins(self, first: int, n: int, ids: Tensor) -> list[Tensor]:
        """Nodes that compute tokens [first, first + n), whose `ids` mean slots."""
        assert self.scratch is not None
        slots = {kind: views.of(0, self.n_slots) for kind, views in self.views.items()}
        return self.chain.twins(first, n, slots, ids, self.scratch, self.copy, self.most_tokens)


class Stop(NamedTuple):
    """A node before which the executor has to act: the `nth` reader of a step, or its chunks.

    Behind the last reader of a layer that is split and what goes ahead there, the rows of the CPU
    are put in place.
    """

    at: int  # in the graph's node order
    step: Step | ChunkedStep
    nth: int = 0


def stops_of(steps: Sequence[Step], chunked: Sequence[ChunkedStep] = ()) -> list[Stop]:
    """Every chunked step and every reader of the others, in node order."""
    stops = [Stop(step.at, step) for step in chunked]
    stops += [Stop(r.index, step, n) for step in steps for n, r in enumerate(step.readers)]
    ends = [Stop(s.end, s, len(s.readers)) for s in steps if s.hybrid is not None]
    return sorted([*ends, *stops], key=lambda stop: stop.at)


def behind_of(steps: Sequence[Step], chunked: Sequence[ChunkedStep], n_nodes: int) -> list[Behind]:
    """The nodes that may change places behind each layer that is split, none of them one before
    which the executor has to act."""
    stops = sorted([step.at for step in chunked] + [r.index for s in steps for r in s.readers])
    stops.append(n_nodes)
    return [
        Behind(s.group, s.last, stops[bisect.bisect_right(stops, s.last)], s.n_used)
        for s in steps
        if s.hybrid is not None
    ]


def find_chunked(
    graph: Graph,
    products: Sequence[Product],
    layout: SlotLayout,
    memories: Sequence[SlotMemory],
    most_tokens: int,
    vector_tokens: int = 0,
) -> list[ChunkedStep]:
    """The layers of which the batch may use more experts than have slots. Not yet numbered.

    With `vector_tokens` also those of batches that are to go in chunks of so many tokens.
    """
    places = layout.places()
    members: dict[tuple[int, Tensor], list[tuple[Product, str]]] = {}
    for product in products:
        number, kind = places[product.weight.name]
        pool = layout.pools[layout.groups[number].pool]
        if product.ids is None:
            continue
        by_vectors = 0 < vector_tokens < product.n_tokens <= _MOST_BY_VECTORS
        if by_vectors or not fits(product.ids, pool):
            members.setdefault((number, product.ids), []).append((product, kind))
    return [
        _chunked(chain, number, ids, of_layer, layout, memories, vector_tokens or most_tokens)
        for (number, ids), of_layer in members.items()
        for chain in chains_of(graph, of_layer)
    ]


def _chunked(
    chain: Chain, number: int, ids: Tensor, members: Sequence[tuple[Product, str]],
    layout: SlotLayout, memories: Sequence[SlotMemory], most_tokens: int,
) -> ChunkedStep:  # fmt: skip
    group = layout.groups[number]
    pool = layout.pools[group.pool]
    n_used, n_tokens, _, _ = ids.shape
    weights = {kind: product.weight for product, kind in members}
    memory = memories[group.pool]
    return ChunkedStep(
        cut=0,
        n_cuts=most_chunks(n_tokens, n_used, pool.n_slots, most_tokens),
        at=chain.end,
        group=number,
        pool=group.pool,
        layer=group.layer,
        chain=chain,
        views={kind: memory.views(kind, weights[kind]) for kind in chain.kinds.values()},
        ids=RouterIds(ids, pool.n_experts),
        n_slots=pool.n_slots,
        most_tokens=most_tokens,
    )


def fits(ids: Tensor, pool: SlotPool) -> bool:
    """True if all experts that a product with these ids may use fit the slots at once."""
    return pool.holds(ids.shape[1])


def without_chains(graph: Graph, chunked: Sequence[ChunkedStep], scratch: Buffer) -> Graph:
    """The graph without the nodes that are computed in chunks, but with what is copied for them.

    Tells each step where it now is.
    """
    gone = sorted(position for step in chunked for position in step.chain.positions)
    copies: dict[int, Tensor] = {}
    for step in chunked:
        step.scratch, step.copy = scratch, step.chain.copy(scratch, step.most_tokens)
        if step.copy is not None:
            copies[step.chain.positions[0]] = step.copy
    kept = [position for position in gone if position in copies]
    for step in chunked:
        before = bisect.bisect_left(gone, step.chain.end) - bisect.bisect_left(kept, step.chain.end)
        step.at = step.chain.end - before
    return graph.replacing(copies, gone)


def number_cuts(steps: Sequence[Step], chunked: Sequence[ChunkedStep]) -> int:
    """Number all cuts in the order in which they are computed; how many there are."""
    n_cuts = 0
    in_order: list[Step | ChunkedStep] = [*chunked, *steps]
    for step in sorted(in_order, key=lambda step: step.at):
        step.begin_at(n_cuts)
        n_cuts += step.n_cuts
    return n_cuts


def find_steps(
    products: Sequence[Product],
    layout: SlotLayout,
    memories: Sequence[SlotMemory],
    hybrids: Mapping[Tensor, HybridLayer] | None = None,
    biases: Mapping[Tensor, Tensor] | None = None,
    *,
    either: bool = False,
) -> list[Step]:
    """The cuts of a graph with these products, by their first node. `memories`: of each pool;
    `hybrids`: the layers that are split, by their router's ids. `biases`: as `find_biases` gives
    them. With `either` layers whose experts lie in order can do without."""
    places = layout.places()
    by_cut: dict[tuple[int, Tensor], list[tuple[Product, str]]] = {}
    for product in products:
        group, kind = places[product.weight.name]
        # A dense weight that two nodes read is two cuts, which may be far apart.
        read_with = product.node if product.ids is None else product.ids
        by_cut.setdefault((group, read_with), []).append((product, kind))
    return [
        _step(
            cut, group, members, layout, memories, (hybrids or {}).get(read_with), biases or {},
            either,
        )
        for cut, ((group, read_with), members) in enumerate(by_cut.items())
    ]  # fmt: skip


def find_biases(graph: Graph, products: Sequence[Product]) -> dict[Tensor, Tensor]:
    """The node that adds the experts' biases to each product, by the product's node."""
    ids_of = {product.node: product.ids for product in products if product.ids is not None}
    found: dict[Tensor, Tensor] = {}
    for _, node in graph.find("ADD_ID") if ids_of else ():
        values, bias, ids = node.sources
        if ids_of.get(values) == ids and bias.type == "f32" and bias.is_contiguous:
            found[values] = node
    return found


def _step(
    cut: int, group: int, members: Sequence[tuple[Product, str]], layout: SlotLayout,
    memories: Sequence[SlotMemory], hybrid: HybridLayer | None, biases: Mapping[Tensor, Tensor],
    either: bool,
) -> Step:  # fmt: skip
    of = layout.groups[group]
    pool = layout.pools[of.pool]
    pieces = tuple((group, expert) for expert in range(max(1, pool.n_experts)))
    need: Need | None = Need(cut, of.pool, pieces)
    read_back: RouterIds | None = None
    n_tokens = 0
    if (ids := members[0][0].ids) is not None:
        n_used, n_tokens, _, _ = ids.shape
        either = either and pool.n_slots <= _most_shown(members, n_tokens)
        fetch, _ = fetch_of(n_tokens, n_used, pool.n_experts, pool.n_slots)
        if hybrid is not None:
            fetch = Fetch.CHOSEN
        if fetch is Fetch.ALL_IN_ORDER:
            need = Need(cut, of.pool, pieces, contiguous=True)
        if either or fetch is not Fetch.ALL_IN_ORDER:
            read_back = RouterIds(ids, pool.n_experts)
        if fetch is Fetch.CHOSEN:
            need = None
    readers = tuple(
        Reader(
            product.index,
            kind,
            Redirect(product.node, 0),
            None if read_back is None else Redirect(product.node, 2),
            memories[of.pool].views(kind, product.weight),
        )
        for product, kind in members
    )
    # The CPU's rows are put into the output of a split layer's last product: its biases then go by
    # the router's ids.
    with_slots = members if hybrid is None else members[:-1]
    for reader, (product, kind) in zip(readers, with_slots, strict=False):
        node = biases.get(product.node)
        if read_back is not None and node is not None and memories[of.pool].has(bias_of(kind)):
            bias = node.sources[1]
            views = memories[of.pool].views(bias_of(kind), bias, axis=1)
            reader.bias = BiasReader(bias, Redirect(node, 1), Redirect(node, 2), views)
    step = Step(cut, group, of.pool, of.layer, readers, need, read_back, pool.n_experts, n_tokens)
    step.hybrid, step.in_order = hybrid, need is not None and need.contiguous
    step.either = either and step.in_order
    return step


def _most_shown(members: Sequence[tuple[Product, str]], n_tokens: int) -> int:
    """The most slots that the products' kernels can be shown at once."""
    limits = []
    for product, _ in members:
        n_rows, (block_bytes, row_bytes, _, _) = product.weight.shape[1], product.weight.strides
        limits.append(most_shown(n_rows, row_bytes // block_bytes, n_tokens))
    return min(limits)
