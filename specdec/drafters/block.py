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
from specdec.types import Block, BlockModel, Decision, Draft, Policy, Round, Walk

_FIRST = 4  # the length of the first block of all
_MEMORY = 0.25


@dataclass(frozen=True)
class Draws:
    """A `Drawing` as plain data."""

    temperature: float
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
        room = self._model.n_ctx - len(history)
        if room < 0:
            return Draft((), (), self.name, Decision(0, "the draft's context is full"))
        # The last drafted token is not decoded, so room + 1 fit.
        limit = min(limit, room + 1)
        walk = policy.begin(limit, self.name)
        if not walk.wants:
            return Draft((), (), self.name, Decision(0, walk.reason, walk.rest))
        found = _Found(walk, drawn=self._sampling is not None)
        draws = self._draws(sequence)
        new = self._memory.tail(sequence, history)
        while found.goes_on:
            n = self._block_length(found.n_steps, limit)
            block = self._step([(sequence, new)], n, draws, begins=not found.n_steps)
            found.take(block, 0, n)
        self._pace.wanted(found.n_fed, limit)
        return found.draft(self.name, self._memory.catch_up_s(sequence))

    @property
    def samples(self) -> bool:
        """True if tokens are drawn."""
        return self._sampling is not None

    def propose_many(
        self, requests: Sequence[tuple[int, Sequence[int], int]], policy: Policy
    ) -> list[tuple[Draft, Walk]]:
        """Drafts for several (sequence, history, limit), with the policy's walk of each: one step
        per token for all of them. Greedy only."""
        found: list[_Found] = []
        parts: dict[int, list[int]] = {}  # of requests: tokens to feed
        limits: dict[int, int] = {}
        for i, (sequence, history, limit) in enumerate(requests):
            room = self._model.n_ctx - len(history)
            limits[i] = max(0, min(limit, room + 1))
            walk = policy.begin(limits[i], self.name)
            found.append(_Found(walk, drawn=False))
            if walk.wants and room >= 0:
                parts[i] = self._memory.tail(sequence, history)
        drafting, n_steps = list(parts), 0
        while drafting:
            n = self._block_length(n_steps, min(limits[i] for i in drafting))
            fed = [(requests[i][0], parts[i]) for i in drafting]
            block = self._step(fed, n, None, begins=not n_steps)
            for part, i in enumerate(drafting):
                found[i].take(block, part, n)
            drafting, n_steps = [i for i in drafting if found[i].goes_on], n_steps + n
        if parts:
            self._pace.wanted(max(found[i].n_fed for i in parts), max(limits[i] for i in parts))
        out = []
        for i, each in enumerate(found):
            caught_up_s = self._memory.catch_up_s(requests[i][0]) if i in parts else 0.0
            out.append((each.draft(self.name, caught_up_s), each.walk))
        return out

    def _block_length(self, n_drafted: int, limit: int) -> int:
        return min(self._pace.length(n_drafted), limit - n_drafted, self._model.n_steps_max)

    def _step(
        self,
        fed: Sequence[tuple[int, list[int]]],
        n: int,
        draws: np.random.Generator | None,
        *,
        begins: bool,
    ) -> Block:
        """Draft a block; what the model holds then is noted."""
        drawing = None
        if self._sampling is not None and draws is not None:
            temperature = self._sampling.temperature(fed[0][0])
            drawing = Draws(temperature, draws.random((n, len(fed))))
        if begins:
            block = self._model.draft(fed, n, drawing)
            for sequence, new in fed:
                self._memory.fed(sequence, new)
                self._memory.mark(sequence)
        else:
            block = self._model.draft_more([sequence for sequence, _ in fed], n, drawing)
        for part, (sequence, last) in enumerate(fed):
            drafted = block.tokens[:, part].tolist()
            held = drafted[:-1] if begins else [last[-1], *drafted[:-1]]
            self._memory.fed(sequence, held)
            last[:] = drafted[-1:]
        return block

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

    def __init__(self, walk: Walk, drawn: bool) -> None:
        self.walk = walk
        self.goes_on = walk.wants
        self.n_steps = 0  # of the model, those included that nobody asked for
        self.n_fed = 0  # tokens that the policy was fed
        self._drawn = drawn
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
