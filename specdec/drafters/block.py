"""A draft model that drafts several tokens before it is asked again: `model` in blocks.

A model on a GPU feeds each drafted token to the next step by itself; what takes time beside the
steps is to bring tokens to the host and to decide. So tokens are drafted in blocks, and the policy
is fed a block's probabilities one by one, as if they came one by one: what it decides is the same.
Steps that it would not have asked for are the price, so blocks are about as long as drafts lately
were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.drafters.memory import DraftMemory
from specdec.types import Block, BlockModel, Decision, Draft, DraftRequest, Policy, Round, Walk

_FIRST = 4  # the length of the first block of all
_MEMORY = 0.25


@dataclass(frozen=True)
class Draws:
    """A `Drawing` as plain data."""

    temperature: NDArray[np.float64]
    uniforms: NDArray[np.float64]


class BlockSampling(Protocol):
    """The draws of each sequence's request, for rejection sampling."""

    def temperature(self, sequence: int) -> float: ...

    def rng(self, sequence: int) -> np.random.Generator: ...


class Pace:
    """Lengths of blocks: the first of a draft as long as drafts lately were, further ones short.

    With `fixed`, all are of that length: 1 is a step and a copy per token, the slow twin.
    """

    def __init__(self, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._usual = float(_FIRST)

    def length(self, n_drafted: int) -> int:
        """Of the next block, behind `n_drafted` tokens of this draft."""
        if self._fixed is not None:
            return self._fixed
        usual = round(self._usual)
        return max(1, usual if n_drafted == 0 else usual // 4)

    def wanted(self, n: int, limit: int) -> None:
        """A draft is over, of which the policy took `n` tokens of the `limit` there could be. One
        that the end of the text cut short says nothing of the next."""
        if n < limit or n > self._usual:
            self._usual += _MEMORY * (n - self._usual)


class BlockDrafter:
    """Drafts with `model`, whose sequences are this drafter's own.

    With `sampling`, tokens are drawn and their distributions kept, for rejection sampling; else
    they are the most likely ones. `block` fixes the length of blocks.
    """

    def __init__(
        self,
        model: BlockModel,
        *,
        name: str = "draft",
        sampling: BlockSampling | None = None,
        block: int | None = None,
    ) -> None:
        self.name = name
        self._model = model
        self._sampling = sampling
        self._memory = DraftMemory(model)
        self._pace = Pace(block)

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        return self.propose_many([DraftRequest(sequence, history, policy, limit)])[0]

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One step per token for all of them."""
        found = [self._begin(request) for request in requests]
        drafting = begun = [f for f in found if isinstance(f, _Found)]
        n_steps = 0
        while drafting:
            n = self._block_length(n_steps, min([f.limit for f in drafting]))
            block = self._step(drafting, n, begins=not n_steps)
            for part, each in enumerate(drafting):
                each.take(block, part, n)
            drafting, n_steps = [f for f in drafting if f.goes_on], n_steps + n
        if begun:
            self._pace.wanted(max([f.n_fed for f in begun]), max([f.limit for f in begun]))
        return [
            f if isinstance(f, Draft) else f.draft(self.name, self._memory.catch_up_s(a.sequence))
            for f, a in zip(found, requests, strict=True)
        ]

    def _begin(self, asked: DraftRequest) -> _Found | Draft:
        """A draft to be made, or the empty one that it is."""
        sequence = asked.sequence
        room = self._model.n_ctx - len(asked.history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        # The last drafted token is not decoded, so room + 1 fit.
        limit = min(asked.limit, room + 1)
        walk = asked.policy.begin(limit, self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        feed = self._memory.tail(sequence, asked.history)
        return _Found(asked, walk, limit, feed, self._draws(sequence))

    def _block_length(self, n_drafted: int, limit: int) -> int:
        return min(self._pace.length(n_drafted), limit - n_drafted, self._model.n_steps_max)

    def _step(self, drafting: Sequence[_Found], n: int, *, begins: bool) -> Block:
        """Draft a block; what the model holds then is noted."""
        sequences = [f.sequence for f in drafting]
        drawing, top_k = self._drawing(drafting, n), drafting[0].p_top_k
        if begins:
            parts = [(f.sequence, f.feed) for f in drafting]
            block = self._model.draft(parts, n, drawing, top_k)
            for each in drafting:
                self._memory.fed(each.sequence, each.feed)
                self._memory.mark(each.sequence)
        else:
            block = self._model.draft_more(sequences, n, drawing, top_k)
        for part, each in enumerate(drafting):
            drafted = block.tokens[:, part].tolist()
            held = drafted[:-1] if begins else [each.feed[-1], *drafted[:-1]]
            self._memory.fed(each.sequence, held)
            each.feed = drafted[-1:]
        return block

    def _drawing(self, drafting: Sequence[_Found], n: int) -> Draws | None:
        """Each sequence's own numbers at its own temperature, so that what it is with does not
        change what it draws."""
        if self._sampling is None:
            return None
        temperatures = [self._sampling.temperature(f.sequence) for f in drafting]
        uniforms = [f.draws.random(n) for f in drafting if f.draws is not None]
        return Draws(np.array(temperatures), np.stack(uniforms, axis=1))

    def _draws(self, sequence: int) -> np.random.Generator | None:
        """Random numbers of one draft: as many as its blocks happen to need, and one of the
        request's, so that what else is drawn from that does not depend on the blocks' lengths."""
        if self._sampling is None:
            return None
        return np.random.default_rng(self._sampling.rng(sequence).integers(1 << 62))

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
        limit: int,
        feed: list[int],
        draws: np.random.Generator | None,
    ) -> None:
        self.sequence, self.walk, self.limit = asked.sequence, walk, limit
        self.p_top_k = asked.policy.p_top_k  # the same for all that share a block
        self.feed = feed  # tokens that the model does not hold yet
        self.draws = draws
        self.goes_on = walk.wants
        self.n_steps = 0  # of the model, those included that nobody asked for
        self.n_fed = 0  # tokens that the policy was fed
        self._drawn = draws is not None
        self._tokens: list[int] = []
        self._probs: list[float] = []
        self._gaps: list[float] = []
        self._rows: list[NDArray[np.float64]] = []

    def take(self, block: Block, part: int, n: int) -> None:
        """Feed the walk with a block's tokens until it wants no more."""
        self.n_steps += n
        for step in range(n):
            if not self.goes_on:
                return
            p = float(block.p[step, part])
            self.goes_on = self.walk.feed(p)
            self.n_fed += 1
            # Whether a drawn token is verified must be decided before it is known which it is:
            # its row's greatest probability is all that the walk has seen.
            if self._drawn and not self.goes_on and self.walk.n_best <= len(self._tokens):
                return
            self._tokens.append(int(block.tokens[step, part]))
            self._probs.append(p)
            self._gaps.append(float(block.gap[step, part]))
            if self._drawn:
                self._rows.append(block.row(step, part))

    def draft(self, name: str, catch_up_s: float) -> Draft:
        n = len(self._tokens) if self._drawn else self.walk.n_best
        return Draft(
            tuple(self._tokens[:n]),
            tuple(self._probs[:n]),
            name,
            Decision(n, self.walk.reason),
            tuple(zip(self._tokens[n:], self._probs[n:], strict=True)),
            rows=tuple(self._rows),
            n_steps=self.n_steps,
            catch_up_s=catch_up_s,
            gaps=tuple(self._gaps),
        )
