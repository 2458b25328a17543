"""Several sequences decoded together: one draft decode and one verification for all of them.

How many tokens of each draft are verified is decided jointly, since the sequences share the rows
of one batch and with them its price.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

from specdec.decoding.accept import Acceptance
from specdec.decoding.rollback import Rollback
from specdec.decoding.rounds import check_start, end_of, prefill
from specdec.policies.joint import allocate
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, End, IsEnd, Policy, Round, Target, Walk


class BatchDrafter(Protocol):
    """A drafter that serves several sequences in one step."""

    def forget(self, sequence: int) -> None: ...

    def propose_many(
        self, requests: Sequence[tuple[int, Sequence[int], int]], policy: Policy
    ) -> list[tuple[Draft, Walk]]:
        """Drafts for several (sequence, history, limit), with the policy's walk of each."""
        ...


@dataclass(slots=True)
class BatchMember:
    """One generation among others. The target holds the first `n_cached` tokens of `history`,
    which grows; `end` is set when it is over."""

    sequence: int
    history: list[int]
    accept: Acceptance
    n_left: int
    is_end: IsEnd
    n_cached: int = 0
    end: End = field(default="")


def decode_batch(
    target: Target, members: Sequence[BatchMember], *, drafter: BatchDrafter, policy: Throughput
) -> Iterator[list[tuple[BatchMember, Round]]]:
    """Rounds of all members until each has ended; a member that has ended leaves the batch.

    `verify_s` and `draft_s` of a round are those of the whole batch. Raises SpecDecError for an
    empty prompt or a sequence of another length.
    """
    for member in members:
        _start(target, member)
        drafter.forget(member.sequence)
    while active := [s for s in members if not s.end and s.n_left > 0]:
        policy.share_batch(len(active))
        began = perf_counter()
        drafts, walks = _drafts(target, active, drafter, policy)
        drafted = perf_counter()
        rounds = _verify(target, active, drafts, drafted - began)
        n_steps = max(draft.n_steps for draft in drafts)
        for (_, round_), walk in zip(rounds, walks, strict=True):
            for p, accepted in round_.evidence:
                policy.calibration.observe(round_.draft.source, p, accepted)
            policy.calibration.elapse(round_.draft.source, len(round_.emitted))
            policy.settle(round_.draft.source, round_, len(round_.evidence), walk)
        policy.account(
            sum(1 + r.n_drafted for _, r in rounds),
            n_steps,
            sum(len(r.emitted) for _, r in rounds),
            verify_s=rounds[0][1].verify_s + rounds[0][1].rollback_s,
            draft_s=drafted - began,
        )
        yield rounds


def _start(target: Target, member: BatchMember) -> None:
    check_start(target, member.sequence, member.history, member.n_cached)
    prefill(target, member.sequence, member.history, member.n_cached)
    if len(member.history) > target.n_ctx:
        member.end = "context"


def _drafts(
    target: Target, active: Sequence[BatchMember], drafter: BatchDrafter, policy: Throughput
) -> tuple[list[Draft], list[Walk]]:
    """Drafts cut to what pays over all members, and how the policy came to them."""
    requests = [
        (s.sequence, s.history, max(0, min(s.n_left - 1, target.n_ctx - len(s.history))))
        for s in active
    ]
    pairs = drafter.propose_many(requests, policy)
    drafts, walks = [draft for draft, _ in pairs], [walk for _, walk in pairs]
    chains = [_reached(draft, policy) for draft in drafts]
    counts = allocate(chains, policy.costs.times, policy.rate)
    return [_cut(draft, n) for draft, n in zip(drafts, counts, strict=True)], walks


def _reached(draft: Draft, policy: Throughput) -> list[float]:
    """The calibrated probability that each drafted token, kept or dropped, is accepted."""
    out, product = [], 1.0
    for p in (*draft.probs, *(p for _, p in draft.dropped)):
        product *= policy.calibration.probability(draft.source, p)
        out.append(product)
    return out


def _cut(draft: Draft, n: int) -> Draft:
    tokens = (*draft.tokens, *(t for t, _ in draft.dropped))
    probs = (*draft.probs, *(p for _, p in draft.dropped))
    return replace(
        draft,
        tokens=tokens[:n],
        probs=probs[:n],
        dropped=tuple(zip(tokens[n:], probs[n:], strict=True)),
        decision=Decision(n, f"{n} of {len(tokens)} drafted pay in this batch"),
    )


def _verify(
    target: Target, active: Sequence[BatchMember], drafts: Sequence[Draft], draft_s: float
) -> list[tuple[BatchMember, Round]]:
    began = perf_counter()
    feds = [[s.history[-1], *d.tokens] for s, d in zip(active, drafts, strict=True)]
    rollbacks = [
        Rollback(target, s.sequence, len(d.tokens)) for s, d in zip(active, drafts, strict=True)
    ]
    lengths = [len(s.history) for s in active]
    try:
        rows = target.extend_batch([(s.sequence, f) for s, f in zip(active, feds, strict=True)])
        verdicts = [
            s.accept(d, r, s.history, s.is_end)
            for s, d, r in zip(active, drafts, rows, strict=True)
        ]
    except BaseException:
        for member, length, rollback in zip(active, lengths, rollbacks, strict=True):
            del member.history[length:]
            rollback.undo()
        raise
    verify_s = perf_counter() - began
    for fed, verdict, rollback in zip(feds, verdicts, rollbacks, strict=True):
        rollback.keep(fed, len(verdict.emitted))
    rollback_s = perf_counter() - began - verify_s
    out = []
    for i, member in enumerate(active):
        verdict = verdicts[i]
        member.n_left -= len(verdict.emitted)
        member.end = end_of(target.n_ctx, member.history, member.n_left, member.is_end)
        emitted = tuple(verdict.emitted)
        round_ = Round(
            drafts[i],
            verdict.n_accepted,
            emitted,
            draft_s,
            verify_s,
            member.end,
            rollback_s=rollback_s,
        )
        out.append((member, round_))
    return out
