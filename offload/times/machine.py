"""The machine model: computes a batch's expected time from a model's header. Pure.

On a GPU each part of a layer takes the time of moving its bytes or that of computing, whichever is
longer (the roofline model: Williams, Waterman and Patterson, 2009). On the CPU, the times of
reading and computing add up for few rows (cpu_time.py). Neighbouring tokens share some
of their experts (`ModelWork.union`). The model ranks plans and gives a first threshold, until
measured times replace it.

A machine's rates are those that kernels were seen to reach, not those of its data sheet. The
functions `ram_seen` and `vram_seen` compute the former from the latter. Their shares, and the fixed
times of `Machine`, come from published measurements (docs/validation.md compares them).

Functions that return seconds also take arrays: as numbers of tokens, and as fields of `Sharing` and
`ModelWork`. They then return the seconds of many plans at once.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from operator import add
from typing import Any

import numpy as np

from offload.model import ModelFacts, is_experts, layer_of
from offload.routing.routing import (
    SHARING_USUAL,
    HitCurve,
    UnionCurve,
    union_of_neighbours,
)
from offload.schedule.batch import LAYER_RING
from offload.schedule.passes import (
    AHEAD_OF_ROUTER,
    MOST_HOST_PAIRS,
    MOST_PAIRS,
    group_size,
    is_in_passes,
    ring_slots,
)
from offload.times.context import (
    ContextOptions,
    attention_work,
    cache_reads,
    caching_layers,
    cpu_attention,
    indexer_work,
)
from offload.times.cpu_time import product_s
from offload.times.guessed_hits import hit_rate
from offload.times.min_batch import VERIFY_MOST
from offload.times.table import CostTable, Entry, Way

_SMALL, _STEP = 16, 2**0.25  # a modelled table has all sizes up to 16, then steps of this ratio
Real = Any  # a number, or an array of numbers
# Share of a layer's experts in use, from which all are copied before the router runs.
AHEAD_SHARE = 0.5
# Share of a data sheet's rate at which decodes were seen to read experts from RAM, by the largest
# number of memory channels (all sockets together). Many channels are not used in full, because the
# threads wait for each other at each of a layer's products.
_RAM_SHARES = ((2, 0.70), (4, 0.50), (math.inf, 0.48))
# Share of the rate of both sockets together. Half of the reads cross from one socket to the other.
_TWO_SOCKETS = 0.22
# Share of a data sheet's rate that the CPU's reads and the copies to a GPU draw together.
_RAM_SHARE_WITH_COPIES = 0.70
_VRAM_SHARE = 0.8  # share of a data sheet's rate at which kernels read a GPU's memory
# The CPU's kernels for these types take longer than kernels for 4-bit blocks, because values are
# looked up one by one. The number is the ratio of the times, by prefix of the type's name.
_CPU_COSTS = (("IQ1", 1.25), ("IQ2", 1.25), ("IQ3", 1.25))
# Reading weights of these types from RAM takes longer than reading as many bytes of 4-bit blocks.
# The number is the ratio of the times, by prefix of the type's name. MXFP4 is computed by the same
# AVX2 instructions on all x86 processors, even if they have AVX-512: ggml_vec_dot_mxfp4_q8_0
# shuffles a table, as for IQ4_NL. It was seen to draw less of RAM's rate.
_READ_COSTS = (("MXFP4", 1.5),)
# Shares of the rates for weights at which the KV cache is read, and attention over it is computed.
_CACHE_SHARE, ATTENTION_SHARE = 0.375, 0.7
CORE_FLOPS = 50e9  # operations per second of one core in prompts, with plain blocks
# Attention runs this many times faster in prompts than in decodes, because tensor cores compute it.
PROMPT_ATTENTION = 2.0


@dataclass(frozen=True)
class Machine:
    """Rates that were seen on a machine, and its fixed costs. The defaults are typical values."""

    link_bytes_per_s: float = 25e9  # pinned host memory to the device: PCIe 4.0 x16
    ram_bytes_per_s: float = 63e9  # all cores together, computing: two channels of DDR5-5600
    vram_bytes_per_s: float = 800e9
    cpu_flops: float = 16 * CORE_FLOPS  # quantised products with many rows, all cores together
    gpu_flops: float = 40e12  # products of prompts
    per_layer_s: float = 60e-6  # launches of a layer's kernels
    per_switch_s: float = 100e-6  # one change from the device to the CPU and back
    # Submitting both parts of a split layer and adding them. On the virtual clock a layer with a
    # doorbell took 14 to 58 µs, and one that waits for the host 28 to 98 µs (docs/gpu.md).
    per_split_s: float = 60e-6
    # In these times the device waits for the host. They were seen with one host, a Xeon, on the
    # stand-in's virtual clock (docs/gpu.md). A faster processor may need less.
    per_decode_s: float = 200e-6  # before a decode's first kernel, and after its last one
    # libllama builds the graph of a layer anew if the batch size changes. A change takes 1.2 to
    # 2.4 ms for 48 layers (docs/results.md).
    per_new_layer_s: float = 40e-6
    # One layer of one token: reading its ids, starting copies of its experts, submitting it.
    per_wait_s: float = 90e-6
    # Launches of one pass over a group of experts: gathering, products and what lies between them,
    # and writing the results. Not measured on a GPU: eight kernels of 5 us each.
    per_pass_s: float = 40e-6
    # The host's time of a layer in passes, on the stand-in's virtual clock with one of two busy
    # cores of an AMD EPYC (docs/gpu.md). The device waits for the first two: until its first
    # launch after the router's ids. The other two bound the layer's time.
    per_passes_begin_s: float = 650e-6
    per_launch_begin_s: float = 22e-6  # added once for each launch that the layer has
    per_copied_expert_s: float = 65e-6
    per_launch_s: float = 200e-6  # tables and submitting of up to `MOST_PAIRS` pairs
    # The same for several tokens. Their graph is new, so kernels are launched one by one after the
    # wait, and Python guesses experts before each layer.
    per_batch_wait_s: float = 200e-6
    disk_bytes_per_s: float = 5e9  # large direct reads, several at once: NVMe of PCIe 4.0 x4
    # Reads of the CPU and of copies together. None: not more than `ram_bytes_per_s`.
    shared_ram_bytes_per_s: float | None = None
    # False for a worker's device: a cache in RAM is on the other side of its link.
    attends_in_ram: bool = True

    @property
    def most_ram_bytes_per_s(self) -> float:
        """The rate at which the CPU's reads and copies to a device together read RAM."""
        return max(self.ram_bytes_per_s, self.shared_ram_bytes_per_s or 0.0)


TYPICAL = Machine()
_EVEN = HitCurve((), 0, date.min)  # hits of experts that are used equally often


def ram_seen(bytes_per_s: float, n_channels: int, n_sockets: int = 1) -> tuple[float, float]:
    """Return the rates for `ram_bytes_per_s` and `shared_ram_bytes_per_s` of a `Machine`.

    `bytes_per_s` is the rate of the data sheet, of all channels of all sockets.
    """
    if n_sockets > 1:
        share = _TWO_SOCKETS
        return share * bytes_per_s, share * bytes_per_s
    share = next(share for most, share in _RAM_SHARES if n_channels <= most)
    return share * bytes_per_s, _RAM_SHARE_WITH_COPIES * bytes_per_s


def vram_seen(bytes_per_s: float) -> float:
    """Return the rate at which kernels read a GPU's memory, from the data sheet's rate."""
    return _VRAM_SHARE * bytes_per_s


@dataclass(frozen=True)
class Part:
    """Weights that are computed together: their bytes, and multiplications for each token."""

    size_bytes: Real = 0.0
    n_weights: Real = 0.0  # matrix elements that one token is multiplied with
    cpu_cost: Real = 1.0  # ratio of the CPU kernels' time to the time for 4-bit blocks
    read_cost: Real = 1.0  # ratio of the CPU's reading time to the time for 4-bit blocks

    def seconds(self, bytes_per_s: float, flops: float, n_tokens: Real) -> Real:
        """Return the seconds for `n_tokens`, reading at `bytes_per_s` and computing at `flops`."""
        return np.maximum(self.size_bytes / bytes_per_s, 2 * self.n_weights * n_tokens / flops)

    def cpu_seconds(self, machine: Machine, n_tokens: Real) -> Real:
        """Return the seconds for `n_tokens` on the CPU."""
        read_s = self.size_bytes * self.read_cost / machine.ram_bytes_per_s
        row_s = 2 * self.n_weights * self.cpu_cost / machine.cpu_flops
        return product_s(read_s, row_s, n_tokens)


@dataclass(frozen=True)
class ModelWork:
    """A model's weights, as the machine model counts them. All layers are assumed to be alike."""

    n_layers: Real
    dense: Part  # a layer's attention, shared experts and router
    head: Part  # the output matrix
    n_expert_layers: Real = 0
    expert: Part = Part()  # one expert of one layer, on average
    n_experts: int = 0
    n_used: int = 0
    hits: HitCurve | None = None  # hits counted with this model; None: `hit_rate` guesses them
    unions: UnionCurve | None = None  # experts of batches, counted with this model
    # Exponent of `union_of_neighbours` if `unions` is None.
    sharing_exponent: float = SHARING_USUAL
    context: Part = Part()  # the whole KV cache, and the multiplications of attention over it
    # Layers whose KV cache is in RAM; 0: the caches are in device memory.
    n_ram_caches: Real = 0
    cache_reads: int = 1  # times that a graph's inputs hold a layer's cache in RAM
    attends_on_cpu: bool = False  # True: only the CPU attends to a cache in RAM
    row_bytes: int = 0  # bytes of one token's row between layers

    def union(self, n_tokens: Real) -> Real:
        """Return the expected number of a layer's experts that `n_tokens` of one text use."""
        if self.unions is not None:
            return self.unions.at(n_tokens, self.n_used, self.n_experts)
        return union_of_neighbours(n_tokens, self.n_used, self.n_experts, self.sharing_exponent)

    def used(self, n_tokens: Real) -> Part:
        """Return the experts of one layer that `n_tokens` use."""
        one = self.expert
        return replace(
            one,
            size_bytes=self.union(n_tokens) * one.size_bytes,
            n_weights=self.n_used * one.n_weights,
        )

    def used_cpu_seconds(self, machine: Machine, n_tokens: Real) -> Real:
        """Return the seconds in which the CPU computes the experts of one layer."""
        pieces = self.union(n_tokens)
        rows = n_tokens * self.n_used / np.maximum(pieces, 1e-12)
        return pieces * self.expert.cpu_seconds(machine, rows)


@dataclass(frozen=True)
class Sharing:
    """The numbers of slots, resident layers and streamed layers of a plan."""

    n_slots: Real = 0  # slots for experts
    n_resident: Real = 0  # layers whose experts are resident
    n_dense_streamed: Real = 0  # layers whose dense weights stream
    n_lent: Real = 0  # more slots in the compute buffer, which hold experts between prompts

    @property
    def n_cached(self) -> Real:
        """Number of slots in which small batches find experts."""
        return self.n_slots + self.n_lent

    def searched_by(self, n_tokens: Real) -> Sharing:
        """Return the slots in which a batch finds experts, all as own slots.

        A large batch takes the bytes of lent slots. Lent slots are never room: every batch is
        divided, and computed in passes, by the own slots.
        """
        is_small = np.asarray(n_tokens) <= VERIFY_MOST
        return replace(self, n_slots=self.n_slots + is_small * self.n_lent, n_lent=0)

    def with_slots(self, n_slots: int) -> Sharing:
        return replace(self, n_slots=n_slots)


class LayersWork:
    """The work of any range of a model's layers."""

    def __init__(
        self, facts: ModelFacts, hits: HitCurve | None = None, unions: UnionCurve | None = None
    ) -> None:
        """`hits` and `unions` were counted in the model's routing, if they are known."""
        self._facts, self._hits, self._unions, self._head = facts, hits, unions, Part()
        n, is_tied = len(facts.layers), facts.is_tied
        # For dense weights and for experts, a row for each layer: bytes, multiplications, and
        # multiplications times the CPU's costs of computing and of reading. The first row is 0.
        each = [[[0.0] * 4 for _ in range(n + 1)] for _ in range(2)]
        for entry in facts.loaded:
            n_weights = math.prod(entry.shape) if len(entry.shape) > 1 else 0
            if entry.name == "output.weight" or (is_tied and entry.name == "token_embd.weight"):
                self._head = Part(entry.size_bytes, n_weights)
            elif (layer := layer_of(entry.name)) >= 0:
                row = each[is_experts(entry)][layer - facts.layers.start + 1]
                costs = n_weights * cpu_cost(entry.type), n_weights * read_cost(entry.type)
                row[:] = map(add, row, (entry.size_bytes, n_weights, *costs))
        self._dense, self._experts = np.cumsum(each, axis=1)  # sums over the layers before
        self._n_expert_layers = np.cumsum([row[0] > 0 for row in each[1]])

    @property
    def whole(self) -> ModelWork:
        """The work of all layers, and of the output."""
        return self.of(0, len(self._facts.layers), has_head=True)

    def of(self, first: Real, end: Real, *, has_head: bool) -> ModelWork:
        """Return the work of the layers `first` to `end - 1`, counted from 0.

        Both may be arrays of many ranges.
        """
        sums, facts = self._n_expert_layers, self._facts
        n, n_layers = sums[end] - sums[first], np.maximum(end - first, 1)
        n_experts, n_used = (facts.n_experts, facts.n_experts_used) if sums[-1] else (0, 0)
        # A range without experts gets the mean expert of the model, and uses none.
        has_experts, experts = n > 0, self._experts
        its = np.where(has_experts[..., None], experts[end] - experts[first], experts[-1])
        pieces = np.maximum(n_experts * np.where(has_experts, n, sums[-1]), 1)
        return ModelWork(
            n_layers=n_layers,
            dense=_mean_part(self._dense[end] - self._dense[first], n_layers),
            head=self._head if has_head else Part(),
            n_expert_layers=n,
            expert=_mean_part(its, pieces),
            n_experts=n_experts,
            n_used=n_used,
            hits=self._hits,
            unions=self._unions,
            row_bytes=4 * facts.number("embedding_length"),
        )


def _mean_part(sums: Real, n: Real) -> Part:
    """Return one of `n` equal parts of weights, from sums as `LayersWork` has them."""
    size_bytes, n_weights, *costs = np.moveaxis(sums, -1, 0)
    each = (np.where(n_weights > 0, c / np.maximum(n_weights, 1), 1.0)[()] for c in costs)
    return Part(size_bytes / n, n_weights / n, *each)


def model_work(
    facts: ModelFacts, hits: HitCurve | None = None, unions: UnionCurve | None = None
) -> ModelWork:
    """Return the work of a model from its header.

    `hits` and `unions` were counted in its routing, if they are known.
    """
    return LayersWork(facts, hits, unions).whole


@cache
def cpu_cost(type_name: str) -> float:
    """Return the CPU kernels' time for a type, as a multiple of their time for 4-bit blocks."""
    return next((cost for prefix, cost in _CPU_COSTS if type_name.upper().startswith(prefix)), 1.0)


@cache
def read_cost(type_name: str) -> float:
    """Return the CPU's time of reading a type, as a multiple of its time for as many Q4_0 bytes."""
    return next((c for prefix, c in _READ_COSTS if type_name.upper().startswith(prefix)), 1.0)


def with_context(work: ModelWork, facts: ModelFacts, context: ContextOptions) -> ModelWork:
    """Return the work of decodes that attend to `context.n_ctx` tokens of a context."""
    found = replace(work, context=Part(*attention_work(facts, context)))
    if context.kv_offload:
        return found
    n_caches = sum(caching_layers(facts)[layer] for layer in facts.layers)
    on_cpu = bool(cpu_attention(facts, context))
    if on_cpu:
        n_bytes, n_weights = indexer_work(facts, context)
        part = Part(found.context.size_bytes + n_bytes, found.context.n_weights + n_weights)
        found = replace(found, context=part)
    return replace(
        found, n_ram_caches=n_caches, cache_reads=cache_reads(facts), attends_on_cpu=on_cpu
    )


def prompt_context(context: ContextOptions, n_prompt: float, n_before: int = 0) -> ContextOptions:
    """Return `context` with the mean number of tokens that a prompt's tokens attend to.

    These are the `n_before` tokens that precede the prompt, and half of the prompt.
    """
    return replace(context, n_ctx=max(1, int(n_before + n_prompt / 2)))


def with_prompt(
    work: ModelWork, facts: ModelFacts, context: ContextOptions, n_prompt: float, n_before: int = 0
) -> ModelWork:
    """Return the work of a prompt's batches.

    `n_before` tokens of the context precede the prompt. The caches have the types of `context`.
    """
    work = with_context(work, facts, prompt_context(context, n_prompt, n_before))
    n_weights = work.context.n_weights / PROMPT_ATTENTION
    k, v = (facts.number(f"attention.{x}_length_mla") for x in ("key", "value"))
    if k:  # prompts attend to keys and values, decodes to the latent vectors
        latent = sum(facts.number(f"attention.{x}_length") for x in ("key", "value"))
        n_weights *= (k + v) / latent
    return replace(work, context=replace(work.context, n_weights=n_weights))


def kept_hits(work: ModelWork, share: Real, n_pieces: Real) -> Real:
    """Return the share of uses that hit, if `share` of the experts are kept.

    A missing expert is kept only in place of one that is used less, as in split layers and in
    memory for experts. A batch uses `n_pieces` experts of each layer. One token has the counted
    hits. If none were counted, it has those that `hit_rate` guesses, and at least `share`: the hits
    of experts that are used equally often. Each token of a larger batch misses as many experts as
    a single token. Neighbouring tokens share those as they share all experts (`union`), and at most
    all experts are missed that are not kept. So two batches never miss fewer experts than one batch
    of all their tokens.
    """
    if not work.n_experts:
        return 1.0
    one = work.n_used / work.n_experts
    guess = np.maximum(share, hit_rate(share, one, work.n_experts))
    of_one = guess if work.hits is None else work.hits.at(share)
    n_even = np.log1p(-np.minimum(n_pieces / work.n_experts, 1 - 1e-12)) / math.log1p(
        -min(one, 1 - 1e-9)
    )
    n_tokens = np.maximum(n_even, (n_pieces / work.n_used) ** (1 / work.sharing_exponent))
    others = np.maximum(1.0 - share, 1e-12)  # share of the experts that are not kept
    chosen = np.minimum(one * (1.0 - of_one) / others, 1.0)  # part of them that a token uses
    missing = np.minimum(
        work.n_experts * others * (1.0 - (1.0 - chosen) ** n_tokens),
        work.n_used * (1.0 - of_one) * n_tokens**work.sharing_exponent,
    )
    hits = 1.0 - missing / np.maximum(n_pieces, 1e-12)
    return np.where(share < 1.0, np.clip(hits, 0.0, 1.0), 1.0)[()]


def expected_hits(work: ModelWork, sharing: Sharing, n_pieces: Real) -> Real:
    """Return the expected `kept_hits` of split layers if a batch uses `n_pieces` of each layer.

    All streamed layers share the slots, lent ones too, since only small batches are split.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    hits = kept_hits(work, _slot_share(work, sharing.searched_by(1)), n_pieces)
    return np.where(n_streamed > 0, hits, 1.0)[()]


def even(work: ModelWork) -> ModelWork:
    """Return the work for a model that uses its experts equally often.

    The share of uses that hit is then the share of experts that have a slot. No texts are known
    that hit less often.
    """
    return replace(work, hits=_EVEN)


def _slot_share(work: ModelWork, sharing: Sharing) -> Real:
    """Return the share of the streamed layers' experts that have an own slot."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    return sharing.n_slots / np.maximum(work.n_experts * n_streamed, 1)


def cpu_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of a decode whose streamed weights the CPU computes in place."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    streamed = work.used_cpu_seconds(machine, n_tokens)
    dense = work.dense.cpu_seconds(machine, n_tokens)
    return (
        _resident_s(machine, work, sharing, n_tokens)
        + n_streamed * (streamed + machine.per_switch_s)
        + sharing.n_dense_streamed * (dense + machine.per_switch_s)
    )


def streamed_s(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_tokens: Real,
    hits: Real | None = None,
    *,
    passes: bool = True,
) -> Real:
    """Return the seconds of a decode whose streamed weights are copied and run on the device.

    `hits` is the share of a layer's used experts that have a slot; None: it is estimated. Without
    `passes`, a layer's experts are all copied before they are computed, as llama.cpp does, and
    batches whose experts do not fit the slots are computed in chunks of tokens.
    """
    total = _resident_s(machine, work, sharing, n_tokens)
    n_streamed = work.n_expert_layers - sharing.n_resident
    if np.any(n_streamed):
        layer_s = _expert_layer_s(machine, work, sharing, n_tokens, hits, passes)
        total = total + n_streamed * layer_s
    return total + _dense_streamed_s(machine, work, sharing, n_tokens)


def _dense_streamed_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of all layers whose dense weights are copied and run on the device."""
    copy_s = work.dense.size_bytes / machine.link_bytes_per_s
    compute_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    return sharing.n_dense_streamed * np.maximum(copy_s, compute_s)


@dataclass(frozen=True)
class LayerDivision:
    """Expected numbers of a layer's used experts, by where they are and who computes them."""

    in_slots: Real  # the device computes them without a copy
    over_link: Real  # copied, then computed by the device
    on_cpu: Real


def divided(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None = None
) -> LayerDivision:
    """Return how a batch of any size divides a layer, as offload/schedule/division.py does.

    All experts are assumed to have equally many pairs. Those in slots stay on the device. Of the
    others, the CPU computes as many as let it end together with the link's copies, or with the
    device's products if these take longer. `hits`: the share of the used experts that have a slot.
    None: `expected_hits` of small batches. Larger batches go through a ring of slots, and find
    their hits in the others.
    """
    pieces = work.union(n_tokens)
    rows = n_tokens * work.n_used / np.maximum(pieces, 1e-12)
    is_small = np.asarray(n_tokens) <= VERIFY_MOST
    share: Real = hits
    if hits is None:
        in_small, in_large = expected_hits(work, sharing, pieces), _passing_hits(work, sharing)
        share = np.where(is_small, in_small, in_large)
    misses = (1.0 - share) * pieces
    host_s = work.expert.cpu_seconds(machine, rows)
    device_s = work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, rows)
    copy_s = work.expert.size_bytes / machine.link_bytes_per_s
    with_link = misses * copy_s / (host_s + copy_s)
    with_device = pieces * device_s / (host_s + device_s)
    most = np.where(is_small, np.inf, MOST_HOST_PAIRS / np.maximum(rows, 1e-12))
    on_cpu = np.minimum(np.minimum(np.maximum(with_link, with_device), misses), most)
    return LayerDivision(pieces - misses, misses - on_cpu, on_cpu)


def hybrid_s(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_tokens: Real,
    hits: Real | None = None,
) -> Real:
    """Return the seconds of a batch of any size whose layers CPU and device share.

    `hits`: as for `divided`. Batches of up to `VERIFY_MOST` tokens are split by the player, and
    larger ones are computed in passes (offload/stream/prompt_side.py). Both sides read RAM: the
    CPU's kernels, and the copies to the device. A layer takes at least the time in which RAM gives
    all missing experts.
    """
    n = np.asarray(n_tokens)
    small = np.minimum(n, VERIFY_MOST)
    if np.all(n <= VERIFY_MOST):
        return _split_s(machine, work, sharing, n_tokens, hits)
    large = np.maximum(n, VERIFY_MOST + 1)
    in_passes_s = _shared_s(machine, work, sharing, large, hits)
    if np.all(n > VERIFY_MOST):
        return in_passes_s
    return np.where(n <= VERIFY_MOST, _split_s(machine, work, sharing, small, hits), in_passes_s)


def _split_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None
) -> Real:
    """Return the seconds of a small batch whose streamed layers are split."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    total = _resident_s(machine, work, sharing, n_tokens)
    dense = work.dense.cpu_seconds(machine, n_tokens)
    total += sharing.n_dense_streamed * (dense + machine.per_switch_s)
    if not np.any(n_streamed):
        return total
    pieces = work.union(n_tokens)
    rows = n_tokens * work.n_used / pieces
    its = divided(machine, work, sharing, n_tokens, hits)
    device_s = work.expert.seconds(machine.vram_bytes_per_s, machine.gpu_flops, rows)
    layer_s = np.maximum(
        np.maximum((its.in_slots + its.over_link) * device_s, _beside_s(machine, work, its, rows)),
        its.over_link * work.expert.size_bytes / machine.link_bytes_per_s,
    )
    return total + n_streamed * (layer_s + machine.per_split_s)


def _beside_s(machine: Machine, work: ModelWork, its: LayerDivision, rows: Real) -> Real:
    """Return the seconds of the CPU's part of a layer, or of reading all misses from RAM."""
    missing_bytes = (its.over_link + its.on_cpu) * work.expert.size_bytes
    return np.maximum(
        its.on_cpu * work.expert.cpu_seconds(machine, rows),
        missing_bytes / machine.most_ram_bytes_per_s,
    )


def _resident_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of a decode's resident weights, which the device always computes."""
    gpu = machine.vram_bytes_per_s, machine.gpu_flops
    return (
        (work.n_layers - sharing.n_dense_streamed) * work.dense.seconds(*gpu, n_tokens)
        + sharing.n_resident * work.used(n_tokens).seconds(*gpu, n_tokens)
        + work.head.seconds(*gpu, np.minimum(n_tokens, 64))
        + work.n_layers * machine.per_layer_s
        + _host_s(machine, work, n_tokens)
        + attention_s(machine, work, n_tokens)
    )


def attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds of attention over the KV cache, where it is fastest.

    A cache in RAM is read by the CPU, or copied to the device for each batch.
    """
    on_device_s = _device_attention_s(machine, work, n_tokens)
    if not np.any(work.n_ram_caches):
        return on_device_s
    in_ram_s = np.minimum(*ram_attention_s(machine, work, n_tokens))
    found: Real = np.where(np.asarray(work.n_ram_caches) > 0, in_ram_s, on_device_s)
    return found[()]


def ram_attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> tuple[Real, Real]:
    """Return the seconds of attention over a cache in RAM: on the CPU, and on the device.

    The CPU writes the new tokens in both cases. The device's seconds are infinite if only the
    CPU can attend, and the CPU's if it cannot.
    """
    cpu = machine.ram_bytes_per_s * _CACHE_SHARE, machine.cpu_flops * ATTENTION_SHARE
    switches_s = work.n_ram_caches * machine.per_switch_s
    copy_s = _exposed_copy_s(machine, work, n_tokens)
    on_device_s = copy_s + _device_attention_s(machine, work, n_tokens) + switches_s
    on_cpu_s = work.context.seconds(*cpu, n_tokens) + switches_s
    if work.attends_on_cpu:
        on_device_s = np.full_like(on_device_s, np.inf)
    elif not machine.attends_in_ram:
        on_cpu_s = np.full_like(on_cpu_s, np.inf)
    return on_cpu_s, on_device_s


def _exposed_copy_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for copies of a cache in RAM.

    Each layer's cache is copied while the device computes the layer before: its dense weights and
    its attention. The link may copy experts during the rest of a layer. Nothing hides the first
    layer's copy. A worker's device waits for each layer's.
    """
    size_bytes, n = work.context.size_bytes, np.maximum(work.n_ram_caches, 1)
    if not machine.attends_in_ram:
        return work.cache_reads * size_bytes / machine.link_bytes_per_s
    layer_s = size_bytes / n / machine.link_bytes_per_s
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    hidden_s = (work.n_layers * dense_s + _device_attention_s(machine, work, n_tokens)) / n
    return work.cache_reads * layer_s + (n - 1) * np.maximum(0.0, layer_s - hidden_s)


def _device_attention_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    bytes_per_s = machine.vram_bytes_per_s * _CACHE_SHARE
    return work.context.seconds(bytes_per_s, machine.gpu_flops * ATTENTION_SHARE, n_tokens)


def attention_crossover(machine: Machine, work: ModelWork, most: int = 8192) -> int | None:
    """Return the fewest tokens of a batch whose attention the device computes, or None.

    `work` has a cache in RAM. The CPU's time grows with the tokens, and the copy's does not.
    """
    sizes = np.arange(1, most + 1)
    on_cpu_s, on_device_s = ram_attention_s(machine, work, sizes)
    faster = np.flatnonzero(np.broadcast_to(on_device_s < on_cpu_s, sizes.shape))
    return int(sizes[faster[0]]) if len(faster) else None


def _host_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for the host, outside of streamed layers.

    Batches of several tokens follow batches of other sizes, so their graphs are built anew. The
    time of a whole decode counts with the output, because the times of several devices are added.
    """
    built_anew_s = np.where(np.asarray(n_tokens) > 1, machine.per_new_layer_s, 0.0)
    has_output = np.asarray(work.head.size_bytes) > 0
    return (has_output * machine.per_decode_s + work.n_layers * built_anew_s)[()]


def _expert_layer_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None,
    passes: bool,
) -> Real:  # fmt: skip
    """Return the seconds of copying and computing one layer's streamed experts, less overlap."""
    pieces, n_slots = work.union(n_tokens), sharing.n_slots
    if hits is None:
        hits = _streamed_hits(work, sharing.searched_by(n_tokens), pieces)
    copy_s, compute_s = _copy_s(machine, work, hits, pieces), _compute_s(machine, work, n_tokens)
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    spare = np.maximum(0.0, n_slots - pieces) * work.expert.size_bytes / machine.link_bytes_per_s
    overlap_s = np.minimum(np.minimum(compute_s + dense_s, spare), copy_s)
    # If a batch uses a smaller share of the experts, copies wait for the router's ids.
    is_ahead = pieces >= AHEAD_SHARE * work.n_experts
    n_uses = pieces * (work.n_expert_layers - sharing.n_resident)
    wait_s = _wait_s(machine, hits, n_uses, n_tokens)
    seconds = copy_s + compute_s + np.where(is_ahead, -overlap_s, wait_s)
    in_passes = passes & _streams_in_passes(work, sharing, n_tokens)
    if np.any(in_passes):
        seconds = np.where(in_passes, _in_passes_s(machine, work, sharing, n_tokens), seconds)
    in_chunks = np.minimum(work.n_experts, n_tokens * work.n_used) > n_slots
    if not passes and np.any(in_chunks):
        seconds = np.where(in_chunks, _in_chunks_s(machine, work, sharing, n_tokens), seconds)
    return seconds


def _wait_s(machine: Machine, hits: Real, n_uses: Real, n_tokens: Real) -> Real:
    """Return the seconds in which the device waits for a layer's ids and for the host.

    A decode that misses none of its `n_uses` experts waits once, at its end (docs/player.md).
    Other decodes wait in each layer.
    """
    misses_any = 1.0 - np.maximum(hits, 0.0) ** n_uses
    several = np.asarray(n_tokens) > 1
    return misses_any * np.where(several, machine.per_batch_wait_s, machine.per_wait_s)


def _in_passes_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, n_on_cpu: Real = 0.0
) -> Real:
    """Return the seconds of one layer's streamed experts, computed in passes over groups of them.

    One group is copied while the group before it is computed. In large batches, the link fills the
    ring while the layer's dense weights are computed. `n_on_cpu`: missing experts that the CPU
    computes.
    """
    pieces, n_group, ring = work.union(n_tokens), *_passes(work, sharing)
    missing = _missing(work, sharing, n_tokens) - n_on_cpu
    on_device = 1.0 - n_on_cpu / np.maximum(pieces, 1e-12)
    n_pairs = n_tokens * work.n_used * on_device
    n_passes = 1.0 + missing / n_group + n_pairs / MOST_PAIRS
    # Gathering rows and writing results each read and write a row.
    moved_bytes = 4.0 * n_pairs * work.row_bytes
    compute_s = (
        on_device * _compute_s(machine, work, n_tokens)
        + moved_bytes / machine.vram_bytes_per_s
        + n_passes * machine.per_pass_s
    )
    one_s = work.expert.size_bytes / machine.link_bytes_per_s
    copy_s = missing * one_s
    dense_s = work.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    is_ahead = pieces >= AHEAD_OF_ROUTER * work.n_experts
    ahead_s = np.where(is_ahead, np.minimum(dense_s, ring * one_s), 0.0)
    last_s = compute_s / n_passes  # the last group is computed after all copies
    n_launches = n_pairs / MOST_PAIRS
    host_s = missing * machine.per_copied_expert_s + n_launches * machine.per_launch_s
    begin_s = machine.per_passes_begin_s + n_launches * machine.per_launch_begin_s
    busy_s = np.maximum(np.maximum(copy_s - ahead_s + last_s, compute_s), host_s)
    return busy_s + begin_s + machine.per_batch_wait_s


def _in_chunks_s(machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the seconds of one layer's streamed experts without passes, in chunks of tokens.

    The experts of each chunk's tokens fit the slots at once, and are copied for each chunk.
    """
    n_chunk = np.maximum(1, sharing.n_slots // max(1, work.n_used))
    whole, rest = np.divmod(n_tokens, n_chunk)
    seconds = machine.per_wait_s
    for n_chunks, n in ((whole, n_chunk), (rest > 0, rest)):
        pieces = work.union(n)
        copy_s = _copy_s(machine, work, _streamed_hits(work, sharing, pieces), pieces)
        seconds = seconds + n_chunks * (copy_s + _compute_s(machine, work, n))
    return seconds


def _passes(work: ModelWork, sharing: Sharing) -> tuple[Real, Real]:
    """Return the experts of a pass, and the slots of the ring that they pass through."""
    n_slots = np.maximum(sharing.n_slots, 1)
    n_group = group_size(work.n_experts, n_slots, work.expert.size_bytes)
    return n_group, ring_slots(work.n_experts, n_slots, n_group)


def _missing(work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the number of experts of a layer that a batch in passes finds in no slot."""
    return (1.0 - _passing_hits(work, sharing)) * work.union(n_tokens)


def _passing_hits(work: ModelWork, sharing: Sharing) -> Real:
    """Return the share of a layer's experts that a batch in passes finds in slots."""
    kept = np.maximum(sharing.n_slots - _passes(work, sharing)[1], 0)
    return np.minimum(_slot_share(work, replace(sharing, n_slots=kept)), 1.0)


def _shared_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, hits: Real | None
) -> Real:
    """Return the seconds of a prompt's batch whose layers CPU and device share, in passes.

    Infinite without slots.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    total = _resident_s(machine, work, sharing, n_tokens)
    total = total + _dense_streamed_s(machine, work, sharing, n_tokens)
    if not np.any(n_streamed):
        return total
    rows = n_tokens * work.n_used / work.union(n_tokens)
    its = divided(machine, work, sharing, n_tokens, hits)
    layer_s = np.maximum(
        _in_passes_s(machine, work, sharing, n_tokens, its.on_cpu),
        _beside_s(machine, work, its, rows),
    )
    shared_s = n_streamed * (layer_s + machine.per_split_s)
    return total + np.where((n_streamed > 0) & (sharing.n_slots == 0), np.inf, shared_s)


def _copy_s(machine: Machine, work: ModelWork, hits: Real, pieces: Real) -> Real:
    """Return the seconds of copying a layer's missing experts, if it uses `pieces` experts."""
    return (1.0 - hits) * pieces * work.expert.size_bytes / machine.link_bytes_per_s


def streamed_hits(work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the share of a batch's experts that are in slots if all others are copied."""
    hits = _streamed_hits(work, sharing.searched_by(n_tokens), work.union(n_tokens))
    is_passing = _streams_in_passes(work, sharing, n_tokens)
    found: Real = np.where(is_passing, _passing_hits(work, sharing), hits)
    return found[()]


def _streams_in_passes(work: ModelWork, sharing: Sharing, n_tokens: Real) -> Any:
    """True if a batch that is streamed is computed in passes."""
    n_slots = sharing.n_slots
    in_passes = is_in_passes(n_tokens, work.n_used, work.n_experts, n_slots)
    return in_passes & (n_slots < work.n_experts * (work.n_expert_layers - sharing.n_resident))


def _streamed_hits(work: ModelWork, sharing: Sharing, pieces: Real) -> Real:
    """Return the share of uses that hit if all missing experts are copied."""
    hits = _kept_between_batches(work, sharing)
    n_streamed = work.n_expert_layers - sharing.n_resident
    # Slots that hold no more experts than a decode uses lose each expert before its next use,
    # unless every expert has a slot.
    holds = sharing.n_slots > pieces * n_streamed
    holds |= sharing.n_slots >= work.n_experts * n_streamed
    if np.any(holds):
        share = _slot_share(work, sharing)
        if work.hits is None:
            guess = hit_rate(share, pieces / max(1, work.n_experts), work.n_experts)
            found = np.maximum(share, guess)
        else:
            found = kept_hits(work, share, pieces)
        hits = np.maximum(hits, holds * found)
    return hits


def _kept_between_batches(work: ModelWork, sharing: Sharing) -> Real:
    """Return the share of experts that stay in slots while all others pass through the rest.

    If batches copy whole layers, the schedule keeps the same layers for the next batch. The other
    layers share the slots of `LAYER_RING` layers. Smaller batches are assumed to keep equally many.
    The ring's slots are subtracted even if all layers fit, because a plan's number of slots is only
    known within a few per cent.
    """
    n_streamed = np.maximum(work.n_expert_layers - sharing.n_resident, 1)
    n_kept = np.maximum(0, sharing.n_slots // max(1, work.n_experts) - LAYER_RING)
    return np.minimum(n_kept / n_streamed, 1.0)


def _compute_s(machine: Machine, work: ModelWork, n_tokens: Real) -> Real:
    return work.used(n_tokens).seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)


def best_s(
    machine: Machine, work: ModelWork, sharing: Sharing, n_tokens: Real, *, hybrid: bool = False
) -> Real:
    """Return the seconds of a decode in its fastest way. With `hybrid` layers may be split."""
    seconds = np.minimum(
        cpu_s(machine, work, sharing, n_tokens), streamed_s(machine, work, sharing, n_tokens)
    )
    if hybrid:
        seconds = np.minimum(seconds, hybrid_s(machine, work, sharing, n_tokens))
    return seconds


def prefill_s(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_prompt: int,
    n_ubatch: Real,
    *,
    hybrid: bool = False,
) -> Real:
    """Return the seconds of a prompt of `n_prompt` tokens, in ubatches of `n_ubatch`.

    With `hybrid`, CPU and device may share the layers of an ubatch.
    """

    def ubatch_s(n_tokens: Real) -> Real:
        return best_s(machine, work, sharing, np.maximum(n_tokens, 1), hybrid=hybrid)

    return in_ubatches_s(ubatch_s, n_prompt, n_ubatch)


def in_ubatches_s(ubatch_s: Callable[[Real], Real], n_prompt: int, n_ubatch: Real) -> Real:
    """Return the seconds of a prompt in ubatches. An ubatch of n tokens takes `ubatch_s(n)`."""
    whole, rest = np.divmod(n_prompt, n_ubatch)
    total = whole * ubatch_s(n_ubatch) if np.any(whole) else 0.0
    if np.any(rest):
        total = total + np.where(rest > 0, ubatch_s(rest), 0.0)
    return total


def modelled(
    machine: Machine, work: ModelWork, sharing: Sharing, n_most: int, *, splits: bool = False,
    shares_prompts: bool = True,
) -> CostTable:  # fmt: skip
    """Return a cost table of expected times, for batches of up to `n_most` tokens.

    The table is used until times are measured. With `splits`, batches also have times for layers
    that CPU and device share: up to `VERIFY_MOST` tokens, or all with `shares_prompts`.
    """
    sizes = [*range(1, min(_SMALL, n_most) + 1)]
    while sizes[-1] < n_most:
        sizes.append(min(n_most, math.ceil(sizes[-1] * _STEP)))
    if n_most > VERIFY_MOST:
        sizes = sorted({*sizes, VERIFY_MOST})

    def entries(seconds: Callable[..., Real], sizes: Sequence[int]) -> dict[int, Entry]:
        each = np.broadcast_to(seconds(machine, work, sharing, np.array(sizes)), len(sizes))
        return {n: Entry(s) for n, s in zip(sizes, each.tolist(), strict=True)}

    ways = {Way.IN_PLACE: entries(cpu_s, sizes)}
    if work.n_expert_layers > sharing.n_resident and sharing.n_slots:
        ways[Way.STREAMED] = entries(streamed_s, sizes)
        if splits:
            most = n_most if shares_prompts else VERIFY_MOST
            ways[Way.SPLIT] = entries(hybrid_s, [n for n in sizes if n <= most])
    return CostTable(work.n_experts, work.n_used, ways)


def together(tables: Sequence[CostTable]) -> CostTable:
    """Return the costs of decodes that pass several devices. Each table has one device's part."""
    ways: dict[Way, dict[int, Entry]] = {}
    for way in dict.fromkeys(way for table in tables for way in table.ways):
        # A device on which nothing streams takes the same time in every way.
        its = [table.ways.get(way, table.ways[Way.IN_PLACE]) for table in tables]
        sizes = [n for n in its[0] if all(n in entries for entries in its)]
        ways[way] = {n: Entry(sum(entries[n].seconds for entries in its)) for n in sizes}
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
