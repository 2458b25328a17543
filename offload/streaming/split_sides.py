"""A split layer as it was computed last, to be computed again for measuring (offload/hybrid)."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.ggml.pairs import check
from offload.hybrid.layers import HybridExecutor, HybridLayer
from offload.schedule.slots import READY, PoolSlots
from offload.streaming.steps import Step


@dataclass(frozen=True)
class SplitSides:
    """Its two sides and the link, to be timed. Nothing may be under way.

    What it computes lies in memory that the next graph writes before it reads it.
    """

    stream: Stream
    hybrid: HybridExecutor
    graph: Graph
    step: Step
    layer: HybridLayer
    slots: PoolSlots
    copy: Callable[[int, int], None]  # an expert of the layer into a slot, and wait for it

    @property
    def n_pairs(self) -> int:
        return 0 if self.step.ids is None else self.step.ids.values.size

    @property
    def n_slots(self) -> int:
        return self.slots.n_slots

    @property
    def n_experts(self) -> int:
        return self.step.n_experts

    def device_s(self, n_experts: int) -> float:
        """Raises DeviceFailed."""
        step, stream = self.step, self.stream
        assert step.slot_ids is not None
        values = step.slot_ids.values
        values[:] = (np.arange(values.size) % n_experts).reshape(values.shape)
        stream.upload(step.slot_ids)
        part = self.graph.part(step.at, step.last + 1)
        pointed = []
        for reader in step.readers:
            assert reader.reads_ids is not None
            reader.reads_weight.to(reader.views.of(0, self.n_slots))
            reader.reads_ids.to(step.slot_ids.tensor)
            pointed += [reader.reads_weight, reader.reads_ids]
        try:
            stream.synchronize()
            start_s = time.perf_counter()
            check(stream.compute(part), "timing experts on the device")
            stream.synchronize()
            return time.perf_counter() - start_s
        finally:
            for redirect in pointed:
                redirect.back()

    def host_s(self, n_experts: int, n_rows: int) -> float:
        """Raises DeviceFailed."""
        return self.hybrid.host_s(self.layer, self.n_experts, n_experts, n_rows)

    def copy_s(self) -> float | None:
        """None while no slot holds one of the layer's experts. Raises DeviceFailed."""
        for (group, expert), slot in self.slots.where.items():
            if group == self.step.group and self.slots.state[slot] == READY:
                start_s = time.perf_counter()
                self.copy(expert, slot)
                return time.perf_counter() - start_s
        return None
