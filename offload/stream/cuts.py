"""Finds the cuts of a graph and the nodes that read slots, once for all decodes with that graph.

The schedule has one need for each *cut*. A cut is a layer's experts, whose products all read the
same slots, or one dense weight, or the experts of one pass (offload/stream/passes.py).
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offload.ggml.backend import RouterIds, SlotIds
from offload.ggml.graph import Graph, Product
from offload.ggml.tensor import Redirect, Tensor
from offload.plan.slot_layout import SlotLayout, bias_of
from offload.routing.routing import LayerRouting
from offload.schedule.batch import Fetch, fetch_of, most_in_range
from offload.schedule.slots import CutNeed
from offload.stream.cpu_side import SplitLayer
from offload.stream.nodes_ahead import Behind, NodesAhead
from offload.stream.passes import PassStep
from offload.stream.slot_memory import SlotMemory, SlotViews

_WAIT_ONCE_TOKENS = 8  # largest batch whose layers wait once for all their copies
Tickets = dict[str, Any]  # tickets of some pieces' copies by kind, as gate need not wait for down


@dataclass(slots=True)
class SlotRead:
    """A source of a node that is replaced by slots."""

    redirect: Redirect
    views: SlotViews  # slots as tensors of the source's type and shape
    slots: Tensor | None = None  # slots that replace the source in this decode


@dataclass(slots=True)
class Reader:
    """A product that reads slots instead of its weight, with the node that adds its biases.

    The product and that node get the same ids. CUDA's backend fuses gate, bias, up, bias and GLU
    into one kernel only if the first four have the same ids tensor (ggml_cuda_should_fuse_mul_mat).
    """

    index: int  # position in the graph
    kind: str
    reads: list[SlotRead]  # the weight; then its biases, if they are read from slots
    ids: list[Redirect]  # sources that read slot ids instead of the router's


@dataclass(slots=True)
class CutStep:
    """A cut and the nodes that read its pieces, in node order."""

    # Decided when the graph is first seen:
    cut: int
    group: int
    pool: int
    layer: int
    readers: tuple[Reader, ...]
    need: CutNeed | None  # None: unknown until the router's ids have been read
    ids: RouterIds | None  # the router's choice, if it may have to be read back
    n_experts: int  # 0: dense
    n_tokens: int  # 0: dense
    biases: Mapping[str, Tensor]  # biases that are read from slots, by kind of weight
    either: bool = False  # True for a whole layer that may be read in order or from any slots
    slot_ids: SlotIds | None = None
    split: SplitLayer | None = None  # set if the CPU computes some of the experts
    routing: LayerRouting | None = None  # record of the router's choices
    # Nodes after the last reader that need not wait for the CPU's rows:
    ahead: NodesAhead = NodesAhead()
    rows: Tensor | None = None  # rows [n_embd, 1, n_tokens] that the experts multiply
    last: int = field(init=False)  # position of the last reader
    # Decided in each decode:
    in_order: bool = False  # True if experts lie in order, so that ids are slot numbers
    slots_seen: tuple[int, int] = (0, 0)  # first slot and number of slots that the nodes see
    is_free: bool = False  # True if nobody wants the results, so that any slots do
    missed: bool = True  # True if a piece had to be copied in the last decode
    use: int = 0  # number of the cut's last use of the slots
    waits: list[Tickets] = field(default_factory=list)  # copies that the readers wait for

    def __post_init__(self) -> None:
        self.last = self.readers[-1].index
        self.in_order = self.need is not None and self.need.contiguous

    @property
    def at(self) -> int:
        return self.readers[0].index

    @property
    def n_used(self) -> int:
        """Experts that a token uses; 0 if the router's choice is never read back."""
        return 0 if self.ids is None else self.ids.tensor.shape[0]

    @property
    def end(self) -> int:
        """Position of the node before which the CPU's rows have to be placed."""
        return self.last + 1 + self.ahead.n_nodes

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of weight in the order of their use."""
        return tuple(reader.kind for reader in self.readers)

    @property
    def n_cuts(self) -> int:
        return 1

    @property
    def reads_ids(self) -> bool:
        """True if the router's ids are read back in this decode."""
        return self.ids is not None and not self.in_order and not self.is_free

    def begin_at(self, cut: int) -> None:
        """Set the cut's number."""
        self.cut = cut
        self.need = None if self.need is None else self.need._replace(cut=cut)

    @property
    def ids_bytes(self) -> int:
        return 0 if self.ids is None else self.ids.values.size * 4


class Stop(NamedTuple):
    """A node before which the executor has to act.

    The node is the `nth` reader of a step, or the place of a layer in passes.
    """

    at: int  # position in the graph
    step: CutStep | PassStep
    nth: int = 0


def waits_once(step: CutStep, depth: int) -> bool:
    """True if a cut waits once for all its copies, instead of for each kind of weight in turn."""
    return step.n_tokens <= _WAIT_ONCE_TOKENS or not depth


def stops_of(steps: Sequence[CutStep], passes: Sequence[PassStep] = ()) -> list[Stop]:
    """Return all stops in node order."""
    stops = [Stop(step.at, step) for step in passes]
    stops += [Stop(r.index, step, n) for step in steps for n, r in enumerate(step.readers)]
    return sorted(stops, key=lambda stop: stop.at)


def behind_of(steps: Sequence[CutStep], passes: Sequence[PassStep], n_nodes: int) -> list[Behind]:
    """Return the nodes after each split layer that may be reordered, up to the next stop."""
    stops = sorted([step.at for step in passes] + [r.index for s in steps for r in s.readers])
    stops.append(n_nodes)
    return [
        Behind(s.group, s.last, stops[bisect.bisect_right(stops, s.last)], s.n_used)
        for s in steps
        if s.split is not None
    ]


def number_cuts(steps: Sequence[CutStep], passes: Sequence[PassStep]) -> int:
    """Number all cuts in the order in which they are computed. Return the number of cuts."""
    n_cuts = 0
    in_order: list[CutStep | PassStep] = [*passes, *steps]
    for step in sorted(in_order, key=lambda step: step.at):
        step.begin_at(n_cuts)
        n_cuts += step.n_cuts
    return n_cuts


def find_steps(
    graph: Graph,
    products: Sequence[Product],
    layout: SlotLayout,
    memories: Sequence[SlotMemory],
    split: Mapping[Tensor, SplitLayer],
    *,
    either: bool,
) -> list[CutStep]:
    """Return the cuts of a graph with these products, in the order of their first nodes.

    `memories`: one for each pool. `split`: the split layers, by their routers' ids. With `either`,
    whole layers whose experts would be read in order may also be read from any slots.
    """
    places, biases = layout.places(), _biases(graph, products)
    by_cut: dict[tuple[int, Tensor], list[tuple[Product, str]]] = {}
    for product in products:
        group, kind = places[product.weight.name]
        # A dense weight that two nodes read makes two cuts, because the nodes may be far apart.
        read_with = product.node if product.ids is None else product.ids
        by_cut.setdefault((group, read_with), []).append((product, kind))
    return [
        _step(cut, group, members, layout, memories, split.get(read_with), biases, either)
        for cut, ((group, read_with), members) in enumerate(by_cut.items())
    ]


def _biases(graph: Graph, products: Sequence[Product]) -> dict[Tensor, Tensor]:
    """Return the node that adds the experts' biases to each product, by the product's node."""
    ids_of = {product.node: product.ids for product in products if product.ids is not None}
    biases: dict[Tensor, Tensor] = {}
    for _, node in graph.find("ADD_ID") if ids_of else ():
        values, bias, ids = node.sources
        if ids_of.get(values) == ids and bias.type == "f32" and bias.is_contiguous:
            biases[values] = node
    return biases


def _step(
    cut: int, group: int, members: Sequence[tuple[Product, str]], layout: SlotLayout,
    memories: Sequence[SlotMemory], split: SplitLayer | None, biases: Mapping[Tensor, Tensor],
    either: bool,
) -> CutStep:  # fmt: skip
    of = layout.groups[group]
    pool, memory = layout.pools[of.pool], memories[of.pool]
    pieces = tuple((group, expert) for expert in range(max(1, pool.n_experts)))
    need: CutNeed | None = CutNeed(cut, of.pool, pieces)
    read_back: RouterIds | None = None
    n_tokens = 0
    if (ids := members[0][0].ids) is not None:
        n_used, n_tokens, _, _ = ids.shape
        fetch = fetch_of(n_tokens, n_used, pool.n_experts, pool.n_slots)
        if split is not None or fetch is Fetch.CHOSEN:
            fetch, need = Fetch.CHOSEN, None
        elif fetch is Fetch.ALL_IN_ORDER:
            need = CutNeed(cut, of.pool, pieces, contiguous=True)
            either = either and pool.n_slots <= _most_in_range(members, n_tokens)
        if either or fetch is not Fetch.ALL_IN_ORDER:
            read_back = RouterIds(ids, pool.n_experts)
    readers, slot_biases = [], {}
    for nth, (product, kind) in enumerate(members):
        reads = [SlotRead(Redirect(product.node, 0), memory.views(kind, product.weight))]
        redirects = [] if read_back is None else [Redirect(product.node, 2)]
        node = biases.get(product.node)
        # The CPU's rows are placed in the output of a split layer's last product. So its biases are
        # added later, by the router's ids.
        is_placed = split is not None and nth == len(members) - 1
        if redirects and node is not None and memory.has(bias_of(kind)) and not is_placed:
            bias = slot_biases[kind] = node.sources[1]
            reads.append(SlotRead(Redirect(node, 1), memory.views(bias_of(kind), bias, axis=1)))
            redirects.append(Redirect(node, 2))
        readers.append(Reader(product.index, kind, reads, redirects))
    step = CutStep(
        cut, group, of.pool, of.layer, tuple(readers), need, read_back, pool.n_experts, n_tokens,
        slot_biases, split=split, rows=members[0][0].node.source(1),
    )  # fmt: skip
    step.either = either and step.in_order
    return step


def _most_in_range(members: Sequence[tuple[Product, str]], n_tokens: int) -> int:
    """Return the most slots that the products' kernels can see at once."""
    limits = []
    for product, _ in members:
        n_rows, (block_bytes, row_bytes, _, _) = product.weight.shape[1], product.weight.strides
        limits.append(most_in_range(n_rows, row_bytes // block_bytes, n_tokens))
    return min(limits)
