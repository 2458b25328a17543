"""The part of a prompt that a step evaluates beside the rounds of running requests. Pure.

A long prompt in one piece would let all others wait; one token at a time would let its own client
wait, and make the device read its weights for little. So a step takes along what costs it next to
nothing, by the measured T(n); and a whole piece when the running requests have had as much time
since the last one as that took: both sides get half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence

_FREE_SHARE = 0.05  # of a step's time, by which tokens that ride along may lengthen it


class PromptShare:
    """Says how many prompt tokens a step takes, and is told how long steps took."""

    def __init__(self, n_piece: int, *, rides_along: bool = True) -> None:
        """`n_piece` tokens are a whole piece. Without `rides_along` nothing is free: the memory is
        recurrent, and computes sequences of different lengths one after the other."""
        self._n_piece, self._rides_along = n_piece, rides_along
        self._is_piece = False  # granted for the step under way
        self._piece_s = 0.0  # the last whole piece
        self._rounds_s = 0.0  # steps since then

    def n_tokens(self, n_rows: int, times: Sequence[float]) -> int | None:
        """Prompt tokens for a step with `n_rows` rows of running requests; None: no limit.

        `times[n - 1]` is T(n) as far as it is known.
        """
        self._is_piece = self._rounds_s >= self._piece_s
        if not n_rows:
            return None
        if self._is_piece:
            return self._n_piece
        return min(self._n_piece, free_tokens(n_rows, times)) if self._rides_along else 0

    def took(self, step_s: float, *, has_rounds: bool, has_prompts: bool) -> None:
        """The step that `n_tokens` was asked for took `step_s`."""
        if not has_rounds:
            self._piece_s = self._rounds_s = 0.0
        elif has_prompts and self._is_piece:
            self._piece_s, self._rounds_s = step_s, 0.0
        else:
            self._rounds_s += step_s


def free_tokens(n_rows: int, times: Sequence[float]) -> int:
    """The tokens that join a batch of `n_rows` rows at next to no cost."""
    if not 0 < n_rows <= len(times):
        return 0
    most_s = times[n_rows - 1] * (1.0 + _FREE_SHARE)
    n = n_rows
    while n < len(times) and times[n] <= most_s:
        n += 1
    return n - n_rows
