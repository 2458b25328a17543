"""Finds the ranges of layers with which several devices are expected to be fastest. Pure.

A token passes the devices one after the other, so the seconds of decodes add up. In a prompt, the
last device computes a ubatch while the other devices compute the next ubatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offload.model import ModelFacts
from offload.plan.found import DeviceRoom
from offload.plan.placement import PlanRequest
from offload.plan.range_times import Floats, RangeTimes, Stages, hand_over_s, ubatches
from offload.plan.ranges import LayerRange
from offload.plan.sharing import SMALL_UBATCHES
from offload.times.machine import Real


def overlap_s(front_s: Real, last_s: Real, n_ubatches: int) -> Real:
    """Return the seconds that a prompt saves because the last device computes beside the others.

    `last_s` is the last device's time for the whole prompt, and `front_s` that of all other devices
    together. They overlap except for the others' first ubatch and the last device's last ubatch.
    """
    return (1.0 - 1.0 / n_ubatches) * np.minimum(front_s, last_s)


def n_passes(request: PlanRequest, n_ubatch: int) -> int:
    """Return the number of ubatches of the workload's prompt, at least 1."""
    return max(1, math.ceil(request.workload.n_prompt / n_ubatch))


@dataclass(frozen=True)
class FoundRanges:
    """The fastest ranges that a search found. `ranges` is empty if nothing fits."""

    seconds: float = math.inf  # expected seconds of the planned workload
    ranges: tuple[LayerRange, ...] = ()
    n_ubatch: int | None = None
    draft_on: int = 0
    streams: bool = True


@dataclass(frozen=True)
class _Fronts:
    """The fastest ranges of the devices so far.

    The arrays are indexed by the number of layers that these devices have together. The score of
    ranges is their decode seconds plus `weight` times their prompt seconds. `weight` is at most 1,
    because a part of the prompt seconds may overlap with the last device.
    """

    weight: float
    prompt_s: Floats
    decode_s: Floats
    tie_s: Floats
    firsts: tuple[NDArray[np.int64], ...] = ()  # first layer of each device's range

    @property
    def score(self) -> Floats:
        return self.weight * self.prompt_s + self.decode_s + self.tie_s

    def then(self, stages: Stages, *, may_skip: bool) -> _Fronts:
        """Return the fastest ranges with one more device.

        `stages` are the new device's times. With `may_skip`, it may get no layers.
        """
        stage_score = self.weight * stages.prompt_s + stages.decode_s + stages.tie_s
        score = self.score[:, None] + stage_score
        if may_skip:
            np.fill_diagonal(score, self.score)
        first, end = np.argmin(score, axis=0), np.arange(len(stage_score))

        def added(before: Floats, more: Floats) -> Floats:
            is_skipped = may_skip & (first == end)
            with_stage: Floats = before[first] + np.where(is_skipped, 0.0, more[first, end])
            return with_stage

        return _Fronts(
            self.weight,
            added(self.prompt_s, stages.prompt_s),
            added(self.decode_s, stages.decode_s),
            added(self.tie_s, stages.tie_s),
            (*self.firsts, first),
        )

    def ranges(self, first: int, n_layers: int, n_devices: int) -> tuple[LayerRange, ...]:
        """Return all devices' ranges if the last device that has layers begins at `first`."""
        bounds = [n_layers + 1, first]
        for firsts in reversed(self.firsts):
            bounds.append(int(firsts[bounds[-1]]))
        ranges = [LayerRange(*pair) for pair in pairwise(reversed(bounds))]
        return (*ranges, *[LayerRange(0, 0)] * (n_devices - len(ranges)))


class Search:
    """Finds the fastest ranges by dynamic programming over the devices."""

    def __init__(
        self, facts: ModelFacts, devices: Sequence[DeviceRoom], request: PlanRequest
    ) -> None:
        self._facts, self._devices, self._request = facts, devices, request
        self._n, self._times = facts.n_layers, RangeTimes(facts, request)

    def best(
        self, draft_places: Sequence[int], *, use_all: bool
    ) -> tuple[FoundRanges, FoundRanges]:
        """Return the fastest ranges, and the fastest that have all layers on one device.

        `draft_places` are the devices that the draft model may be on. With `use_all`, every device
        gets a layer, and the second result is empty.
        """
        best = [FoundRanges(), FoundRanges()]
        for draft_on in draft_places:
            is_over = [False, use_all]
            for n_ubatch in ubatches(self._devices, self._request):
                both = self._with_ubatch(n_ubatch, draft_on, use_all=use_all)
                for i, of_goal in enumerate(both):
                    if not is_over[i] and of_goal.seconds < best[i].seconds:
                        best[i] = of_goal
                    # If all weights are resident, larger ubatches would save nothing.
                    is_over[i] |= not of_goal.streams and n_ubatch not in SMALL_UBATCHES
        return best[0], best[1]

    def _with_ubatch(
        self, n_ubatch: int, draft_on: int, *, use_all: bool
    ) -> tuple[FoundRanges, FoundRanges]:
        """Return the results of `best` with this ubatch, and the draft on device `draft_on`."""
        n, request, devices = self._n, self._request, self._devices
        n_ubatches = n_passes(request, n_ubatch)
        # With two devices, the number of the first one's layers is also its range. So all values
        # of `weight` would give the same result.
        weights = {1.0} if len(devices) < 3 else {1.0, 0.5, 1.0 / n_ubatches}
        start = np.where(np.arange(n + 1) == 0, 0.0, np.inf)
        fronts = [_Fronts(weight, start, start, start) for weight in weights]
        best, alone = FoundRanges(), FoundRanges()
        for d, device in enumerate(devices):
            room: int | None = device.budget_bytes
            if room is not None and device.is_counted:
                room -= request.reserve_bytes if d == draft_on else 0
                if room < 0:
                    return FoundRanges(), FoundRanges()  # the draft model does not fit
            last = self._times.stages(device, room, n_ubatch, is_last=True, is_first=not d)
            handed = hand_over_s(self._facts, device, request, n_ubatch, is_first=False)
            last = last.handed(*handed, first=0 if device.is_remote else 1)
            for front in fronts if d == len(devices) - 1 or not use_all else ():
                before_s, its_s = map(_finite, (front.prompt_s[:n], last.prompt_s))
                saved_s = last.overlaps * overlap_s(before_s, its_s, n_ubatches)
                saved_s *= may_overlap(devices[: d + 1])
                total = front.prompt_s[:n] + last.prompt_s - saved_s + last.tie_s
                total = total + front.decode_s[:n] + last.decode_s + front.tie_s[:n]
                for first in {int(np.argmin(total)), 0}:
                    ranges = FoundRanges(
                        float(total[first]), front.ranges(first, n, len(devices)), n_ubatch,
                        draft_on, bool(front.tie_s[first] + last.tie_s[first] > 0),
                    )  # fmt: skip
                    best = min(best, ranges, key=lambda f: f.seconds)
                    if not first:
                        alone = min(alone, ranges, key=lambda f: f.seconds)
            if d < len(devices) - 1:
                stages = self._times.stages(device, room, n_ubatch, is_last=False, is_first=not d)
                stages = stages.handed(*handed, first=0 if device.is_remote else 1)
                fronts = [front.then(stages, may_skip=not use_all) for front in fronts]
        return best, alone


class _MayBeRemote(Protocol):
    @property
    def is_remote(self) -> bool: ...


def may_overlap(devices: Sequence[_MayBeRemote]) -> bool:
    """True if the last of these devices can compute an ubatch while the others compute the next.

    A remote device computes what it was sent. A local one needs another local device, because
    only then it computes on a thread (offload/ggml/deferred.py).
    """
    *others, last = devices
    return last.is_remote or any(not device.is_remote for device in others)


def prompt_s(
    each_s: Sequence[float], devices: Sequence[_MayBeRemote], n_ubatches: int, *, overlaps: bool
) -> float:
    """Return a prompt's seconds from those of each device's part.

    `overlaps`: the last device computes whole ubatches.
    """
    *front, last = each_s
    if not (overlaps and may_overlap(devices)):
        return sum(each_s)
    return sum(each_s) - float(overlap_s(sum(front), last, n_ubatches))


def _finite(seconds: Floats) -> Floats:
    return np.where(np.isfinite(seconds), seconds, 0.0)
