"""Device memory budgets for tests, by the slots that they leave room for."""

from __future__ import annotations

from pathlib import Path

from offload.errors import DoesNotFit
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.streaming.options import StreamingOptions


def budget(path: Path, streaming: StreamingOptions, slots: str) -> int:
    """Bytes of device memory for the resident weights and slots for half of the streamed ones.

    If `slots` is not "half", returns the least budget that works.
    """
    facts = read_facts(path)
    whole = make_plan(facts, PlanRequest(n_gpu_layers=streaming.n_gpu_layers))
    if slots == "half":
        return whole.resident_bytes + whole.slot_bytes // 2
    low, high = 0, whole.resident_bytes + whole.slot_bytes
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            make_plan(facts, PlanRequest(budget_bytes=middle, n_gpu_layers=streaming.n_gpu_layers))
            high = middle
        except DoesNotFit:
            low = middle
    return high
