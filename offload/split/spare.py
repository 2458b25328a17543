"""Slots that the device of a split layer reads for the CPU's pairs. Pure.

The device's product cannot skip a pair (token, expert). It computes the CPU's pairs too, with
whatever is in a slot, and its results are overwritten. A slot that is read anyway costs least. But
no token may name a slot twice: CUDA's products of several tokens with experts (mmid.cu and mmf.cuh
in llama.cpp) look for each expert once in a token's ids, so a second one would leave a wrong row.
A single token may name a slot twice if the weights are quantised: its product (mmvq.cu) goes by
pairs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

NO_SLOT = -1
_NOT_QUANTISED = ("f32", "f16", "bf16")


def may_repeat(n_tokens: int, types: Collection[str]) -> bool:
    """True if a token may name a slot twice, in a batch of `n_tokens` with weights of `types`."""
    return n_tokens == 1 and not any(name in _NOT_QUANTISED for name in types)


def other_slots(slots: Sequence[int], n: int, n_slots: int) -> list[int]:
    """Return up to `n` slots that are not among `slots`, near the first of them."""
    start, n_near, taken = slots[0] if slots else 0, n + len(slots), set(slots)
    near = [
        *range(start, min(start + n_near, n_slots)),
        *range(min(start, start + n_near - n_slots)),
    ]
    return [slot for slot in near if slot not in taken][:n]


def fill_in(ids: NDArray[np.int32], slots: Sequence[int], others: Sequence[int]) -> None:
    """Replace each NO_SLOT in `ids` [n_tokens, n_used] by a slot that its token does not use yet.

    `slots`: all slots in `ids`. `others`: n_used other slots, or all if there are fewer.
    """
    without = ids == NO_SLOT
    n_used = ids.shape[1]
    if len(others) >= n_used:
        np.copyto(ids, np.asarray(others, np.int32), where=without)  # one for each column
        return
    offered = np.array([*others, *slots][:n_used], np.int32)
    taken = (ids[:, :, None] == offered).any(axis=1)
    free_first = taken.argsort(axis=1, kind="stable")
    nth = without.cumsum(axis=1) - 1
    tokens, places = without.nonzero()
    ids[tokens, places] = offered[free_first[tokens, nth[tokens, places]]]
