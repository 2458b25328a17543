"""Drafts with a draft model, greedily or by sampling, one token per call or in blocks.

A model that feeds its own tokens back (`BlockModel`) drafts several tokens per call. On a GPU,
copying a token to the host and deciding takes longer than a step. The policy is fed a block's
probabilities one by one, as if the tokens were drafted one by one. Other models draft one token
per call.

Sampled drafts are for rejection sampling, which is exact only if the decision to verify a token
does not depend on which token was drawn. So the policy is fed the greatest probability in the
token's row, and every drawn token that is kept is verified.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.tree import drafted_tree
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
    holds_trees,
)

if TYPE_CHECKING:
    from specdec.drafters.rows import RowMemory
    from specdec.policies.tree import TreeGrowth

BATCHED_TAIL = 8  # most missing tokens that the draft's first decode evaluates
_FIRST_BLOCK = 4
_BLOCK_MEMORY = 0.25  # weight of the newest draft's length


class DraftSampling(Protocol):
    """The sampling of each sequence's request, for rejection sampling."""

    def temperature(self, sequence: int) -> float: ...

    def rng(self, sequence: int) -> np.random.Generator: ...


class ModelDrafter:
    """Drafts with `model`; nothing else may use its sequences.

    With `sampling`, tokens are drawn and their distributions are kept for rejection sampling.
    Without it, the likeliest tokens are drafted. `n_vocab` cuts off padding that the target's
    vocabulary lacks. `memory` tracks which tokens the model lacks; None: a `DraftMemory`.
    `most` is the most tokens of a draft; None: no limit. Set `n_candidates` to keep that many of
    the likeliest tokens of each greedily drafted position, for a log.
    """

    n_candidates = 0

    def __init__(
        self,
        model: Target,
        *,
        name: str = "draft",
        sampling: DraftSampling | None = None,
        n_vocab: int | None = None,
        memory: DraftMemory | RowMemory | None = None,
        most: int | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._blocks = model if isinstance(model, BlockModel) else None
        self._trees = model if holds_trees(model) and sampling is None and most is None else None
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._sampling = sampling
        self._memory = memory or DraftMemory(model)
        self._most = most
        self._usual = float(_FIRST_BLOCK)  # running mean of draft lengths

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        found = [self._begin(request) for request in requests]
        begun = [f for f in found if isinstance(f, Growing)]
        if begun and self._blocks is not None:
            self._draft_in_blocks(self._blocks, begun)
        elif len(begun) == len(requests) == 1 and (growth := self._growth(begun[0])) is not None:
            return [
                drafted_tree(self._model, self._memory, self.name, begun[0], growth, self._n_vocab)
            ]
        elif begun:
            self._draft_by_token(begun)
        return [f if isinstance(f, Draft) else f.draft(self.name) for f in found]

    def _begin(self, asked: DraftRequest) -> Growing | Draft:
        sequence = asked.sequence
        room = self._model.n_ctx - len(asked.history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        limit = min(asked.limit, room + 1)  # the last drafted token is not decoded
        if self._most is not None:
            limit = min(limit, self._most)
        walk = asked.begin(limit, self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        draws, temperature = None, 0.0
        if self._sampling is not None:
            # One number of the request's generator seeds all draws of the draft. So the count of
            # numbers that a request uses does not depend on the lengths of blocks.
            draws = np.random.default_rng(self._sampling.rng(sequence).integers(1 << 62))
            temperature = self._sampling.temperature(sequence)
        growing = Growing(asked, walk, limit, draws, temperature, self.n_candidates)
        growing.feed, growing.catch_up_s = self._memory.tail(sequence, asked.history)
        return growing

    def _growth(self, growing: Growing) -> TreeGrowth | None:
        """The tree to grow in place of a chain, or None."""
        asked = growing.asked
        if self._trees is None or asked.trees is None:
            return None
        return asked.trees.growth(growing.walk, self.name, asked.n_nodes, growing.limit)

    # -- token by token ---------------------------------------------------------------------------

    def _draft_by_token(self, drafting: list[Growing]) -> None:
        """Draft with one decode of the model per token until no policy wants more."""
        model, memory, n_vocab = self._model, self._memory, self._n_vocab
        begins = True
        while len(drafting) > 1:
            rows = [r for parts in self._batches(drafting) for r in model.extend_batch(parts)]
            for growing in drafting:
                memory.fed(growing.sequence, growing.feed)
                if begins:
                    memory.mark(growing.sequence)
            begins, step = False, zip(drafting, rows, strict=True)
            drafting = [f for f, logits in step if f.choose(logits[-1][:n_vocab])]
        for growing in drafting:  # at most one draft, which needs no batches
            sequence, goes_on = growing.sequence, True
            while goes_on:
                feed = growing.feed
                logits = model.extend(sequence, feed, 1)[-1]
                memory.fed(sequence, feed)
                if begins:
                    memory.mark(sequence)
                    begins = False
                goes_on = growing.choose(logits[:n_vocab])

    def _batches(
        self, drafting: Sequence[Growing]
    ) -> Iterator[list[tuple[int, Sequence[int], int]]]:
        """The tokens to feed, in order, grouped into decodes that the model allows."""
        model, n_tokens = self._model, 0
        batch: list[tuple[int, Sequence[int], int]] = []
        for growing in drafting:
            n = len(growing.feed)
            if batch and (n_tokens + n > model.n_batch or len(batch) == model.n_outputs):
                yield batch
                batch, n_tokens = [], 0
            batch.append((growing.sequence, growing.feed, 1))
            n_tokens += n
        yield batch

    # -- in blocks ---------------------------------------------------------------------------------

    def _draft_in_blocks(self, model: BlockModel, begun: list[Growing]) -> None:
        """Draft with one call of the model per block until no policy wants more."""
        drafting, n_steps = begun, 0
        while drafting:
            limit = min([f.limit for f in drafting])
            n = min(self._block_length(n_steps), limit - n_steps, model.n_steps_max)
            self._step(model, drafting, n, begins=not n_steps)
            drafting, n_steps = [f for f in drafting if f.goes_on], n_steps + n
        self._remember(max([f.n_fed for f in begun]), max([f.limit for f in begun]))

    def _block_length(self, n_drafted: int) -> int:
        """Length of the next block of a draft that has `n_drafted` tokens.

        The first block is as long as recent drafts, and later ones are a quarter of that.
        """
        return max(1, round(self._usual) if n_drafted == 0 else round(self._usual) // 4)

    def _remember(self, n_fed: int, limit: int) -> None:
        """Update the usual length of drafts with `n_fed`, the tokens that the policy took.

        A draft cut short by its `limit` does not lower the usual length.
        """
        if n_fed < limit or n_fed > self._usual:
            self._usual += _BLOCK_MEMORY * (n_fed - self._usual)

    def _step(
        self, model: BlockModel, drafting: Sequence[Growing], n: int, *, begins: bool
    ) -> None:
        """Draft a block of `n` tokens for each draft, and record what the model holds then."""
        memory, drawing, top_k = self._memory, self._drawing(drafting, n), drafting[0].top_k
        if begins:
            block = model.draft([(f.sequence, f.feed) for f in drafting], n, drawing, top_k)
            for growing in drafting:
                memory.fed(growing.sequence, growing.feed)
                memory.mark(growing.sequence)
        else:
            block = model.draft_more([f.sequence for f in drafting], n, drawing, top_k)
        tokens, probs = block.tokens.T.tolist(), block.p.T.tolist()
        for part, (growing, drafted) in enumerate(zip(drafting, tokens, strict=True)):
            held = drafted[:-1] if begins else [growing.feed[-1], *drafted[:-1]]
            if held:
                memory.fed(growing.sequence, held)
            growing.feed = drafted[-1:]
            growing.take(drafted, probs[part], block, part)

    def _drawing(self, drafting: Sequence[Growing], n: int) -> Drawing | None:
        """Each sequence's own random numbers and temperature; None without sampling."""
        if self._sampling is None:
            return None
        uniforms = [f.draws.random(n) for f in drafting if f.draws is not None]
        return Drawing(np.array([f.temperature for f in drafting]), np.stack(uniforms, axis=1))

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def heard(self, sequence: int) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._memory.forget(sequence)

    @property
    def n_rows(self) -> int:
        """Tokens that the model has decoded so far."""
        return self._memory.n_rows


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

    def choose(self, logits: NDArray[np.float32]) -> bool:
        """Draft the token after `feed` by its logits [n_vocab]; True if the policy wants more."""
        self._n_steps += 1
        if self.draws is not None:
            return self._draw(logits, self.draws)
        token = int(logits.argmax())
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

    def _draw(self, logits: NDArray[np.float32], draws: np.random.Generator) -> bool:
        # A temperature near 0 overflows float32.
        q = softmax(np.divide(logits, self.temperature, dtype=np.float64))
        p = float(q.max())
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


# -- what the model holds --------------------------------------------------------------------------


class _HeldTokens:
    """The tokens and the checkpoint that one sequence of the model is known to hold."""

    __slots__ = ("checkpoint", "checkpoint_length", "n_checked", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_checked = 0  # number of first tokens known to equal the history
        self.checkpoint: object = None
        self.checkpoint_length = -1


class DraftMemory:
    """The sequences of a draft model, updated to the current text before each draft.

    Accepted tokens stay and rejected ones are rewound. So a round usually decodes one or two new
    tokens, and then all drafted tokens but the last.
    """

    def __init__(self, model: Target) -> None:
        self._model = model
        self._held: dict[int, _HeldTokens] = {}
        self.n_rows = 0  # tokens decoded so far

    def tail(self, sequence: int, history: Sequence[int]) -> tuple[list[int], float]:
        """The last tokens of `history` that the model lacks, and the seconds spent on earlier ones.

        If more than BATCHED_TAIL tokens are missing, as after a new prompt, all but the last are
        evaluated here.
        """
        new = self._missing(sequence, history)
        if len(new) <= BATCHED_TAIL:
            return new, 0.0
        began = perf_counter()
        self._model.extend(sequence, new[:-1], 0)
        self.fed(sequence, new[:-1])
        return new[-1:], perf_counter() - began

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        """Record that the model was extended by these tokens."""
        self._held[sequence].tokens += tokens
        self.n_rows += len(tokens)

    def mark(self, sequence: int) -> None:
        """Record that all tokens held now are history. The tokens fed later are drafted ones."""
        held = self._held[sequence]
        held.n_checked = len(held.tokens)
        if not self._model.can_rewind:
            held.checkpoint = self._model.checkpoint(sequence)
            held.checkpoint_length = len(held.tokens)

    def forget(self, sequence: int) -> None:
        """Next time, compare the held tokens with the history from the first token on."""
        if sequence in self._held:
            self._held[sequence].n_checked = 0

    def _missing(self, sequence: int, history: Sequence[int]) -> list[int]:
        """Cut the model back to what it shares with `history`. Returns the tokens that it lacks."""
        held = self._held.setdefault(sequence, _HeldTokens())
        if self._model.length(sequence) != len(held.tokens):
            # After a failed decode, the model's tokens differ from those recorded here.
            self._model.rewind(sequence, 0)
            held = self._held[sequence] = _HeldTokens()
        # The last token of the history is always decoded, since its logits are needed.
        tokens, most = held.tokens, min(len(held.tokens), len(history) - 1)
        n = min(held.n_checked, most)
        while n < most and tokens[n] == history[n]:
            n += 1
        if len(tokens) > n:
            n = self._cut(sequence, held, n)
        return list(history[n:])

    def _cut(self, sequence: int, held: _HeldTokens, n: int) -> int:
        """Rewind the model to at most `n` tokens. Returns the number that it then holds."""
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
