"""Drafts for one member or several, and learning from their rounds.

Sequences that are decoded together share the rows of one batch and with them its price. So the
policy `throughput` decides how many tokens of each draft are verified over all of them at once:
the most probable ones, as long as the batch pays. Other policies decide for each alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.decoding.member import BatchMember
from specdec.drafters.together import one_by_one, propose_many_of
from specdec.policies.bounded import DraftBounds, bounded
from specdec.policies.joint import allocate, level
from specdec.policies.throughput import Throughput
from specdec.types import (
    BatchDrafter,
    Decision,
    Draft,
    Drafter,
    DraftRequest,
    Policy,
    Round,
    Target,
    Walk,
)


@dataclass
class DraftCounters:
    """Proof that several sequences were drafted and decided together."""

    draft_batches: int = 0  # times that the drafter was asked for several sequences at once
    joint_steps: int = 0  # batches of which all lengths were chosen together
    joint_changed: int = 0  # lengths in them that the sequence alone would not have had


class ChainDrafting:
    """Chains of tokens by `drafter`, of lengths by `policy`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        policy: Policy,
        *,
        joint: bool = True,
        batched: bool = True,
        draws: bool = False,
    ) -> None:
        """Slow twins: without `joint`, each length is chosen as if its sequence had the batch for
        itself; without `batched`, each is drafted by itself. `draws`: drafts may be drawn, for
        rejection sampling."""
        self.policy = policy
        self.counters = DraftCounters()
        self._target, self._drafter, self._joint, self._draws = target, drafter, joint, draws
        # By sequence and drafter, those that the last step began; several sequences' only.
        self._walks: dict[int, Mapping[str, Walk]] = {}
        self._n_shared = 1  # members whose batch the policy prices
        self._drafts_many = batched and isinstance(drafter, BatchDrafter)
        self._propose_many = propose_many_of(drafter) if batched else one_by_one(drafter)

    def propose(self, member: BatchMember) -> Draft:
        if self._n_shared != 1:
            self._share(1)
        return self._drafter.propose(
            member.sequence,
            member.history,
            bounded(self.policy, member.bounds),
            self._limit(member),
        )

    def propose_many(self, members: Sequence[BatchMember]) -> list[Draft]:
        self._share(len(members) if self._joint else 1)
        drafts = self._drafts_of(members)
        if self._joint and isinstance(self.policy, Throughput):
            return self._together(members, drafts, self.policy)
        return self._cut_to_fit(drafts)

    def learn(self, member: BatchMember, round_: Round) -> None:
        self.policy.learn(round_)
        self._drafter.learn(member.sequence, round_)

    def learn_many(
        self, rounds: Sequence[tuple[BatchMember, Round]], draft_s: float, *, is_priced: bool
    ) -> None:
        if isinstance(self.policy, Throughput):
            self._learn_together(rounds, self.policy, draft_s, is_priced=is_priced)
        else:
            for _, round_ in rounds:
                self.policy.learn(round_)
        self._walks.clear()
        for member, round_ in rounds:
            self._drafter.learn(member.sequence, round_)

    def forget(self, sequence: int) -> None:
        self._drafter.forget(sequence)

    # -- one by one ------------------------------------------------------------------------------

    def _limit(self, member: BatchMember, n_members: int = 1) -> int:
        """A round of m drafts feeds m + 1 tokens and may emit m + 1. Drawn drafts of all members
        fit a decode: to cut one afterwards would make what is kept depend on what was drawn."""
        target = self._target
        n_rows = min(target.n_outputs, target.n_batch) // (n_members if self._draws else 1)
        n_most = min(self.policy.n_max, n_rows - 1)
        if member.bounds.n_max is not None:
            n_most = min(n_most, member.bounds.n_max)
        return max(0, min(member.n_left - 1, target.n_ctx - len(member.history), n_most))

    def _share(self, n_members: int) -> None:
        """Tell a policy that prices batches of how many members the next ones are."""
        if n_members != self._n_shared and isinstance(self.policy, Throughput):
            self.policy.share_batch(n_members, shares_steps=self._drafts_many)
        self._n_shared = n_members

    def _cut_to_fit(self, drafts: list[Draft]) -> list[Draft]:
        """The longest are cut where all of their rows do not fit one decode."""
        n_most = min(self._target.n_outputs, self._target.n_batch) - len(drafts)
        n_over = sum([len(draft.tokens) for draft in drafts]) - n_most
        while n_over > 0:
            longest = max(drafts, key=lambda draft: len(draft.tokens))
            at, n = drafts.index(longest), len(longest.tokens)
            drafts[at] = cut(longest, max(0, n - max(1, n_over // len(drafts))))
            n_over -= n - len(drafts[at].tokens)
        return drafts

    # -- several together ------------------------------------------------------------------------

    def _together(
        self, members: Sequence[BatchMember], drafts: list[Draft], policy: Throughput
    ) -> list[Draft]:
        """The drafts cut to what pays over all members. A drawn draft stays as its walk left it,
        which decided on each token before it was drawn: rejection sampling is exact for those."""
        if not any([not d.rows and (d.tokens or d.dropped) for d in drafts]):
            return drafts
        chains = [
            [] if d.rows else _reached(d, policy, m.bounds)
            for d, m in zip(drafts, members, strict=True)
        ]
        n_drawn = sum([len(draft.rows) for draft in drafts])
        times = policy.costs.planned[: min(self._target.n_outputs, self._target.n_batch)]
        if self._target.can_rewind:
            counts = allocate(chains, times, policy.rate, n_beside=n_drawn)
        else:
            counts = (level(chains, times, policy.rate),) * len(members)
        out = []
        for draft, member, n in zip(drafts, members, counts, strict=True):
            if not draft.rows and (draft.tokens or draft.dropped):
                n_kept = member.bounds.kept(n)
                self.counters.joint_changed += n_kept != len(draft.tokens)
                draft = cut(draft, n_kept)
            out.append(draft)
        self.counters.joint_steps += 1
        return out

    def _drafts_of(self, members: Sequence[BatchMember]) -> list[Draft]:
        policies = [_Remembering(self.policy) for _ in members]
        requests = [
            DraftRequest(m.sequence, m.history, bounded(p, m.bounds), self._limit(m, len(members)))
            for m, p in zip(members, policies, strict=True)
        ]
        drafts = self._propose_many(requests)
        for member, remembering in zip(members, policies, strict=True):
            self._walks[member.sequence] = remembering.walks
        if self._drafts_many and sum([d.n_steps > 0 for d in drafts]) > 1:
            self.counters.draft_batches += 1
        return drafts

    def _learn_together(
        self,
        rounds: Sequence[tuple[BatchMember, Round]],
        policy: Throughput,
        draft_s: float,
        *,
        is_priced: bool,
    ) -> None:
        for member, round_ in rounds:
            walks, source = self._walks.get(member.sequence, {}), round_.draft.source
            if round_.draft.others:
                policy.overhear(round_.draft.others, round_.emitted, walks)
            evidence = round_.evidence
            for p, accepted in evidence:
                policy.calibration.observe(source, p, accepted)
            policy.calibration.elapse(source, len(round_.emitted))
            policy.settle(source, round_, len(evidence), walks.get(source))
        if not self._joint:
            _account_alone(rounds, policy)
        elif is_priced and rounds:
            first = rounds[0][1]
            n_steps = [round_.draft.n_steps for _, round_ in rounds]
            policy.account(
                sum([1 + round_.n_drafted for _, round_ in rounds]),
                max(n_steps) if self._drafts_many else sum(n_steps),
                sum([len(round_.emitted) for _, round_ in rounds]),
                verify_s=first.verify_s + first.rollback_s,
                draft_s=draft_s,
            )


def _account_alone(rounds: Sequence[tuple[BatchMember, Round]], policy: Throughput) -> None:
    """Each round at the price that it would have had by itself."""
    costs = policy.costs
    for _, round_ in rounds:
        n_rows, n_steps = 1 + round_.n_drafted, round_.draft.n_steps
        policy.account(
            n_rows,
            n_steps,
            len(round_.emitted),
            verify_s=costs.times[n_rows - 1],
            draft_s=n_steps * costs.draft_step_s,
        )


def cut(draft: Draft, n: int) -> Draft:
    """The first `n` tokens that were drafted, of those kept and dropped; the rest is dropped."""
    tokens = (*draft.tokens, *(t for t, _ in draft.dropped))
    probs = (*draft.probs, *(p for _, p in draft.dropped))
    # What was sampled says nothing by not being the target's choice.
    dropped = () if draft.rows else tuple(zip(tokens[n:], probs[n:], strict=True))
    return replace(
        draft,
        tokens=tokens[:n],
        probs=probs[:n],
        rows=draft.rows[:n],
        dropped=dropped,
        decision=Decision(n, f"{n} of {len(tokens)} drafted pay in this batch"),
    )


def _reached(draft: Draft, policy: Throughput, bounds: DraftBounds) -> list[float]:
    """The calibrated probability that each drafted token, kept or dropped, is accepted, of those
    that may be kept."""
    out, product = [], 1.0
    probs = (*draft.probs, *(p for _, p in draft.dropped))
    for p in probs[: bounds.n_allowed(probs)]:
        product *= policy.calibration.probability(draft.source, p)
        out.append(product)
    return out


class _Remembering:
    """A policy that remembers the walks it began, by drafter."""

    __slots__ = ("_policy", "n_max", "name", "p_top_k", "walks")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.n_max, self.p_top_k = policy.name, policy.n_max, policy.p_top_k
        self.walks: dict[str, Walk] = {}

    def begin(self, limit: int, source: str) -> Walk:
        walk = self.walks[source] = self._policy.begin(limit, source)
        return walk

    def learn(self, round_: Round) -> None:
        self._policy.learn(round_)
