"""Counts a decode's bytes and multiplications, and times the CPU's products. Pure.

Neighbouring tokens share some of their experts (`ModelWork.union`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from datetime import date
from operator import add

import numpy as np

from offload.model import ModelFacts, is_experts, layer_of
from offload.routing.routing import (
    SHARING_USUAL,
    HitCurve,
    UnionCurve,
    union_of_neighbours,
    usual_sharing,
)
from offload.times.context_memory import (
    ContextOptions,
    attention_work,
    cache_reads,
    caching_layers,
    cpu_attention,
    indexer_work,
)
from offload.times.cpu_kernels import PLAIN, ROW_SHARE, cpu_kernel
from offload.times.kernels import PLAIN_LAYER, kernels_per_layer
from offload.times.machine import Machine, Real

# From this number of rows on, as in prompts, reading hides behind computing.
_FEW_ROWS = 8


def product_s(read_s: Real, row_s: Real, n_rows: Real, row_share: Real = ROW_SHARE) -> Real:
    """Return the seconds of a product of `n_rows`.

    `read_s` are the seconds of reading its weights. They contain the computation of the first row,
    unless that takes longer. `row_s` are the seconds of computing one row alone. `row_share` is
    the kernel's `CpuKernel.row_share`.
    """
    added_s = np.minimum(row_share * read_s, row_s)
    few_s = read_s + added_s * (np.minimum(n_rows, _FEW_ROWS) - 1)
    return np.maximum(few_s, row_s * n_rows)


_EVEN = HitCurve((), 0, date.min)  # hits of experts that are used equally often


@dataclass(frozen=True)
class WeightWork:
    """Weights that are computed together: their bytes, and multiplications for each token."""

    size_bytes: Real = 0.0
    n_weights: Real = 0.0  # matrix elements that one token is multiplied with
    cpu_cost: Real = 1.0  # of the CPU's kernels, as in `CpuKernel`; so are the next two
    read_cost: Real = 1.0
    row_share: Real = ROW_SHARE

    def seconds(self, bytes_per_s: float, flops: float, n_tokens: Real) -> Real:
        """Return the seconds for `n_tokens`, reading at `bytes_per_s` and computing at `flops`."""
        return np.maximum(self.size_bytes / bytes_per_s, 2 * self.n_weights * n_tokens / flops)

    def cpu_seconds(self, machine: Machine, n_tokens: Real) -> Real:
        """Return the seconds for `n_tokens` on the CPU."""
        read_s = self.size_bytes * self.read_cost / machine.ram_bytes_per_s
        row_s = 2 * self.n_weights * self.cpu_cost / machine.cpu_flops
        return product_s(read_s, row_s, n_tokens, self.row_share)


@dataclass(frozen=True)
class ModelWork:
    """A model's weights, as the machine model counts them. All layers are assumed to be alike."""

    n_layers: Real
    dense: WeightWork  # a layer's attention, shared experts and router
    head: WeightWork  # the output matrix
    n_expert_layers: Real = 0
    expert: WeightWork = WeightWork()  # one expert of one layer, on average
    n_experts: int = 0
    n_used: int = 0
    hits: HitCurve | None = None  # hits counted with this model; None: `hit_rate` guesses them
    unions: UnionCurve | None = None  # experts of batches, counted with this model
    # Exponent of `union_of_neighbours` if `unions` is None.
    sharing_exponent: float = SHARING_USUAL
    misses_left: float = 1.0  # share of the misses that routing which prefers cached experts leaves
    context: WeightWork = (
        WeightWork()
    )  # the whole KV cache, and the multiplications of attention over it
    # Layers whose KV cache is in RAM; 0: the caches are in device memory.
    n_ram_caches: Real = 0
    cache_reads: int = 1  # times that a graph's inputs hold a layer's cache in RAM
    attends_on_cpu: bool = False  # True: only the CPU attends to a cache in RAM
    row_bytes: int = 0  # bytes of one token's row between layers
    kernels_per_layer: float = PLAIN_LAYER  # of the graph of one token's decode

    def union(self, n_tokens: Real) -> Real:
        """Return the expected number of a layer's experts that `n_tokens` of one text use."""
        if self.unions is not None:
            return self.unions.at(n_tokens, self.n_used, self.n_experts)
        return union_of_neighbours(n_tokens, self.n_used, self.n_experts, self.sharing_exponent)

    def used(self, n_tokens: Real) -> WeightWork:
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


class LayersWork:
    """The work of any range of a model's layers."""

    def __init__(
        self, facts: ModelFacts, hits: HitCurve | None = None, unions: UnionCurve | None = None
    ) -> None:
        """`hits` and `unions` were counted in the model's routing, if they are known."""
        self._facts, self._hits, self._unions, self._head = facts, hits, unions, WeightWork()
        n, is_tied = len(facts.layers), facts.is_tied
        # For dense weights and for experts, a row for each layer: bytes, multiplications, and
        # multiplications times the numbers of the CPU's kernels. The first row is 0.
        each = [[[0.0] * 5 for _ in range(n + 1)] for _ in range(2)]
        for entry in facts.loaded:
            n_weights = math.prod(entry.shape) if len(entry.shape) > 1 else 0
            if entry.name == "output.weight" or (is_tied and entry.name == "token_embd.weight"):
                self._head = WeightWork(entry.size_bytes, n_weights)
            elif (layer := layer_of(entry.name)) >= 0:
                row = each[is_experts(entry)][layer - facts.layers.start + 1]
                kernel = cpu_kernel(entry.type)
                costs = (kernel.cpu_cost, kernel.read_cost, kernel.row_share)
                weighted = (n_weights * cost for cost in costs)
                row[:] = map(add, row, (entry.size_bytes, n_weights, *weighted))
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
        expert_sums = np.where(has_experts[..., None], experts[end] - experts[first], experts[-1])
        pieces = np.maximum(n_experts * np.where(has_experts, n, sums[-1]), 1)
        return ModelWork(
            n_layers=n_layers,
            dense=_mean_part(self._dense[end] - self._dense[first], n_layers),
            head=self._head if has_head else WeightWork(),
            n_expert_layers=n,
            expert=_mean_part(expert_sums, pieces),
            n_experts=n_experts,
            n_used=n_used,
            hits=self._hits,
            unions=self._unions,
            sharing_exponent=usual_sharing(facts.architecture),
            row_bytes=4 * facts.number("embedding_length"),
            kernels_per_layer=kernels_per_layer(facts.architecture),
        )


def _mean_part(sums: Real, n: Real) -> WeightWork:
    """Return one of `n` equal parts of weights, from sums as `LayersWork` has them."""
    size_bytes, n_weights, *costs = np.moveaxis(sums, -1, 0)
    usual = PLAIN.cpu_cost, PLAIN.read_cost, PLAIN.row_share
    # Rounded, so that layers of equal types cost the same in each range of a model.
    each = (
        np.where(n_weights > 0, np.round(cost / np.maximum(n_weights, 1), 9), plain)[()]
        for cost, plain in zip(costs, usual, strict=True)
    )
    return WeightWork(size_bytes / n, n_weights / n, *each)


def model_work(
    facts: ModelFacts, hits: HitCurve | None = None, unions: UnionCurve | None = None
) -> ModelWork:
    """Return the work of a model from its header.

    `hits` and `unions` were counted in its routing, if they are known.
    """
    return LayersWork(facts, hits, unions).whole


def with_context(work: ModelWork, facts: ModelFacts, context: ContextOptions) -> ModelWork:
    """Return the work of decodes that attend to all cells that a sequence of the context may use.

    These are `context.n_ctx`, or an equal part of them if each sequence has cells of its own.
    """
    context = context.of_one
    attending = replace(work, context=WeightWork(*attention_work(facts, context)))
    if context.kv_offload:
        return attending
    n_caches = sum(caching_layers(facts)[layer] for layer in facts.layers)
    on_cpu = bool(cpu_attention(facts, context))
    if on_cpu:
        n_bytes, n_weights = indexer_work(facts, context)
        part = WeightWork(
            attending.context.size_bytes + n_bytes, attending.context.n_weights + n_weights
        )
        attending = replace(attending, context=part)
    return replace(
        attending, n_ram_caches=n_caches, cache_reads=cache_reads(facts), attends_on_cpu=on_cpu
    )


def even(work: ModelWork) -> ModelWork:
    """Return the work for a model that uses its experts equally often.

    The share of uses that hit is then the share of experts that have a slot. No texts are known
    that hit less often.
    """
    return replace(work, hits=_EVEN)
