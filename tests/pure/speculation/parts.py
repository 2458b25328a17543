"""Helpers of tests that draft: drafters, a model that drafts blocks, loop members and texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fake_target import FakeTarget
from numpy.typing import NDArray

from specdec.decoding.acceptance import AcceptanceRule, Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import NO_DRAFT, DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.ngrams import HistoryDrafter
from specdec.types import Chooser, Draft, Drafter, DraftRequest, Drawing, Policy, Round, Target


def never(_: int) -> bool:
    return False


class OwnDraws:
    """Each sequence has its own random numbers and its own temperature."""

    def __init__(self, seed: int) -> None:
        self._rngs = [np.random.default_rng((seed, s)) for s in range(8)]

    def temperature(self, sequence: int) -> float:
        return 0.4 + 0.3 * sequence

    def rng(self, sequence: int) -> np.random.Generator:
        return self._rngs[sequence]


class Silent(HistoryDrafter):
    """A drafter that never has a proposal."""

    name = "silent"
    n_asked = 0

    def _propose(self, asked: DraftRequest) -> Draft:
        self.n_asked += 1
        return NO_DRAFT

    def forget(self, sequence: int) -> None:
        pass


class Proposes(Silent):
    """Proposes the same tokens each time; each takes `step` draft decodes."""

    def __init__(self, name: str, tokens: Sequence[int], p: float, step: int = 0) -> None:
        self.name, self._tokens, self._p, self._step = name, tuple(tokens), p, step

    def _propose(self, asked: DraftRequest) -> Draft:
        self.n_asked += 1
        draft = self._offer(asked, self._tokens, [self._p] * len(self._tokens))
        n_steps = self._step * (len(draft.tokens) + len(draft.dropped))
        return replace(draft, n_steps=n_steps, catch_up_s=0.25 * self._step)


def plain(target: FakeTarget, prompt: Sequence[int], n: int, end: int | None = None) -> list[int]:
    """`prompt` and the target's next `n` tokens, or as many as fit its context."""
    text = list(prompt)
    while len(text) < len(prompt) + n and len(text) <= target.n_ctx:
        text.append(target.next_token(text))
        if text[-1] == end:
            break
    return text


def generated(
    target: Target,
    prompt: Sequence[int],
    n_predict: int,
    drafter: Drafter | None = None,
    policy: Policy | None = None,
    *,
    chooser: Chooser | None = None,
    end: int | None = None,
    n_cached: int = 0,
    acceptance: AcceptanceRule | None = None,
) -> Iterator[Round]:
    """The rounds of one generation in sequence 0."""
    chooser = chooser or Greedy()
    drafting = None
    if drafter is not None and policy is not None:
        drafting = ChainDrafting(target, drafter, policy)
    loop = DecodingLoop(target, drafting)
    accept = acceptance or MatchAcceptance(chooser)
    loop.add(member_of(0, prompt, n_predict, end=end, accept=accept, n_cached=n_cached))
    while not loop.is_idle:
        step = loop.step()
        for _, error in step.failed:
            raise error
        for _, round_ in step.rounds:
            yield round_


def member_of(
    sequence: int,
    prompt: Sequence[int],
    n_predict: int,
    *,
    n_cached: int = 0,
    end: int | None = None,
    accept: AcceptanceRule | None = None,
    chooser: Chooser | None = None,
    **more: Any,
) -> BatchMember:
    judged = accept or MatchAcceptance(chooser or Greedy())
    return BatchMember(
        sequence, list(prompt), judged, n_predict, lambda t: t == end, n_cached, **more
    )


def emitted(rounds: Iterable[Round]) -> list[int]:
    return list(itertools.chain.from_iterable(r.emitted for r in rounds))


# -- a model that drafts by itself, as one on a GPU does -------------------------------------------


@dataclass
class FakeBlock:
    tokens: NDArray[np.int64]
    p: NDArray[np.float32]
    rows: list[list[NDArray[np.float64]]] = field(default_factory=list)

    def row(self, step: int, part: int) -> NDArray[np.float64]:
        return self.rows[step][part]


class FakeBlockModel(FakeTarget):
    """Implements `BlockModel`. `blocks` are the requested draft lengths."""

    def __init__(self, n_steps_max: int = 16, **parameters: object) -> None:
        super().__init__(**parameters)  # type: ignore[arg-type]
        self.n_steps_max = n_steps_max
        self.blocks: list[int] = []
        self._ends: dict[int, int] = {}  # sequence -> last drafted token, not held yet

    def draft(
        self,
        parts: Sequence[tuple[int, Sequence[int]]],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> FakeBlock:
        return self._block(dict(parts), n_steps, drawing, top_k)

    def draft_more(
        self,
        sequences: Sequence[int],
        n_steps: int,
        drawing: Drawing | None = None,
        top_k: int = 0,
    ) -> FakeBlock:
        return self._block({s: [self._ends[s]] for s in sequences}, n_steps, drawing, top_k)

    def _block(
        self, feed: dict[int, Sequence[int]], n_steps: int, drawing: Drawing | None, top_k: int
    ) -> FakeBlock:
        assert 1 <= n_steps <= self.n_steps_max
        self.blocks.append(n_steps)
        shape = (n_steps, len(feed))
        out = FakeBlock(np.zeros(shape, np.int64), np.zeros(shape, np.float32))
        for step in range(n_steps):
            out.rows.append([])
            for part, (sequence, tokens) in enumerate(feed.items()):
                logits = self._append(sequence, tokens)[-1].astype(np.float64)
                given = 1.0 if drawing is None else drawing.temperature
                q = np.exp((logits - logits.max()) / np.broadcast_to(given, len(feed))[part])
                q /= q.sum()
                token = int(q.argmax())
                if drawing is not None:
                    token = int(np.searchsorted(q.cumsum(), drawing.uniforms[step, part], "right"))
                    token = min(token, self.n_vocab - 1)
                if drawing is None and top_k:
                    q[np.argsort(-q, kind="stable")[top_k:]] = 0.0
                    q /= q.sum()
                out.tokens[step, part], out.p[step, part] = token, q.max()
                out.rows[step].append(q)
                feed[sequence] = [token]
        self._ends = {sequence: tokens[-1] for sequence, tokens in feed.items()}
        return out
