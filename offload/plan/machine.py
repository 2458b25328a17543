"""The machine model: computes a batch's expected time from a model's header. Pure.

Each part of a layer takes the time of moving its bytes or that of computing, whichever is longer
(the roofline model: Williams, Waterman and Patterson, 2009). The model assumes that tokens choose
experts independently and uniformly, so n tokens use E · (1 - (1 - k/E)^n) of E experts. Real texts
use fewer. The model ranks plans and gives a first threshold, until measured times replace it.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, replace

from offload.costs.table import CostTable, Entry, Way
from offload.model import ModelFacts, is_experts, layer_of
from offload.plan.min_batch import VERIFY_MOST
from offload.routing import HitCurve, expected_union

# (share of all experts that have a slot, share of uses that hit) with LRU eviction. The values were
# reported for layers of 512 experts, of which a token uses 10 (llama.cpp #27861).
_HITS = ((0.125, 0.67), (0.25, 0.81), (1.0, 1.0))
_SMALL, _STEP = 16, 2**0.25  # a modelled table has all sizes up to 16, then steps of this ratio
_AHEAD = 0.5  # share of a layer's used experts from which all are copied before the router runs


@dataclass(frozen=True)
class Machine:
    """Sustained rates of a machine, and its fixed costs. The defaults are typical values."""

    link_bytes_per_s: float = 25e9  # pinned host memory to the device: PCIe 4.0 x16
    ram_bytes_per_s: float = 70e9  # reads of all cores together: two channels of DDR5
    vram_bytes_per_s: float = 800e9
    cpu_flops: float = 0.8e12  # quantised products with many rows, all cores together
    gpu_flops: float = 60e12
    per_layer_s: float = 60e-6  # launches of a layer's kernels
    per_switch_s: float = 40e-6  # one change from the device to the CPU and back
    disk_bytes_per_s: float = 5e9  # large direct reads, several at once: NVMe of PCIe 4.0 x4


TYPICAL = Machine()


@dataclass(frozen=True)
class Part:
    """Weights that are computed together: their bytes, and multiplications for each token."""

    size_bytes: float = 0.0
    n_weights: float = 0.0  # matrix elements that one token is multiplied with

    def seconds(self, bytes_per_s: float, flops: float, n_tokens: float) -> float:
        """Return the seconds for `n_tokens`, reading at `bytes_per_s` and computing at `flops`."""
        return float(max(self.size_bytes / bytes_per_s, 2 * self.n_weights * n_tokens / flops))


@dataclass(frozen=True)
class ModelWork:
    """A model's weights, as the machine model counts them. All layers are assumed to be alike."""

    n_layers: int
    dense: Part  # a layer's attention, shared experts and router
    head: Part  # the output matrix
    n_expert_layers: int = 0
    expert: Part = Part()  # one expert of one layer, on average
    n_experts: int = 0
    n_used: int = 0
    hits: HitCurve | None = None  # hits counted with this model; None: `hit_rate` guesses them

    def union(self, n_tokens: float) -> float:
        """Return the expected number of a layer's experts that `n_tokens` use."""
        return expected_union(n_tokens, self.n_used, self.n_experts)


@dataclass(frozen=True)
class Sharing:
    """The numbers of slots, resident layers and streamed layers of a plan."""

    n_slots: int = 0  # for experts
    n_resident: int = 0  # layers whose experts are resident
    n_dense_streamed: int = 0  # layers whose dense weights stream

    def with_slots(self, n_slots: int) -> Sharing:
        return replace(self, n_slots=n_slots)


def model_work(facts: ModelFacts, hits: HitCurve | None = None) -> ModelWork:
    """Return the work of a model from its header. `hits`: hits counted in its routing, if known."""
    dense_bytes, dense_n, expert_bytes, expert_n, head_bytes, head_n = 0, 0, 0, 0, 0, 0
    layers: set[int] = set()
    tied = not any(entry.name == "output.weight" for entry in facts.loaded)
    for entry in facts.loaded:
        n_weights = math.prod(entry.shape) if len(entry.shape) > 1 else 0
        if entry.name == "output.weight" or (tied and entry.name == "token_embd.weight"):
            head_bytes, head_n = entry.size_bytes, n_weights
        elif is_experts(entry):
            layers.add(layer_of(entry.name))
            expert_bytes += entry.size_bytes
            expert_n += n_weights
        elif layer_of(entry.name) >= 0:
            dense_bytes += entry.size_bytes
            dense_n += n_weights
    n_layers, n_experts = max(1, len(facts.layers)), facts.n_experts if layers else 0
    pieces = max(1, len(layers) * n_experts)
    return ModelWork(
        n_layers=n_layers,
        dense=Part(dense_bytes / n_layers, dense_n / n_layers),
        head=Part(head_bytes, head_n),
        n_expert_layers=len(layers),
        expert=Part(expert_bytes / pieces, expert_n / pieces),
        n_experts=n_experts,
        n_used=facts.n_experts_used if layers else 0,
        hits=hits,
    )


def hit_rate(share: float, in_use: float) -> float:
    """Return a guess of the share of an expert's uses that find it in a slot (hits).

    `share` is the share of all experts that have a slot, `in_use` the share that a decode uses. If
    the slots hold no more than a decode uses, each expert is evicted before its next use, and the
    result is 0.
    """
    if share >= 1.0:
        return 1.0
    if share <= in_use:
        return 0.0
    low = (in_use, 0.0)
    for point in _HITS:
        if point[0] <= in_use:
            continue
        if share <= point[0]:
            return low[1] + (point[1] - low[1]) * (share - low[0]) / (point[0] - low[0])
        low = point
    return 1.0


def expected_hits(work: ModelWork, sharing: Sharing, n_pieces: float) -> float:
    """Return the expected share of hits if a batch uses `n_pieces` experts of each layer.

    The source is counted hits if there are any, otherwise `hit_rate`. All streamed layers share the
    slots. Hits were counted for tokens that are decoded alone, so for larger batches the result is
    capped at the share of the used experts that the slots can hold.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    if not n_streamed or not work.n_experts:
        return 1.0
    share = sharing.n_slots / (work.n_experts * n_streamed)
    in_use = n_pieces / work.n_experts
    if work.hits is None:
        return hit_rate(share, in_use)
    return min(work.hits.at(share), share / in_use, 1.0)


def cpu_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """Return the seconds of a decode whose streamed weights the CPU computes in place."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    experts = Part(
        work.union(n_tokens) * work.expert.size_bytes, work.n_used * work.expert.n_weights
    )
    streamed = experts.seconds(machine.ram_bytes_per_s, machine.cpu_flops, n_tokens)
    dense = work.dense.seconds(machine.ram_bytes_per_s, machine.cpu_flops, n_tokens)
    return (
        _resident_s(machine, work, sharing, n_tokens)
        + n_streamed * (streamed + machine.per_switch_s)
        + sharing.n_dense_streamed * (dense + machine.per_switch_s)
    )


def streamed_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """Return the seconds of a decode whose streamed weights are copied and run on the device."""
    total = _resident_s(machine, work, sharing, n_tokens)
    n_streamed = work.n_expert_layers - sharing.n_resident
    if n_streamed:
        total += n_streamed * _expert_layer_s(machine, work, sharing, n_tokens)
    if sharing.n_dense_streamed:
        copy_s = work.dense.size_bytes / machine.link_bytes_per_s
        compute_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
        total += sharing.n_dense_streamed * max(copy_s, compute_s)
    return total


def hybrid_s(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_tokens: int,
    hits: float | None = None,
) -> float:
    """Return the seconds of a decode whose streamed layers are split between CPU and device.

    `hits` is the share of a layer's used experts that have a slot; None: `expected_hits`. All
    experts are assumed to cost the same. Each layer takes the longest of three times: computing all
    its experts by CPU and device, computing its misses by the CPU or copying them over the link,
    and reading its misses from RAM.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    total = _resident_s(machine, work, sharing, n_tokens)
    dense = work.dense.seconds(machine.ram_bytes_per_s, machine.cpu_flops, n_tokens)
    total += sharing.n_dense_streamed * (dense + machine.per_switch_s)
    if not n_streamed:
        return total
    pieces = work.union(n_tokens)
    rows = n_tokens * work.n_used / pieces
    if hits is None:
        hits = expected_hits(work, sharing, pieces)
    misses = (1.0 - hits) * pieces
    host_s = work.expert.seconds(machine.ram_bytes_per_s, machine.cpu_flops, rows)
    device_s = work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, rows)
    copy_s = work.expert.size_bytes / machine.link_bytes_per_s
    layer_s = max(
        pieces / (1.0 / host_s + 1.0 / device_s),
        misses / (1.0 / host_s + 1.0 / copy_s),
        misses * work.expert.size_bytes / machine.ram_bytes_per_s,
    )
    return total + n_streamed * (layer_s + machine.per_switch_s)


def _resident_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """Return the seconds of a decode's resident weights, which the device always computes."""
    gpu = machine.vram_bytes_per_s, machine.gpu_flops
    experts = Part(
        work.union(n_tokens) * work.expert.size_bytes, work.n_used * work.expert.n_weights
    )
    return (
        (work.n_layers - sharing.n_dense_streamed) * work.dense.seconds(*gpu, n_tokens)
        + sharing.n_resident * experts.seconds(*gpu, n_tokens)
        + work.head.seconds(*gpu, min(n_tokens, 64))
        + work.n_layers * machine.per_layer_s
    )


def _expert_layer_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """Return the seconds of copying and computing one layer's streamed experts, less overlap."""
    if min(work.n_experts, n_tokens * work.n_used) > sharing.n_slots:
        return _in_chunks_s(machine, work, sharing, n_tokens)
    pieces = work.union(n_tokens)
    copy_s, compute_s = _copy_s(machine, work, sharing, pieces), _compute_s(machine, work, n_tokens)
    if pieces < _AHEAD * work.n_experts:
        return copy_s + compute_s + machine.per_switch_s  # copies wait for the router's ids
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    spare = max(0.0, sharing.n_slots - pieces) * work.expert.size_bytes / machine.link_bytes_per_s
    return copy_s + compute_s - min(compute_s + dense_s, spare, copy_s)


def _in_chunks_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """Return the seconds of one layer's streamed experts, computed in chunks of tokens."""
    n_chunk = max(1, sharing.n_slots // max(1, work.n_used))
    whole, rest = divmod(n_tokens, n_chunk)
    seconds = machine.per_switch_s
    for n_chunks, n in ((whole, n_chunk), (1, rest)):
        if n:
            copy_s = _copy_s(machine, work, sharing, work.union(n))
            seconds += n_chunks * (copy_s + _compute_s(machine, work, n))
    return seconds


def _copy_s(machine: Machine, work: ModelWork, sharing: Sharing, pieces: float) -> float:
    """Return the seconds of copying a layer's missing experts, if it uses `pieces` experts."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    # If the slots hold no more than a decode uses, each expert is evicted before its next use.
    holds = sharing.n_slots > pieces * n_streamed
    missed = 1.0 - (expected_hits(work, sharing, pieces) if holds else 0.0)
    return missed * pieces * work.expert.size_bytes / machine.link_bytes_per_s


def _compute_s(machine: Machine, work: ModelWork, n_tokens: int) -> float:
    pieces = work.union(n_tokens)
    used = Part(pieces * work.expert.size_bytes, work.n_used * work.expert.n_weights)
    return used.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)


def best_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int, *, hybrid: bool = False
) -> float:
    """Return the seconds of a decode in its fastest way. With `hybrid` layers may be split."""
    seconds = min(
        cpu_s(machine, work, sharing, n_tokens), streamed_s(machine, work, sharing, n_tokens)
    )
    return min(seconds, hybrid_s(machine, work, sharing, n_tokens)) if hybrid else seconds


def prefill_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_prompt: int, n_ubatch: int
) -> float:
    """Return the seconds of a prompt of `n_prompt` tokens, in ubatches of `n_ubatch`."""
    whole, rest = divmod(n_prompt, n_ubatch)
    total = whole * best_s(machine, work, sharing, n_ubatch) if whole else 0.0
    return total + (best_s(machine, work, sharing, rest) if rest else 0.0)


def modelled(
    machine: Machine, work: ModelWork, sharing: Sharing, n_most: int, *, splits: bool = False
) -> CostTable:
    """Return a cost table of expected times, for batches of up to `n_most` tokens.

    The table is used until times are measured. With `splits`, batches of up to `VERIFY_MOST` tokens
    also have times for split layers.
    """
    sizes = [*range(1, min(_SMALL, n_most) + 1)]
    while sizes[-1] < n_most:
        sizes.append(min(n_most, math.ceil(sizes[-1] * _STEP)))
    ways: dict[Way, dict[int, Entry]] = {
        Way.IN_PLACE: {n: Entry(cpu_s(machine, work, sharing, n)) for n in sizes}
    }
    if work.n_expert_layers > sharing.n_resident and sharing.n_slots:
        ways[Way.STREAMED] = {n: Entry(streamed_s(machine, work, sharing, n)) for n in sizes}
        if splits:
            small = [n for n in sizes if n <= VERIFY_MOST]
            ways[Way.SPLIT] = {n: Entry(hybrid_s(machine, work, sharing, n)) for n in small}
    return CostTable(work.n_experts, work.n_used, ways)


def modelled_crossover(
    machine: Machine, work: ModelWork, sharing: Sharing, most: int = 8192
) -> int | None:
    """Return the least number of tokens from which streaming is no slower than the CPU, or None.

    Some sizes up to `most` are probed. From the returned number on, streaming is no slower at any
    probed size, even if times rise and fall.
    """

    def wins(n: int) -> bool:
        return streamed_s(machine, work, sharing, n) <= cpu_s(machine, work, sharing, n)

    sizes = [n for n in {round(2 ** (i / 4)) for i in range(4 * most.bit_length())} if n < most]
    sizes = sorted([*sizes, most])
    low = next((n for n in reversed(sizes) if not wins(n)), 0)
    if low == most:
        return None
    between = range(low + 1, next(n for n in sizes if n > low))
    return between.start + bisect.bisect_left(between, True, key=wins)
