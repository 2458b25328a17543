"""One draft while a model drafts it: its tokens, and the policy's walk along them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.types import Block, Decision, Draft, DraftRequest, Walk


class Growing:
    """One draft as it grows, and the policy's walk along it."""

    feed: list[int]  # tokens that the model does not hold yet
    catch_up_s: float

    def __init__(
        self,
        asked: DraftRequest,
        walk: Walk,
        limit: int,
        draws: np.random.Generator | None,
        temperature: float,
        n_candidates: int = 0,
    ) -> None:
        self.asked = asked
        self._n_candidates = n_candidates
        self._candidates: list[tuple[tuple[int, float], ...]] = []
        self.sequence, self.top_k = asked.sequence, asked.policy.p_top_k
        self.walk, self.limit = walk, limit
        self.draws, self.temperature = draws, temperature
        self.goes_on = True
        self.n_fed = 0  # block tokens whose probabilities the policy was fed
        self._n_steps = 0  # the model's steps, including those that the policy did not ask for
        self._tokens: list[int] = []
        self._probs: list[float] = []
        self._rows: list[NDArray[np.float64]] = []

    def choose(self, logits: NDArray[np.float32], confidence: float | None = None) -> bool:
        """Draft the token after `feed` by its logits [n_vocab]; True if the policy wants more.

        `confidence`: the drafter's own estimate that the token is accepted. Without it, the policy
        is fed the likeliest token's probability.
        """
        self._n_steps += 1
        if self.draws is not None:
            return self._draw(logits, self.draws, confidence)
        token = int(logits.argmax())
        p = confidence
        if p is None:
            p = _share_of_best(logits, float(logits[token]), self.top_k)
        self._tokens.append(token)
        self._probs.append(p)
        if self._n_candidates:
            likeliest = np.argsort(-logits, kind="stable")[: self._n_candidates].tolist()
            best = float(logits[token])
            self._candidates.append(
                tuple((t, p * float(np.exp(logits[t] - best))) for t in likeliest)
            )
        self.feed = [token]
        return self.walk.feed(p)

    def _draw(
        self, logits: NDArray[np.float32], draws: np.random.Generator, confidence: float | None
    ) -> bool:
        # A temperature near 0 overflows float32.
        q = softmax(np.divide(logits, self.temperature, dtype=np.float64))
        p = float(q.max()) if confidence is None else confidence
        goes_on = self.walk.feed(p)
        if not goes_on and self.walk.n_best <= len(self._tokens):
            return False  # no draw of a token that is not worth verifying
        ends = q.cumsum()
        token = min(int(ends.searchsorted(draws.random() * ends[-1], "right")), len(q) - 1)
        self._tokens.append(token)
        self._probs.append(p)
        self._rows.append(q)
        self.feed = [token]
        return goes_on

    def take(self, tokens: Sequence[int], probs: Sequence[float], block: Block, part: int) -> None:
        """Feed the walk with a block's tokens until it wants no more."""
        self._n_steps += len(tokens)
        is_drawn = self.draws is not None
        for step, p in enumerate(probs):
            self.goes_on = goes_on = self.walk.feed(p)
            self.n_fed += 1
            if is_drawn and not goes_on and self.walk.n_best <= len(self._tokens):
                return  # the decision not to verify must not depend on the token
            self._tokens.append(tokens[step])
            self._probs.append(p)
            if is_drawn:
                self._rows.append(block.row(step, part))
            if not goes_on:
                return

    def draft(self, source: str) -> Draft:
        n = self.walk.n_best if self.draws is None else len(self._tokens)
        return Draft(
            tuple(self._tokens[:n]),
            tuple(self._probs[:n]),
            source,
            Decision(n, self.walk.reason),
            tuple(zip(self._tokens[n:], self._probs[n:], strict=True)),
            rows=tuple(self._rows),
            n_steps=self._n_steps,
            catch_up_s=self.catch_up_s,
            candidates=tuple(self._candidates),
        )


def softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probabilities of logits [n_vocab]."""
    e = np.exp(x - x.max(), dtype=np.float64)
    return np.asarray(e / e.sum(), np.float64)


def _share_of_best(logits: NDArray[np.float32], best: float, top_k: int) -> float:
    """The softmax of the greatest logit, `best`, among the `top_k` greatest (0: among all)."""
    if 0 < top_k < len(logits):
        logits = np.partition(logits, -top_k)[-top_k:]
    return float(1.0 / np.exp(logits - best).sum(dtype=np.float64))
