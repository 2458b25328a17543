"""The costs of decodes that are expected of a layout, before any is timed. Pure."""

from __future__ import annotations

from offload.plan.layout import Layout
from offload.plan.placement import Plan
from offload.times.first_table import modelled, together
from offload.times.table import CostTable
from offload.times.work import model_work


def expected_costs(layout: Layout, plan: Plan, n_most: int) -> CostTable:
    """Return a table of expected times for batches of up to `n_most` tokens, in every way.

    The times follow from the rates of the devices that were found. `plan` is the plan of all local
    devices together, with the slots that they got. If there are several devices, each one's own
    plan counts.
    """
    devices = layout.local
    parts = [device for device in devices if len(device.layers)]
    if len(parts) > 1:
        each = [(device.device.machine, device.facts, device.plan.sharing) for device in parts]
    else:
        each = [(devices[0].device.machine, layout.facts, plan.sharing)]
    unions = parts[0].request.unions if parts else None
    return together(
        [
            modelled(
                machine,
                model_work(facts, unions=unions),
                sharing,
                n_most,
                splits=True,
                shares_prompts=len(each) == 1,
            )
            for machine, facts, sharing in each
        ]
    )
