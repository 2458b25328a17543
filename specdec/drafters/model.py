"""A small model as drafter, greedy or sampled, over any `Target`.

Sampled drafts are for rejection sampling, which is exact only if a kept token is distributed as
the draft model says. So the policy is fed what can be known before a token is drawn, the greatest
probability of its row, and a token that was drawn is verified whatever follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.memory import DraftMemory
from specdec.types import Decision, Draft, Policy, Round, Target, Walk


class DraftSampling(Protocol):
    """The draws of each sequence's request, for rejection sampling."""

    def probabilities(self, sequence: int, logits: NDArray[np.float32]) -> NDArray[np.float64]:
        """The distribution that a token is drawn from, by logits [n_vocab]."""
        ...

    def rng(self, sequence: int) -> np.random.Generator: ...


class ModelDrafter:
    """Drafts with `model`, whose sequences are this drafter's own.

    With `sampling`, tokens are drawn and their distributions are kept for rejection sampling; else
    they are the most likely ones. `n_vocab` cuts off padding that the target's vocabulary does not
    have.
    """

    def __init__(
        self,
        model: Target,
        *,
        name: str = "draft",
        sampling: DraftSampling | None = None,
        n_vocab: int | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._sampling = sampling
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._memory = DraftMemory(model)

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        room = self._model.n_ctx - len(history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        # The last drafted token is not decoded, so room + 1 fit.
        walk = policy.begin(min(limit, room + 1), self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        logits = self._memory.catch_up(sequence, history)
        if self._sampling is not None:
            return self._sampled(sequence, walk, logits, self._sampling)
        tokens: list[int] = []
        probs: list[float] = []
        while True:
            token, p = self._most_likely(logits)
            tokens.append(token)
            probs.append(p)
            if not walk.feed(p):
                break
            logits = self._memory.step(sequence, token)
        return self._draft(walk, tokens, probs, self._memory.catch_up_s(sequence))

    def _sampled(
        self, sequence: int, walk: Walk, logits: NDArray[np.float32], sampling: DraftSampling
    ) -> Draft:
        tokens: list[int] = []
        probs: list[float] = []
        rows: list[NDArray[np.float64]] = []
        n_steps = 1
        while True:
            q = sampling.probabilities(sequence, logits[: self._n_vocab])
            p = float(q.max())
            goes_on = walk.feed(p)
            if not goes_on and walk.n_best <= len(tokens):
                break  # not worth drawing, decided before it was
            drawn = sampling.rng(sequence).random() * q.sum()
            token = int(np.searchsorted(np.cumsum(q), drawn, side="right"))
            tokens.append(min(token, len(q) - 1))
            probs.append(p)
            rows.append(q)
            if not goes_on:
                break
            logits = self._memory.step(sequence, tokens[-1])
            n_steps += 1
        return Draft(
            tuple(tokens),
            tuple(probs),
            self.name,
            Decision(len(tokens), walk.reason),
            rows=tuple(rows),
            n_steps=n_steps,
            catch_up_s=self._memory.catch_up_s(sequence),
        )

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._memory.forget(sequence)

    @property
    def samples(self) -> bool:
        """True if tokens are drawn, not the most likely ones."""
        return self._sampling is not None

    @property
    def n_rows(self) -> int:
        """Tokens that the model has decoded so far."""
        return self._memory.n_rows

    def propose_many(
        self, requests: Sequence[tuple[int, Sequence[int], int]], policy: Policy
    ) -> list[tuple[Draft, Walk]]:
        """Drafts for several (sequence, history, limit), one decode per token for all of them,
        and the policy's walk of each.

        Greedy only. The number of decodes is the largest `n_steps` of the drafts.
        """
        walks: list[Walk] = []
        parts: list[tuple[int, list[int]]] = []
        drafting: list[int] = []
        for i, (sequence, history, limit) in enumerate(requests):
            room = self._model.n_ctx - len(history)
            walk = policy.begin(max(0, min(limit, room + 1)), self.name)
            walks.append(walk)
            if walk.wants and room >= 0:
                drafting.append(i)
                parts.append((sequence, self._memory.tail(sequence, history)))
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[float]] = [[] for _ in requests]
        while drafting:
            rows = self._model.extend_batch([(s, new, 1) for s, new in parts])
            for sequence, new in parts:
                self._memory.fed(sequence, new)
            parts, still = [], []
            for i, logits in zip(drafting, rows, strict=True):
                if not tokens[i]:
                    self._memory.mark(requests[i][0])
                token, p = self._most_likely(logits[-1])
                tokens[i].append(token)
                probs[i].append(p)
                if walks[i].feed(p):
                    still.append(i)
                    parts.append((requests[i][0], [token]))
            drafting = still
        drafts = []
        for i, walk in enumerate(walks):
            caught_up_s = self._memory.catch_up_s(requests[i][0]) if tokens[i] else 0.0
            drafts.append((self._draft(walk, tokens[i], probs[i], caught_up_s), walk))
        return drafts

    def _draft(self, walk: Walk, tokens: list[int], probs: list[float], catch_up_s: float) -> Draft:
        n = walk.n_best
        return Draft(
            tuple(tokens[:n]),
            tuple(probs[:n]),
            self.name,
            Decision(n, walk.reason),
            tuple(zip(tokens[n:], probs[n:], strict=True)),
            n_steps=len(tokens),
            catch_up_s=catch_up_s,
        )

    def _most_likely(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        row = logits[: self._n_vocab]
        token = int(row.argmax())
        # p of the most likely token: its own exponential is 1.
        return token, float(1.0 / np.exp(row - row[token]).sum(dtype=np.float64))
