"""Two ways to judge a draft. Both leave the distribution of texts unchanged.

- `match` keeps a drafted token if the target's sampler chooses it. The sampler chooses every
  emitted token from the target's logits for its prefix, as it does without a draft. This holds for
  all samplers, grammars and penalties.
- `reject` accepts a drafted token with probability min(1, p/q). On rejection another token is drawn
  from max(0, p - q). So each emitted token has exactly the target's distribution p, for any
  distribution q of the draft (Leviathan et al., Chen et al. 2023). It accepts more often than
  `match`, but needs the draft's distributions and a sampler that can name its probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.types import Chooser, Draft, IsEnd


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of judging a draft.

    `emitted` holds the `n_accepted` drafted tokens, then one token that the target chose, unless an
    accepted token ended the text. `path` are the accepted nodes of a tree.
    """

    n_accepted: int
    emitted: list[int]
    path: tuple[int, ...] = ()


class AcceptanceRule(Protocol):
    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        """Judge a draft by logits [1 + n drafted, n_vocab]. Append emitted tokens to `history`."""
        ...


class Greedy:
    """A chooser of the target's likeliest token."""

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        return int(logits.argmax())

    def accepted(self, token: int) -> None:
        pass


class MatchAcceptance:
    """Accepts drafted tokens up to the first that `chooser` does not choose."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        choose, accepted = self._chooser.choose, self._chooser.accepted
        emitted: list[int] = []
        for i, drafted in enumerate(draft.tokens):
            token = choose(logits[i], history)
            accepted(token)
            emitted.append(token)
            history.append(token)
            if token != drafted:
                return Verdict(i, emitted)
            if is_end(token):
                return Verdict(i + 1, emitted)
        token = choose(logits[len(draft.tokens)], history)
        accepted(token)
        emitted.append(token)
        history.append(token)
        return Verdict(len(draft.tokens), emitted)

    def descend(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        """Judge a tree as `__call__` judges a chain: go down while the choice is among the nodes.

        `logits` [1 + n nodes, n_vocab] are those after the last token and after each node.
        """
        nodes = {
            (parent, token): i
            for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
        }
        emitted: list[int] = []
        path: list[int] = []
        at = -1
        while True:
            token = self._chooser.choose(logits[at + 1], history)
            self._chooser.accepted(token)
            emitted.append(token)
            history.append(token)
            child = nodes.get((at, token))
            if child is None:
                break
            at = child
            path.append(at)
            if is_end(token):
                break
        return Verdict(len(path), emitted, tuple(path))


class Distribution(Protocol):
    """A sampler that can give the probabilities that it samples with."""

    def probabilities(
        self, logits: NDArray[np.float32], history: Sequence[int]
    ) -> NDArray[np.float64]:
        """[n_vocab], summing to 1."""
        ...

    def accepted(self, token: int) -> None: ...


class RejectionAcceptance:
    """Accepts a drafted token with probability min(1, p/q).

    A draft without `rows`, such as one by n-grams, is judged with q = 1.
    """

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
            if self._rng.random() * said >= p[token]:
                self._emit(draw(residual(p, q, token), self._rng), emitted, history)
                return Verdict(i, emitted)
            self._emit(token, emitted, history)
            if is_end(token):
                return Verdict(i + 1, emitted)
        p = self._distribution.probabilities(logits[len(draft.tokens)], history)
        self._emit(draw(p, self._rng), emitted, history)
        return Verdict(len(draft.tokens), emitted)

    def _emit(self, token: int, emitted: list[int], history: list[int]) -> None:
        self._distribution.accepted(token)
        emitted.append(token)
        history.append(token)


def residual(
    p: NDArray[np.float64], q: NDArray[np.float64] | None, token: int
) -> NDArray[np.float64]:
    """The distribution max(0, p - q), normalised. If q is None, p without `token`, normalised."""
    rest = p.copy()
    if q is None:
        rest[token] = 0.0
    else:
        rest[: len(q)] -= q[: len(p)]
        np.maximum(rest, 0.0, out=rest)
    total = float(rest.sum())
    # If p equals q up to rounding, only rounding caused the rejection.
    return rest / total if total > 0.0 else p


def draw(p: NDArray[np.float64], rng: np.random.Generator) -> int:
    """One token from probabilities [n_vocab]."""
    total = p.cumsum()
    token = int(total.searchsorted(rng.random() * total[-1], "right"))
    return min(token, len(p) - 1)
