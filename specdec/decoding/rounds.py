"""The frame of all decoding loops: the start, the room for a draft, and the end of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from specdec.decoding.accept import Acceptance
from specdec.decoding.rollback import take_back
from specdec.errors import SpecDecError
from specdec.types import Draft, End, IsEnd, Policy, Round, Target

PlayRound = Callable[[int], Round]


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


def prefill(target: Target, sequence: int, history: Sequence[int], n_cached: int) -> None:
    """Evaluate all of the prompt that the target lacks, but for its last token."""
    tail = history[n_cached:-1]
    if tail:
        target.extend(sequence, tail, 0)


def play_rounds(
    target: Target,
    sequence: int,
    history: list[int],
    n_predict: int,
    is_end: IsEnd,
    policy: Policy,
    accept: Acceptance,
    play: PlayRound,
) -> Iterator[Round]:
    """Rounds until one of them ends the generation; the last says why.

    `play(limit)` decodes one round of at most `limit` drafted tokens, appends what it emits to
    `history`, and leaves the target with all of the history but its last token. Where its decision
    holds for further rounds, those decode one token each here, and neither drafter nor policy is
    asked; the policy learns from them all the same.
    """
    n_left, n_ctx, n_max = n_predict, target.n_ctx, policy.n_max
    end: End = ""
    round_: Round | None = None
    rest = 0  # rounds for which the last decision still holds
    while not end and n_left > 0 and len(history) <= n_ctx:
        if rest and round_ is not None:
            rest -= 1
            round_ = play_alone(target, sequence, history, round_.draft, accept, is_end)
            policy.learn(round_)
        else:
            # A round of m drafts feeds m + 1 tokens and may emit m + 1.
            round_ = play(max(0, min(n_left - 1, n_ctx - len(history), n_max)))
            rest = round_.draft.decision.rest
        n_left -= len(round_.emitted)
        end = end_of(n_ctx, history, n_left, is_end)
        yield replace(round_, end=end) if end else round_


def play_alone(
    target: Target,
    sequence: int,
    history: list[int],
    draft: Draft,
    accept: Acceptance,
    is_end: IsEnd,
    draft_s: float = 0.0,
) -> Round:
    """One decode of the last token; `draft` is the empty one that was decided on in `draft_s`."""
    n_history = len(history)
    began = perf_counter()
    try:
        verdict = accept(draft, target.extend(sequence, history[-1:]), history, is_end)
    except BaseException:
        del history[n_history:]
        take_back(target, sequence, n_history - 1)
        raise
    return Round(draft, 0, tuple(verdict.emitted), draft_s, perf_counter() - began)


def end_of(n_ctx: int, history: Sequence[int], n_left: int, is_end: IsEnd) -> End:
    """Why no round follows, "" when one does."""
    if is_end(history[-1]):
        return "end"
    if n_left <= 0:
        return "length"
    return "context" if len(history) > n_ctx else ""
