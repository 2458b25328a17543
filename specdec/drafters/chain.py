"""Combines drafters: the proposal with the greatest expected value is verified.

Proposals of drafters without a model cost nothing, so the policy values all of them. A draft model,
or the target's own layers, is asked only if the best of these is worth less than its own recent
proposals.
llama.cpp takes the first proposal that is not empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter

from specdec.drafters.ngrams import nothing
from specdec.types import Draft, Drafter, DraftRequest, Round

_MEMORY = 0.15
_PROBE_ROUNDS = 16  # most steps between two questions to the same paid drafter


class _Offer:
    """All proposals for one request so far, and the best of them."""

    __slots__ = ("best", "drafts", "gain")

    def __init__(self, nothing: Draft) -> None:
        self.best, self.gain = nothing, 0.0
        self.drafts: list[Draft] = []

    def add_free(self, draft: Draft, gain: float) -> None:
        if draft.tokens or draft.dropped:
            self.drafts.append(draft)
        if draft.tokens and gain > self.gain:
            self.best, self.gain = draft, gain

    def add_paid(self, paid: Draft, gain: float) -> None:
        self.drafts.append(paid)
        if not self.best.tokens:
            self.best = paid
        elif paid.tokens and gain >= self.gain:
            # The choice of this draft depended on its drawn tokens, so they no longer have the
            # distribution in its rows. Without rows, rejection sampling assumes q = 1, which is
            # exact for any proposal.
            self.best = replace(paid, rows=())
        else:
            # The draft model's steps count for this round even if another draft is verified.
            n_steps = self.best.n_steps + paid.n_steps
            catch_up_s = self.best.catch_up_s + paid.catch_up_s
            self.best = replace(self.best, n_steps=n_steps, catch_up_s=catch_up_s)

    def outcome(self) -> Draft:
        best = self.best
        if best.decision.rest:
            # Only the draft model rests; another drafter may have a proposal at any time.
            best = replace(best, decision=replace(best.decision, rest=0))
        others = [d for d in self.drafts if d.source != best.source and (d.tokens or d.dropped)]
        return replace(best, others=tuple(others)) if others else best


class _Paid:
    """A drafter that spends draft steps, and the recent gain of its proposals."""

    __slots__ = ("drafter", "gain", "n_since")

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.gain: float | None = None  # running mean in tokens, less the price of the steps
        self.n_since = 0  # steps since it was asked

    @property
    def usual_gain(self) -> float:
        return math.inf if self.gain is None else self.gain


class ChainDrafter:
    """Verifies the best proposal of `free` drafters, which cost nothing, and of `paid`.

    Drafters in `paid` spend draft steps. The one that gained most is asked first.
    """

    name = "chain"

    def __init__(self, free: Sequence[Drafter], *paid: Drafter) -> None:
        self.free, self._paid = tuple(free), [_Paid(drafter) for drafter in paid]
        self._all = (*self.free, *paid)
        self._nothing = nothing(self.name, "no drafter has a proposal")

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        offers = [_Offer(self._nothing) for _ in requests]
        for drafter in self.free:
            drafts = drafter.propose(requests)
            for request, offer, draft in zip(requests, offers, drafts, strict=True):
                offer.add_free(draft, _gain(request, drafter))
        for paid in sorted(self._paid, key=lambda p: -p.usual_gain):
            self._ask(requests, offers, paid)
        return [offer.outcome() for offer in offers]

    def _ask(self, requests: Sequence[DraftRequest], offers: Sequence[_Offer], paid: _Paid) -> None:
        """Ask `paid` for drafts of the requests whose best offer is below its usual gain.

        If `paid` is due for a probe, it is asked for all requests.
        """
        paid.n_since += 1
        is_due = paid.gain is None or paid.n_since >= _PROBE_ROUNDS
        usual, drafter = paid.gain or 0.0, paid.drafter
        poor = [
            (request, offer)
            for request, offer in zip(requests, offers, strict=True)
            if is_due or not offer.best.tokens or offer.gain < usual
        ]
        if not poor:
            return
        paid.n_since = 0
        began = perf_counter()
        drafts = drafter.propose([request for request, _ in poor])
        if len(self._paid) > 1:  # steps of different drafters take different times
            took_s = perf_counter() - began - max([draft.catch_up_s for draft in drafts])
            n_steps = max([draft.n_steps for draft in drafts])
            drafts = [replace(d, step_s=took_s / n_steps) if d.n_steps else d for d in drafts]
        for (request, offer), draft in zip(poor, drafts, strict=True):
            gain, walk = _gain(request, drafter), request.walks.get(drafter.name)
            # The price of the draft steps counts for the decision to ask again. It does not count
            # for the choice between drafts, since the steps are already spent.
            net = gain - (0.0 if walk is None else walk.spent)
            before = net if paid.gain is None else paid.gain
            paid.gain = before + _MEMORY * (net - before)
            offer.add_paid(draft, gain)

    def learn(self, sequence: int, round_: Round) -> None:
        for drafter in self._all:
            drafter.learn(sequence, round_)

    def heard(self, sequence: int) -> None:
        for drafter in self._all:
            drafter.heard(sequence)

    def forget(self, sequence: int) -> None:
        for drafter in self._all:
            drafter.forget(sequence)


def _gain(request: DraftRequest, drafter: Drafter) -> float:
    """The gain that the policy expects of the drafter's proposal; 0 without one."""
    walk = request.walks.get(drafter.name)
    return 0.0 if walk is None else walk.gain
