"""A draft model as drafter: greedy or sampled, one token a call or in blocks.

A model that feeds its own tokens back (`BlockModel`) drafts several tokens before it is asked
again, since bringing tokens to the host and deciding takes more time than a step on a GPU. The
policy is fed a block's probabilities one by one, and decides as if they came one by one. Other
models are asked token by token, through the same interface.

Sampled drafts are for rejection sampling, which is exact only if the decision to verify a token
does not depend on which token was drawn. So the policy is fed the greatest probability of the
token's row, and every drawn token is verified, whatever follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.types import (
    Block,
    BlockModel,
    Decision,
    Draft,
    DraftRequest,
    Drawing,
    Round,
    Target,
    Walk,
)

BATCHED_TAIL = 8  # most new tokens of a sequence that join the others' decode
_FIRST_BLOCK = 4
_BLOCK_MEMORY = 0.25  # weight of the newest draft's length


@dataclass(frozen=True)
class BlockDraws:
    """The numbers that a block's tokens are drawn by: `temperature` [n_parts], `uniforms`
    [n_steps, n_parts]."""

    temperature: NDArray[np.float64]
    uniforms: NDArray[np.float64]


class DraftSampling(Protocol):
    """The sampling of each sequence's request, for rejection sampling."""

    def temperature(self, sequence: int) -> float: ...

    def rng(self, sequence: int) -> np.random.Generator: ...


class ModelDrafter:
    """Drafts with `model`; nothing else may use its sequences.

    With `sampling`, tokens are drawn and their distributions are kept for rejection sampling;
    without, the likeliest tokens are drafted. `n_vocab` cuts off padding that the target's
    vocabulary does not have. `n_candidates` likeliest tokens are kept of each position, if the
    model drafts token by token.
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
        self._model = model if isinstance(model, BlockModel) else TokenByToken(model, n_vocab)
        self._sampling = sampling
        self._n_candidates = n_candidates
        self._memory = DraftMemory(model)
        self._usual = float(_FIRST_BLOCK)  # length of drafts lately

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = [self._begin(request) for request in requests]
        drafting = begun = [f for f in found if isinstance(f, _Growing)]
        n_steps = 0
        while drafting:
            n = self._block_length(n_steps, min([f.limit for f in drafting]))
            self._step(drafting, n, begins=not n_steps)
            drafting, n_steps = [f for f in drafting if f.goes_on], n_steps + n
        if begun:
            self._remember(max([f.n_fed for f in begun]), max([f.limit for f in begun]))
        return [f if isinstance(f, Draft) else f.draft(self.name) for f in found]

    def _begin(self, asked: DraftRequest) -> _Growing | Draft:
        """A draft to grow, or the empty draft."""
        sequence = asked.sequence
        room = self._model.n_ctx - len(asked.history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        limit = min(asked.limit, room + 1)  # the last drafted token is not decoded
        walk = asked.begin(limit, self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        draws = None
        if self._sampling is not None:
            # One number of the request's generator seeds all draws of the draft. How many numbers
            # a request uses then does not depend on the lengths of blocks.
            draws = np.random.default_rng(self._sampling.rng(sequence).integers(1 << 62))
        feed, catch_up_s = self._memory.tail(sequence, asked.history)
        top_k = asked.policy.p_top_k
        return _Growing(sequence, walk, limit, feed, catch_up_s, draws, top_k, self._n_candidates)

    def _block_length(self, n_drafted: int, limit: int) -> int:
        """Length of the next block of a draft that has `n_drafted` tokens: first as long as
        drafts were lately, then a quarter of that."""
        if self._model.n_steps_max == 1:
            return 1
        usual = round(self._usual) if n_drafted == 0 else round(self._usual) // 4
        return min(max(1, usual), limit - n_drafted, self._model.n_steps_max)

    def _remember(self, n_fed: int, limit: int) -> None:
        """The policy took `n_fed` tokens of a draft. A draft that the end of the text cut short
        says nothing of the next."""
        if n_fed < limit or n_fed > self._usual:
            self._usual += _BLOCK_MEMORY * (n_fed - self._usual)

    def _step(self, drafting: Sequence[_Growing], n: int, *, begins: bool) -> None:
        """Draft a block of `n` tokens for each, and note what the model holds then."""
        memory, drawing, top_k = self._memory, self._drawing(drafting, n), drafting[0].top_k
        if begins:
            parts = [(f.sequence, f.feed) for f in drafting]
            block: Block | _OneToken = self._model.draft(parts, n, drawing, top_k)
            for growing in drafting:
                memory.fed(growing.sequence, growing.feed)
                memory.mark(growing.sequence)
        else:
            block = self._model.draft_more([f.sequence for f in drafting], n, drawing, top_k)
        if isinstance(block, _OneToken):
            tokens, probs = block.columns
        else:
            tokens, probs = block.tokens.T.tolist(), block.p.T.tolist()
        for part, (growing, drafted) in enumerate(zip(drafting, tokens, strict=True)):
            held = drafted[:-1] if begins else [growing.feed[-1], *drafted[:-1]]
            if held:
                memory.fed(growing.sequence, held)
            growing.feed = drafted[-1:]
            growing.take(drafted, probs[part], block, part)

    def _drawing(self, drafting: Sequence[_Growing], n: int) -> BlockDraws | None:
        """Each sequence's own numbers and temperature, whatever else is in the batch."""
        if self._sampling is None:
            return None
        temperatures = [self._sampling.temperature(f.sequence) for f in drafting]
        uniforms = [f.draws.random(n) for f in drafting if f.draws is not None]
        return BlockDraws(np.array(temperatures), np.stack(uniforms, axis=1))

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._memory.forget(sequence)

    @property
    def n_rows(self) -> int:
        """Tokens that the model has decoded so far."""
        return self._memory.n_rows


class _Growing:
    """One draft as it grows, and the policy's walk along it."""

    def __init__(
        self,
        sequence: int,
        walk: Walk,
        limit: int,
        feed: list[int],
        catch_up_s: float,
        draws: np.random.Generator | None,
        top_k: int,
        n_candidates: int,
    ) -> None:
        self.sequence, self.walk, self.limit = sequence, walk, limit
        self.feed = feed  # tokens that the model does not hold yet
        self.draws, self.top_k = draws, top_k
        self.goes_on = walk.wants
        self.n_fed = 0  # tokens that the policy was fed
        self._catch_up_s, self._n_candidates = catch_up_s, n_candidates
        self._n_steps = 0  # of the model, including steps that the policy did not ask for
        self._tokens: list[int] = []
        self._probs: list[float] = []
        self._rows: list[NDArray[np.float64]] = []
        self._candidates: list[tuple[tuple[int, float], ...]] = []

    def take(
        self, tokens: Sequence[int], probs: Sequence[float], block: Block | _OneToken, part: int
    ) -> None:
        """Feed the walk with a block's tokens until it wants no more."""
        self._n_steps += len(tokens)
        is_drawn = self.draws is not None
        for step, p in enumerate(probs):
            self.goes_on = goes_on = self.walk.feed(p)
            self.n_fed += 1
            if is_drawn and not goes_on and self.walk.n_best <= len(self._tokens):
                return  # not worth verifying, which was decided without looking at the token
            self._tokens.append(tokens[step])
            self._probs.append(p)
            if is_drawn:
                self._rows.append(block.row(step, part))
            elif self._n_candidates and isinstance(block, _OneToken):
                self._candidates.append(block.likeliest(part, self._n_candidates))
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
            catch_up_s=self._catch_up_s,
            candidates=tuple(self._candidates),
        )


# -- models that draft token by token --------------------------------------------------------------


class TokenByToken:
    """Any `Target` as a block model whose blocks have one token."""

    n_steps_max = 1

    def __init__(self, model: Target, n_vocab: int | None = None) -> None:
        self._model = model
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._last: dict[int, list[int]] = {}  # sequence -> its last drafted token

    @property
    def n_ctx(self) -> int:
        return self._model.n_ctx

    def draft(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> _OneToken:
        if len(parts) == 1:
            rows = [self._model.extend(*parts[0], 1)]
        else:
            rows = [r for batch in self._batches(parts) for r in self._model.extend_batch(batch)]
        block = _OneToken([row[-1][: self._n_vocab] for row in rows], drawing, top_k)
        for (sequence, _), tokens in zip(parts, block.columns[0], strict=True):
            self._last[sequence] = tokens
        return block

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> _OneToken:
        return self.draft([(s, self._last[s]) for s in sequences], n_steps, drawing, top_k)

    def _batches(
        self, parts: Sequence[tuple[int, Sequence[int]]]
    ) -> Iterator[list[tuple[int, Sequence[int], int]]]:
        """The parts in order, in as few decodes as the model takes them in."""
        model, n_tokens = self._model, 0
        batch: list[tuple[int, Sequence[int], int]] = []
        for sequence, tokens in parts:
            n = len(tokens)
            if batch and (n_tokens + n > model.n_batch or len(batch) == model.n_outputs):
                yield batch
                batch, n_tokens = [], 0
            batch.append((sequence, tokens, 1))
            n_tokens += n
        yield batch


class _OneToken:
    """A block of one token per part, chosen from logits [n_vocab]. `columns` are its tokens and
    their probabilities, by part and step."""

    def __init__(
        self, logits: Sequence[NDArray[np.float32]], drawing: Drawing | None, top_k: int
    ) -> None:
        self._logits = logits
        self._rows: list[NDArray[np.float64]] = []
        if drawing is None:
            tokens = [int(row.argmax()) for row in logits]
            best = zip(logits, tokens, strict=True)
            probs = [_share_of_best(row, row[token], top_k) for row, token in best]
        else:
            n = len(logits)
            temperatures = np.broadcast_to(drawing.temperature, n)
            self._rows = [softmax(row / t) for row, t in zip(logits, temperatures, strict=True)]
            ends = [q.cumsum() for q in self._rows]
            at = [
                e.searchsorted(u * e[-1], "right")
                for e, u in zip(ends, drawing.uniforms[0], strict=True)
            ]
            tokens = [min(int(i), len(q) - 1) for i, q in zip(at, self._rows, strict=True)]
            probs = [float(q.max()) for q in self._rows]
        self.columns = [[token] for token in tokens], [[p] for p in probs]

    def row(self, step: int, part: int) -> NDArray[np.float64]:
        return self._rows[part]

    def likeliest(self, part: int, n: int) -> tuple[tuple[int, float], ...]:
        """The `n` likeliest tokens of a part, each with its probability."""
        row, p = self._logits[part], self.columns[1][part][0]
        best = np.argsort(-row, kind="stable")[:n].tolist()
        return tuple((t, p * float(np.exp(row[t] - row[best[0]]))) for t in best)


def softmax(x: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probabilities of logits [n_vocab]."""
    e = np.exp(x - x.max(), dtype=np.float64)
    return np.asarray(e / e.sum(), np.float64)


def _share_of_best(logits: NDArray[np.float32], best: np.float32, top_k: int) -> float:
    """The softmax of the greatest logit, `best`, among the `top_k` greatest, 0: among all."""
    if 0 < top_k < len(logits):
        logits = np.partition(logits, -top_k)[-top_k:]
    return float(1.0 / np.exp(logits - best).sum(dtype=np.float64))


# -- what the model holds --------------------------------------------------------------------------


class _HeldTokens:
    """One sequence of the model's memory, as far as it is known here."""

    __slots__ = ("checkpoint", "checkpoint_length", "n_checked", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_checked = 0  # first tokens known to equal the history
        self.checkpoint: object = None
        self.checkpoint_length = -1


class DraftMemory:
    """The sequences of a draft model, brought up to a text before each draft.

    Accepted tokens stay and rejected ones are taken back, so that a round decodes one or two new
    tokens and then one for each drafted token; the last drafted token is never decoded.
    """

    def __init__(self, model: Target) -> None:
        self._model = model
        self._held: dict[int, _HeldTokens] = {}
        self.n_rows = 0  # tokens decoded so far

    def tail(self, sequence: int, history: Sequence[int]) -> tuple[list[int], float]:
        """The last tokens of `history` that the model lacks, few enough for a step, and the
        seconds it took to evaluate those before them, which happens once per prompt."""
        new = self._missing(sequence, history)
        if len(new) <= BATCHED_TAIL:
            return new, 0.0
        began = perf_counter()
        self._model.extend(sequence, new[:-1], 0)
        self.fed(sequence, new[:-1])
        return new[-1:], perf_counter() - began

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        """The model was extended by these tokens."""
        self._held[sequence].tokens += tokens
        self.n_rows += len(tokens)

    def mark(self, sequence: int) -> None:
        """All that is held now is history; what follows is draft."""
        held = self._held[sequence]
        held.n_checked = len(held.tokens)
        if not self._model.can_rewind:
            held.checkpoint = self._model.checkpoint(sequence)
            held.checkpoint_length = len(held.tokens)

    def forget(self, sequence: int) -> None:
        """The history may be another: compare what is held from its first token."""
        if sequence in self._held:
            self._held[sequence].n_checked = 0

    def _missing(self, sequence: int, history: Sequence[int]) -> list[int]:
        """Cut the model back to what it shares with `history`; the tokens it lacks."""
        held = self._held.setdefault(sequence, _HeldTokens())
        if self._model.length(sequence) != len(held.tokens):
            # A decode failed: a recurrent memory lost what it held, or it was not noted here.
            self._model.rewind(sequence, 0)
            held = self._held[sequence] = _HeldTokens()
        # The last token of the history is decoded anew, since its logits are wanted.
        tokens, most = held.tokens, min(len(held.tokens), len(history) - 1)
        n = min(held.n_checked, most)
        while n < most and tokens[n] == history[n]:
            n += 1
        if len(tokens) > n:
            n = self._cut(sequence, held, n)
        return list(history[n:])

    def _cut(self, sequence: int, held: _HeldTokens, n: int) -> int:
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
