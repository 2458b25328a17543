"""A split layer of the last decode, computed again to time both sides and the link."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.ggml.threads import check
from offload.schedule.slots import LOADING, READY, PoolSlots
from offload.split.cpu_side import SplitLayer
from offload.split.measuring import Beside
from offload.split.path import SplitPath
from offload.streaming.copying import Copier
from offload.streaming.cuts import Step


@dataclass(frozen=True)
class SplitSides:
    """The two sides of a split layer and the link, to be timed while nothing is under way.

    The results go to memory that the next graph writes before it reads it.
    """

    stream: Stream
    split: SplitPath
    graph: Graph
    step: Step
    layer: SplitLayer
    slots: PoolSlots
    copier: Copier
    settle: Callable[[], None]  # returns when no copy is under way
    copy: Callable[[Sequence[tuple[int, int]]], object]  # copies (expert, slot) pairs in order
    kinds: tuple[float, ...]
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @property
    def n_pairs(self) -> int:
        return 0 if self.step.ids is None else self.step.ids.values.size

    @property
    def n_tokens(self) -> int:
        return self.step.n_tokens

    @property
    def n_slots(self) -> int:
        return self.slots.n_slots

    @property
    def n_experts(self) -> int:
        return self.step.n_experts

    def device_s(self, n_experts: int) -> float:
        """Return the device's seconds for all pairs, spread over `n_experts` slots.

        Each call picks random slots, so that their contents are in no cache. `n_experts` is at
        least the number that a token uses, so that no token names a slot twice
        (offload/split/spare.py). Raises DeviceFailed.
        """
        step, stream = self.step, self.stream
        assert step.slot_ids is not None
        values = step.slot_ids.values
        slots = self.random.choice(self.n_slots, n_experts, replace=False)
        values[:] = slots[np.arange(values.size) % n_experts].reshape(values.shape)
        stream.upload(step.slot_ids)
        if step.ids is not None:
            # Experts' biases and factors are read by the router's own ids. Later nodes have
            # overwritten these ids, and ids out of range would end the process.
            stream.upload(step.ids)
        # The device also computes the nodes that go ahead of the CPU's rows.
        part = self.graph.part(step.at, step.last + 1 + step.ahead.n_repeatable)
        pointed = []
        for reader in step.readers:
            weight, ids = reader.reads[0], reader.ids[0]
            weight.redirect.to(weight.views.of(0, self.n_slots))
            ids.to(step.slot_ids.tensor)
            pointed += [weight.redirect, ids]
        try:
            stream.synchronize()
            start_s = time.perf_counter()
            check(stream.compute(part), "timing experts on the device")
            stream.synchronize()
            self.split.wait_for_device(start_s, n_experts)
            return time.perf_counter() - start_s
        finally:
            for redirect in pointed:
                redirect.back()

    def host_s(self, n_experts: int, n_rows: int) -> float:
        """Return the CPU's seconds for `n_experts` of `n_rows` rows each. Raises DeviceFailed."""
        return self.split.host_s(self.layer, self.n_experts, n_experts, n_rows)

    @property
    def can_copy(self) -> bool:
        """True if one of the layer's experts is in a slot. Raises DeviceFailed."""
        self.settle()  # waits for promoted experts that are still being copied
        return bool(self._in_slots())

    def copies_s(self, n: int) -> float:
        """Return the link's seconds for copies of `n` experts. Raises DeviceFailed."""
        start_s = time.perf_counter()
        self._begin_copies(n)
        self.settle()
        return time.perf_counter() - start_s

    def beside_copies(self, n: int, until_s: float, n_experts: int, n_rows: int) -> Beside:
        """Time the CPU while the link copies, as in `Sides`. Raises DeviceFailed."""
        start_s = time.perf_counter()
        self._begin_copies(n)
        host_s: list[float] = []
        while True:
            host_s.append(self.host_s(n_experts, n_rows))
            busy_s = time.perf_counter() - start_s
            if busy_s + host_s[-1] > until_s:
                break
        self.settle()
        return Beside(host_s, busy_s, time.perf_counter() - start_s - busy_s)

    def _begin_copies(self, n: int) -> None:
        """Enqueue `n` copies of experts into the slots they are in, each expert in turn."""
        self.copier.begin()
        copies = itertools.islice(itertools.cycle(self._in_slots()), n)
        while batch := list(itertools.islice(copies, self.n_slots)):
            self.copy(batch)

    def _in_slots(self) -> list[tuple[int, int]]:
        """Return (expert, slot) for the layer's experts that are in slots."""
        slots, group = self.slots, self.step.group
        return [
            (expert, slot)
            for (number, expert), slot in slots.where.items()
            if number == group and slots.state[slot] in (LOADING, READY)
        ]
