"""Chooses how device memory is divided between resident layers, slots and a ubatch's buffers. Pure.

The ways are listed by `offload/plan/candidates.py`, each with every ubatch. `best_way` chooses one
by the objective of all plans (`offload/plan/objective.py`), for whole models and for the ranges of
layers of several devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.plan.candidates import Candidates, Limits, candidates
from offload.plan.long_prompts import LONG_UBATCHES, LongPrompt, longer_ubatch
from offload.plan.objective import MeasuredDecode, Objective, Seconds, by_measured
from offload.plan.slot_layout import SlotLayout
from offload.plan.weights import Weights, least_slots, ring_slots
from offload.times.disk import DiskUse
from offload.times.hits import Sharing
from offload.times.machine import Machine, Real
from offload.times.work import ModelWork

UBATCHES = (512, 1024, 2048, 4096, 8192)
_NOTHING: Mapping[int, int] = {}
SMALL_UBATCHES = (128, 256)  # ubatches with small buffers, for more slots if memory is short


@dataclass(frozen=True)
class Choice:
    """A division of device memory."""

    streamed_experts: frozenset[int]  # layers whose experts stream
    streamed_dense: frozenset[int]
    n_ubatch: int
    sharing: Sharing
    streamed_bytes: int = 0  # host memory that the streamed weights take
    reason: str = ""  # why measured decodes or long prompts chose it; "": the planned workload did

    @property
    def streams(self) -> bool:
        return bool(self.streamed_experts or self.streamed_dense)


def best_way(found: Candidates, seconds: Seconds, n_ubatch: Real, fits: Any) -> NDArray[np.int64]:
    """Return the index of the best way in each row of ways [..., n_ways].

    `fits` says which ways can be used. A row without any gets index 0. A way that streams nothing
    is better than all others, with the smallest usual ubatch: larger ones would save nothing.
    """
    n_ubatch = np.broadcast_to(n_ubatch, fits.shape)
    holds_all = fits & ~found.streams & ~np.isin(n_ubatch, SMALL_UBATCHES)
    smallest = np.where(holds_all, n_ubatch, UBATCHES[-1] + 1).min(axis=-1, keepdims=True)
    holds_all &= n_ubatch == smallest
    return seconds.fastest(np.where(holds_all.any(axis=-1, keepdims=True), holds_all, fits))


def choose_sharing(
    weights: Weights,
    work: ModelWork,
    machine: Machine,
    objective: Objective,
    limits: Limits,
    rooms_bytes: Mapping[int, int],
    *,
    working_bytes: Mapping[int, int] = _NOTHING,
    prompt_work: ModelWork | None = None,
    host_bytes: int | None = None,
    reads_disk: bool = False,
    decodes: Sequence[MeasuredDecode] = (),
    lent_bytes: Mapping[int, int] = _NOTHING,
    long_prompt: LongPrompt | None = None,
) -> Choice | None:
    """Return the best way of sharing device memory, or None if none fits.

    `rooms_bytes` is the memory for weights and slots, for each ubatch. If experts stream, the
    ubatch's `working_bytes` are taken from it. Streamed weights take at most `host_bytes` of host
    memory; with `reads_disk`, experts beyond that are read from the disk.
    `decodes` are those that earlier starts measured. `lent_bytes`: for each ubatch, the part of the
    compute buffer that holds experts between prompts. `long_prompt`: the prompt by which ubatches
    of `LONG_UBATCHES` are compared with the best other one; None: all ubatches are alike.
    """
    ubatches, rooms = (np.array([*its])[:, None] for its in (rooms_bytes, rooms_bytes.values()))
    # Arrays below have a row for each ubatch and a column for each way.
    working, lent = (
        np.array([its.get(n, 0) for n in rooms_bytes])[:, None]
        for its in (working_bytes, lent_bytes)
    )
    choices = candidates(weights.whole, limits, rooms, working, lent)
    fits, disk = choices.fits, None
    if host_bytes is not None and reads_disk:
        dense_bytes = weights.whole.dense_bytes(choices.sharing.n_dense_streamed)
        disk = DiskUse(work, choices.sharing, host_bytes - dense_bytes, machine.disk_bytes_per_s)
    elif host_bytes is not None:
        fits = fits & (choices.streamed_bytes <= host_bytes)
    is_long = np.isin(ubatches, LONG_UBATCHES if long_prompt is not None else ())
    fits, fits_long = fits & ~is_long, fits & is_long
    if not fits.any():
        return None
    seconds = objective.seconds(
        machine, work, choices.sharing, ubatches, prompt_work=prompt_work, disk=disk
    )
    sizes, streamed = (np.broadcast_to(a, fits.shape) for a in (ubatches, choices.streamed_bytes))
    flat = replace(choices, streamed_bytes=streamed.ravel())
    best = int(best_way(flat, seconds.flat(fits.shape), sizes.ravel(), fits.ravel()))
    why = ""
    by_times = by_measured(seconds, fits, decodes, choices.sharing, best)
    if by_times is not None:
        best, why = by_times.index, by_times.reason
    its = choices.sharing
    if long_prompt is not None and disk is None and flat.streams[best]:
        long_s = np.broadcast_to(long_prompt.seconds(machine, its, ubatches), fits.shape).ravel()
        longer = longer_ubatch(
            long_prompt, long_s, seconds.flat(fits.shape), sizes.ravel(), fits_long.ravel(), best
        )
        if longer is not None:
            best, why = longer.index, longer.reason
    n_slots, resident, n_dense, n_lent = (
        int(np.broadcast_to(a, fits.shape).flat[best])
        for a in (its.n_slots, its.n_resident, its.n_dense_streamed, its.n_lent)
    )
    return Choice(
        weights.spread_experts(len(weights.expert_layers) - resident),
        weights.spread_dense(n_dense), int(sizes.flat[best]),
        Sharing(n_slots, resident, n_dense, n_lent), int(streamed.flat[best]), why,
    )  # fmt: skip


@dataclass(frozen=True)
class LeastBytes:
    """The least device memory that weights need."""

    resident_bytes: int
    slot_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.slot_bytes


def least_bytes(weights: Weights, limits: Limits, working_bytes: int = 0) -> LeastBytes:
    """Return the memory of the way that needs the least.

    `working_bytes`: memory that is taken with the slots if experts stream.
    """
    choices = candidates(weights.whole, limits, 0, working_bytes)
    best = int(np.argmin(choices.resident_bytes + choices.least_slot_bytes))
    return LeastBytes(
        int(choices.resident_bytes.flat[best]), int(choices.least_slot_bytes.flat[best])
    )


def sized(layout: SlotLayout, room_bytes: int) -> SlotLayout | None:
    """Return the layout with as many slots as fit `room_bytes`, or None if not even the least fit.

    Each pool first gets its least number of slots, and then a ring. The remaining memory is shared
    in proportion to the bytes that each pool still lacks.
    """
    if layout.size_bytes <= room_bytes:
        return layout
    counts = least_slots(layout)
    if layout.with_slots(counts).size_bytes > room_bytes:
        return None
    experts = [pool.n_experts > 0 for pool in layout.pools]
    rings = [ring_slots(pool) if pool.n_experts else 0 for pool in layout.pools]
    # Dense weights are read in a fixed cycle, so weights in further slots would be overwritten
    # before their next use. If there are experts, they get all remaining memory.
    everything = [
        pool.most_slots if is_expert or not any(experts) else 0
        for pool, is_expert in zip(layout.pools, experts, strict=True)
    ]
    for wanted in (rings, everything):
        counts = _grown(layout, counts, wanted, room_bytes)
    return layout.with_slots(counts)


def _grown(
    layout: SlotLayout, counts: Sequence[int], wanted: Sequence[int], room_bytes: int
) -> list[int]:
    """Return `counts` grown towards `wanted`, all by the same share, within `room_bytes`."""
    missing = [max(0, most - n) for n, most in zip(counts, wanted, strict=True)]
    size = sum(n * pool.slot_bytes for n, pool in zip(missing, layout.pools, strict=True))
    left = room_bytes - layout.with_slots(counts).size_bytes
    if size <= left:
        return [n + more for n, more in zip(counts, missing, strict=True)]
    grown = [n + more * left // size for n, more in zip(counts, missing, strict=True)]
    # Rounding down left room for a few slots. The pools with the largest slots get it first.
    for i in sorted(range(len(grown)), key=lambda i: -layout.pools[i].slot_bytes):
        spare = room_bytes - layout.with_slots(grown).size_bytes
        more = min(counts[i] + missing[i] - grown[i], spare // layout.pools[i].slot_bytes)
        grown[i] += max(0, more)
    return grown
