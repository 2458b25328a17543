"""A small model as drafter, greedy or sampled, over any `Target`.

Sampled drafts are for rejection sampling, which is exact only if a kept token is distributed as
the draft model says. So the policy is fed what can be known before a token is drawn, the greatest
probability of its row, and a token that was drawn is verified whatever follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.memory import DraftMemory
from specdec.types import Decision, Draft, DraftRequest, Policy, Round, Target, Walk

_Part = tuple[int, Sequence[int], int]  # a sequence, its new tokens, rows of logits wanted


class DraftSampling(Protocol):
    """The draws of each sequence's request, for rejection sampling."""

    def probabilities(self, sequence: int, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The distribution that a token is drawn from, by logits [n_vocab]."""
        ...

    def rng(self, sequence: int) -> np.random.Generator: ...


def probability_of_best(logits: NDArray[np.float32], best: float, top_k: int) -> float:
    """The softmax of the greatest logit, `best`, over the `top_k` greatest, 0: over all."""
    if 0 < top_k < len(logits):
        logits = np.partition(logits, -top_k)[-top_k:]
    # The best one's own exponential is 1.
    return float(1.0 / np.exp(logits - best).sum(dtype=np.float64))


class ModelDrafter:
    """Drafts with `model`, whose sequences are this drafter's own.

    With `sampling`, tokens are drawn and their distributions are kept for rejection sampling; else
    they are the most likely ones. `n_vocab` cuts off padding that the target's vocabulary does not
    have. `n_candidates` are kept of each greedy draft's positions.
    """

    def __init__(
        self,
        model: Target,
        *,
        name: str = "draft",
        sampling: DraftSampling | None = None,
        n_vocab: int | None = None,
        n_candidates: int = 0,
    ) -> None:
        self.name = name
        self._n_candidates = n_candidates
        self._model = model
        self._sampling = sampling
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._memory = DraftMemory(model)

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        found = self._begin(DraftRequest(sequence, history, policy, limit))
        if isinstance(found, Draft):
            return found
        logits = self._memory.catch_up(sequence, history)
        while (token := found.take(logits)) is not None:
            logits = self._memory.step(sequence, token)
        return found.draft(self.name, self._memory.catch_up_s(sequence))

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One decode per token for all of them, or several where they do not fit one."""
        if len(requests) == 1:
            return [self.propose(*requests[0])]
        found = [self._begin(request) for request in requests]
        drafting = [f for f in found if isinstance(f, _Found)]
        feed = [self._memory.tail(f.asked.sequence, f.asked.history) for f in drafting]
        begins = True
        while drafting:
            parts = [(f.asked.sequence, new, 1) for f, new in zip(drafting, feed, strict=True)]
            rows: list[NDArray[np.float32]] = []
            for batch in self._batches(parts):
                rows += self._model.extend_batch(batch)
                for sequence, new, _ in batch:
                    self._memory.fed(sequence, new)
                    if begins:
                        self._memory.mark(sequence)
            begins, going, drafting, feed = False, drafting, [], []
            for f, logits in zip(going, rows, strict=True):
                token = f.take(logits[-1])
                if token is not None:
                    drafting.append(f)
                    feed.append([token])
        return [
            f if isinstance(f, Draft) else f.draft(self.name, self._memory.catch_up_s(a.sequence))
            for f, a in zip(found, requests, strict=True)
        ]

    def _batches(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """The parts in order, cut into as few decodes as the draft model takes them in."""
        model, batch, n_tokens = self._model, list[_Part](), 0
        for part in parts:
            n = len(part[1])
            if batch and (n_tokens + n > model.n_batch or len(batch) == model.n_outputs):
                yield batch
                batch, n_tokens = [], 0
            batch.append(part)
            n_tokens += n
        yield batch

    def _begin(self, asked: DraftRequest) -> _Found | Draft:
        """A draft to be made, or the empty one that it is."""
        room = self._model.n_ctx - len(asked.history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        # The last drafted token is not decoded, so room + 1 fit.
        walk = asked.policy.begin(min(asked.limit, room + 1), self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        return _Found(asked, walk, self._n_vocab, self._sampling, self._n_candidates)

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._memory.forget(sequence)

    @property
    def n_rows(self) -> int:
        """Tokens that the model has decoded so far."""
        return self._memory.n_rows


class _Found:
    """One draft as it grows, and what the policy's walk makes of it."""

    def __init__(
        self,
        asked: DraftRequest,
        walk: Walk,
        n_vocab: int,
        sampling: DraftSampling | None,
        n_candidates: int,
    ) -> None:
        self.asked = asked
        self._n_candidates = n_candidates
        self._candidates: list[tuple[tuple[int, float], ...]] = []
        self._walk, self._n_vocab, self._sampling = walk, n_vocab, sampling
        self._n_steps = 0
        self._tokens: list[int] = []
        self._probs: list[float] = []
        self._rows: list[NDArray[np.float64]] = []

    def take(self, logits: NDArray[np.float32]) -> int | None:
        """Draft a token by `logits`; it is to be decoded next, or None when the draft is over."""
        self._n_steps += 1
        row = logits[: self._n_vocab]
        if self._sampling is not None:
            return self._draw(row, self._sampling)
        token = int(row.argmax())
        p = probability_of_best(row, float(row[token]), self.asked.policy.p_top_k)
        self._tokens.append(token)
        self._probs.append(p)
        if self._n_candidates:
            best = np.argsort(-row, kind="stable")[: self._n_candidates].tolist()
            self._candidates.append(
                tuple((t, p * float(np.exp(row[t] - row[token]))) for t in best)
            )
        return token if self._walk.feed(p) else None

    def _draw(self, row: NDArray[np.float32], sampling: DraftSampling) -> int | None:
        sequence = self.asked.sequence
        q = sampling.probabilities(sequence, row)
        p = float(q.max())
        goes_on = self._walk.feed(p)
        if not goes_on and self._walk.n_best <= len(self._tokens):
            return None  # not worth drawing, decided before it was
        drawn = sampling.rng(sequence).random() * q.sum()
        token = min(int(np.searchsorted(np.cumsum(q), drawn, side="right")), len(q) - 1)
        self._tokens.append(token)
        self._probs.append(p)
        self._rows.append(q)
        return token if goes_on else None

    def draft(self, name: str, catch_up_s: float) -> Draft:
        n = self._walk.n_best if self._sampling is None else len(self._tokens)
        return Draft(
            tuple(self._tokens[:n]),
            tuple(self._probs[:n]),
            name,
            Decision(n, self._walk.reason),
            tuple(zip(self._tokens[n:], self._probs[n:], strict=True)),
            rows=tuple(self._rows),
            n_steps=self._n_steps,
            catch_up_s=catch_up_s,
            candidates=tuple(self._candidates),
        )
