"""A machine's time for a batch of tokens, from a model's header: pure, small, in one place.

Every part of a layer is bound by the slowest of what it moves and what it computes (the roofline
model: Williams, Waterman and Patterson, 2009). Experts are chosen independently and uniformly, so
that n tokens use E · (1 - (1 - k/E)^n) of E experts; texts use fewer. It ranks plans and gives the
first guess of a threshold; what is measured on the machine replaces it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from offload.costs.table import CostTable, Entry, Way
from offload.model import ModelFacts, is_experts, layer_of
from offload.plan.min_batch import VERIFY_MOST
from offload.routing import HitCurve, expected_union

# Share of all experts that have a slot -> share of uses that find theirs there, least recently used
# leaving first: reported for a layer of 512 experts, 10 of them used (llama.cpp #27861).
_HITS = ((0.125, 0.67), (0.25, 0.81), (1.0, 1.0))
_SMALL, _STEP = 16, 2**0.25  # sizes that a modelled table has all of, and steps between others
_AHEAD = 0.5  # a batch that uses this share of a layer's experts has all copied before its router


@dataclass(frozen=True)
class Machine:
    """The bytes that a machine moves and the operations it computes in a second, sustained."""

    link_bytes_per_s: float = 25e9  # pinned host memory to the device: PCIe 4.0 x16
    ram_bytes_per_s: float = 70e9  # what all cores together read: two channels of DDR5
    vram_bytes_per_s: float = 800e9
    cpu_flops: float = 0.8e12  # quantised products with many rows, all cores together
    gpu_flops: float = 60e12
    per_layer_s: float = 60e-6  # launches of a layer's kernels
    per_switch_s: float = 40e-6  # from the device to the CPU and back


TYPICAL = Machine()


@dataclass(frozen=True)
class Part:
    """Weights that are computed together: what is read, and multiplications for each token."""

    size_bytes: float = 0.0
    n_weights: float = 0.0  # matrix elements that one token is multiplied with

    def seconds(self, bytes_per_s: float, flops: float, n_tokens: float) -> float:
        """Time for `n_tokens` where the weights lie in memory of that bandwidth."""
        return float(max(self.size_bytes / bytes_per_s, 2 * self.n_weights * n_tokens / flops))


@dataclass(frozen=True)
class ModelWork:
    """A model as the machine sees it. Layers are taken to be alike."""

    n_layers: int
    dense: Part  # a layer's attention, shared experts and router
    head: Part  # the output matrix, for a decode's wanted rows
    n_expert_layers: int = 0
    expert: Part = Part()  # one expert of one layer, on average
    n_experts: int = 0
    n_used: int = 0
    hits: HitCurve | None = None  # as counted; None: a guess

    def union(self, n_tokens: float) -> float:
        """Expected number of a layer's experts that `n_tokens` use."""
        return expected_union(n_tokens, self.n_used, self.n_experts)


@dataclass(frozen=True)
class Sharing:
    """The sharing of device memory: layers and slots."""

    n_slots: int = 0  # for experts
    n_resident: int = 0  # layers whose experts are resident
    n_dense_streamed: int = 0  # layers whose dense weights stream

    def with_slots(self, n_slots: int) -> Sharing:
        return replace(self, n_slots=n_slots)


def model_work(facts: ModelFacts, hits: HitCurve | None = None) -> ModelWork:
    """The work of a token, from the header, with the hits that were counted of its routing."""
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
    n_layers, n_experts = max(1, facts.n_layers), facts.n_experts if layers else 0
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
    """A guess of the share of uses that find their expert in a slot.

    `share` of all experts have one; a step touches `in_use` of them. Where the slots hold less than
    a step touches, each is taken again before it is used: nothing hits.
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
    """Share of the `n_pieces` experts of a layer that a batch uses which have a slot: as counted,
    else a guess.

    The layers that stream share the slots. Hits are counted of tokens that are decoded alone; of
    the experts of several no more hit than have slots.
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
    """A decode whose streamed weights the CPU computes where they lie."""
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
    """A decode whose streamed weights are copied into slots and computed by the device."""
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
    """A decode whose streamed experts are split: each in a slot, copied, or computed by the CPU.

    `hits` is the share of a layer's used experts that have a slot, by default as expected. All
    experts cost alike, so that the split is one of shares: the layer ends when both sides have done
    what they can at once, and no sooner than all misses have left RAM, by whichever way.
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
    """The part of a decode that the device computes whatever becomes of the streamed weights."""
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
    """One layer's streamed experts: copies, and the computation that they are hidden behind."""
    if min(work.n_experts, n_tokens * work.n_used) > sharing.n_slots:
        return _in_chunks_s(machine, work, sharing, n_tokens)
    pieces = work.union(n_tokens)
    copy_s, compute_s = _copy_s(machine, work, sharing, pieces), _compute_s(machine, work, n_tokens)
    if pieces < _AHEAD * work.n_experts:
        return copy_s + compute_s + machine.per_switch_s  # the router has to be heard first
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    spare = max(0.0, sharing.n_slots - pieces) * work.expert.size_bytes / machine.link_bytes_per_s
    return copy_s + compute_s - min(compute_s + dense_s, spare, copy_s)


def _in_chunks_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: int) -> float:
    """The same where the slots hold the experts of some tokens at a time."""
    n_chunk = max(1, sharing.n_slots // max(1, work.n_used))
    whole, rest = divmod(n_tokens, n_chunk)
    seconds = machine.per_switch_s
    for n_chunks, n in ((whole, n_chunk), (1, rest)):
        if n:
            copy_s = _copy_s(machine, work, sharing, work.union(n))
            seconds += n_chunks * (copy_s + _compute_s(machine, work, n))
    return seconds


def _copy_s(machine: Machine, work: ModelWork, sharing: Sharing, pieces: float) -> float:
    """Copying what of `pieces` experts has no slot yet."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    # Slots for less than a step touches: each is taken again before it is used.
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
    """A decode by the faster side, or by both if layers may be split (`hybrid`)."""
    seconds = min(
        cpu_s(machine, work, sharing, n_tokens), streamed_s(machine, work, sharing, n_tokens)
    )
    return min(seconds, hybrid_s(machine, work, sharing, n_tokens)) if hybrid else seconds


def prefill_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_prompt: int, n_ubatch: int
) -> float:
    """A prompt of `n_prompt` tokens, `n_ubatch` at a time."""
    whole, rest = divmod(n_prompt, n_ubatch)
    total = whole * best_s(machine, work, sharing, n_ubatch) if whole else 0.0
    return total + (best_s(machine, work, sharing, rest) if rest else 0.0)


def crossover(
    cpu: Callable[[int], float], streamed: Callable[[int], float], most: int
) -> int | None:
    """The least number of tokens from which on streaming is faster, up to `most`; None: never.

    Where a side's costs are jagged, the least size such that no probed larger one loses.
    """
    sizes = sorted({round(2 ** (i / 4)) for i in range(4 * most.bit_length())} | {most})
    sizes = [n for n in sizes if n <= most]
    low, high = 0, None
    for n in reversed(sizes):
        if streamed(n) > cpu(n):
            low = n
            break
        high = n
    if high is None:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        if streamed(middle) > cpu(middle):
            low = middle
        else:
            high = middle
    return high


def modelled(
    machine: Machine, work: ModelWork, sharing: Sharing, n_most: int, *, splits: bool = False
) -> CostTable:
    """The cost table of a machine, for batches of up to `n_most` tokens: what it is expected to
    take before anything is measured. With `splits` layers may be split in small batches."""
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
    """From how many tokens on streaming beats the CPU on this machine; None: never."""
    return crossover(
        lambda n: cpu_s(machine, work, sharing, n),
        lambda n: streamed_s(machine, work, sharing, n),
        most,
    )
