"""Plans of a configuration, as a start executes them."""

from __future__ import annotations

from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.opening.context_size import sized
from specoffload.opening.drafters import with_usable_drafters
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned


def planned_for(config: Config, own: PlanOptions) -> Planned:
    """The plan for this configuration on its devices, or on the machine that `own` describes."""
    return Planner(with_usable_drafters(config), own).planned(config.ctx_size)


def with_context(config: Config) -> Config:
    """The configuration with the context that a start on this machine takes."""
    return sized(config, Planner(config))
