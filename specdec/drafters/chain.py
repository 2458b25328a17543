"""Several drafters, one draft: the one of the greatest expected value, not the first in a list.

Proposals that cost nothing are all shown to the policy, and the best is compared with what the
paid drafter has brought lately. llama.cpp takes the first that is not empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.drafters.offer import nothing
from specdec.drafters.together import ProposeMany, propose_many_of
from specdec.types import Draft, Drafter, DraftRequest, Policy, Round, Walk

_MEMORY = 0.15
_PROBE_ROUNDS = 16  # the paid drafter is asked at least this often, so that its value is known


class _Watched:
    """A policy that remembers the walk it began, for its gain."""

    __slots__ = ("_policy", "n_max", "name", "p_top_k", "walk")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.n_max, self.p_top_k = policy.name, policy.n_max, policy.p_top_k
        self.walk: Walk | None = None

    def begin(self, limit: int, source: str) -> Walk:
        self.walk = self._policy.begin(limit, source)
        return self.walk

    def learn(self, round_: Round) -> None:
        self._policy.learn(round_)

    @property
    def gain(self) -> float:
        return 0.0 if self.walk is None else self.walk.gain

    @property
    def spent(self) -> float:
        """0 for policies that do not price a draft's steps."""
        return getattr(self.walk, "spent", 0.0)


class _Offer:
    """The best proposal for one sequence so far, and all there were."""

    __slots__ = ("best", "drafts", "gain")

    def __init__(self, nothing: Draft) -> None:
        self.best, self.gain = nothing, 0.0
        self.drafts: list[Draft] = []

    def add_paid(self, paid: Draft, gain: float) -> None:
        self.drafts.append(paid)
        if not self.best.tokens:
            self.best = paid
        elif paid.tokens and gain >= self.gain:
            # Chosen for what it drew, so its tokens are no longer distributed as its rows say:
            # rejection sampling takes them as certain, which is exact whatever was proposed.
            self.best = replace(paid, rows=())
        else:
            # The model's steps were spent on this round, whoever's tokens it verifies.
            best = self.best
            self.best = replace(
                best,
                n_steps=best.n_steps + paid.n_steps,
                catch_up_s=best.catch_up_s + paid.catch_up_s,
            )

    def outcome(self) -> Draft:
        best = self.best
        if best.decision.rest:
            # The paid drafter's rest is not that of the others, which may have a proposal any time.
            best = replace(best, decision=replace(best.decision, rest=0))
        if not self.drafts:
            return best
        others = tuple(
            [d for d in self.drafts if d.source != best.source and (d.tokens or d.dropped)]
        )
        return replace(best, others=others) if others else best


class ChainDrafter:
    """`free` drafters cost nothing to ask; `paid`, if any, spends draft steps."""

    name = "chain"

    def __init__(self, free: Sequence[Drafter], paid: Drafter | None = None) -> None:
        self.free = tuple(free)
        self._paid_many = None if paid is None else propose_many_of(paid)
        self._all = self.free if paid is None else (*self.free, paid)
        self._nothing = nothing(self.name, "no drafter has a proposal")
        self._paid_gain: float | None = None
        self._since_paid = 0

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        return self.propose_many([DraftRequest(sequence, history, policy, limit)])[0]

    def propose_many(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """The paid drafter is asked for all of them at once."""
        offers = [self._offer(request) for request in requests]
        if self._paid_many is not None:
            self._ask(requests, offers, self._paid_many)
        return [offer.outcome() for offer in offers]

    def _offer(self, asked: DraftRequest) -> _Offer:
        """The best of what costs nothing."""
        sequence, history, policy, limit = asked
        offer, watched = _Offer(self._nothing), _Watched(policy)
        for drafter in self.free:
            watched.walk = None
            draft = drafter.propose(sequence, history, watched, limit)
            if draft.tokens or draft.dropped:
                offer.drafts.append(draft)
            if draft.tokens and watched.gain > offer.gain:
                offer.best, offer.gain = draft, watched.gain
        return offer

    def _ask(
        self, requests: Sequence[DraftRequest], offers: Sequence[_Offer], paid_many: ProposeMany
    ) -> None:
        """Let the paid drafter better the offers that it is worth asking for."""
        self._since_paid += 1
        usual, is_due = self._paid_gain or 0.0, self._since_paid >= _PROBE_ROUNDS
        is_due = is_due or self._paid_gain is None
        asked, poor = [], []
        for request, offer in zip(requests, offers, strict=True):
            if is_due or not offer.best.tokens or offer.gain < usual:
                asked.append(request._replace(policy=_Watched(request.policy)))
                poor.append(offer)
        if not asked:
            return
        self._since_paid = 0
        for request, offer, draft in zip(asked, poor, paid_many(asked), strict=True):
            watched = request.policy
            assert isinstance(watched, _Watched)
            self._paid_was_worth(watched.gain - watched.spent)
            offer.add_paid(draft, watched.gain)

    def _paid_was_worth(self, net: float) -> None:
        # Whether to ask it again depends on what its steps took, too; which draft to verify, now
        # that both are there, does not.
        before = net if self._paid_gain is None else self._paid_gain
        self._paid_gain = before + _MEMORY * (net - before)

    def learn(self, sequence: int, round_: Round) -> None:
        for drafter in self._all:
            drafter.learn(sequence, round_)

    def forget(self, sequence: int) -> None:
        for drafter in self._all:
            drafter.forget(sequence)
