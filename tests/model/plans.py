"""Plans of a configuration, as a start executes them."""

from __future__ import annotations

from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.opening.planning import Planned, Planner


def planned_for(config: Config, own: PlanOptions) -> Planned:
    """The plan for this configuration on its devices, or on the machine that `own` describes."""
    return Planner(config, own).planned(config.ctx_size)
