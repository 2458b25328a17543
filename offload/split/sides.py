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
    """The two sides of a layer and the link, to be timed. Nothing may be under way.

    Its results go to memory that the next graph writes before it reads it.
    """

    stream: Stream
    split: SplitPath
    graph: Graph
    step: Step
    layer: SplitLayer
    slots: PoolSlots
    copier: Copier
    settle: Callable[[], None]  # until no copy is under way
    copy: Callable[[Sequence[tuple[int, int]]], object]  # experts into slots, one after the other
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
        """Return the device's seconds for all pairs, spread over so many experts in slots.

        Takes other slots each time, so that they are in no cache; at least as many as a token uses,
        so that no token names one twice (offload/split/spare.py). Raises DeviceFailed.
        """
        step, stream = self.step, self.stream
        assert step.slot_ids is not None
        values = step.slot_ids.values
        slots = self.random.choice(self.n_slots, n_experts, replace=False)
        values[:] = slots[np.arange(values.size) % n_experts].reshape(values.shape)
        stream.upload(step.slot_ids)
        if step.ids is not None:
            # Biases and factors of experts are read by the router's own ids, whose memory later
            # nodes have used for something else: out of range they end the process.
            stream.upload(step.ids)
        # What goes ahead is the device's meanwhile.
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
        """Raises DeviceFailed."""
        return self.split.host_s(self.layer, self.n_experts, n_experts, n_rows)

    @property
    def can_copy(self) -> bool:
        """Raises DeviceFailed."""
        self.settle()  # what a slow link still brings for later
        return bool(self._in_slots())

    def copies_s(self, n: int) -> float:
        """Raises DeviceFailed."""
        start_s = time.perf_counter()
        self._begin_copies(n)
        self.settle()
        return time.perf_counter() - start_s

    def beside_copies(self, n: int, until_s: float, n_experts: int, n_rows: int) -> Beside:
        """Raises DeviceFailed."""
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
        """Have experts in slots copied there again, so many, each as often as any other."""
        self.copier.begin()
        copies = itertools.islice(itertools.cycle(self._in_slots()), n)
        while batch := list(itertools.islice(copies, self.n_slots)):
            self.copy(batch)

    def _in_slots(self) -> list[tuple[int, int]]:
        """The layer's experts that have one, and which."""
        slots, group = self.slots, self.step.group
        return [
            (expert, slot)
            for (number, expert), slot in slots.where.items()
            if number == group and slots.state[slot] in (LOADING, READY)
        ]
