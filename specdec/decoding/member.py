"""One generation among those that are decoded together: its text so far, and why it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.accept import Acceptance
from specdec.errors import SpecDecError
from specdec.policies.bounded import NO_BOUNDS, DraftBounds
from specdec.types import Chooser, End, IsEnd, Target


@dataclass(slots=True, eq=False)
class BatchMember:
    """A generation in `sequence`, of at most `n_left` further tokens.

    `history` is the prompt and then what was emitted; it grows. The target holds the first
    `n_cached` tokens of it at the beginning, and from the first round on all of it but the last.
    """

    sequence: int
    history: list[int]
    chooser: Chooser
    accept: Acceptance
    n_left: int
    is_end: IsEnd
    n_cached: int = 0
    bounds: DraftBounds = NO_BOUNDS  # the request's own, of its drafts
    end: End = field(default="")  # set when it is over
    # Told the logits [n, n_vocab] after each token of a part of the prompt, and the number of the
    # first. Without it none are computed: they cost rows of each decode's output.
    hear_prompt: Callable[[int, NDArray[np.float32]], None] | None = None


def check_start(target: Target, sequence: int, prompt: Sequence[int], n_cached: int) -> None:
    """Raises SpecDecError unless `sequence` holds exactly the first `n_cached` tokens of a prompt
    that is longer than that."""
    if not prompt:
        raise SpecDecError("the prompt is empty: decoding starts from at least one token")
    if not 0 <= n_cached < len(prompt):
        raise SpecDecError(
            f"{n_cached} of {len(prompt)} prompt tokens are cached; the last must be evaluated "
            "anew, so rewind the target by one"
        )
    held = target.length(sequence)
    if held != n_cached:
        raise SpecDecError(
            f"sequence {sequence} holds {held} tokens where {n_cached} are said to be cached"
        )


def end_of(n_ctx: int, history: Sequence[int], n_left: int, is_end: IsEnd) -> End:
    """Why no round follows, "" when one does."""
    if is_end(history[-1]):
        return "end"
    if n_left <= 0:
        return "length"
    return "context" if len(history) > n_ctx else ""
