"""An engine's plan for memory nodes, made before it opens. Pure.

A NumaPlan exists only where threads are to be pinned; on a machine with one memory node there is
none, and nothing of this costs anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from numa.pinning import Team, ThreadPlan
from numa.place import PlacedWeight, Strategy
from numa.rows import Weight
from numa.topology import Topology
from offload.model import TensorEntry, is_experts
from offload.store.layout import Layout


@dataclass(frozen=True)
class NumaPlan:
    """Teams of threads, and where the streamed weights' pages go.

    `strategy` is None where only threads are pinned (a draft). `node` is for `single`.
    """

    topology: Topology
    strategy: Strategy | None
    decode: Team
    batch: Team
    draft: Team
    node: int | None = None
    huge_pages: bool = True
    reasons: tuple[str, ...] = ()

    def for_draft(self) -> NumaPlan:
        """The draft's own team, on one node; its weights stay where its loader puts them."""
        return replace(self, strategy=None, decode=self.draft, batch=self.draft, reasons=())

    def in_mask_order(self, *, openmp: bool) -> NumaPlan:
        """The plan as ggml carries it out: each team in the order in which a mask hands out."""
        decode, batch, draft = (
            in_mask_order(team, openmp=openmp) for team in (self.decode, self.batch, self.draft)
        )
        reasons = self.reasons
        if openmp and decode.cpus != self.decode.cpus and self.strategy is Strategy.ROWS:
            reasons += (
                "processor numbers are not ascending node by node and ggml hands them out in"
                " ascending order: threads alternate between nodes, pages follow the threads",
            )
        return replace(self, decode=decode, batch=batch, draft=draft, reasons=reasons)


def make_numa_plan(
    topology: Topology,
    strategy: Strategy,
    threads: ThreadPlan,
    *,
    node: int | None = None,
    huge_pages: bool = True,
) -> NumaPlan:
    """The plan for an engine from a thread plan (numa.strategy.threads_for)."""
    return NumaPlan(
        topology,
        strategy,
        decode=threads.decode,
        batch=threads.batch,
        draft=threads.draft,
        node=node,
        huge_pages=huge_pages,
        reasons=threads.reasons,
    )


def in_mask_order(team: Team, *, openmp: bool) -> Team:
    """The team as `strict_cpu` would place it: same processors, and thread i where ggml puts it.

    Placement follows `Team.nodes`, so reads stay local in any order; where the numbers alternate
    between nodes, slabs are a thread's instead of a node's and fewer pages can be huge.
    """
    node_of = dict(zip(team.cpus, team.nodes, strict=True))
    cpus = team.cpus_under_strict_mask(openmp=openmp)
    return Team(team.name, cpus, tuple(node_of[cpu] for cpu in cpus))


def weight_of(entry: TensorEntry) -> Weight:
    """A tensor as `numa.rows` sees it: matrices of packed rows."""
    dims = (*entry.shape, 1, 1, 1)
    n_rows, n_matrices = dims[1], dims[2]
    return Weight(
        entry.name,
        n_rows=n_rows,
        row_bytes=entry.size_bytes // (n_rows * n_matrices),
        n_matrices=n_matrices,
        routed=is_experts(entry),
        quant=entry.type.lower(),
    )


def placed_weights(entries: Iterable[TensorEntry], layout: Layout) -> list[PlacedWeight]:
    """The streamed weights at their offsets in the store's memory, ascending."""
    placed = [PlacedWeight(weight_of(e), layout.spots[e.name].at_bytes) for e in entries]
    return sorted(placed, key=lambda p: p.offset_bytes)
