"""Combines drafters: the proposal with the greatest expected value is verified.

Proposals of drafters without a model cost nothing, so the policy values all of them. A draft model
or the target's own layers spend draft steps. Only one of these, the *leader*, is asked, and only if
the best free proposal is worth less than the leader's own recent ones. The others are tried
sometimes: for a few steps they are asked together with the leader. One that gained more becomes the
leader. Trials that change nothing are repeated ever more rarely, so they cost little.
llama.cpp takes the first proposal that is not empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean
from time import perf_counter

from specdec.drafters.memory import BATCHED_TAIL
from specdec.drafters.ngrams import nothing
from specdec.types import Draft, Drafter, DraftRequest, Round

_PRICE_MEMORY = 0.2  # weight of the newest price
_MEMORY = 0.05  # weight of the newest gain
_RECOVERED = 0.3  # the same if a drafter that gained nothing gains again
_TRIAL_SHARE = 0.003  # largest share of all tokens' time that a drafter's trials may cost
_CREDIT = 10.0  # tokens that a drafter's trials may cost in advance
_FIRST_TRIALS = 4  # trials in a row, so that a drafter that is far better leads soon
_LEAST_COMPARED = 8.0  # differences, with decay, from which a drafter may lead
_BETWEEN = 24  # least tokens between two later trials
_SURE = 3.0  # standard errors by which a drafter must gain more to lead
_FADE = 0.99  # decay of older differences, per difference
_LONG_REST = 31  # rounds in which a drafter is not asked if nothing else limits them
_MOST_APART = 3.0  # cap on a difference, in tokens


class _Proposals:
    """All proposals for one request so far, and the best of them."""

    __slots__ = ("best", "drafts", "gain", "paid_rest")

    def __init__(self, nothing: Draft) -> None:
        self.best, self.gain = nothing, 0.0
        self.drafts: list[Draft] = []
        self.paid_rest = _LONG_REST  # rounds in which no drafter that spends steps is asked

    def add_free(self, draft: Draft, gain: float) -> None:
        if draft.tokens or draft.dropped:
            self.drafts.append(draft)
        if draft.tokens and gain > self.gain:
            self.best, self.gain = draft, gain

    def add_paid(self, paid: Draft, gain: float) -> None:
        self.drafts.append(paid)
        self.paid_rest = min(self.paid_rest, paid.decision.rest)
        if not self.best.tokens:
            self.best, self.gain = paid, gain
        elif paid.tokens and gain >= self.gain:
            # The choice of this draft depended on its drawn tokens, so they no longer have the
            # distribution in its rows. Without rows, rejection sampling assumes q = 1, which is
            # exact for any proposal.
            self.best, self.gain = replace(paid, rows=()), gain

    def outcome(self, rest_of_looks: int) -> Draft:
        """The draft of the chain. Free drafters rest for `rest_of_looks` rounds if it is empty."""
        best = self.best
        rest = 0 if best.tokens else min(self.paid_rest, rest_of_looks)
        if best.decision.rest != rest:
            best = replace(best, decision=replace(best.decision, rest=rest))
        drafts = [d for d in self.drafts if d.source != best.source]
        # All steps count for this round, even if another draft is verified.
        n_steps = best.n_steps + sum([d.n_steps for d in drafts])
        if n_steps != best.n_steps:
            catch_up_s = best.catch_up_s + sum([d.catch_up_s for d in drafts])
            best = replace(best, n_steps=n_steps, catch_up_s=catch_up_s)
        others = tuple([d for d in drafts if d.tokens or d.dropped])
        return replace(best, others=others) if others else best


class _Paid:
    """A drafter that spends draft steps, and what its proposals gained."""

    __slots__ = ("_at", "_credit", "_mean", "_n_trials", "_price", "_squares", "_until", "_weight",
                 "asked_at", "catch_up", "drafter", "gain", "missed", "price")  # fmt: skip

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.gain: float | None = None  # running mean in tokens, less the price of the steps
        self.asked_at = 0  # emitted tokens when it was asked last
        self.catch_up = 0.0  # usual price in tokens of catching up with the text
        self.price = 0.0  # usual price in tokens of its steps and of catching up
        self.missed = 0.0  # tokens that it might have gained since then
        self._credit = _CREDIT  # tokens that trials may cost now
        self._at = 0  # emitted tokens that the credit counts
        self._until = 0  # emitted tokens at which the next trial may be
        self._price = 0.0  # price of the last trial, in tokens
        self._n_trials = 0
        self.forget()

    def forget(self) -> None:
        """Forget how it compares with the leader."""
        self._weight = self._mean = self._squares = 0.0

    @property
    def usual_gain(self) -> float:
        return math.inf if self.gain is None else self.gain

    @property
    def leads(self) -> bool:
        """True if it surely gained more than the leader."""
        # The variance is assumed to be 1 before there are differences.
        error = math.sqrt((1.0 + self._squares) / (1.0 + self._weight) / max(1.0, self._weight))
        return self._weight >= _LEAST_COMPARED and self._mean > _SURE * error

    def is_tried(self, n_tokens: int) -> bool:
        """True if it may be tried now, after `n_tokens` emitted tokens."""
        self._credit = min(_CREDIT, self._credit + _TRIAL_SHARE * (n_tokens - self._at))
        self._at = n_tokens
        return n_tokens >= self._until and self._credit >= min(self._price, _CREDIT)

    def tried(self, price: float, *, n_in_a_row: int = 0) -> None:
        """Record a trial's price in tokens. The first `n_in_a_row` trials are in a row."""
        self._credit -= price
        self._price = price
        self._n_trials += 1
        self._until = self._at + (0 if self._n_trials < n_in_a_row else _BETWEEN)

    def compared(self, difference: float) -> None:
        """Learn from a trial in which it gained `difference` tokens more than the leader."""
        difference = max(-_MOST_APART, min(_MOST_APART, difference))
        self._weight = _FADE * self._weight + 1.0
        self._squares = _FADE * self._squares + (difference - self._mean) ** 2
        self._mean += (difference - self._mean) / self._weight


class _Bet:
    """A proposal of a trial, and its price in tokens if it is verified."""

    __slots__ = ("_draft", "_price", "paid")

    def __init__(self, request: DraftRequest, offer: _Proposals, paid: _Paid) -> None:
        name = paid.drafter.name
        walk = request.walks.get(name)
        self.paid = paid
        self._draft = next((d for d in offer.drafts if d.source == name), None)
        self._price = 0.0 if walk is None else walk.price + walk.spent

    def gained(self, emitted: Sequence[int]) -> float:
        """The tokens that it gained, less its price.

        If it equals all of the emitted tokens, its further tokens count by their probability.
        """
        if self._draft is None:
            return -self._price
        n, pairs = 0, zip(self._draft.tokens, emitted, strict=False)
        while next((a == b for a, b in pairs), False):
            n += 1
        more, product = 0.0, 1.0
        if n == len(emitted):
            for p in self._draft.probs[n:]:
                product *= p
                more += product
        return n + more - self._price


class ChainDrafter:
    """Verifies the best proposal of `free` drafters, which cost nothing, and of `paid`.

    Drafters in `paid` spend draft steps, which `clock` times if there are several.
    """

    name = "chain"

    def __init__(
        self,
        free: Sequence[Drafter],
        *paid: Drafter,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.free, self._paid = tuple(free), [_Paid(drafter) for drafter in paid]
        self.every = (*self.free, *paid)
        self._clock = clock
        self._n_tokens = 0  # emitted so far
        self._compared: dict[int, list[tuple[_Paid, _Bet, _Bet]]] = {}  # trials, by sequence
        self._nothing = nothing(self.name, "no drafter has a proposal")

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        offers = [_Proposals(self._nothing) for _ in requests]
        for drafter in self.free:
            drafts = drafter.propose(requests)
            for request, offer, draft in zip(requests, offers, drafts, strict=True):
                offer.add_free(draft, _gain(request, drafter))
        if self._paid:
            self._ask_paid(requests, offers)
        looks = [request.policy.rest_of_looks if self.free else 0 for request in requests]
        return [offer.outcome(rest) for offer, rest in zip(offers, looks, strict=True)]

    def _ask_paid(self, requests: Sequence[DraftRequest], offers: Sequence[_Proposals]) -> None:
        """Ask the leader if free drafts are poor, and drafters whose trial is due."""
        leader, *others = self._paid
        is_due = bool(self.free) and leader.is_tried(self._n_tokens)
        poor = [
            (request, offer)
            for request, offer in zip(requests, offers, strict=True)
            if is_due or not offer.best.tokens or offer.gain < leader.usual_gain
        ]
        if not poor:
            return
        tried = [paid for paid in others if paid.is_tried(self._n_tokens)]
        if (
            self.free
            and not is_due
            and not tried
            and self._n_tokens - leader.asked_at > BATCHED_TAIL * len(requests)
            and not self._may_catch_up(leader, poor)
        ):
            return
        price = self._ask(poor, leader)
        if is_due:
            leader.tried(price)
        for paid in tried:
            paid.tried(self._ask(poor, paid), n_in_a_row=_FIRST_TRIALS)
            for request, offer in poor:
                self._compared.setdefault(request.sequence, []).append(
                    (paid, _Bet(request, offer, paid), _Bet(request, offer, leader))
                )

    def _may_catch_up(self, leader: _Paid, poor: Sequence[tuple[DraftRequest, _Proposals]]) -> bool:
        """Count a round in which the leader would have to catch up. True if it is asked."""
        if leader.usual_gain <= 0.0:  # catching up is as rare as a trial
            return leader.price <= _TRIAL_SHARE * (self._n_tokens - leader.asked_at)
        # Catching up comes first, and pays only after several poor offers.
        leader.missed += fmean([leader.usual_gain - offer.gain for _, offer in poor])
        if leader.missed >= leader.catch_up:
            return True
        for _, offer in poor:
            offer.paid_rest = 0  # each round counts
        return False

    def _ask(self, poor: Sequence[tuple[DraftRequest, _Proposals]], paid: _Paid) -> float:
        """Ask `paid` for drafts. Returns the mean price of its steps, in tokens."""
        drafter = paid.drafter
        began = self._clock()
        drafts = drafter.propose([request for request, _ in poor])
        took_s = self._clock() - began - max([draft.catch_up_s for draft in drafts])
        n_steps = max([draft.n_steps for draft in drafts])
        if n_steps and len(self._paid) > 1:  # steps of different drafters take different times
            drafts = [replace(d, step_s=took_s / n_steps) if d.n_steps else d for d in drafts]
        prices = []
        for (request, offer), draft in zip(poor, drafts, strict=True):
            walk = request.walks.get(drafter.name)
            gain, spent = (0.0, 0.0) if walk is None else (walk.gain, walk.spent)
            # The price of the draft steps counts for the decision to ask again. It does not count
            # for the choice between drafts, since the steps are already spent.
            paid.gain = gain - spent if paid.gain is None else paid.gain
            has_recovered = paid.gain <= 0.0 < gain - spent  # it is asked rarely, so this counts
            weight = _RECOVERED if has_recovered else _MEMORY
            paid.gain += weight * (gain - spent - paid.gain)
            catch_up = spent * draft.catch_up_s / took_s if took_s > 0.0 else 0.0
            if catch_up:
                paid.catch_up += _MEMORY * (min(catch_up, _MOST_APART) - paid.catch_up)
            prices.append(spent + catch_up)
            offer.add_paid(draft, gain)
        price = fmean(prices)
        if price > 0.0:  # else the policy let it draft nothing
            paid.asked_at, paid.missed = self._n_tokens, 0.0
            paid.price += (
                _PRICE_MEMORY * (min(price, _CREDIT) - paid.price) if paid.price else price
            )
        return price

    def learn(self, sequence: int, round_: Round) -> None:
        self._n_tokens += len(round_.emitted)
        for paid, bet, leaders_bet in self._compared.pop(sequence, ()):
            if leaders_bet.paid is self._paid[0]:
                paid.compared(bet.gained(round_.emitted) - leaders_bet.gained(round_.emitted))
            if paid.leads:
                self._paid.remove(paid)
                self._paid.insert(0, paid)
                for other in self._paid:
                    other.forget()
        for drafter in self.every:
            drafter.learn(sequence, round_)

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        for drafter in self.every:
            drafter.heard(sequence, text, n_read, salt)

    def forget(self, sequence: int) -> None:
        self._compared.pop(sequence, None)
        for drafter in self.every:
            drafter.forget(sequence)


def _gain(request: DraftRequest, drafter: Drafter) -> float:
    """The gain that the policy expects of the drafter's proposal; 0 without one."""
    walk = request.walks.get(drafter.name)
    return 0.0 if walk is None else walk.gain
