"""Divides device memory between resident layers, slots and a ubatch's buffers. Pure.

For each division, the machine model computes the expected time of a prompt and of the tokens
generated after it. The fastest division that fits is chosen.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from offload.model import LOOKED_UP, ModelFacts, TensorEntry, layer_of
from offload.plan.disk import DiskUse
from offload.plan.machine import Machine, ModelWork, Real, Sharing, best_s, prefill_s
from offload.plan.slot_layout import SlotLayout, SlotPool, slot_layout

UBATCHES = (512, 1024, 2048, 4096, 8192)
SMALL_UBATCHES = (128, 256)  # ubatches with small buffers, for more slots if memory is short
# A plan for the usual mix decodes with at least `KEPT_DECODE` of the best possible speed, if that
# keeps `KEPT_PROMPTS` of the best possible speed of prompts. Short prompts make up for no more.
KEPT_DECODE = 0.9
KEPT_PROMPTS = 0.5
_AHEAD = 8  # a ring has room for an eighth of the next layer's experts


@dataclass(frozen=True)
class PlannedWork:
    """The workload that a plan is made for: a prompt, then tokens in batches."""

    n_prompt: int = 4096  # tokens of the prompt; 0: decoding alone
    n_generated: float = 512
    n_batch: int = 1  # tokens of one decode after the prompt


@dataclass(frozen=True)
class TokenMix:
    """The proportion of prompt tokens that are evaluated to generated ones."""

    n_prompt: float
    n_generated: float

    def workload(self, n_prompt: int) -> PlannedWork:
        """Return a workload with a prompt of `n_prompt` tokens, in this proportion.

        If the mix has no prompt tokens, returns a workload of decoding alone.
        """
        if not self.n_prompt:
            return PlannedWork(0, 1)
        return PlannedWork(n_prompt, n_prompt * self.n_generated / self.n_prompt)

    @property
    def rounded(self) -> TokenMix:
        """The mix rounded to a power of two, so that plans do not change from start to start.

        Both numbers must be above 0.
        """
        return TokenMix(2.0 ** round(math.log2(self.n_prompt / self.n_generated)), 1)

    @property
    def words(self) -> str:
        if not self.n_prompt:
            return "planned for decoding alone"
        if not self.n_generated:
            return "planned for prompts alone"
        share = self.n_prompt / self.n_generated
        if share < 1:
            return f"planned for {1 / share:.3g} generated tokens to each prompt token"
        return f"planned for {share:.3g} prompt tokens to each generated one"


DECODING = TokenMix(0, 1)


@dataclass(frozen=True)
class Choice:
    """A division of device memory, and its expected time."""

    streamed_experts: frozenset[int]  # layers whose experts stream
    streamed_dense: frozenset[int]
    n_ubatch: int
    sharing: Sharing
    streamed_bytes: int = 0  # host memory that the streamed weights take
    expected_s: float = 0.0

    @property
    def streams(self) -> bool:
        return bool(self.streamed_experts or self.streamed_dense)


def spread(n: int, n_layers: int) -> frozenset[int]:
    """Return `n` of `n_layers` layers, spread evenly.

    So the link can copy streamed layers while the layers between them compute.
    """
    n = max(0, min(n, n_layers))
    return frozenset(i for i in range(n_layers) if (i + 1) * n // n_layers > i * n // n_layers)


def ring_slots(pool: SlotPool) -> int:
    """Return the number of slots of a ring, for all experts of a layer and some of the next."""
    return min(pool.most_slots, pool.n_experts + max(1, pool.n_experts // _AHEAD))


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
        # By number of layers with resident experts: the layers whose experts stream, their bytes.
        self.experts = [(chosen, sum(expert_bytes[i] for i in chosen)) for chosen in every]
        # By number of layers whose dense weights stream: these layers, their bytes.
        first = facts.layers.start
        some = [frozenset(first + i for i in spread(d, n_layers)) for d in range(n_layers + 1)]
        self.dense = [(chosen, sum(dense_bytes[i] for i in chosen)) for chosen in some]
        in_slots = [*experts, *facts.expert_biases]
        self.layout = slot_layout(in_slots, facts.n_experts, facts.n_experts_used)
        self.slot_sizes = SlotSizes.of(self.layout)
        # By number of layers with resident experts: the mean of the streamed layers' slots.
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
    resident experts. `n_dense_streamed`: layers whose dense weights stream. Each of the last two
    begins with the number that is combined with all of the other.
    """

    reserve_bytes: Mapping[int, int]
    n_resident: Sequence[int]
    n_dense_streamed: Sequence[int]

    @property
    def ways(self) -> list[tuple[int, int]]:
        """Pairs of layers with resident experts and layers with streamed dense weights."""
        ways = [(n, self.n_dense_streamed[0]) for n in self.n_resident]
        return ways + [(self.n_resident[0], n) for n in self.n_dense_streamed[1:]]


def choose_sharing(
    weights: Weights,
    work: ModelWork,
    machine: Machine,
    workload: PlannedWork,
    attempts: Attempts,
    *,
    budget_bytes: int,
    hybrid: bool = False,
    host_bytes: int | None = None,
    reads_disk: bool = False,
    most_s: Callable[[], float] | None = None,
) -> Choice | None:
    """Return the fastest way of sharing that fits `budget_bytes`, or None if none fits.

    With `most_s`, a way that keeps the speed of decodes and prompts (`KEPT_DECODE`) is preferred to
    the fastest, if its expected time is at most `most_s()`.

    Streamed weights take at most `host_bytes` of host memory; with `reads_disk`, experts beyond
    that are read from the disk. With `hybrid`, layers may be split, so that the device computes
    experts in slots in every batch.
    """
    resident, n_dense = np.array(attempts.ways).T
    ubatches = list(attempts.reserve_bytes)
    expert_bytes = np.array([weights.experts[n][1] for n in resident])
    dense_bytes = np.array([weights.dense[n][1] for n in n_dense])
    n_streamed = np.array([len(weights.experts[n][0]) for n in resident])
    # Arrays below have a row for each ubatch and a column for each way.
    rooms = np.array([[budget_bytes - reserved] for reserved in attempts.reserve_bytes.values()])
    rooms = rooms - (weights.resident_bytes - expert_bytes - dense_bytes)
    rooms -= np.where(dense_bytes > 0, weights.dense_ring_bytes, 0)
    slot_bytes = np.array([weights.slot_bytes[n] for n in resident])
    n_slots = replace(weights.slot_sizes, mean=slot_bytes).within(rooms, n_streamed)
    is_more = resident > attempts.n_resident[0]
    fits = may_run(rooms, n_slots, n_streamed, is_more & (workload.n_prompt > 0), weights.facts)
    sizes = np.array([[n_ubatch] for n_ubatch in ubatches])
    sharing = Sharing(n_slots, resident, n_dense)
    seconds = expected_s(machine, work, workload, sharing, sizes, hybrid=hybrid)
    seconds = np.where(fits, seconds, np.inf)
    streamed_bytes = expert_bytes + dense_bytes

    def choice(i: int, k: int) -> Choice:
        its = Sharing(int(n_slots[i, k]), int(resident[k]), int(n_dense[k]))
        return Choice(
            weights.experts[resident[k]][0], weights.dense[n_dense[k]][0], ubatches[i], its,
            int(streamed_bytes[k]), float(seconds[i, k]),
        )  # fmt: skip

    # If all weights are resident, larger ubatches would save nothing.
    streams = (n_streamed > 0) | (n_dense > 0)
    is_small = np.isin(sizes, SMALL_UBATCHES)
    for i, k in np.argwhere(fits & ~streams & ~is_small)[:1]:
        return choice(i, k)
    host_bytes = int(streamed_bytes.max()) if host_bytes is None else host_bytes
    for i, k in np.argwhere(fits & (streamed_bytes > host_bytes)):
        seconds[i, k] = np.inf
        if reads_disk:
            found = choice(i, k)
            in_memory = host_bytes - int(dense_bytes[k])
            disk = DiskUse(work, found.sharing, in_memory, machine.disk_bytes_per_s)
            seconds[i, k] = expected_s(
                machine, work, workload, found.sharing, ubatches[i], hybrid=hybrid, disk=disk
            )
    fastest = np.unravel_index(np.argmin(seconds), seconds.shape)
    i, k = int(fastest[0]), int(fastest[1])
    if not np.isfinite(seconds[i, k]):
        return None
    if most_s is not None:
        decodes_s = best_s(machine, work, sharing, workload.n_batch, hybrid=hybrid)
        decodes_s = np.broadcast_to(decodes_s, seconds.shape)
        may_decode = may_run(rooms, n_slots, n_streamed, np.False_, weights.facts)
        may_decode = may_decode & (streamed_bytes <= host_bytes)
        answers_s = workload.n_generated / workload.n_batch * decodes_s
        kept = _keeping_decode(seconds, decodes_s, seconds - answers_s, may_decode)
        if kept is not None and kept != (i, k) and seconds[kept] <= most_s():
            i, k = kept
    return choice(i, k)


def _keeping_decode(
    seconds: NDArray[np.float64],
    decodes_s: NDArray[np.float64],
    prompts_s: NDArray[np.float64],
    may_decode: NDArray[np.bool_],
) -> tuple[int, int] | None:
    """Return the fastest way that keeps the speed of decodes and prompts, or None.

    The arrays are [ubatches, ways]: seconds of the workload (infinite if a way does not fit), of
    one decode and of the prompt. `may_decode` are the ways that can run at all.
    """
    fits = np.isfinite(seconds)
    least_decode_s = decodes_s[may_decode | fits].min()
    keeps = fits & (decodes_s <= least_decode_s / KEPT_DECODE)
    keeps &= prompts_s <= prompts_s[fits].min() / KEPT_PROMPTS
    if not keeps.any():
        return None
    i, k = np.unravel_index(np.argmin(np.where(keeps, seconds, np.inf)), seconds.shape)
    return int(i), int(k)


def may_run(
    rooms_bytes: Real, n_slots: Real, n_streamed: Real, needs_ring: Real, facts: ModelFacts
) -> Real:
    """Return whether a plan can run if it leaves `rooms_bytes` for slots of `n_streamed` layers.

    `needs_ring` is True if the slots have to hold a whole layer's experts. They have to if more
    layers than necessary are resident, because prompts could not run on the device otherwise.
    """
    has_slots = (n_streamed == 0) | (n_slots > 0)
    has_ring = (n_streamed == 0) | (n_slots >= facts.n_experts)
    return (rooms_bytes >= 0) & has_slots & (has_ring | ~needs_ring)


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

        The number is 0 if not even one token's experts fit. It is less than a layer's experts
        unless a ring fits. The reason is that the header predicts free memory only within a few per
        cent, and one slot too few would keep prompts off the device.
        """
        few = np.clip(room_bytes // np.maximum(self.row, 1), 1, max(1, self.n_experts - 1))
        many = np.minimum(n_layers * self.n_experts, room_bytes // np.maximum(self.mean, 1.0))
        n_slots = np.where(room_bytes < self.ring, few, many).astype(np.int64)
        return np.where((n_layers > 0) & (room_bytes >= self.least), n_slots, 0)


def expected_s(
    machine: Machine,
    work: ModelWork,
    workload: PlannedWork,
    sharing: Sharing,
    n_ubatch: Real,
    *,
    hybrid: bool,
    disk: DiskUse | None = None,
) -> Real:
    """Return the expected seconds of the workload. With `hybrid`, decodes may split layers.

    `disk`: reads from the disk, None if all streamed weights fit memory.
    """
    n_prompt, n_batch = workload.n_prompt, workload.n_batch
    prompt_s = prefill_s(machine, work, sharing, n_prompt, n_ubatch)
    decode_s = best_s(machine, work, sharing, n_batch, hybrid=hybrid)
    if disk is not None:
        prompt_s = max(prompt_s, disk.prompt_s(n_prompt, n_ubatch))
        decode_s = disk.with_reads(decode_s, n_batch)
    return prompt_s + workload.n_generated / n_batch * decode_s


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
