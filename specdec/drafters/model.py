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
from typing import Protocol

import numpy as np

from specdec.drafters.growing import Growing
from specdec.drafters.memory import DraftMemory, TokenMemory
from specdec.drafters.tree import drafted_tree
from specdec.policies.tree import TreeGrowth
from specdec.types import (
    BlockModel,
    Decision,
    Draft,
    DraftRequest,
    Drawing,
    Round,
    Target,
    holds_trees,
)

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
        memory: TokenMemory | None = None,
        most: int | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._blocks = model if isinstance(model, BlockModel) else None
        self._may_branch = holds_trees(model) and sampling is None and most is None
        self._n_vocab = min(n_vocab or model.n_vocab, model.n_vocab)
        self._sampling = sampling
        self._memory = memory or DraftMemory(model)
        self._most = most
        self._usual = float(_FIRST_BLOCK)  # running mean of draft lengths

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        begun_or_done = [self._begin(request) for request in requests]
        begun = [f for f in begun_or_done if isinstance(f, Growing)]
        if begun and self._blocks is not None:
            self._draft_in_blocks(self._blocks, begun)
        elif len(begun) == len(requests) == 1 and (growth := self._growth(begun[0])) is not None:
            return [self._draft_tree(begun[0], growth)]
        elif begun:
            self._draft_by_token(begun)
        return [f if isinstance(f, Draft) else f.draft(self.name) for f in begun_or_done]

    def _begin(self, asked: DraftRequest) -> Growing | Draft:
        sequence = asked.sequence
        if asked.n_same is not None:
            self._memory.forget(sequence, asked.n_same)
        room = self._model.n_ctx - len(asked.history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        limit = min(asked.limit, room + 1)  # the last drafted token is not decoded
        if self._most is not None:
            limit = min(limit, self._most)
        walk = asked.begin(limit, self.name, lambda: self._memory.n_unread(sequence, asked.history))
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
        if not self._may_branch or asked.trees is None:
            return None
        return asked.trees.growth(growing.walk, self.name, asked.n_nodes, growing.limit)

    def _draft_tree(self, growing: Growing, growth: TreeGrowth) -> Draft:
        return drafted_tree(self._model, self._memory, self.name, growing, growth, self._n_vocab)

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

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._memory.forget(sequence)

    @property
    def n_rows(self) -> int:
        """Tokens that the model has decoded so far."""
        return self._memory.n_rows
