"""Measures a split layer's two sides and the link. These times decide the split.

The device computes the layer's products again, with the same number of rows for each expert, in
randomly chosen slots. The CPU computes a few random experts of the layer. The link copies experts
into the slots that they are in already. Every time is a median.

CPU and link read the same RAM, so each slows the other down. So three measurements alternate: the
CPU alone, the link alone, and both at once.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import numpy as np

from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.ggml.threads import check
from offload.schedule.division import MeasuredCosts, side_times, slowdown
from offload.schedule.slots import LOADING, NEEDED, READY, Copy, PoolSlots
from offload.stream.copy_queue import CopyQueue
from offload.stream.cpu_side import SplitLayer
from offload.stream.cuts import CutStep
from offload.stream.split_path import SplitPath
from offload.times.split_corrections import (
    HOST_EXPERTS,
    SplitCorrections,
    TimedSide,
    device_timings,
)

_REPEATED = 3
_ROWS = (1, 2, 4, 8, 16)  # rows of one expert
_OUTLASTS = 4  # ratio of the copies' time to the time of the CPU's experts, each timed alone
_LEAST_S = 0.01  # least seconds of all copies, because a copying thread has to get a processor
_COPIES, _MOST_COPIES = 2, 64
_TURNS = 5  # measurements of each side alone and of both at once
_LEAST_DONE = 1 / 16  # least share of the copies done while the CPU computed

SecondsByRows = dict[int, list[tuple[int, float]]]  # rows -> (experts, seconds)


@dataclass(frozen=True)
class Beside:
    """Times of the CPU's computations while the link copied."""

    host_s: Sequence[float]  # seconds of each computation
    busy_s: float  # from the first copy to the end of the last computation
    left_s: float  # from the end of the last computation to the end of the last copy


@dataclass(frozen=True)
class SplitSides:
    """The two sides of a split layer and the link. Time them while no graph runs.

    The results are written to memory that the next graph overwrites before it reads it.
    """

    stream: Stream
    split: SplitPath
    copies: CopyQueue
    graph: Graph
    step: CutStep
    layer: SplitLayer
    slots: PoolSlots
    kinds: tuple[float, ...]  # each kind's share of an expert, in the order of copying
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
        (offload/stream/slot_ids.py). Raises DeviceFailed.
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
            return time.perf_counter() - start_s
        finally:
            for redirect in pointed:
                redirect.back()

    def host_s(self, n_experts: int, n_rows: int) -> float:
        """Return the CPU's seconds for `n_experts` with `n_rows` rows each. Raises DeviceFailed."""
        return self.split.host_s(self.layer, self.n_experts, n_experts, n_rows)

    @property
    def can_copy(self) -> bool:
        """True if one of the layer's experts is in a slot. Raises DeviceFailed."""
        self.copies.settle()  # waits for promoted experts that are still being copied
        return bool(self._in_slots())

    def copies_s(self, n: int) -> float:
        """Return the link's seconds for copies of `n` experts. Raises DeviceFailed."""
        self._read(n)
        start_s = time.perf_counter()
        self._begin_copies(n)
        self.copies.settle()
        return time.perf_counter() - start_s

    def beside_copies(self, n: int, until_s: float, n_experts: int, n_rows: int) -> Beside:
        """Copy `n` experts while the CPU computes `n_experts` with `n_rows` rows each.

        The CPU computes at least once. It repeats while the next computation is expected to end
        within `until_s` seconds of the first copy. Raises DeviceFailed.
        """
        self._read(n)
        start_s = time.perf_counter()
        self._begin_copies(n)
        host_s: list[float] = []
        while True:
            host_s.append(self.host_s(n_experts, n_rows))
            busy_s = time.perf_counter() - start_s
            if busy_s + host_s[-1] > until_s:
                break
        self.copies.settle()
        return Beside(host_s, busy_s, time.perf_counter() - start_s - busy_s)

    def _read(self, n: int) -> None:
        """Read the experts of `n` copies into memory, so that no read from the disk is timed."""
        self.copies.read(self.step.layer, [expert for expert, _ in self._in_slots()[:n]])

    def _begin_copies(self, n: int) -> None:
        """Enqueue `n` copies of experts into the slots that they are in already, in turn."""
        self.copies.copier.begin()
        step = self.step
        there = itertools.islice(itertools.cycle(self._in_slots()), n)
        while batch := list(itertools.islice(there, self.n_slots)):
            self.copies.copy(
                [
                    Copy(step.pool, slot, (step.group, expert), step.cut, NEEDED, None)
                    for expert, slot in batch
                ]
            )

    def _in_slots(self) -> list[tuple[int, int]]:
        """Return (expert, slot) for the layer's experts that are in slots."""
        slots, group = self.slots, self.step.group
        return [
            (expert, slot)
            for (number, expert), slot in slots.where.items()
            if number == group and slots.state[slot] in (LOADING, READY)
        ]


# -- measurements


@dataclass(frozen=True)
class LinkTimes:
    """Seconds of an expert's copy, and the slowdowns of CPU and link while the other is busy."""

    copy_s: float  # seconds of a copy while the CPU rests
    host_slowdown: float = 1.0
    link_slowdown: float = 1.0


def on_device(sides: SplitSides, measured: SecondsByRows) -> None:
    """Time the device and add (experts, seconds) to `measured`, by rows of each expert.

    Times 1, 2, 4, ... rows up to the number of tokens, so that no token uses an expert twice. Skips
    a number of rows that does not divide the number of pairs, or that needs more experts than the
    layer or the slots have.
    """
    most_experts = min(sides.n_slots, sides.n_experts)
    for timing in device_timings(sides.n_tokens, sides.n_pairs, most_experts):
        seconds = _median(partial(sides.device_s, timing.n_experts))
        measured.setdefault(timing.n_rows, []).append((timing.n_experts, seconds))


def on_host(sides: SplitSides) -> SecondsByRows:
    """Return the CPU's times: (experts, seconds) by rows of each expert."""
    seconds_by_rows: SecondsByRows = {}
    for n_rows, n_experts in _sizes(sides.n_experts):
        seconds = _median(partial(sides.host_s, n_experts, n_rows))
        seconds_by_rows.setdefault(n_rows, []).append((n_experts, seconds))
    return seconds_by_rows


def _sizes(n_experts: int) -> Iterator[tuple[int, int]]:
    for n_rows in _ROWS:
        for n in dict.fromkeys(min(n_experts, wanted) for wanted in HOST_EXPERTS):
            yield n_rows, n


def on_link(sides: SplitSides, n_turns: int = _TURNS) -> LinkTimes | None:
    """Return the link's times, or None if no expert of the layer is in a slot.

    The CPU alone, the link alone and both at once are timed by turns, `n_turns` times each.
    """
    if not sides.can_copy:
        return None
    n_experts, n_rows = min(sides.n_experts, min(HOST_EXPERTS)), 1
    once_s = _median(partial(sides.host_s, n_experts, n_rows))
    copy_s = _median(partial(sides.copies_s, _COPIES)) / _COPIES
    long_s = max(_OUTLASTS * once_s, _LEAST_S)
    n = max(_COPIES, math.ceil(min(_MOST_COPIES, long_s / max(copy_s, 1e-9))))
    if n * copy_s < once_s:  # the copies end too soon to slow the CPU down
        return LinkTimes(copy_s)
    host_s: list[float] = []
    host_beside_s: list[float] = []
    copies_s: list[float] = []
    copies_beside_s: list[float] = []
    for _ in range(n_turns):
        host_s.append(sides.host_s(n_experts, n_rows))
        copies_s.append(sides.copies_s(n))
        beside = sides.beside_copies(n, copies_s[-1], n_experts, n_rows)
        host_beside_s += beside.host_s
        # Copies that remained when the CPU had finished ran alone. The others took `busy_s`. This
        # time is scaled up to all copies.
        done = max(_LEAST_DONE, 1.0 - beside.left_s / copies_s[-1])
        copies_beside_s.append(beside.busy_s / done)
    return LinkTimes(
        median(copies_s) / n,
        slowdown(host_s, host_beside_s),
        slowdown(copies_s, copies_beside_s),
    )


def _allowed(sides: SplitSides) -> tuple[int, int, int]:
    """Return what `device_timings` needs to know of a layer: tokens, pairs and most experts."""
    return sides.n_tokens, sides.n_pairs, min(sides.n_slots, sides.n_experts)


def may_wait(sides: SplitSides, corrections: SplitCorrections) -> bool:
    """True if a timing for a batch of another size was repeated least often."""
    return corrections.may_wait(*_allowed(sides))


def time_once_more(sides: SplitSides, corrections: SplitCorrections) -> None:
    """Repeat the timing that was repeated least often. Raises DeviceFailed."""
    timing = corrections.next(*_allowed(sides))
    if timing.side is TimedSide.LINK:
        link = on_link(sides, n_turns=1)
        if link is None:
            corrections.skip(timing)
        else:
            corrections.see_link(link.copy_s, link.host_slowdown, link.link_slowdown)
    elif timing.n_experts > sides.n_experts:
        corrections.skip(timing)
    else:
        seconds = (
            partial(sides.host_s, timing.n_experts, timing.n_rows)
            if timing.side is TimedSide.HOST
            else partial(sides.device_s, timing.n_experts)
        )
        seconds()  # warm-up run, as in the first measurement
        corrections.see(timing, seconds())


def costs_of(
    device: SecondsByRows, host: SecondsByRows, link: LinkTimes, kinds: Sequence[float]
) -> MeasuredCosts:
    """Return the costs of split layers. `kinds`: as in `SplitSides`.

    Raises ValueError if a side has no times.
    """
    return MeasuredCosts(
        side_times(host),
        side_times(device),
        link.copy_s * link.link_slowdown,
        link.host_slowdown,
        link.link_slowdown,
        tuple(kinds),
    )


def _median(timed: Callable[[], float]) -> float:
    timed()  # warm-up run, as the memory may not have been used for long
    return median(timed() for _ in range(_REPEATED))
