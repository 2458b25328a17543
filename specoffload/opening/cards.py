"""Plans with one GPU fewer and one more, beside the plan with the GPUs that there are."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from offload.errors import DoesNotFit
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned


@dataclass(frozen=True)
class CardCount:
    """A number of GPUs, and the plan with them. None: the model does not fit."""

    n_cards: int
    planned: Planned | None


def card_counts(planner: Planner, planned: Planned) -> tuple[CardCount, ...]:
    """Return the plans with one GPU fewer, with those of `planned`, and with one more.

    A further GPU is like the last one, and has a link of its own. All plans have the context of
    `planned`. Returns () if no GPU of one machine is planned for, or if --tensor-split divides the
    layers.
    """
    n_cards = planner.n_cards
    counts = []
    for n in range(max(1, n_cards - 1), n_cards + 2) if n_cards else ():
        with_cards: Planned | None = planned
        if n != n_cards:
            with_cards = None
            with suppress(DoesNotFit):
                with_cards = planner.with_cards(n).planned(planned.context.n_ctx)
        counts.append(CardCount(n, with_cards))
    return tuple(counts)


def layers_and_slots(planned: Planned) -> tuple[int, int]:
    """Return how many layers have all their weights in GPU memory, and the number of slots."""
    plans = [part.plan for part in planned.parts]
    slots = sum(pool.n_slots for plan in plans for pool in plan.layout.pools if pool.n_experts)
    return sum(plan.n_resident for plan in plans), slots
