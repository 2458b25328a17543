"""Acceptance by match: a drafted token stands while it is what the target's sampler chooses.

Pure but for the chooser's own state. The emitted tokens are exactly those of decoding without a
draft, for any sampler chain, grammar and penalties included, because every emitted token was
chosen by the chain from the target's own logits for its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.types import Chooser, Draft, IsEnd


@dataclass(frozen=True, slots=True)
class Verdict:
    """`emitted` holds the `n_accepted` drafted tokens and then, unless one of them ended the
    text, one token of the target's own."""

    n_accepted: int
    emitted: list[int]


class Acceptance(Protocol):
    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        """Judge a draft by logits [1 + n drafted, n_vocab]; appends what it emits to `history`."""
        ...


class Greedy:
    """The target's most likely token, whatever came before."""

    def choose(self, logits: NDArray[np.float32], history: Sequence[int]) -> int:
        return int(logits.argmax())

    def accepted(self, token: int) -> None:
        pass


class MatchAcceptance:
    """Accepts a drafted token while the chooser would have taken it."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        choose, accepted = self._chooser.choose, self._chooser.accepted
        emitted: list[int] = []
        for i, drafted in enumerate(draft.tokens):
            token = choose(logits[i], history)
            accepted(token)
            emitted.append(token)
            history.append(token)
            if token != drafted:
                return Verdict(i, emitted)
            if is_end(token):
                return Verdict(i + 1, emitted)
        token = choose(logits[len(draft.tokens)], history)
        accepted(token)
        emitted.append(token)
        history.append(token)
        return Verdict(len(draft.tokens), emitted)
