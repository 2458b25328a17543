"""One generation: a decoding loop of one member, and the iterator of its rounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from specdec.decoding.accept import Acceptance, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember, check_start
from specdec.types import Chooser, Drafter, IsEnd, Policy, Round, Target


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
    member = BatchMember(sequence, list(prompt), chooser, accept, n_predict, is_end, n_cached)
    return DecodingLoop(target, ChainDrafting(target, drafter, policy)).rounds_of(member)


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
    member = BatchMember(sequence, list(prompt), chooser, accept, n_predict, is_end, n_cached)
    return DecodingLoop(target).rounds_of(member)
