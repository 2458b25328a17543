"""A small model as drafter, greedy or sampled, over any `Target`.

Sampled drafts are for rejection sampling, which is exact only if a kept token is distributed as
the draft model says. So the policy is fed what can be known before a token is drawn, the greatest
probability of its row, and a token that was drawn is verified whatever follows it.

Its KV cache is kept for what was accepted and rolled back to what was kept, so a round
decodes one or two new tokens and then one per drafted token; the last drafted is never decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from specdec.types import Decision, Draft, Policy, Round, Target, Walk

RowProbabilities = Callable[[NDArray[np.float32]], NDArray[np.float64]]

BATCHED_TAIL = 8  # new tokens of a sequence that may join the others' decode


class _Held:
    """The draft model's memory of one sequence, as far as it is known here."""

    __slots__ = ("catch_up_s", "checkpoint", "checkpoint_length", "n_checked", "tokens")

    def __init__(self) -> None:
        self.catch_up_s = 0.0  # of the draft in hand
        self.tokens: list[int] = []
        self.n_checked = 0  # of them, known to equal the history
        self.checkpoint: object = None
        self.checkpoint_length = -1


class ModelDrafter:
    """Drafts with `model`, whose sequences are this drafter's own.

    With `distribution` (logits [n_vocab] -> probabilities) and `rng`, tokens are sampled from it
    and their distributions are kept for rejection sampling; else they are the most likely ones.
    `n_vocab` cuts off padding that the target's vocabulary does not have.
    """

    def __init__(
        self,
        model: Target,
        *,
        name: str = "draft",
        distribution: RowProbabilities | None = None,
        rng: np.random.Generator | None = None,
        n_vocab: int | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._distribution = distribution
        self._rng = rng or np.random.default_rng()
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._held: dict[int, _Held] = {}
        self.n_rows = 0  # tokens decoded so far, to see that none is evaluated twice

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        room = self._model.n_ctx - len(history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        # The last drafted token is not decoded, so room + 1 fit.
        walk = policy.begin(min(limit, room + 1), self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason))
        logits = self._catch_up(sequence, history)
        if self._distribution is not None:
            return self._sampled(sequence, walk, logits, self._distribution)
        tokens: list[int] = []
        probs: list[float] = []
        while True:
            token, p = self._most_likely(logits)
            tokens.append(token)
            probs.append(p)
            if not walk.feed(p):
                break
            logits = self._step(sequence, token)
        return self._draft(walk, tokens, probs, self._held[sequence].catch_up_s)

    def _sampled(
        self, sequence: int, walk: Walk, logits: NDArray[np.float32], distribution: RowProbabilities
    ) -> Draft:
        tokens: list[int] = []
        probs: list[float] = []
        rows: list[NDArray[np.float64]] = []
        n_steps = 1
        while True:
            q = distribution(logits[: self._n_vocab])
            p = float(q.max())
            goes_on = walk.feed(p)
            if not goes_on and walk.n_best <= len(tokens):
                break  # not worth drawing, decided before it was
            token = int(np.searchsorted(np.cumsum(q), self._rng.random() * q.sum(), side="right"))
            tokens.append(min(token, len(q) - 1))
            probs.append(p)
            rows.append(q)
            if not goes_on:
                break
            logits = self._step(sequence, tokens[-1])
            n_steps += 1
        return Draft(
            tuple(tokens),
            tuple(probs),
            self.name,
            Decision(len(tokens), walk.reason),
            rows=tuple(rows),
            n_steps=n_steps,
            catch_up_s=self._held[sequence].catch_up_s,
        )

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        """The history may be another: what is held is compared from its first token."""
        held = self._held.get(sequence)
        if held is not None:
            held.n_checked = 0

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
                parts.append((sequence, self._tail(sequence, history)))
        tokens: list[list[int]] = [[] for _ in requests]
        probs: list[list[float]] = [[] for _ in requests]
        while drafting:
            rows = self._model.extend_batch(parts)
            for sequence, new in parts:
                self._held[sequence].tokens += new
                self.n_rows += len(new)
            parts, still = [], []
            for i, logits in zip(drafting, rows, strict=True):
                if not tokens[i]:
                    self._mark(requests[i][0])
                token, p = self._most_likely(logits[-1])
                tokens[i].append(token)
                probs[i].append(p)
                if walks[i].feed(p):
                    still.append(i)
                    parts.append((requests[i][0], [token]))
            drafting = still
        caught_up = [self._held[s].catch_up_s if tokens[i] else 0.0
                     for i, (s, _, _) in enumerate(requests)]  # fmt: skip
        return [
            (self._draft(walk, tokens[i], probs[i], caught_up[i]), walk)
            for i, walk in enumerate(walks)
        ]

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

    def _missing(self, sequence: int, history: Sequence[int]) -> list[int]:
        """Cut the model back to what it shares with `history`; the tokens it lacks."""
        held = self._held.setdefault(sequence, _Held())
        if self._model.length(sequence) != len(held.tokens):
            # A decode failed: what a recurrent memory held went with it, or it was not noted here.
            self._model.rewind(sequence, 0)
            held.tokens, held.n_checked = [], 0
            held.checkpoint, held.checkpoint_length = None, -1
        n = self._common(held, history)
        if len(held.tokens) > n:
            n = self._cut(sequence, held, n)
        return list(history[n:])

    def _tail(self, sequence: int, history: Sequence[int]) -> list[int]:
        """The last tokens the model lacks, few enough for a step; the others are evaluated here,
        and the time that takes is set apart, for it comes once per prompt."""
        new = self._missing(sequence, history)
        held = self._held[sequence]
        held.catch_up_s = 0.0
        if len(new) > BATCHED_TAIL:
            began = perf_counter()
            self._model.extend(sequence, new[:-1], 0)
            held.tokens += new[:-1]
            self.n_rows += len(new) - 1
            held.catch_up_s = perf_counter() - began
            new = new[-1:]
        return new

    def _mark(self, sequence: int) -> None:
        """All that is held now is history; from here on it is draft."""
        held = self._held[sequence]
        held.n_checked = len(held.tokens)
        if not self._model.can_rewind:
            held.checkpoint = self._model.checkpoint(sequence)
            held.checkpoint_length = len(held.tokens)

    def _catch_up(self, sequence: int, history: Sequence[int]) -> NDArray[np.float32]:
        """Make the model hold `history`; logits [n_vocab] after it."""
        new = self._tail(sequence, history)
        logits: NDArray[np.float32] = self._model.extend(sequence, new, 1)[0]
        self._held[sequence].tokens += new
        self.n_rows += len(new)
        self._mark(sequence)
        return logits

    def _common(self, held: _Held, history: Sequence[int]) -> int:
        n, most = held.n_checked, min(len(held.tokens), len(history) - 1)
        tokens = held.tokens
        n = min(n, most)
        while n < most and tokens[n] == history[n]:
            n += 1
        return n

    def _cut(self, sequence: int, held: _Held, n: int) -> int:
        """Roll the model back to at most `n` tokens; how many it holds then."""
        if self._model.can_rewind:
            self._model.rewind(sequence, n)
        elif 0 <= held.checkpoint_length <= n:
            self._model.restore(sequence, held.checkpoint)
            n = held.checkpoint_length
        else:
            self._model.rewind(sequence, 0)
            n = 0
            held.checkpoint, held.checkpoint_length = None, -1
        del held.tokens[n:]
        return n

    def _step(self, sequence: int, token: int) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._model.extend(sequence, [token], 1)[0]
        self._held[sequence].tokens.append(token)
        self.n_rows += 1
        return logits

    def _most_likely(self, logits: NDArray[np.float32]) -> tuple[int, float]:
        row = logits[: self._n_vocab]
        token = int(row.argmax())
        # p of the most likely token: its own exponential is 1.
        return token, float(1.0 / np.exp(row - row[token]).sum(dtype=np.float64))
