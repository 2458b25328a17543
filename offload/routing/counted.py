"""Hits as they were counted of one model's recorded routing, and the curve that a plan reads. Pure.

Routing does not depend on machine, plan or threads: what is counted in one run holds for all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date

import numpy as np
from numpy.typing import NDArray

from offload.routing.hits import SHARES, recorded_hits

LEAST_TOKENS = 64  # fewer tell little: their first half fills the slots
_HALF_LIFE_TOKENS = 2048.0  # counted later: what was counted before then weighs half


@dataclass(frozen=True)
class HitCurve:
    """The share of a decode's uses of experts that find theirs in a slot, by the share of all
    experts that have one."""

    points: tuple[tuple[float, float], ...]  # shares between 0 and 1, rising, and their hits
    n_tokens: int
    counted_on: date

    def at(self, share: float) -> float:
        """The hits where `share` of all experts have a slot: on lines between the points, none
        without slots, all where every expert has one."""
        low = (0.0, 0.0)
        for point in (*self.points, (1.0, 1.0)):
            if share < point[0]:
                return low[1] + (point[1] - low[1]) * (share - low[0]) / (point[0] - low[0])
            low = point
        return 1.0

    @property
    def source(self) -> str:
        """Words for where they come from."""
        return f"counted on {self.counted_on} over {self.n_tokens} tokens"


@dataclass(frozen=True)
class CountedHits:
    """Hits of each layer whose routing was recorded."""

    n_experts: int
    n_used: int
    layers: Mapping[int, tuple[float, ...]]  # at SHARES
    n_tokens: float  # counted, those of long ago for less
    counted_on: date  # the last of it
    uses: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Tokens that used each expert of a layer at the end of the last run."""

    @property
    def curve(self) -> HitCurve:
        """Of all layers alike: their experts share the slots."""
        mean = np.mean([*self.layers.values()], axis=0)
        rising = np.maximum.accumulate(np.clip(mean, 0.0, 1.0)).tolist()
        points = tuple(zip(SHARES, rising, strict=True))
        return HitCurve(points, round(self.n_tokens), self.counted_on)

    def merged(self, newer: CountedHits) -> CountedHits:
        """Both, this one for less the more was counted since. Layers that only one has are its."""
        before = self.n_tokens * 0.5 ** (newer.n_tokens / _HALF_LIFE_TOKENS)
        total = before + newer.n_tokens
        layers = {**self.layers, **newer.layers}
        for layer in self.layers.keys() & newer.layers.keys():
            old, new = np.array(self.layers[layer]), np.array(newer.layers[layer])
            mixed = (before * old + newer.n_tokens * new) / total
            layers[layer] = tuple(mixed.tolist())
        uses = {**self.uses, **newer.uses}
        return CountedHits(self.n_experts, self.n_used, layers, total, newer.counted_on, uses)


def counted_hits(
    recorded: Mapping[int, NDArray[np.integer]], n_experts: int, today: date
) -> CountedHits | None:
    """The hits of recorded routing [n_tokens, n_used] by layer, as many tokens of each; None where
    that is too little, or layers differ in how many experts they use."""
    rows = [*recorded.values()]
    if not rows or len({layer.shape for layer in rows}) > 1 or len(rows[0]) < LEAST_TOKENS:
        return None
    n_tokens, n_used = rows[0].shape
    found = recorded_hits(np.stack(rows, axis=1), n_experts)
    layers = {layer: tuple(hits) for layer, hits in zip(recorded, found.tolist(), strict=True)}
    uses = {
        layer: tuple(np.bincount(ids.ravel(), minlength=n_experts).tolist())
        for layer, ids in recorded.items()
    }
    return CountedHits(n_experts, n_used, layers, float(n_tokens), today, uses)
