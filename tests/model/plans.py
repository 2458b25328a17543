"""Plans of a configuration, as a start executes them."""

from __future__ import annotations

from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.opening.context_size import ContextSize, chosen_context
from specoffload.opening.drafters import usable_drafters
from specoffload.opening.header import target_facts
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned


def planned_for(config: Config, own: PlanOptions) -> Planned:
    """The plan for this configuration on its devices, or on the machine that `own` describes."""
    spec = usable_drafters(target_facts(config), config.spec)
    return Planner(config, spec, own).planned(config.ctx_size)


def context_of(config: Config) -> ContextSize:
    """The context that a start on this machine takes."""
    return chosen_context(config, Planner(config, config.spec))
