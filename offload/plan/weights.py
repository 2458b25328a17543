"""Sums the bytes of a model's weights, for the whole model and for ranges of its layers. Pure.

Several devices have thousands of ranges of layers to choose from, which are computed at once as
arrays. A whole model is one range, so both have the same sums. If some layers of a range stream,
they are spread evenly over it (`spread`), so that the link can copy them while the layers between
them compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from offload.model import LOOKED_UP, ModelFacts, TensorEntry, layer_of
from offload.plan.slot_layout import SlotLayout, SlotPool, slot_layout

Array = NDArray[Any]
_AHEAD = 8  # beside a whole layer, there is room for an eighth of the next layer's experts


def device_bytes(facts: ModelFacts) -> int:
    """Return the bytes of the weights that would be on the device if none streamed.

    Embeddings do not count, because the CPU looks them up in host memory. Token embeddings count
    only if they are also the output matrix, which the device has a copy of.
    """
    looked_up = LOOKED_UP - {"token_embd.weight"} if facts.is_tied else LOOKED_UP
    return sum(entry.size_bytes for entry in facts.loaded if entry.name not in looked_up)


def ring_slots(pool: SlotPool) -> int:
    """Return the number of slots for all experts of a layer and some of the next."""
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


def spread(n: int, n_layers: int) -> frozenset[int]:
    """Return `n` of `n_layers` layers, spread evenly."""
    n = max(0, min(n, n_layers))
    return frozenset(np.flatnonzero(_chosen(n_layers)[n]).tolist()) if n else frozenset()


def _chosen(n_layers: int) -> NDArray[np.bool_]:
    """Return which layers `spread` chooses: an array [n_layers + 1 chosen ones, n_layers]."""
    n, i = np.arange(n_layers + 1)[:, None], np.arange(n_layers)
    return (i + 1) * n // n_layers > i * n // n_layers


class LayerSums:
    """Sums of a number that each layer has, over ranges of layers."""

    def __init__(self, by_layer: Array) -> None:
        self._by_layer, n = by_layer, len(by_layer) + 1
        self._before = np.concatenate([np.zeros(1, by_layer.dtype), np.cumsum(by_layer)])
        # Indexes: layers of the range, those that are spread over it, first layer of the range.
        self._spread = np.zeros((n, n, n))
        self._lengths = {0}  # the lengths of ranges whose sums are known

    def of(self, first: Array, end: Array) -> Array:
        """Return the sums over the layers `first` to `end - 1`."""
        sums: Array = self._before[end] - self._before[first]
        return sums

    def of_spread(self, first: Array, end: Array, n: Array) -> Array:
        """Return the sums over `n` layers that are spread over the layers `first` to `end - 1`."""
        lengths = end - first
        for length in set(np.unique(lengths).tolist()) - self._lengths:
            windows = sliding_window_view(self._by_layer, length)
            self._spread[length, : length + 1, : len(windows)] = _chosen(length) @ windows.T
            self._lengths.add(length)
        sums: Array = self._spread[lengths, n, first]
        return sums


class Weights:
    """The weights of a model, or of a part of one, and those that may stream."""

    def __init__(
        self,
        facts: ModelFacts,
        experts: Sequence[TensorEntry],
        dense: Sequence[TensorEntry],
        gpu_layers: frozenset[int] = frozenset(),
    ) -> None:
        """`experts` and `dense` are the weights that may stream.

        Experts of `gpu_layers` never do.
        """
        self.layers, self.gpu_layers = facts.layers, gpu_layers
        self.expert_layers = sorted({layer_of(e.name) for e in experts})
        self.free_layers = [i for i in self.expert_layers if i not in gpu_layers]
        biases = facts.expert_biases
        self.layout = slot_layout([*experts, *biases], facts.n_experts, facts.n_experts_used)
        ring = slot_layout(dense, 0, 0)
        self.dense_ring_bytes = ring.with_slots(least_slots(ring)).size_bytes if dense else 0
        held, expert = self._by_layer(facts.loaded), self._by_layer(experts)
        self.outside_bytes = device_bytes(facts) - round(held.sum())  # of no layer
        self.held_bytes, self.dense_bytes = LayerSums(held), LayerSums(self._by_layer(dense))
        # Only layers that have experts count here.
        self.expert_bytes = LayerSums(expert[[i - self.layers.start for i in self.expert_layers]])
        self.free_bytes = LayerSums(expert * np.isin(self.layers, self.free_layers))
        n_groups = np.zeros((len(self.layout.pools), len(self.layers)), int)
        for group in self.layout.groups:
            n_groups[group.pool, group.layer - self.layers.start] += 1
        self.n_groups = [LayerSums(of_pool) for of_pool in n_groups]

    def _by_layer(self, entries: Iterable[TensorEntry]) -> Array:
        size_bytes = [0.0] * len(self.layers)
        for entry in entries:
            if (layer := layer_of(entry.name)) >= 0:
                size_bytes[layer - self.layers.start] += entry.size_bytes
        return np.array(size_bytes)

    def spread_experts(self, n: int) -> frozenset[int]:
        """Return `n` of the layers whose experts may stream, or all of them if they are fewer."""
        return frozenset(self.free_layers[i] for i in spread(n, len(self.free_layers)))

    def spread_dense(self, n: int) -> frozenset[int]:
        """Return `n` of all layers."""
        return frozenset(self.layers[i] for i in spread(n, len(self.layers)))

    @cached_property
    def whole(self) -> Parts:
        """All layers, and the weights outside them."""
        return Parts(self, np.array([[0]]), np.array([[len(self.layers)]]), self.outside_bytes)


@dataclass(frozen=True)
class Parts:
    """Ranges of layers, each for one device. Arrays have a row for each range, and one column.

    Layers count from 0, even if the weights are a part of a model.
    """

    weights: Weights
    first: Array  # the first layer
    end: Array  # the layer after the last one
    outside_bytes: int = 0  # bytes that the device also needs, whatever range it has

    @cached_property
    def n_layers(self) -> Array:
        return self.end - self.first

    @cached_property
    def _experts(self) -> tuple[Array, Array]:
        """The ranges, counted in layers that have experts."""
        numbers = [i - self.weights.layers.start for i in self.weights.expert_layers]
        return np.searchsorted(numbers, self.first), np.searchsorted(numbers, self.end)

    @cached_property
    def n_expert_layers(self) -> Array:
        first, end = self._experts
        return end - first

    @cached_property
    def held_bytes(self) -> Array:
        """Bytes of all weights."""
        return self.total(self.weights.held_bytes) + self.outside_bytes

    def count(self, layers: Collection[int]) -> Array:
        """Return how many of these layers each range has."""
        return self.total(LayerSums(np.isin(self.weights.layers, list(layers)).astype(int)))

    def total(self, sums: LayerSums) -> Array:
        """Return the sums over all layers of each range."""
        return sums.of(self.first, self.end)

    def expert_bytes(self, n: Array) -> Array:
        """Return the bytes of the experts of `n` layers that are spread over the range.

        If the user named the layers whose experts are resident, these are the other ones.
        """
        weights = self.weights
        n_bytes = weights.expert_bytes.of_spread(*self._experts, n)
        if not weights.gpu_layers:
            return n_bytes
        is_free = n == self.count(weights.free_layers)
        return np.where(is_free, self.total(weights.free_bytes), n_bytes)

    def dense_bytes(self, n: Array) -> Array:
        """Return the bytes of dense weights that may stream, of `n` layers."""
        return self.weights.dense_bytes.of_spread(self.first, self.end, n)
