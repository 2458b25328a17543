"""Divides a layer's pairs into passes over groups of experts, and passes into launches. Pure.

A *pair* is a token with one of its experts. A *pass* computes all pairs of a group of experts,
whose weights are in slots at the same time. So room for two groups is enough to stream a layer of
any size: one group is copied while the other one is computed. A *launch* is a part of a pass that
fits the device's memory for rows of pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.decode import SMALL_BATCH
from offload.schedule.division import HOST, SplitCosts, seconds_at
from offload.schedule.slots import NOWHERE

# Share of a layer's experts in use from which experts are copied before the router has run.
AHEAD_OF_ROUTER = 0.8
MOST_PAIRS = 1024  # most pairs of a launch, to limit the memory for their rows
MOST_HOST_PAIRS = 4096  # most pairs of a layer that the CPU computes, to limit memory
# Rows whose way takes less are computed in one block: each block takes the threads about 0.1 ms.
_LEAST_WAY_S = 500e-6
LEAST_GAIN = 0.02  # least share of a layer's time that the CPU's part saves
_GROUPS_IN_MODEL = 4  # groups of copies that products follow, in the model of a division
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
    groups = [ready] if ready else []
    for experts in (late, missing):
        groups += [experts[i : i + n_group] for i in range(0, len(experts), n_group)]
    return groups


def host_experts(
    kinds: NDArray[np.uint8],
    rows: NDArray[np.integer],
    resident: NDArray[np.bool_],
    coming: Collection[int],
) -> list[int]:
    """Return the experts that a splitter gives to the CPU, those with the fewest pairs first.

    `kinds` [n_experts]: the side of each expert by the splitter. `rows` [n_experts]: number of
    pairs. `resident` [n_experts]: True for experts in slots. `coming`: experts whose copies are
    under way. They stay on the device. At most MOST_HOST_PAIRS pairs are returned.
    """
    may_compute = _by_pairs(rows, resident, coming)
    return [int(expert) for expert in may_compute if kinds[expert] == HOST]


def soonest_host_experts(
    rows: NDArray[np.integer],
    resident: NDArray[np.bool_],
    coming: Collection[int],
    costs: SplitCosts,
    way: RowsWay,
) -> list[int]:
    """Return the experts that the CPU computes so that both sides of a layer end soonest.

    The arguments are those of `host_experts`, with measured costs, and the way of the CPU's rows.
    The CPU gets experts with few pairs, because every copy takes equally long and is worth most for
    an expert with many. Experts that are coming stay on the device, and the link copies them first.
    The CPU gets none if the layer would end less than `LEAST_GAIN` sooner by it.
    """
    chosen = _by_pairs(rows, resident, coming)
    its_rows, slow = rows[chosen], costs.host_slowdown
    n_copied = int(((rows > 0) & ~resident).sum()) - np.arange(len(chosen) + 1)
    n_pairs = _sums(its_rows)
    copies_s = n_copied * costs.copy_s + way.row_s * n_pairs  # results take the link from copies
    host_s = costs.host_fixed_s + _sums(seconds_at(costs.host_s, its_rows)) + way.host_s(n_pairs)
    host_s[0] = 0.0
    # Each side is slower only while the other one is busy.
    host_s = np.minimum(slow * host_s, host_s + (1.0 - 1.0 / slow) * copies_s)
    alone = 1.0 / costs.link_slowdown
    copies_s = np.minimum(copies_s, alone * copies_s + (1.0 - alone) * host_s)
    all_s = costs.device_fixed_s + float(seconds_at(costs.device_s, rows).sum())
    products_s = all_s - _sums(seconds_at(costs.device_s, its_rows))
    # Each group's products wait for its own copies: the first group's, or the last group's.
    part = 1.0 / _GROUPS_IN_MODEL
    device_s = np.maximum(part * copies_s + products_s, copies_s + part * products_s)
    ends_s = np.maximum(host_s, device_s)
    n = int(ends_s.argmin())
    if ends_s[n] > (1.0 - LEAST_GAIN) * ends_s[0]:
        return []
    return [int(expert) for expert in chosen[:n]]


def _by_pairs(
    rows: NDArray[np.integer], resident: NDArray[np.bool_], coming: Collection[int]
) -> NDArray[np.intp]:
    """Return the experts that the CPU may compute, those with the fewest pairs first."""
    may_compute = (rows > 0) & ~resident
    may_compute[list(coming)] = False
    chosen = may_compute.nonzero()[0]
    chosen = chosen[rows[chosen].argsort(kind="stable")]
    return chosen[rows[chosen].cumsum() <= MOST_HOST_PAIRS]


def _sums(seconds: NDArray[Any]) -> NDArray[Any]:
    """Return the sums of the first 0, 1, ... values."""
    return np.concatenate(([0.0], seconds.cumsum()))


@dataclass(frozen=True)
class RowsWay:
    """Seconds in which rows of a prompt go over the link to the CPU and back.

    The CPU computes its pairs in blocks (`host_blocks`).
    """

    begin_s: float = 0.0  # until the CPU has the rows of all tokens
    row_s: float = 0.0  # of the link, for the result of one pair
    # Until the CPU has the rows of its first block, for each of all its pairs. None: it waits for
    # the rows of all tokens.
    first_row_s: float | None = None
    last_share: float = 1.0  # share of the results that the device waits for when the CPU has ended

    @classmethod
    def over(
        cls, bytes_per_s: float, n_rows: int, row_bytes: int, result_bytes: int, *, in_blocks: bool
    ) -> RowsWay:
        """The way over a link of `n_rows` rows to the CPU, and of results.

        `in_blocks`: rows of a block come while the CPU computes the block before, and so do the
        results of all blocks but the last one.
        """
        row_s, result_s = row_bytes / bytes_per_s, result_bytes / bytes_per_s
        if not in_blocks:
            return cls(n_rows * row_s, result_s)
        return cls(n_rows * row_s, result_s, _BLOCK_SHARES[0] * row_s, _BLOCK_SHARES[-1])

    def host_s(self, n_pairs: NDArray[np.integer]) -> NDArray[np.float64]:
        """Return the seconds that the way adds to the CPU's, for several numbers of pairs.

        Results come beside copies, so they have half of the link. Pairs in one block wait for all
        of their rows, and the device for all of their results.
        """
        in_one = self.is_in_one(n_pairs)
        seconds = np.full(n_pairs.shape, self.begin_s)
        if self.first_row_s is not None:
            first_share = np.where(in_one, 1.0 / _BLOCK_SHARES[0], 1.0)
            np.minimum(seconds, first_share * self.first_row_s * n_pairs, out=seconds)
        seconds += 2 * np.where(in_one, 1.0, self.last_share) * self.row_s * n_pairs
        return seconds

    def is_in_one(self, n_pairs: Any) -> Any:
        """True for numbers of pairs that the CPU computes in one block. May be an array."""
        return self.row_s * n_pairs < _LEAST_WAY_S


# Shares of the CPU's pairs in each block. The CPU waits for the rows of the first block, and the
# device for the results of the last one, so these are short.
_BLOCK_SHARES = (0.125, 0.375, 0.375, 0.125)


def host_blocks(rows: NDArray[np.integer]) -> list[slice]:
    """Return the blocks in which the CPU computes its pairs, as slices of these pairs.

    `rows`: number of pairs of each of its experts, in order. A block has whole experts, because the
    weights are read once for each block.
    """
    ends = rows.cumsum()
    wanted = ends[-1] * np.cumsum(_BLOCK_SHARES)
    # Each block ends with the expert whose end is the nearest one.
    middles = (ends[1:] + ends[:-1]) / 2
    last = np.unique([*middles.searchsorted(wanted[:-1]), len(ends) - 1])
    bounds = [0, *ends[last].tolist()]
    return [slice(first, end) for first, end in itertools.pairwise(bounds)]


@dataclass(frozen=True)
class Launch:
    """Pairs to compute together, in the order of their experts' slots.

    `pairs`: indices into a batch's ids [n_tokens, n_used]. `experts`, `slots`: one for each pair.
    """

    pairs: NDArray[np.int32]
    experts: NDArray[np.int32]
    slots: NDArray[np.int32]


def in_order_of_use(
    rows: NDArray[np.int32], n_rows: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the rows that are used, in the order of their first use, and each pair's among them.

    `rows` [n_pairs]: each pair's row, of `n_rows`.
    """
    in_order = np.arange(len(rows), dtype=np.int32)
    first = np.empty(n_rows, np.int32)
    first[rows[::-1]] = in_order[::-1]  # the last value that is written stays
    used = rows[first[rows] == in_order]
    number = np.empty(n_rows, np.int32)
    number[used] = in_order[: len(used)]
    return used, number[rows]


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
        launches, first = [], 0
        while first < len(pairs):
            end = min(len(pairs), first + most_pairs)
            beyond = int(of_slot.searchsorted(of_slot[first] + most_slots))
            part = slice(first, min(end, beyond))
            launches.append(Launch(pairs[part], of_expert[part], of_slot[part]))
            first = part.stop
        return launches
