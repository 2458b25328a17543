"""Divides a layer's pairs into passes over groups of experts, and passes into launches. Pure.

A *pair* is a token with one of its experts. A *pass* computes all pairs of a group of experts,
whose weights are in slots at the same time. So room for two groups is enough to stream a layer of
any size: one group is copied while the other one is computed. A *launch* is a part of a pass that
fits the device's memory for rows of pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.schedule.division import HOST
from offload.schedule.slots import NOWHERE

# Share of a layer's experts in use from which experts are copied before the router has run.
AHEAD_OF_ROUTER = 0.8
MOST_PAIRS = 1024  # most pairs of a launch, to limit the memory for their rows
MOST_HOST_PAIRS = 4096  # most pairs of a layer that the CPU computes, to limit memory
_GROUPS = 16  # groups of a layer's experts, if the slots have room for two of them
_LEAST_BYTES = 32 << 20  # least bytes of a group, so that its copies outlast submitting a pass
_RING_SHARE = 4  # a ring is 1/4 of the slots or of a layer's experts, but at least two groups


def is_in_passes(n_tokens: Any, n_used: int, n_experts: int, n_slots: Any) -> Any:
    """True if a batch's layers are computed in passes, unless each expert has a slot of its own.

    They are in two cases: the experts that the batch may use do not fit the slots, or the batch is
    a prompt and the slots hold less than two layers. Numbers may be arrays.
    """
    n_tokens, n_slots = np.asarray(n_tokens), np.asarray(n_slots)
    wanted = np.minimum(n_experts, n_tokens * n_used)
    return (wanted > n_slots) | ((n_tokens > SMALL_BATCH) & (n_slots < 2 * n_experts))


def group_size(n_experts: int, n_slots: Any, slot_bytes: Any) -> Any:
    """Return the number of experts of a pass. Numbers may be arrays."""
    wanted = np.maximum(-(-n_experts // _GROUPS), -(-_LEAST_BYTES // np.maximum(1, slot_bytes)))
    return np.maximum(1, np.minimum(np.minimum(wanted, n_slots // 2), n_experts))


def ring_slots(n_experts: int, n_slots: Any, n_group: Any) -> Any:
    """Return the number of slots that experts of prompts pass through. Numbers may be arrays.

    The other slots keep what they hold. A larger ring lets the link copy for longer while the
    device computes attention.
    """
    room = np.minimum(n_slots, n_experts) // _RING_SHARE
    return np.minimum(n_slots, np.maximum(2 * n_group, room))


def most_passes(n_experts: int, n_group: int) -> int:
    """Return the most passes that `passes_of` can make."""
    return 2 + -(-n_experts // n_group)


def passes_of(
    rows: NDArray[np.integer], slots: NDArray[np.integer], coming: Container[int], n_group: int
) -> list[list[int]]:
    """Return the experts of each pass.

    `rows` [n_experts]: number of pairs. `slots` [n_experts]: each expert's slot, or NOWHERE.
    `coming`: experts whose copies into their slots may not be complete. Experts that need no copy
    come first, all in one pass, because nothing has to be waited for. Missing experts come last, in
    ascending order, so that neighbours are copied together.
    """
    used = rows.nonzero()[0].tolist()
    missing = [expert for expert in used if slots[expert] == NOWHERE]
    there = [expert for expert in used if slots[expert] != NOWHERE]
    late = [expert for expert in there if expert in coming]
    ready = [expert for expert in there if expert not in coming]
    found = [ready] if ready else []
    for experts in (late, missing):
        found += [experts[i : i + n_group] for i in range(0, len(experts), n_group)]
    return found


def host_experts(
    kinds: NDArray[np.uint8],
    rows: NDArray[np.integer],
    resident: NDArray[np.bool_],
    coming: Collection[int],
    *,
    may_swap: bool = True,
) -> list[int]:
    """Return the experts of a layer that the CPU computes, those with the fewest pairs first.

    `kinds` [n_experts]: the side of each expert by a splitter. `rows` [n_experts]: number of pairs.
    `resident` [n_experts]: True for experts in slots. `coming`: experts whose copies are under way.
    They stay on the device. If `may_swap`, the CPU then gets as many others, because every copy
    takes equally long and is worth most for an expert with many pairs. At most MOST_HOST_PAIRS
    pairs are returned.
    """
    may_compute = (rows > 0) & ~resident
    n = int(((kinds == HOST) & may_compute).sum())
    may_compute[list(coming)] = False
    if not may_swap:
        may_compute &= kinds == HOST
    found = may_compute.nonzero()[0]
    found = found[rows[found].argsort(kind="stable")][:n]
    within = rows[found].cumsum() <= MOST_HOST_PAIRS
    return [int(expert) for expert in found[within]]


@dataclass(frozen=True)
class Launch:
    """Pairs to compute together, in the order of their experts' slots.

    `pairs`: indices into a batch's ids [n_tokens, n_used]. `experts`, `slots`: one for each pair.
    """

    pairs: NDArray[np.int32]
    experts: NDArray[np.int32]
    slots: NDArray[np.int32]


class PairOrder:
    """A batch's pairs, ordered by expert."""

    def __init__(self, ids: NDArray[np.int32], n_experts: int) -> None:
        """`ids` [n_tokens, n_used]: the experts of each token."""
        flat = ids.ravel()
        # NumPy sorts numbers of 16 bits by radix, so the time is linear in the number of pairs.
        small = flat.astype(np.uint16) if n_experts <= 1 << 16 else flat
        self._pairs = small.argsort(kind="stable").astype(np.int32)
        self.rows = np.bincount(flat, minlength=n_experts)
        self._ends = self.rows.cumsum()

    def pairs_of(self, experts: Sequence[int]) -> NDArray[np.int32]:
        """Return the pairs of these experts, one expert after the other."""
        ends, rows, pairs = self._ends, self.rows, self._pairs
        parts = [pairs[ends[expert] - rows[expert] : ends[expert]] for expert in experts]
        return np.concatenate(parts) if parts else pairs[:0]

    def launches(
        self, experts: Sequence[int], slots: Sequence[int], most_pairs: int, most_slots: int
    ) -> list[Launch]:
        """Return the launches of a pass over `experts`, which are in `slots`.

        A launch has at most `most_pairs` pairs. Its slots lie in a range of at most `most_slots`,
        because kernels have a limit for the slots that they can be shown.
        """
        in_order = sorted(zip(slots, experts, strict=True))
        ordered = [expert for _, expert in in_order]
        pairs, rows = self.pairs_of(ordered), self.rows[ordered]
        of_expert = np.repeat(np.array(ordered, np.int32), rows)
        of_slot = np.repeat(np.array([slot for slot, _ in in_order], np.int32), rows)
        found, first = [], 0
        while first < len(pairs):
            end = min(len(pairs), first + most_pairs)
            beyond = int(of_slot.searchsorted(of_slot[first] + most_slots))
            part = slice(first, min(end, beyond))
            found.append(Launch(pairs[part], of_expert[part], of_slot[part]))
            first = part.stop
        return found
