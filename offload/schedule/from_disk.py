"""Divides the experts of a layer while some of them are still being read from the disk. Pure.

An expert is in a slot, in memory, or on the disk. All experts on the disk have to be read,
whichever side computes them, and they arrive one after the other. There are two ways to divide such
a layer:

    late    The CPU computes its experts in memory, then each expert from the disk when it arrives.
            Meanwhile the link copies experts in memory, and the device computes.
    wait    The sides begin when all experts have been read. The experts are divided as if all of
            them had been in memory. This is better if the CPU takes longer for an expert than the
            disk, for example with many rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from offload.schedule.division import (
    HIT,
    HOST,
    LATE,
    STREAMED,
    Split,
    SplitCosts,
    seconds_at,
    split_pairs,
)


def split_from_disk(
    ids: NDArray[np.int32],
    resident: NDArray[np.bool_],
    late: Sequence[int],
    costs: SplitCosts,
    read_s: float,
) -> Split | None:
    """Return the division whose slowest part ends soonest, None if waiting for the disk is better.

    `ids` and `resident`: as in `split_pairs`. `late`: experts that are being read, in the order in
    which they arrive, one every `read_s` seconds.
    """
    rows = np.bincount(ids.ravel(), minlength=len(resident))
    used = rows.nonzero()[0]
    used = used[(-rows[used]).argsort(kind="stable")]
    used = used[~np.isin(used, late)]
    there = resident[used]
    hits, misses = used[there], used[~there]
    n_late, n_misses = len(late), len(misses)
    # Experts that arrive late stay with the CPU, as if they were hits that it computes.
    ends = costs.tables(int(rows.max(initial=0)), n_misses).ends_s(
        np.concatenate(([0], rows[late], rows[hits], rows[misses])), n_late + len(hits), n_late
    )
    late_s = seconds_at(costs.host_s, rows[late])
    arrivals_s = read_s * np.arange(1, n_late + 1)
    # After an expert arrives, the CPU still has to compute it and the experts that arrive later.
    last_s = float((arrivals_s + late_s[::-1].cumsum()[::-1]).max(initial=0.0))
    ends[0] = np.maximum(ends[0], last_s)
    latest = np.maximum.reduce(ends)
    n_streamed = int(latest.argmin())
    waiting = split_pairs(ids, resident, costs, rows)
    if n_late * read_s + max(waiting.cpu_s, waiting.device_s) < latest[n_streamed]:
        return None
    kind = np.zeros(len(resident), np.uint8)
    kind[misses] = HOST
    kind[misses[:n_streamed]] = STREAMED
    kind[late] = LATE
    cpu_s, *stages_s = ends[:, n_streamed].tolist()
    return Split(kind, cpu_s, max(stages_s), n_streamed * costs.copy_s)


def stay_late(resident: NDArray[np.bool_], late: Sequence[int]) -> NDArray[np.uint8]:
    """Assign hits to the device and other experts to the CPU, `late` ones when they arrive."""
    kind = np.where(resident, np.uint8(HIT), np.uint8(HOST))
    kind[late] = LATE
    return kind
