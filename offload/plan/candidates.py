"""The search for the best way to divide device memory between resident layers and slots. Pure.

`candidates` says which ways fit, and `best_way` (`offload/plan/sharing.py`) chooses one by the
objective of all plans. Both are used in two cases:

- A whole model has the exact bytes of its layers. All numbers of layers are tried.
- A model on several devices has thousands of ranges of layers, which are computed at once with sums
  over their layers. A few numbers of layers are tried (`offload/plan/range_times.py`). The range
  that is chosen is then planned like a whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from offload.plan.machine import Real, Sharing
from offload.plan.slot_layout import SlotLayout, SlotPool

_AHEAD = 8  # beside a whole layer, there is room for an eighth of the next layer's experts


def ring_slots(pool: SlotPool) -> int:
    """Return the number of slots for all experts of a layer and some of the next."""
    return min(pool.most_slots, pool.n_experts + max(1, pool.n_experts // _AHEAD))


def least_expert_bytes(layout: SlotLayout) -> int:
    """Return the bytes of slots for one token's experts."""
    return sum(max(1, pool.n_used) * pool.slot_bytes for pool in layout.pools)


@dataclass(frozen=True)
class SlotSizes:
    """Bytes of slots for experts: numbers, or arrays for several parts of a model."""

    least: Real  # bytes for one token's experts
    ring: Real  # bytes of a ring (`ring_slots`)
    row: Real  # bytes for one slot of each pool
    mean: Real  # bytes of one slot, as a mean over the layers
    n_experts: int  # experts of one layer

    @classmethod
    def of(cls, layout: SlotLayout) -> SlotSizes:
        pools = layout.pools
        n_groups = sum(pool.n_groups for pool in pools)
        return cls(
            least_expert_bytes(layout),
            sum(ring_slots(pool) * pool.slot_bytes for pool in pools),
            sum(pool.slot_bytes for pool in pools),
            sum(pool.slot_bytes * pool.n_groups for pool in pools) / max(1, n_groups),
            max(1, pools[0].n_experts) if pools else 0,
        )

    def within(self, room_bytes: Real, n_layers: Real) -> Real:
        """Return the number of slots that experts of `n_layers` layers will surely get.

        The number is 0 if not even one token's experts fit. If `ring` does not fit, the number is
        the slots of one pool, and less than a layer's experts.
        """
        few = np.clip(room_bytes // np.maximum(self.row, 1), 1, max(1, self.n_experts - 1))
        many = np.minimum(n_layers * self.n_experts, room_bytes // np.maximum(self.mean, 1.0))
        n_slots = np.where(room_bytes < self.ring, few, many).astype(np.int64)
        return np.where((n_layers > 0) & (room_bytes >= self.least), n_slots, 0)


@dataclass(frozen=True)
class Candidates:
    """Ways to divide device memory. All fields are arrays [..., n_ways], or broadcast to them."""

    sharing: Sharing
    fits: Any  # True if the model can run this way
    streamed_bytes: Real  # host memory that the streamed weights take

    @property
    def streams(self) -> Any:
        return self.streamed_bytes > 0


def candidates(
    room_bytes: Real,
    held_bytes: Real,
    counts: Sharing,
    n_streamed: Real,
    expert_bytes: Real,
    dense_bytes: Real,
    sizes: SlotSizes,
    *,
    dense_ring_bytes: int,
) -> Candidates:
    """Return the ways to use `room_bytes`, with slots in the room that other weights leave.

    `held_bytes` are all weights, of which `expert_bytes` and `dense_bytes` stream. `counts` are the
    numbers of layers with resident experts and with streamed dense weights; `n_streamed` is the
    number of layers whose experts stream.
    """
    left_bytes = room_bytes - (held_bytes - expert_bytes - dense_bytes)
    left_bytes = left_bytes - np.where(dense_bytes > 0, dense_ring_bytes, 0)
    n_slots = sizes.within(left_bytes, n_streamed)
    has_slots = (n_streamed == 0) | (n_slots > 0)
    fits = (left_bytes >= 0) & has_slots
    sharing = Sharing(n_slots, counts.n_resident, counts.n_dense_streamed)
    return Candidates(sharing, fits, expert_bytes + dense_bytes)
