"""The decoding loop: draft, verify in one batch with the last token, accept, roll back.

After every round the target holds all of the history but its last token, so that closing the
iterator at any round leaves a sequence that the next generation can go on from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

from specdec.decoding.accept import Acceptance, MatchAcceptance, Verdict
from specdec.decoding.rollback import Rollback
from specdec.decoding.rounds import check_start, end_of, play_alone, play_rounds, prefill
from specdec.drafters.none import NO_DRAFT
from specdec.types import Chooser, Draft, Drafter, End, IsEnd, Policy, Round, Target


def decode(
    target: Target,
    sequence: int,
    prompt: Sequence[int],
    *,
    drafter: Drafter,
    policy: Policy,
    chooser: Chooser,
    n_predict: int,
    is_end: IsEnd,
    n_cached: int = 0,
    acceptance: Acceptance | None = None,
) -> Iterator[Round]:
    """Rounds of at most `n_predict` tokens after `prompt`, until an end token or a full context.

    The target's sequence must hold exactly the first `n_cached` tokens of the prompt; the rest of
    it but the last token is prefilled when the first round is asked for. `chooser` samples the
    target; `acceptance` replaces acceptance by match. The policy and the drafter learn from every
    round. Raises SpecDecError for an empty prompt or a sequence of another length, before any
    round; what the target raises passes through with the round undone.
    """
    check_start(target, sequence, prompt, n_cached)
    accept = acceptance or MatchAcceptance(chooser)
    return _rounds(
        target, sequence, list(prompt), drafter, policy, accept, n_predict, is_end, n_cached
    )


def decode_alone(
    target: Target,
    sequence: int,
    prompt: Sequence[int],
    *,
    chooser: Chooser,
    n_predict: int,
    is_end: IsEnd,
    n_cached: int = 0,
) -> Iterator[Round]:
    """As `decode` without a draft: every round is one token, and nobody decides or learns."""
    check_start(target, sequence, prompt, n_cached)
    accept = MatchAcceptance(chooser)
    return _rounds_alone(target, sequence, list(prompt), accept, n_predict, is_end, n_cached)


def _rounds_alone(
    target: Target,
    sequence: int,
    history: list[int],
    accept: Acceptance,
    n_predict: int,
    is_end: IsEnd,
    n_cached: int,
) -> Iterator[Round]:
    prefill(target, sequence, history, n_cached)
    n_left, n_ctx = n_predict, target.n_ctx
    end: End = ""
    while not end and n_left > 0 and len(history) <= n_ctx:
        round_ = play_alone(target, sequence, history, NO_DRAFT, accept, is_end)
        n_left -= 1
        end = end_of(n_ctx, history, n_left, is_end)
        yield replace(round_, end=end) if end else round_


def _rounds(
    target: Target,
    sequence: int,
    history: list[int],
    drafter: Drafter,
    policy: Policy,
    accept: Acceptance,
    n_predict: int,
    is_end: IsEnd,
    n_cached: int,
) -> Iterator[Round]:
    prefill(target, sequence, history, n_cached)
    drafter.forget(sequence)

    def play(limit: int) -> Round:
        began = perf_counter()
        draft = drafter.propose(sequence, history, policy, limit)
        drafted = perf_counter()
        if not draft.tokens:
            draft_s = drafted - began - draft.catch_up_s
            round_ = play_alone(target, sequence, history, draft, accept, is_end, draft_s)
            policy.learn(round_)
            drafter.learn(sequence, round_)
            return round_
        verdict, verified = _verify(target, sequence, history, draft, accept, is_end)
        round_ = Round(
            draft,
            verdict.n_accepted,
            tuple(verdict.emitted),
            drafted - began - draft.catch_up_s,
            verified - drafted,
            rollback_s=perf_counter() - verified,
        )
        policy.learn(round_)
        drafter.learn(sequence, round_)
        return round_

    yield from play_rounds(target, sequence, history, n_predict, is_end, policy, accept, play)


def _verify(
    target: Target,
    sequence: int,
    history: list[int],
    draft: Draft,
    accept: Acceptance,
    is_end: IsEnd,
) -> tuple[Verdict, float]:
    """One decode of [last, *draft], judged and rolled back; and when the judging was done."""
    fed = [history[-1], *draft.tokens]
    rollback = Rollback(target, sequence, len(draft.tokens))
    n_history = len(history)
    try:
        verdict = accept(draft, target.extend(sequence, fed), history, is_end)
    except BaseException:
        del history[n_history:]
        rollback.undo()
        raise
    verified = perf_counter()
    rollback.keep(fed, len(verdict.emitted))
    return verdict, verified
