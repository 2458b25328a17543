"""Proposals that cost nothing to make: a whole chain of tokens shown to the policy at once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from specdec.types import Decision, Draft, Policy


def offer(
    source: str, tokens: Sequence[int], probs: Sequence[float], policy: Policy, limit: int
) -> Draft:
    """The draft that the policy keeps of `tokens`, at most `limit` of them."""
    walk = policy.begin(min(limit, len(tokens)), source)
    fed, wants = 0, walk.wants
    while wants and fed < len(tokens):
        wants = walk.feed(probs[fed])
        fed += 1
    n = walk.n_best
    dropped = tuple(zip(tokens[n:fed], probs[n:fed], strict=True))
    kept, their_probs = tuple(tokens[:n]), tuple(probs[:n])
    return Draft(kept, their_probs, source, Decision(n, walk.reason), dropped)


@lru_cache(maxsize=256)
def nothing(source: str, reason: str) -> Draft:
    """The empty draft: the same object for the same words."""
    return Draft((), (), source, Decision(0, reason))


def match_probability(length: int) -> float:
    """A prior for a token that followed an equal context of `length` tokens before.

    The calibration learns the true rate of each length, since each has a probability of its own.
    """
    return 1.0 - 1.0 / (2.0 + 0.25 * length)
