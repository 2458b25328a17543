"""Drafts for one member or several, and learning from their rounds.

Sequences that are decoded together share the rows of one batch and with them its price. So the
policy `throughput` decides how many tokens of each draft are verified over all of them at once:
the most probable ones, as long as the batch pays. Other policies decide for each alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdec.decoding.member import BatchMember
from specdec.policies.joint import allocate, level
from specdec.policies.throughput import Throughput
from specdec.types import BatchDrafter, Decision, Draft, Drafter, Policy, Round, Target, Walk


class ChainDrafting:
    """Chains of tokens by `drafter`, of lengths by `policy`."""

    def __init__(
        self, target: Target, drafter: Drafter, policy: Policy, *, joint: bool = True
    ) -> None:
        """Without `joint`, each length is chosen as if its sequence had the batch for itself: the
        slow twin."""
        self.policy = policy
        self._target, self._drafter, self._joint = target, drafter, joint
        # By sequence and drafter, those that the last step began; several sequences' only.
        self._walks: dict[int, Mapping[str, Walk]] = {}
        self._n_shared = 1  # members whose batch the policy prices
        self._drafts_many = isinstance(drafter, BatchDrafter) and not drafter.samples

    def propose(self, member: BatchMember) -> Draft:
        if self._n_shared != 1:
            self._share(1)
        return self._drafter.propose(
            member.sequence, member.history, self.policy, self._limit(member)
        )

    def propose_many(self, members: Sequence[BatchMember]) -> list[Draft]:
        self._share(len(members) if self._joint else 1)
        if isinstance(self.policy, Throughput):
            if self._joint:
                return self._together(members, self.policy)
            return self._cut_to_fit(self._drafts_of(members, self.policy))
        return self._cut_to_fit([self._alone(member, self.policy) for member in members])

    def learn(self, member: BatchMember, round_: Round) -> None:
        self.policy.learn(round_)
        self._drafter.learn(member.sequence, round_)

    def learn_many(
        self, rounds: Sequence[tuple[BatchMember, Round]], draft_s: float, *, is_priced: bool
    ) -> None:
        if isinstance(self.policy, Throughput):
            self._learn_together(rounds, self.policy, draft_s, is_priced=is_priced)
            self._walks.clear()
        else:
            for _, round_ in rounds:
                self.policy.learn(round_)
        for member, round_ in rounds:
            self._drafter.learn(member.sequence, round_)

    def forget(self, sequence: int) -> None:
        self._drafter.forget(sequence)

    # -- one by one ------------------------------------------------------------------------------

    def _limit(self, member: BatchMember) -> int:
        """A round of m drafts feeds m + 1 tokens and may emit m + 1."""
        target = self._target
        n_most = min(self.policy.n_max, target.n_outputs - 1, target.n_batch - 1)
        if member.draft_max is not None:
            n_most = min(n_most, member.draft_max)
        return max(0, min(member.n_left - 1, target.n_ctx - len(member.history), n_most))

    def _share(self, n_members: int) -> None:
        """Tell a policy that prices batches of how many members the next ones are."""
        if n_members != self._n_shared and isinstance(self.policy, Throughput):
            self.policy.share_batch(n_members)
        self._n_shared = n_members

    def _alone(self, member: BatchMember, policy: Policy) -> Draft:
        return self._drafter.propose(member.sequence, member.history, policy, self._limit(member))

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

    def _together(self, members: Sequence[BatchMember], policy: Throughput) -> list[Draft]:
        """Drafts cut to what pays over all members."""
        drafts = self._drafts_of(members, policy)
        if not any([draft.tokens or draft.dropped for draft in drafts]):
            return drafts
        chains = [_reached(draft, policy) for draft in drafts]
        times = policy.costs.times[: min(self._target.n_outputs, self._target.n_batch)]
        if self._target.can_rewind:
            counts = allocate(chains, times, policy.rate)
        else:
            counts = (level(chains, times, policy.rate),) * len(members)
        return [
            cut(draft, n) if draft.tokens or draft.dropped else draft
            for draft, n in zip(drafts, counts, strict=True)
        ]

    def _drafts_of(self, members: Sequence[BatchMember], policy: Throughput) -> list[Draft]:
        drafter = self._drafter
        if self._drafts_many:
            assert isinstance(drafter, BatchDrafter)
            requests = [(m.sequence, m.history, self._limit(m)) for m in members]
            pairs = drafter.propose_many(requests, policy)
            for member, (_, walk) in zip(members, pairs, strict=True):
                self._walks[member.sequence] = {drafter.name: walk}
            return [draft for draft, _ in pairs]
        drafts = []
        for member in members:
            remembering = _Remembering(policy)
            drafts.append(self._alone(member, remembering))
            self._walks[member.sequence] = remembering.walks
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


def _reached(draft: Draft, policy: Throughput) -> list[float]:
    """The calibrated probability that each drafted token, kept or dropped, is accepted."""
    out, product = [], 1.0
    for p in (*draft.probs, *(p for _, p in draft.dropped)):
        product *= policy.calibration.probability(draft.source, p)
        out.append(product)
    return out


class _Remembering:
    """A policy that remembers the walks it began, by drafter."""

    __slots__ = ("_policy", "n_max", "name", "walks")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.n_max = policy.name, policy.n_max
        self.walks: dict[str, Walk] = {}

    def begin(self, limit: int, source: str) -> Walk:
        walk = self.walks[source] = self._policy.begin(limit, source)
        return walk

    def learn(self, round_: Round) -> None:
        self._policy.learn(round_)
