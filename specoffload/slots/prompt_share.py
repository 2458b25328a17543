"""Decides which prompts a step reads, how much of them, and when a step is stopped. Pure.

A step evaluates tokens of prompts beside the rounds of running requests. A *piece* is a whole
ubatch of a prompt; it may take many seconds. Running requests and prompts each get about half of
the time. A short prompt does not wait for a long one: it is read first, and its first token comes
before the long prompt's next piece. If it arrives during a piece, the piece is stopped if that
costs less time than its end would take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_FREE_SHARE = 0.05  # largest share of a step's time by which free prompt tokens lengthen it
_SHORT_SHARE = 1 / 8  # most tokens of a short prompt, as a share of a long prompt's next piece
_LEAST_WAIT_S = 0.5  # shortest wait for which a step is stopped
_MOST_LOST = 0.5  # share of an ubatch after which its end is awaited


@dataclass(frozen=True)
class PromptReads:
    """The prompts that a step reads, by index and in order.

    `n_tokens` limits the tokens of all of them together. None: as many as a decode takes.
    """

    n_tokens: int | None
    prompts: tuple[int, ...]


class PromptShare:
    """Shares the steps of a target between running requests, short prompts and long prompts.

    Most steps with rounds take only free prompt tokens. By the measured T(n), these lengthen the
    step by at most 5%. A step takes a whole piece once the steps since the last whole piece took as
    long as that piece. Steps that hold a long prompt back for a short one are limited in the same
    way.
    """

    def __init__(
        self, n_piece: int, n_batch: int, *, rides_along: bool = True, keeps_ubatches: bool = True
    ) -> None:
        """`n_piece` is the number of tokens of a whole piece, `n_batch` the most of a step.

        If `rides_along` is False, no prompt token is free. Pass False for memory that computes
        sequences of different lengths one after the other. `keeps_ubatches`: a stopped
        step loses only the ubatch that it was computing.
        """
        self._n_piece, self._n_batch = n_piece, n_batch
        self._rides_along, self._keeps_ubatches = rides_along, keeps_ubatches
        self._is_piece = False  # True if the current step takes a whole piece beside rounds
        self._piece_s = 0.0  # seconds of the last step with a whole piece beside rounds
        self._rounds_s = 0.0  # seconds of all steps since the last whole piece
        self._token_s: float | None = None  # seconds per prompt token of the last long piece
        self._n_step = 0  # prompt tokens of the current step, 0 if it reads no long prompt
        self._is_held = False  # True if the current step holds a long prompt back
        self._held_s = 0.0  # seconds that long prompts lost to short ones since the last piece

    def choose(
        self, n_rows: int, lefts: Sequence[int], times: Sequence[float] = (), *, is_first: bool
    ) -> PromptReads:
        """Return what the next step reads.

        Running requests use `n_rows` rows of the step. `lefts` has the number of tokens that each
        prompt lacks, in the order of their arrival. `times[n - 1]` is T(n) in seconds; sizes that
        are not measured are missing. `is_first`: the step gives a request its first token.
        """
        self._is_piece = self._rounds_s >= self._piece_s
        short = self._short(lefts)
        others = [i for i in range(len(lefts)) if i not in short]
        order = (*short, *others)
        n_free = min(self._n_piece, free_tokens(n_rows, times)) if self._rides_along else 0
        self._is_held = bool(others) and (bool(short) or is_first) and self._may_hold(lefts)
        if self._is_held:
            n_short = sum([lefts[i] for i in short])
            self._n_step = 0
            return PromptReads(max(n_short, n_free), order if n_free > n_short else tuple(short))
        n_tokens = None if not n_rows else self._n_piece if self._is_piece else n_free
        n_most = self._n_batch if n_tokens is None else n_tokens
        self._n_step = min(n_most, sum(lefts)) if others else 0
        return PromptReads(n_tokens, order)

    def took(self, step_s: float, *, has_rounds: bool, has_prompts: bool) -> None:
        """Record the seconds of the step for which `choose` was called last."""
        is_long = has_prompts and self._n_step > self._n_piece // 2
        if is_long and (not has_rounds or self._is_piece):
            self._token_s, self._held_s = step_s / self._n_step, 0.0
        if self._is_held:
            self._held_s += step_s
        self._n_step = 0
        if not has_rounds:
            self._piece_s = self._rounds_s = 0.0
        elif has_prompts and self._is_piece and not self._is_held:
            self._piece_s, self._rounds_s = step_s, 0.0
        else:
            self._rounds_s += step_s

    def was_stopped(self, step_s: float) -> None:
        """Record that the step for which `choose` was called last was stopped after `step_s`."""
        self._held_s += self._lost_s(step_s)
        self._n_step = 0

    def is_worth_stopping(self, n_tokens: int, step_s: float) -> bool:
        """True if the current step should be stopped now, `step_s` after its begin.

        `n_tokens` are those that a request lacks which has arrived since and could begin at once.
        Stopping makes the long prompt lose the part of its ubatch that is computed. Going on makes
        the short one wait for the rest of the ubatch. The shorter of both times is lost. Another
        thread may call this.
        """
        n_step, token_s = self._n_step, self._token_s
        if n_tokens > _SHORT_SHARE * n_step:
            return False
        if token_s is None:  # then the time that is left is as likely shorter as longer
            return step_s >= _LEAST_WAIT_S and not self._held_s
        whole_s = n_step * token_s
        if whole_s - step_s < _LEAST_WAIT_S:
            return False
        lost_s = self._lost_s(step_s)
        ubatch_s = min(n_step, self._n_piece) * token_s if self._keeps_ubatches else whole_s
        may_lose = not self._held_s or self._held_s + lost_s <= whole_s
        return may_lose and lost_s <= _MOST_LOST * ubatch_s

    def _lost_s(self, step_s: float) -> float:
        """Return the seconds of computing that stopping the current step at `step_s` loses."""
        if not self._keeps_ubatches or self._token_s is None:
            return step_s
        return step_s % (self._n_piece * self._token_s)

    def _may_hold(self, lefts: Sequence[int]) -> bool:
        """True if long prompts have not yet lost as much time to short ones as their piece takes.

        So a stream of short prompts slows a long one down, but does not stop it.
        """
        if self._token_s is None or not self._held_s:
            return True
        return self._held_s < self._token_s * min(self._n_batch, max(lefts))

    def _short(self, lefts: Sequence[int]) -> list[int]:
        """Return the prompts that are much shorter than the longest one."""
        if len(lefts) < 2:
            return []
        most = _SHORT_SHARE * min(self._n_batch, max(lefts))
        return [i for i, n in enumerate(lefts) if n <= most]


def free_tokens(n_rows: int, times: Sequence[float]) -> int:
    """Return how many more tokens lengthen a batch of `n_rows` rows by at most 5% of its time."""
    if not 0 < n_rows <= len(times):
        return 0
    most_s = times[n_rows - 1] * (1.0 + _FREE_SHARE)
    n = n_rows
    while n < len(times) and times[n] <= most_s:
        n += 1
    return n - n_rows
