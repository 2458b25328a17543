"""The slots that a batch's experts lie between. Pure.

A kernel that multiplies matrices is launched for every slot it is shown, used or not: in CUDA's
backend of llama.cpp (mmq.cuh) one block for each slot and 128 rows. Shown the slots from the first
to the last that are used, it has fewer to find empty.
"""

from __future__ import annotations

from collections.abc import Sequence

VECTOR_TOKENS = 8  # up to which the kernels go by tokens, not by slots (MMVQ_MAX_BATCH_SIZE)
_STEPS = 16  # of all slots: few different bands, whose tensors are kept


def band(slots: Sequence[int], n_slots: int) -> tuple[int, int]:
    """(first, number) of neighbouring slots that hold all of `slots`."""
    step = max(1, n_slots // _STEPS)
    first = min(slots) // step * step
    end = min(n_slots, (max(slots) // step + 1) * step)
    return first, end - first
