"""The one cost function of plans: the expected time of a workload, under uncertain hits. Pure.

Every decode takes the fastest way that a start may take: in place, streamed or split. Its time
depends on hits. Before hits are counted, they lie between two ends. At the low end a model uses all
experts equally often. At the other end hits are guessed from the number of experts. Both ends are
assumed to be equally likely (`EVEN_WEIGHT`). Only ways that lose little speed at the low end are
considered (`MOST_LOSS`). The fastest of them by the mean of both ends is chosen. Counted hits have
one end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.plan.workload import PlannedWork
from offload.times.decodes import best_s
from offload.times.disk import DiskUse
from offload.times.hits import Sharing
from offload.times.machine import Machine, Real
from offload.times.prompts import prefill_s
from offload.times.work import ModelWork, even

EVEN_WEIGHT = 0.5  # prior probability that a text uses all experts equally often
MOST_LOSS = 0.05  # share of the best plan's speed that a plan may lose at the low end of hits
_ALIKE = 0.1  # share by which the number of slots of one plan differs from start to start


@dataclass(frozen=True)
class Seconds:
    """Expected seconds of a prompt and of one decode: numbers, or arrays for many ways."""

    prompt_s: Real
    decode_s: Real  # with counted hits, or guessed ones
    even_decode_s: Real  # with experts that are used equally often; `decode_s` if hits are counted
    n_decodes: float
    refill_s: Real = 0.0  # copying experts into lent slots again, whose bytes a prompt has taken

    @property
    def mean_decode_s(self) -> Real:
        """Seconds of one decode, as a mean over both ends of hits."""
        return EVEN_WEIGHT * self.even_decode_s + (1.0 - EVEN_WEIGHT) * self.decode_s

    @property
    def even_s(self) -> Real:
        """Seconds of the workload if the hits are at their low end."""
        return self.prompt_s + self.refill_s + self.n_decodes * self.even_decode_s

    @property
    def mean_s(self) -> Real:
        """Seconds of the workload, as a mean over both ends of hits."""
        return self.prompt_s + self.refill_s + self.n_decodes * self.mean_decode_s

    def flat(self, shape: tuple[int, ...]) -> Seconds:
        """Return the seconds of ways of this shape as one row."""
        prompt_s, decode_s, even_s, refill_s = (
            np.broadcast_to(s, shape).ravel()
            for s in (self.prompt_s, self.decode_s, self.even_decode_s, self.refill_s)
        )
        return Seconds(prompt_s, decode_s, even_s, self.n_decodes, refill_s)

    def fastest(self, fits: Any) -> NDArray[np.int64]:
        """Return the index of the best way in each row of ways [..., n_ways].

        `fits` says which ways can be used. A row without any gets index 0.
        """
        even_s = np.where(fits, self.even_s, np.inf)
        allowed = fits & ((1.0 - MOST_LOSS) * even_s <= even_s.min(axis=-1, keepdims=True))
        best: NDArray[np.int64] = np.argmin(np.where(allowed, self.mean_s, np.inf), axis=-1)
        return best


@dataclass(frozen=True)
class Objective:
    """The measure by which a plan is chosen. `splits`: this start may split layers."""

    workload: PlannedWork
    splits: bool = False
    shares_prompts: bool = True  # False: several devices compute prompts at the same time

    def seconds(
        self,
        machine: Machine,
        work: ModelWork,
        sharing: Sharing,
        n_ubatch: Real,
        *,
        prompt_work: ModelWork | None = None,
        disk: DiskUse | None = None,
    ) -> Seconds:
        """Return the expected seconds of the workload, with this use of device memory.

        `prompt_work` includes a prompt's attention; None: `work`. `disk`: reads from the disk,
        None if all streamed weights fit memory.
        """
        n_prompt, n_batch = self.workload.n_prompt, self.workload.n_batch
        prompt_s: Real = 0.0
        if n_prompt:
            its_work = prompt_work or work
            prompt_s = prefill_s(
                machine,
                its_work,
                sharing,
                n_prompt,
                n_ubatch,
                hybrid=self.splits and self.shares_prompts,
            )
        decodes_s = [
            best_s(machine, of_hits, sharing, n_batch, hybrid=self.splits)
            for of_hits in ((work, even(work)) if work.hits is None else (work,))
        ]
        if disk is not None:
            prompt_s = np.maximum(prompt_s, disk.prompt_s(n_prompt, n_ubatch))
            ends = (disk, replace(disk, work=even(disk.work)))
            decodes_s = [
                of_hits.with_reads(s, n_batch) for of_hits, s in zip(ends, decodes_s, strict=False)
            ]
        refill_s = bool(n_prompt) * sharing.n_lent * work.expert.size_bytes
        refill_s = refill_s / machine.link_bytes_per_s
        return Seconds(prompt_s, decodes_s[0], decodes_s[-1], self.workload.n_decodes, refill_s)


# -- decodes that earlier starts measured ----------------------------------------------------------


@dataclass(frozen=True)
class MeasuredDecode:
    """The seconds of a decode of one token, measured by an earlier start with this sharing.

    `device` is the name of the device that had all layers, "" if a start may use only one.
    """

    sharing: Sharing
    seconds: float
    device: str = ""


def measured_s(decodes: Sequence[MeasuredDecode], sharing: Sharing) -> Real:
    """Return the last measured seconds of a decode with about this sharing, NaN if there are none.

    `sharing` may have arrays, and so has the result.
    """
    measured: Real = np.full(np.shape(sharing.n_slots + sharing.n_resident), np.nan)
    for decode in decodes:
        timed = decode.sharing
        is_alike = (
            (sharing.n_resident == timed.n_resident)
            & (sharing.n_dense_streamed == timed.n_dense_streamed)
            & (np.abs(sharing.n_cached - timed.n_cached) <= _ALIKE * sharing.n_cached)
        )
        measured = np.where(is_alike, decode.seconds, measured)
    return measured


@dataclass(frozen=True)
class MeasuredChoice:
    """The way that measured decodes choose, and the reason."""

    index: int
    reason: str


def by_measured(
    seconds: Seconds, fits: Any, decodes: Sequence[MeasuredDecode], sharing: Sharing, chosen: int
) -> MeasuredChoice | None:
    """Return the way that is faster than `chosen` by decodes of both that were measured.

    `fits` has any shape, and the others broadcast to it. `chosen` and the result's index count all
    its ways. Returns None if `chosen` was not measured, or if none is faster. The time of prompts
    is not measured.
    """
    if not decodes:
        return None
    its_s = np.broadcast_to(measured_s(decodes, sharing), fits.shape).ravel()
    if np.isnan(its_s[chosen]):
        return None
    totals_s = replace(seconds.flat(fits.shape), decode_s=its_s, even_decode_s=its_s).mean_s
    best = int(np.nanargmin(np.where(fits.ravel(), totals_s, np.nan)))
    if totals_s[best] >= totals_s[chosen]:
        return None
    before_ms, after_ms = (1e3 * its_s[i] for i in (chosen, best))
    return MeasuredChoice(
        best,
        f"At earlier starts a decode took {after_ms:.1f} ms with this plan, and {before_ms:.1f} ms "
        "with the plan that is expected to be faster",
    )
