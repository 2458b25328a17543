"""Divides device memory between resident layers, slots and a ubatch's buffers. Pure.

All divisions of a kind are tried. Their objective (offload/plan/objective.py) decides.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.model import LOOKED_UP, ModelFacts, TensorEntry, layer_of
from offload.plan.candidates import (
    Candidates,
    SlotSizes,
    candidates,
    least_expert_bytes,
    ring_slots,
)
from offload.plan.disk import DiskUse
from offload.plan.machine import Machine, ModelWork, Real, Sharing
from offload.plan.objective import MeasuredDecode, Objective, Seconds, by_measured
from offload.plan.slot_layout import SlotLayout, slot_layout

UBATCHES = (512, 1024, 2048, 4096, 8192)
SMALL_UBATCHES = (128, 256)  # ubatches with small buffers, for more slots if memory is short


@dataclass(frozen=True)
class Choice:
    """A division of device memory."""

    streamed_experts: frozenset[int]  # layers whose experts stream
    streamed_dense: frozenset[int]
    n_ubatch: int
    sharing: Sharing
    streamed_bytes: int = 0  # host memory that the streamed weights take
    why: str = ""  # why measured decodes chose it; "": the machine model did

    @property
    def streams(self) -> bool:
        return bool(self.streamed_experts or self.streamed_dense)


def spread(n: int, n_layers: int) -> frozenset[int]:
    """Return `n` of `n_layers` layers, spread evenly.

    So the link can copy streamed layers while the layers between them compute.
    """
    n = max(0, min(n, n_layers))
    return frozenset(i for i in range(n_layers) if (i + 1) * n // n_layers > i * n // n_layers)


def least_slots(layout: SlotLayout) -> list[int]:
    """Return the least number of slots of each pool that the model can run with.

    Pools of experts need slots for one token's experts, other pools for two layers' dense weights.
    """
    needed = []
    for index, pool in enumerate(layout.pools):
        if pool.n_experts:
            needed.append(min(pool.most_slots, max(1, pool.n_used)))
            continue
        per_layer = Counter(group.layer for group in layout.groups if group.pool == index)
        needed.append(min(pool.most_slots, 2 * max(per_layer.values())))
    return needed


class Weights:
    """The weights of a model that can stream, and their bytes."""

    def __init__(
        self, facts: ModelFacts, experts: Sequence[TensorEntry], dense: Sequence[TensorEntry]
    ) -> None:
        """`experts` and `dense` are the weights that may stream."""
        self.facts = facts
        self.resident_bytes = device_bytes(facts)
        self.expert_layers = sorted({layer_of(e.name) for e in experts})
        n_layers, n = len(facts.layers), len(self.expert_layers)
        expert_bytes, dense_bytes = _bytes_by_layer(experts), _bytes_by_layer(dense)
        every = [frozenset(self.expert_layers[i] for i in spread(n - r, n)) for r in range(n + 1)]
        # Index: number of layers with resident experts. Value: layers that stream, their bytes.
        self.experts = [(chosen, sum(expert_bytes[i] for i in chosen)) for chosen in every]
        # Index: number of layers whose dense weights stream. Value: these layers, their bytes.
        first = facts.layers.start
        some = [frozenset(first + i for i in spread(d, n_layers)) for d in range(n_layers + 1)]
        self.dense = [(chosen, sum(dense_bytes[i] for i in chosen)) for chosen in some]
        in_slots = [*experts, *facts.expert_biases]
        self.layout = slot_layout(in_slots, facts.n_experts, facts.n_experts_used)
        self.slot_sizes = SlotSizes.of(self.layout)
        # Index: number of layers with resident experts. Value: mean bytes of a slot, over layers
        # that stream.
        mean = sum(expert_bytes.values()) / max(1, n)  # bytes of a layer's experts
        self.slot_bytes = [
            self.slot_sizes.mean * (n_bytes / len(chosen) / mean if chosen else 1.0)
            for chosen, n_bytes in self.experts
        ]
        ring = slot_layout(dense, 0, 0)
        self.dense_ring_bytes = ring.with_slots(least_slots(ring)).size_bytes if dense else 0


def _bytes_by_layer(entries: Sequence[TensorEntry]) -> dict[int, int]:
    sizes: dict[int, int] = defaultdict(int)
    for entry in entries:
        sizes[layer_of(entry.name)] += entry.size_bytes
    return sizes


def device_bytes(facts: ModelFacts) -> int:
    """Return the bytes of the weights that would be on the device if none streamed.

    Embeddings do not count, because the CPU looks them up in host memory. Token embeddings count
    only if they are also the output matrix, which the device has a copy of.
    """
    tied = not any(entry.name == "output.weight" for entry in facts.loaded)
    looked_up = LOOKED_UP - {"token_embd.weight"} if tied else LOOKED_UP
    return sum(entry.size_bytes for entry in facts.loaded if entry.name not in looked_up)


@dataclass(frozen=True)
class Attempts:
    """The numbers that a choice of sharing tries.

    `reserve_bytes`: the bytes to keep for the context, by ubatch. `n_resident`: layers with
    resident experts. `n_dense_streamed`: layers whose dense weights stream. The first number of
    each of these two is combined with all numbers of the other one.
    """

    reserve_bytes: Mapping[int, int]
    n_resident: Sequence[int]
    n_dense_streamed: Sequence[int]

    @property
    def ways(self) -> list[tuple[int, int]]:
        """Pairs of layers with resident experts and layers with streamed dense weights."""
        ways = [(n, self.n_dense_streamed[0]) for n in self.n_resident]
        return ways + [(self.n_resident[0], n) for n in self.n_dense_streamed[1:]]


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
    attempts: Attempts,
    *,
    budget_bytes: int,
    prompt_work: ModelWork | None = None,
    host_bytes: int | None = None,
    reads_disk: bool = False,
    decodes: Sequence[MeasuredDecode] = (),
) -> Choice | None:
    """Return the best way of sharing that fits `budget_bytes`, or None if none fits.

    Streamed weights take at most `host_bytes` of host memory; with `reads_disk`, experts beyond
    that are read from the disk. `decodes` are those that earlier starts measured.
    """
    resident, n_dense = np.array(attempts.ways).T
    ubatches = list(attempts.reserve_bytes)
    # Arrays below have a row for each ubatch and a column for each way.
    found = candidates(
        np.array([[budget_bytes - reserved] for reserved in attempts.reserve_bytes.values()]),
        weights.resident_bytes,
        Sharing(0, resident, n_dense),
        np.array([len(weights.experts[n][0]) for n in resident]),
        np.array([weights.experts[n][1] for n in resident]),
        np.array([weights.dense[n][1] for n in n_dense]),
        replace(weights.slot_sizes, mean=np.array([weights.slot_bytes[n] for n in resident])),
        dense_ring_bytes=weights.dense_ring_bytes,
    )
    sizes = np.broadcast_to([[n] for n in ubatches], found.fits.shape)
    seconds = objective.seconds(machine, work, found.sharing, sizes, prompt_work=prompt_work)

    def choice(i: int, k: int, why: str = "") -> Choice:
        its = Sharing(int(found.sharing.n_slots[i, k]), int(resident[k]), int(n_dense[k]))
        return Choice(
            weights.experts[resident[k]][0], weights.dense[n_dense[k]][0], ubatches[i], its,
            int(found.streamed_bytes[k]), why,
        )  # fmt: skip

    fits = found.fits
    if host_bytes is not None:
        if reads_disk:
            dense_bytes = np.array([weights.dense[n][1] for n in n_dense])
            disk = DiskUse(work, found.sharing, host_bytes - dense_bytes, machine.disk_bytes_per_s)
            seconds = objective.seconds(
                machine, work, found.sharing, sizes, prompt_work=prompt_work, disk=disk
            )
        else:
            fits = fits & (found.streamed_bytes <= host_bytes)
    if not fits.any():
        return None
    flat = replace(found, streamed_bytes=np.broadcast_to(found.streamed_bytes, fits.shape).ravel())
    best = int(best_way(flat, seconds.flat(fits.shape), sizes.ravel(), fits.ravel()))
    why = ""
    by_times = by_measured(seconds, fits, decodes, found.sharing, best)
    if by_times is not None:
        best, why = by_times.index, by_times.why
    i, k = divmod(best, len(resident))
    return choice(i, k, why)


@dataclass(frozen=True)
class LeastBytes:
    """The least device memory that a model runs in."""

    resident_bytes: int
    slot_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.slot_bytes + self.reserve_bytes


def least_bytes(weights: Weights, attempts: Attempts) -> LeastBytes:
    """Return the memory of the smallest division among the attempts of `choose_sharing`."""
    reserve_bytes = min(attempts.reserve_bytes.values())
    found = []
    for resident, n_dense in attempts.ways:
        experts, expert_bytes = weights.experts[resident]
        _, dense_bytes = weights.dense[n_dense]
        slots = weights.dense_ring_bytes if dense_bytes else 0
        slots += least_expert_bytes(weights.layout) if experts else 0
        held = weights.resident_bytes - expert_bytes - dense_bytes
        found.append(LeastBytes(held, slots, reserve_bytes))
    return min(found, key=lambda least: least.total_bytes)


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
