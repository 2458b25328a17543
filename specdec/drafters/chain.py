"""Several drafters, one draft: the one of the greatest expected value, not the first in a list.

Proposals that cost nothing are all shown to the policy, and the best is compared with what the
paid drafter has brought lately. llama.cpp takes the first that is not empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specdec.drafters.offer import nothing
from specdec.types import Draft, Drafter, Policy, Round, Walk

_MEMORY = 0.15
_PROBE_ROUNDS = 16  # the paid drafter is asked at least this often, so that its value is known


class _Watched:
    """A policy that remembers the walk it began, for its gain."""

    __slots__ = ("_policy", "n_max", "name", "walk")

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.name, self.n_max = policy.name, policy.n_max
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


class ChainDrafter:
    """`free` drafters cost nothing to ask; `paid`, if any, spends draft steps."""

    name = "chain"

    def __init__(self, free: Sequence[Drafter], paid: Drafter | None = None) -> None:
        self.free = tuple(free)
        self._paid = paid
        self._all = self.free if paid is None else (*self.free, paid)
        self._nothing = nothing(self.name, "no drafter has a proposal")
        self._paid_gain: float | None = None
        self._since_paid = 0

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        drafts: list[Draft] = []
        best, gain = self._nothing, 0.0
        watched = _Watched(policy)
        for drafter in self.free:
            watched.walk = None
            draft = drafter.propose(sequence, history, watched, limit)
            if draft.tokens or draft.dropped:
                drafts.append(draft)
            if draft.tokens and watched.gain > gain:
                best, gain = draft, watched.gain
        if self._paid is not None:
            self._since_paid += 1
            asked = self._paid_gain is None or self._since_paid >= _PROBE_ROUNDS
            if not best.tokens or asked or gain < (self._paid_gain or 0.0):
                paid, won = self._asked(self._paid, gain, sequence, history, policy, limit)
                drafts.append(paid)
                best = self._better(best, paid, won=won)
        if best.decision.rest:
            # The paid drafter's rest is not that of the others, which may have a proposal any time.
            best = replace(best, decision=replace(best.decision, rest=0))
        if not drafts:
            return best
        others = tuple([d for d in drafts if d.source != best.source and (d.tokens or d.dropped)])
        return replace(best, others=others) if others else best

    def _asked(
        self,
        paid: Drafter,
        gain: float,
        sequence: int,
        history: Sequence[int],
        policy: Policy,
        limit: int,
    ) -> tuple[Draft, bool]:
        """The paid drafter's proposal, and whether it is worth more than `gain`."""
        watched = _Watched(policy)
        draft = paid.propose(sequence, history, watched, limit)
        self._since_paid = 0
        # Whether to ask it again depends on what its steps took, too; which draft to verify, now
        # that both are there, does not.
        net = watched.gain - watched.spent
        before = net if self._paid_gain is None else self._paid_gain
        self._paid_gain = before + _MEMORY * (net - before)
        return draft, bool(draft.tokens) and watched.gain >= gain

    def _better(self, best: Draft, paid: Draft, *, won: bool) -> Draft:
        if not best.tokens:
            return paid
        if won:
            # Chosen for what it drew, so its tokens are no longer distributed as its rows say:
            # rejection sampling takes them as certain, which is exact whatever was proposed.
            return replace(paid, rows=())
        # The model's steps were spent on this round, whoever's tokens it verifies.
        return replace(
            best, n_steps=best.n_steps + paid.n_steps, catch_up_s=best.catch_up_s + paid.catch_up_s
        )

    def learn(self, sequence: int, round_: Round) -> None:
        for drafter in self._all:
            drafter.learn(sequence, round_)

    def forget(self, sequence: int) -> None:
        for drafter in self._all:
            drafter.forget(sequence)
