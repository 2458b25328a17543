"""Lists the ways to divide a device's memory between resident weights and slots. Pure.

A whole model and a range of its layers, as each of several devices has, get the same list. It has
every number of layers with resident experts while all dense weights are resident, and every number
of layers whose dense weights stream while all experts stream. Slots get the room that is left. For
thousands of ranges at once, only some of these numbers are listed (`_MOST`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.plan.lending import n_lent_slots
from offload.plan.weights import Array, Parts, ring_slots
from offload.times.hits import Sharing
from offload.times.machine import Real

_MOST = 20_000  # most numbers of each kind that are listed, for all ranges together
_FEWEST_STEPS = 8  # steps between these numbers, however many ranges there are


@dataclass(frozen=True)
class SlotSizes:
    """Bytes of slots for experts, and numbers of them. Numbers are arrays, as those of `Parts`."""

    least: Real  # bytes for one token's experts
    ring: Real  # bytes of a ring (`ring_slots`)
    row: Real  # bytes for one slot of each pool
    mean: Real  # bytes of one slot, as a mean over the layers
    n_experts: int  # experts of one layer

    @classmethod
    def of(cls, parts: Parts) -> SlotSizes:
        pools = parts.weights.layout.pools
        least, ring, row, size, n_groups = np.zeros((5, *parts.first.shape))
        for pool, sums in zip(pools, parts.weights.n_groups, strict=True):
            n_here = parts.total(sums)
            one = (n_here > 0) * pool.slot_bytes
            least += one * max(1, pool.n_used)
            ring += np.minimum(n_here * pool.n_experts, ring_slots(pool)) * pool.slot_bytes
            row += one
            size += n_here * pool.slot_bytes
            n_groups += n_here
        n_experts = max(1, pools[0].n_experts) if pools else 0
        return cls(least, ring, row, size / np.maximum(n_groups, 1), n_experts)

    def within(self, room_bytes: Real, n_layers: Real, slot_bytes: Real) -> Real:
        """Return the number of slots that experts of `n_layers` layers will surely get.

        `slot_bytes` is the mean of these layers. The number is 0 if not even one token's experts
        fit. If `ring` does not fit, the number is the slots of one pool, and less than a layer's
        experts.
        """
        few = np.clip(room_bytes // np.maximum(self.row, 1), 1, max(1, self.n_experts - 1))
        many = np.minimum(n_layers * self.n_experts, room_bytes // np.maximum(slot_bytes, 1.0))
        n_slots = np.where(room_bytes < self.ring, few, many).astype(np.int64)
        return np.where((n_layers > 0) & (room_bytes >= self.least), n_slots, 0)


@dataclass(frozen=True)
class Limits:
    """The fewest and the most layers that a way may have, as columns of arrays like `Parts`."""

    fewest_resident: Array  # layers with resident experts
    most_resident: Array
    fewest_dense: Array  # layers whose dense weights stream
    most_dense: Array

    @property
    def fewest(self) -> Limits:
        """The limits of the one way that has the fewest layers of both kinds."""
        fewest, dense = self.fewest_resident, self.fewest_dense
        return Limits(fewest, fewest, dense, dense)


@dataclass(frozen=True)
class Candidates:
    """Ways to divide device memory: arrays [n_parts, n_ways], or others that broadcast to them."""

    sharing: Sharing
    fits: Any  # True if the model can run this way
    streamed_bytes: Real  # host memory that the streamed weights take
    resident_bytes: Real  # device memory of the other weights
    least_slot_bytes: Real  # device memory of the fewest slots that the streamed weights need

    @property
    def streams(self) -> Any:
        return self.streamed_bytes > 0


def candidates(
    parts: Parts, limits: Limits, room_bytes: Real, working_bytes: Real = 0, lent_bytes: Real = 0
) -> Candidates:
    """Return the ways to use `room_bytes` for each part of a model.

    With a single part, `room_bytes` may be a column of several sizes. Each then has a row of ways.
    `working_bytes`: the working memory of ways whose experts stream. `lent_bytes`: the part of the
    compute buffer that holds experts between prompts. Both have the shape of `room_bytes`.
    """
    n, sizes, weights = parts.n_expert_layers, SlotSizes.of(parts), parts.weights
    resident, n_dense = _numbers(parts, limits, sizes, room_bytes - working_bytes)
    n_streamed = n - resident
    expert_bytes, dense_bytes = parts.expert_bytes(n_streamed), parts.dense_bytes(n_dense)
    held_bytes = parts.held_bytes - expert_bytes - dense_bytes
    ring_bytes = np.where(dense_bytes > 0, weights.dense_ring_bytes, 0)
    mean_bytes = np.maximum(parts.expert_bytes(n), 1.0) / np.maximum(n, 1)  # experts of a layer
    slot_bytes = sizes.mean * np.where(
        n_streamed > 0, expert_bytes / np.maximum(n_streamed, 1) / mean_bytes, 1.0
    )
    works_bytes = np.where(n_streamed > 0, working_bytes, 0)
    left_bytes = room_bytes - held_bytes - ring_bytes - works_bytes
    n_slots = sizes.within(left_bytes, n_streamed, slot_bytes)
    fits = (left_bytes >= 0) & ((n_streamed == 0) | (n_slots > 0))
    n_lent = np.minimum(
        n_lent_slots(weights.layout.pools, lent_bytes),
        np.maximum(n_streamed * sizes.n_experts - n_slots, 0),
    )
    return Candidates(
        Sharing(n_slots, resident, n_dense, n_lent), fits, expert_bytes + dense_bytes, held_bytes,
        ring_bytes + np.where(n_streamed > 0, sizes.least, 0) + works_bytes,
    )  # fmt: skip


def _numbers(
    parts: Parts, limits: Limits, sizes: SlotSizes, room_bytes: Real
) -> tuple[Array, Array]:
    """Return each way's numbers of layers: with resident experts, and with streamed dense weights.

    The fewest of each kind are combined with all numbers of the other kind.
    """
    fewest, most = limits.fewest_resident, limits.most_resident
    fewest_dense, most_dense = limits.fewest_dense, limits.most_dense
    n_steps = max(_FEWEST_STEPS, _MOST // len(parts.first))
    if max((most - fewest).max(), (most_dense - fewest_dense).max()) <= n_steps:
        resident = _steps(fewest, most)
        dense = _steps(fewest_dense, most_dense)[:, 1:]
    else:  # steps between the numbers that fit, by the mean of a layer's bytes
        ring_bytes, n = parts.weights.dense_ring_bytes, parts.n_expert_layers
        expert_bytes = np.maximum(parts.expert_bytes(n) / np.maximum(n, 1), 1.0)
        dense_bytes = np.maximum(parts.dense_bytes(parts.n_layers) / parts.n_layers, 1.0)
        spare = room_bytes - parts.held_bytes + (n - fewest) * expert_bytes - sizes.least
        rings = np.where(fewest_dense > 0, ring_bytes, 0)
        fitting = (spare + fewest_dense * dense_bytes - rings) // expert_bytes
        needed = np.ceil((ring_bytes - spare) / dense_bytes)
        most_fitting = np.clip(fewest + fitting, fewest, most).astype(int)
        least_dense = np.clip(needed, np.minimum(fewest_dense + 1, most_dense), most_dense)
        resident = np.concatenate([_steps(fewest, most_fitting, n_steps), most], axis=1)
        dense = _steps(least_dense.astype(int), most_dense, n_steps)
    return (
        np.concatenate([resident, np.broadcast_to(fewest, dense.shape)], axis=1),
        np.concatenate([np.broadcast_to(fewest_dense, resident.shape), dense], axis=1),
    )


def _steps(low: Array, high: Array, most_steps: int | None = None) -> Array:
    """Return the numbers from `low` to `high`, at most in `most_steps` even steps."""
    n = int((high - low).max())
    n = n if most_steps is None else min(n, most_steps)
    steps: Array = np.round(low + (high - low) * np.arange(n + 1) / max(1, n)).astype(int)
    return steps
