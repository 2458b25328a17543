"""The cuts of a graph and the nodes that read slots: the same every time it is computed.

A *cut* is one need of the schedule: a layer's experts, whose products all read the same slots, or
one dense weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from offload.ggml.backend import RouterIds, SlotIds
from offload.ggml.graph import Product
from offload.ggml.tensor import Buffer, Redirect, Tensor
from offload.plan.slot_layout import SlotLayout
from offload.schedule.commands import Need
from offload.schedule.predict import Fetch, fetch_of
from offload.streaming.slot_memory import SlotMemory, SlotViews

Tickets = dict[str, Any]  # of the copies of some pieces, by kind: gate need not wait for down


@dataclass(slots=True)
class Reader:
    """A node that reads slots instead of its weight."""

    index: int  # in the graph's node order
    kind: str
    reads_weight: Redirect
    reads_ids: Redirect | None  # where the ids have to mean slots
    views: SlotViews  # of the slots, as weights like this one
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
    ids: RouterIds | None  # the router's choice, where it has to be read back
    n_experts: int  # 0: dense
    n_tokens: int  # 0: dense
    ids_offset: int = 0  # of the remapped ids in their buffer
    ids_buffer: Buffer | None = None
    slot_ids: SlotIds | None = None  # the remapped ids, in that buffer
    missed: bool = True  # something had to be copied for it the last time
    use: int = 0  # the number of its use of the slots, the last time
    waits: list[Tickets] = field(default_factory=list)  # of copies that its readers wait for
    last: int = field(init=False)  # the node after which its slots are read no more

    def __post_init__(self) -> None:
        self.last = self.readers[-1].index

    @property
    def ids_bytes(self) -> int:
        return 0 if self.ids is None else self.ids.values.size * 4


class Stop(NamedTuple):
    """A node before which the executor has to act: the `nth` reader of a step."""

    at: int  # in the graph's node order
    step: Step
    nth: int


def stops_of(steps: Sequence[Step]) -> list[Stop]:
    """Every reader of the steps, in node order."""
    stops = [Stop(r.index, step, n) for step in steps for n, r in enumerate(step.readers)]
    return sorted(stops, key=lambda stop: stop.at)


def find_steps(
    products: Sequence[Product], layout: SlotLayout, memories: Sequence[SlotMemory]
) -> list[Step]:
    """The cuts of a graph with these products, by their first node. `memories`: of each pool."""
    places = layout.places()
    by_cut: dict[tuple[int, Tensor], list[tuple[Product, str]]] = {}
    for product in products:
        group, kind = places[product.weight.name]
        # A dense weight that two nodes read is two cuts, which may be far apart.
        read_with = product.node if product.ids is None else product.ids
        by_cut.setdefault((group, read_with), []).append((product, kind))
    return [
        _step(cut, group, members, layout, memories)
        for cut, ((group, _), members) in enumerate(by_cut.items())
    ]


def _step(
    cut: int, group: int, members: Sequence[tuple[Product, str]], layout: SlotLayout,
    memories: Sequence[SlotMemory],
) -> Step:  # fmt: skip
    of = layout.groups[group]
    pool = layout.pools[of.pool]
    pieces = tuple((group, expert) for expert in range(max(1, pool.n_experts)))
    need: Need | None = Need(cut, of.pool, pieces)
    read_back: RouterIds | None = None
    n_tokens = 0
    if (ids := members[0][0].ids) is not None:
        n_used, n_tokens, _, _ = ids.shape
        fetch, _ = fetch_of(n_tokens, n_used, pool.n_experts, pool.n_slots)
        if fetch is Fetch.ALL_IN_ORDER:
            need = Need(cut, of.pool, pieces, contiguous=True)
        else:
            read_back = RouterIds(ids)
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
    return Step(cut, group, of.pool, of.layer, readers, need, read_back, pool.n_experts, n_tokens)
