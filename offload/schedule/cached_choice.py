"""Chooses experts of a token by its router's scores, with less for experts that are in no slot.

Mixture of Cache-Conditional Experts (arXiv 2412.00099) adds a part of the scores' mean range to
experts that are cached. Here the others lose as much. The order is the same, and scores of cached
experts keep all their bits. So nothing changes at all if every expert is cached. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float32]


@dataclass(frozen=True)
class RouteOptions:
    """The strength of the preference for cached experts, and what it leaves to the router."""

    strength: float = 0.0  # share of the scores' mean range that missing experts lose; 0: off
    n_kept: int = 2  # best experts of each token that are always the router's own

    @property
    def is_on(self) -> bool:
        return self.strength > 0.0

    def no_effect_reason(self, n_used: int) -> str:
        """Return why no choice of a token's `n_used` experts can change; "" if some can."""
        if not 0 < n_used <= self.n_kept:
            return ""
        what = "the one expert" if n_used == 1 else f"all {n_used} experts"
        return f"--route-keep {self.n_kept} leaves {what} of a token to the router"


@dataclass
class MeanRange:
    """The running mean of a layer's range of scores over tokens."""

    n_tokens: int = 0
    sum: float = 0.0

    def see(self, scores: Scores) -> None:
        """Add the tokens of `scores` [n_tokens, n_experts]. Masked experts have no finite score."""
        finite = np.isfinite(scores)
        high = np.where(finite, scores, -np.inf).max(axis=1)
        low = np.where(finite, scores, np.inf).min(axis=1)
        ranges = (high - low)[finite.any(axis=1)]
        self.n_tokens += len(ranges)
        self.sum += float(ranges.sum())

    @property
    def mean(self) -> float:
        """The mean, 0 before the first token."""
        return self.sum / self.n_tokens if self.n_tokens else 0.0


def penalties(cached: NDArray[np.bool_], mean_range: float, strength: float) -> Scores:
    """Return what is added to each expert's score: 0, or a negative number for a missing one."""
    lost = np.float32(-strength * mean_range)
    return np.where(cached, np.float32(0.0), lost).astype(np.float32)


def best(scores: Scores, n: int) -> NDArray[np.intp]:
    """Return each token's `n` experts with the highest scores, the highest first: [n_tokens, n]."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :n]


def choose(scores: Scores, penalty: Scores, n_kept: int, n_used: int) -> NDArray[np.intp]:
    """Return the experts that each token uses: [n_tokens, n_used].

    `scores` [n_tokens, n_experts] are those by which the router selects. `penalty` [n_experts], or
    a row of it for each token, is not added to a token's `n_kept` best ones.
    """
    lowered = scores + penalty
    rows, own = np.arange(len(scores))[:, None], best(scores, min(n_kept, n_used))
    lowered[rows, own] = scores[rows, own]
    return best(lowered, n_used)


@dataclass
class ChoiceCounts:
    """Counts of uses of an expert by a token, in small batches."""

    n_choices: int = 0
    n_kept: int = 0  # those that the router would have chosen, too
    n_cached: int = 0  # those whose expert was in a slot before the batch
    n_own_cached: int = 0  # choices of the router alone whose expert was in a slot
    ranges: dict[int, MeanRange] = field(default_factory=dict)  # by group

    def see(
        self, group: int, scores: Scores, penalty: Scores, cached: NDArray[np.bool_], n_kept: int,
        n_used: int,
    ) -> None:  # fmt: skip
        """Count a layer's choices, and add its scores to the running mean."""
        own, chosen = best(scores, n_used), choose(scores, penalty, n_kept, n_used)
        self.n_choices += own.size
        self.n_kept += int((own[:, :, None] == chosen[:, None, :]).any(axis=2).sum())
        self.n_cached += int(cached[chosen].sum())
        self.n_own_cached += int(cached[own].sum())
        self.ranges.setdefault(group, MeanRange()).see(scores)
