"""A reference sampler in numpy, and a helper that asks a drafter for one draft."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.acceptance import draw
from specdec.drafters.growing import softmax
from specdec.types import Draft, Drafter, DraftRequest, Policy


class Sampler:
    """Temperature, top-k, top-p and min-p over logits, in llama.cpp's order."""

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._temperature, self._top_k, self._top_p, self._min_p = temperature, top_k, top_p, min_p
        self._rng = rng or np.random.default_rng()
        self._known: dict[bytes, NDArray[np.float64]] = {}  # bytes of logits -> probabilities

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int] = ()
    ) -> NDArray[np.float64]:
        key = logits.tobytes()
        if key not in self._known:
            self._known[key] = self._computed(logits)
        return self._known[key]

    def _computed(self, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        out = np.zeros(len(logits))
        order = np.argsort(-logits, kind="stable")[: self._top_k or None]
        if self._top_p < 1.0:
            n = int(np.searchsorted(np.cumsum(softmax(logits[order])), self._top_p)) + 1
            order = order[:n]
        if self._min_p > 0.0:
            p = softmax(logits[order])
            order = order[p >= self._min_p * p[0]]
        out[order] = softmax(logits[order] / max(self._temperature, 1e-9))  # type: ignore[arg-type]
        return out

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        return draw(self.probabilities(logits), self._rng)

    def accepted(self, token: int) -> None:
        pass


def proposed(
    drafter: Drafter, sequence: int, history: Sequence[int], policy: Policy, limit: int
) -> Draft:
    return drafter.propose([DraftRequest(sequence, history, policy, limit)])[0]
