"""Plans an engine's threads and pages on memory nodes, before the engine opens. Pure.

A NumaPlan exists only if the machine has several memory nodes. So machines with one node have no
extra cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from numa.place import Candidate, PlacedWeight, Strategy, placement_for
from numa.threads import Team, plan_threads
from numa.topology import Topology
from offload.model import TensorEntry, is_experts
from offload.plan.store_layout import StoreLayout

if TYPE_CHECKING:
    from numa.memory import PlacedMemory

NOT_OURS = (
    "numa: no weights lie in memory of ours (nothing streams, or --mmap): pages stay where the page"
    " cache has them"
)


@dataclass(frozen=True)
class NumaPlan:
    """Teams of threads, and the placement of the streamed weights' pages.

    `candidate` is None if only threads are bound (a draft).
    """

    topology: Topology
    candidate: Candidate | None
    decode: Team
    batch: Team
    draft: Team
    reasons: tuple[str, ...] = ()

    def for_draft(self) -> NumaPlan:
        """Return the plan of a draft model: its own team, on one node, and no placed pages."""
        return replace(self, candidate=None, decode=self.draft, batch=self.draft, reasons=())

    def in_mask_order(self, *, openmp: bool) -> NumaPlan:
        """Return the plan with each team's processors in the order in which ggml hands them out."""
        decode, batch, draft = (
            team.in_mask_order(openmp=openmp) for team in (self.decode, self.batch, self.draft)
        )
        reasons = self.reasons
        is_rows = self.candidate is not None and self.candidate.strategy is Strategy.ROWS
        if openmp and decode.cpus != self.decode.cpus and is_rows:
            reasons += (
                "processor numbers are not ascending node by node and ggml hands them out in"
                " ascending order: threads alternate between nodes, pages follow the threads",
            )
        return replace(self, decode=decode, batch=batch, draft=draft, reasons=reasons)


def make_numa_plan(
    topology: Topology,
    candidate: Candidate,
    n_batch: int | None = None,
    *,
    n_spare_cores: int | None = None,
) -> NumaPlan:
    """Return the plan for `candidate`. `n_batch`: threads for several tokens. Raises NoSuchNode.

    `n_spare_cores` are left free for other threads; None: chosen.
    """
    threads = plan_threads(
        topology,
        candidate.n_threads,
        n_batch,
        n_spare_cores=n_spare_cores,
        node=candidate.node,
        alternate=candidate.strategy is Strategy.DISTRIBUTE,
    )
    return NumaPlan(
        topology, candidate, threads.decode, threads.batch, threads.draft, threads.reasons
    )


def placed_weights(entries: Iterable[TensorEntry], layout: StoreLayout) -> list[PlacedWeight]:
    """Return the streamed weights with their offsets in the store's memory, ascending."""
    placed = []
    for entry in entries:
        _, n_rows, n_matrices, *_ = *entry.shape, 1, 1, 1
        placed.append(
            PlacedWeight(
                layout.spots[entry.name].at_bytes,
                n_rows,
                entry.size_bytes // (n_rows * n_matrices),
                n_matrices,
                is_experts(entry),
            )
        )
    return sorted(placed, key=lambda weight: weight.offset_bytes)


class PagePlacer:
    """Places the store's pages on the plan's nodes, before weights are read into them.

    Afterwards `notes` describe how the pages were placed, and the kernel's refusals.
    """

    def __init__(self, plan: NumaPlan, streamed: Sequence[TensorEntry]) -> None:
        self._plan, self._streamed = plan, streamed
        self.notes: tuple[str, ...] = ()

    def __call__(self, memory: PlacedMemory, layout: StoreLayout, /) -> None:
        """Let the kernel allocate each page on its node. Raises NoSuchNode or PlacementRefused."""
        plan, candidate = self._plan, self._plan.candidate
        if candidate is None:
            return
        team = plan.decode
        placement = placement_for(
            candidate,
            plan.topology,
            team.nodes,
            placed_weights(self._streamed, layout),
            memory.size_bytes,
        )
        cpus = team.cpus_per_node()
        # The pages of a node without threads are touched by threads of the nearest node.
        for node in plan.topology.memory_nodes:
            near = min(set(team.nodes), key=lambda n: (plan.topology.distance(node, n), n))
            cpus.setdefault(node, cpus[near])
        report = memory.apply(placement, cpus)
        proof = (
            "where they lie is not proven"
            if report.local_share is None
            else f"{report.local_share:.1%} of the sampled pages on the wanted node"
        )
        placed = f"numa {candidate.strategy}: streamed weights placed by {report.how}, {proof}"
        self.notes = tuple(dict.fromkeys((placed, *report.notes)))
