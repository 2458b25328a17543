"""Device memory budgets for tests, by the slots that they leave room for."""

from __future__ import annotations

from pathlib import Path

from lab.options import Streaming
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan

ON_GPU = 999  # for `n_gpu_layers`: the dense weights of all layers stay resident


def budget(path: Path, streaming: Streaming, slots: str) -> int:
    """Bytes of device memory for the resident weights and slots for half of the streamed ones.

    If `slots` is not "half", returns the least budget that works.
    """
    return budget_of(read_facts(path), streaming, slots)


def budget_of(facts: ModelFacts, streaming: Streaming, slots: str) -> int:
    """As `budget`, of a model's facts or of some of its layers."""
    whole = make_plan(facts, PlanRequest(n_gpu_layers=streaming.get("n_gpu_layers")))
    if slots == "half":
        return whole.resident_bytes + whole.slot_bytes // 2
    low, high = 0, whole.resident_bytes + whole.slot_bytes
    while low + 1 < high:
        middle = (low + high) // 2
        try:
            make_plan(
                facts, PlanRequest(budget_bytes=middle, n_gpu_layers=streaming.get("n_gpu_layers"))
            )
            high = middle
        except DoesNotFit:
            low = middle
    return high


def limited(path: Path, streaming: Streaming, slots: str) -> Streaming:
    """`streaming` with the memory of `budget`.

    With "half", dense weights stay resident unless the options say something else. On a tiny model
    a plan may find it faster to stream them and to keep all experts.
    """
    limits = streaming | Streaming(vram_bytes=budget(path, streaming, slots))
    if slots == "half" and streaming.get("n_gpu_layers") is None:
        return limits | Streaming(n_gpu_layers=ON_GPU)
    return limits
