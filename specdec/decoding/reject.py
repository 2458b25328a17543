"""Rejection sampling: a sampled draft token is accepted with probability min(1, p/q).

On rejection the token comes from the residual max(0, p - q), so every emitted token has exactly
the target's distribution p, whatever the draft's q (Leviathan et al., Chen et al. 2023). It
accepts more often than matching a sampled token does, but needs the draft's distributions and a
sampler chain that can name its probabilities; where it cannot, acceptance by match serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.accept import Verdict
from specdec.errors import SpecDecError
from specdec.types import Draft, IsEnd


class Distribution(Protocol):
    """A sampler chain that can say what it would sample from."""

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        """[n_vocab], summing to 1."""
        ...

    def accepted(self, token: int) -> None: ...


class RejectionAcceptance:
    """Judges drafts that carry `rows`. A draft without them counts as certain of its tokens
    (q = 1), which is acceptance with probability p: right for n-gram drafts."""

    def __init__(self, distribution: Distribution, rng: np.random.Generator) -> None:
        self._distribution = distribution
        self._rng = rng

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        emitted: list[int] = []
        for i, token in enumerate(draft.tokens):
            p = self._distribution.probabilities(logits[i], history)
            q = draft.rows[i] if draft.rows else None
            said = 1.0 if q is None else float(q[token])
            if self._rng.random() * said < p[token]:
                self._emit(token, emitted, history)
                if is_end(token):
                    return Verdict(i + 1, emitted)
                continue
            self._emit(sample(residual(p, q, token), self._rng), emitted, history)
            return Verdict(i, emitted)
        p = self._distribution.probabilities(logits[len(draft.tokens)], history)
        self._emit(sample(p, self._rng), emitted, history)
        return Verdict(len(draft.tokens), emitted)

    def _emit(self, token: int, emitted: list[int], history: list[int]) -> None:
        self._distribution.accepted(token)
        emitted.append(token)
        history.append(token)


def residual(
    p: NDArray[np.float64], q: NDArray[np.float64] | None, token: int
) -> NDArray[np.float64]:
    """The distribution max(0, p - q), normalised; without q, p without `token`."""
    if q is None:
        rest = p.copy()
        rest[token] = 0.0
    else:
        rest = p.copy()
        rest[: len(q)] -= q[: len(p)]
        np.maximum(rest, 0.0, out=rest)
    total = float(rest.sum())
    # p = q up to rounding leaves nothing over: a rejection was rounding, too.
    return rest / total if total > 0.0 else p


def sample(p: NDArray[np.float64], rng: np.random.Generator) -> int:
    """One draw from probabilities [n_vocab]."""
    total = p.cumsum()
    token = int(total.searchsorted(rng.random() * total[-1], "right"))
    return min(token, len(p) - 1)


class Sampler:
    """Temperature, top-k, top-p and min-p over logits, in llama.cpp's order: a chooser and a
    distribution. A temperature of 0 is greedy; 0, 1 and 0 switch the others off."""

    def __init__(
        self,
        temperature: float = 1.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        """Raises SpecDecError for a parameter outside its range."""
        good = temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1
        if not good:
            raise SpecDecError(
                f"temperature {temperature}, top-k {top_k}, top-p {top_p}, min-p {min_p}: "
                "temperature and top-k must be at least 0, top-p in (0, 1], min-p in [0, 1]"
            )
        self._temperature, self._top_k = temperature, top_k
        self._top_p, self._min_p = top_p, min_p
        self._rng = rng or np.random.default_rng()

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int] = ()
    ) -> NDArray[np.float64]:
        x = logits.astype(np.float64)
        out = np.zeros(len(x))
        if self._temperature == 0:
            out[int(x.argmax())] = 1.0
            return out
        order = np.argsort(-x, kind="stable")
        if self._top_k:
            order = order[: self._top_k]
        if self._top_p < 1.0:
            p = _softmax(x[order])
            order = order[: int(np.searchsorted(np.cumsum(p), self._top_p)) + 1]
        if self._min_p > 0.0:
            p = _softmax(x[order])
            order = order[p >= self._min_p * p[0]]
        out[order] = _softmax(x[order] / self._temperature)
        return out

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        return sample(self.probabilities(logits), self._rng)

    def accepted(self, token: int) -> None:
        pass


def _softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum(), np.float64)
