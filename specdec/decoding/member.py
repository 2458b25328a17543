"""A member of the decoding loop: one generation, with what its rounds need to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.acceptance import AcceptanceRule
from specdec.policies.rules import NO_BOUNDS, DraftBounds
from specdec.types import End, IsEnd, Round


@dataclass(slots=True, eq=False)
class BatchMember:
    """A generation in `sequence`, of at most `n_left` further tokens.

    `history` is the prompt followed by the emitted tokens, and grows. At the beginning the target
    holds its first `n_cached` tokens.
    """

    sequence: int
    history: list[int]
    accept: AcceptanceRule
    n_left: int
    is_end: IsEnd
    n_cached: int = 0
    bounds: DraftBounds = NO_BOUNDS  # limits for the request's drafts
    end: End = field(default="")  # reason for the end; "" before the end
    # Called as (index of the first of n prompt tokens, logits [n, n_vocab] after each of them).
    # None: no logits of the prompt are computed.
    hear_prompt: Callable[[int, NDArray[np.float32]], None] | None = None
    # (start, end) of images in the prompt, in order. Each is evaluated alone and whole.
    images: Sequence[tuple[int, int]] = ()
    # Lengths of the prompt's beginnings that are evaluated without what follows, ascending, so that
    # the caller can save the target's state there.
    stops: Sequence[int] = ()
    salt: int = 0  # texts with another one do not draft for this one


Rounds = Sequence[tuple[BatchMember, Round]]  # of one step
