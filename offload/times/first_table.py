"""The table of expected times with which a model starts, before any decode is timed. Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from offload.decode import SMALL_BATCH
from offload.times.decodes import cpu_s, hybrid_s, streamed_s
from offload.times.hits import Sharing
from offload.times.machine import Machine, Real
from offload.times.table import CostTable, DecodeTime, Way
from offload.times.work import ModelWork

_SMALL, _STEP = 16, 2**0.25  # a modelled table has all sizes up to 16, then steps of this ratio


def modelled(
    machine: Machine, work: ModelWork, sharing: Sharing, n_most: int, *, splits: bool = False,
    shares_prompts: bool = True,
) -> CostTable:  # fmt: skip
    """Return a cost table of expected times, for batches of up to `n_most` tokens.

    The table is used until times are measured. With `splits`, batches also have times for layers
    that CPU and device share: up to `SMALL_BATCH` tokens, or all with `shares_prompts`.
    """
    sizes = [*range(1, min(_SMALL, n_most) + 1)]
    while sizes[-1] < n_most:
        sizes.append(min(n_most, math.ceil(sizes[-1] * _STEP)))
    if n_most > SMALL_BATCH:
        sizes = sorted({*sizes, SMALL_BATCH})

    def entries(seconds: Callable[..., Real], sizes: Sequence[int]) -> dict[int, DecodeTime]:
        each = np.broadcast_to(seconds(machine, work, sharing, np.array(sizes)), len(sizes))
        return {n: DecodeTime(s) for n, s in zip(sizes, each.tolist(), strict=True)}

    ways = {Way.IN_PLACE: entries(cpu_s, sizes)}
    if work.n_expert_layers > sharing.n_resident and sharing.n_slots:
        ways[Way.STREAMED] = entries(streamed_s, sizes)
        if splits:
            most = n_most if shares_prompts else SMALL_BATCH
            ways[Way.SPLIT] = entries(hybrid_s, [n for n in sizes if n <= most])
    return CostTable(work.n_experts, work.n_used, ways)


def together(tables: Sequence[CostTable]) -> CostTable:
    """Return the costs of decodes that pass several devices. Each table has one device's part."""
    ways: dict[Way, dict[int, DecodeTime]] = {}
    for way in dict.fromkeys(way for table in tables for way in table.ways):
        # A device on which nothing streams takes the same time in every way.
        parts = [table.ways.get(way, table.ways[Way.IN_PLACE]) for table in tables]
        sizes = [n for n in parts[0] if all(n in entries for entries in parts)]
        ways[way] = {n: DecodeTime(sum(entries[n].seconds for entries in parts)) for n in sizes}
    return replace(tables[0], ways=ways)


def modelled_crossover(
    machine: Machine, work: ModelWork, sharing: Sharing, most: int = 8192
) -> int | None:
    """Return the least number of tokens from which streaming is no slower than the CPU, or None.

    Some sizes up to `most` are probed. From the returned number on, streaming is no slower at any
    probed size, even if times rise and fall.
    """

    def wins(n: Real) -> Real:
        return streamed_s(machine, work, sharing, n) <= cpu_s(machine, work, sharing, n)

    sizes = [n for n in {round(2 ** (i / 4)) for i in range(4 * most.bit_length())} if n < most]
    sizes = sorted([*sizes, most])
    loses = ~np.broadcast_to(wins(np.array(sizes)), len(sizes))
    if loses[-1]:
        return None
    first = int(np.flatnonzero(loses)[-1]) + 1 if loses.any() else 0
    between = range(sizes[first - 1] + 1 if first else 1, sizes[first])
    return between.start + bisect.bisect_left(between, True, key=wins)
