"""Puts the store's pages on the nodes that read them, before anything is read into them."""

from __future__ import annotations

from collections.abc import Sequence

from numa.memory import PlacedMemory
from numa.place import Strategy
from numa.rows import Build
from numa.strategy import placement_for, stealing_sentence, touchers
from offload.ggml.threadpool import has_llamafile
from offload.model import TensorEntry
from offload.nodes.numa_plan import NumaPlan, placed_weights, weight_of
from offload.store.layout import Layout

_BATCH_TOKENS = 8
NOT_OURS = (
    "numa: no weights lie in memory of ours (nothing streams, or --mmap): pages stay where the page"
    " cache has them"
)


class PagePlacer:
    """The store's `place_pages`: places its memory as the plan says and remembers how it went."""

    def __init__(self, plan: NumaPlan, streamed: Sequence[TensorEntry]) -> None:
        self._plan, self._streamed = plan, streamed
        self.notes: tuple[str, ...] = ()

    def __call__(self, memory: PlacedMemory, layout: Layout, /) -> None:
        """Fault the pages in on their nodes. Raises NoSuchNode or PlacementRefused."""
        plan = self._plan
        if plan.strategy is None:
            return
        placement = placement_for(
            plan.strategy,
            plan.topology,
            plan.decode,
            placed_weights(self._streamed, layout),
            memory.size_bytes,
            node=plan.node,
            huge_pages=plan.huge_pages,
        )
        report = memory.apply(placement, touchers(plan.topology, plan.decode))
        notes = [_said(plan.strategy, report.how, report.local_share), *report.notes]
        build = Build(llamafile=has_llamafile())
        stolen = stealing_sentence([weight_of(e) for e in self._streamed], _BATCH_TOKENS, build)
        if stolen and plan.strategy in (Strategy.ROWS, Strategy.DISTRIBUTE):
            notes.append(stolen)
        self.notes = tuple(dict.fromkeys(notes))


def _said(strategy: Strategy, how: str, local_share: float | None) -> str:
    if local_share is None:
        return f"numa {strategy}: streamed weights placed by {how}, where they lie is not proven"
    return (
        f"numa {strategy}: streamed weights placed by {how}, {local_share:.1%} of the sampled pages"
        " on the wanted node"
    )
