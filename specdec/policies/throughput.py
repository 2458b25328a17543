"""The policy `throughput`, the default: it maximises tokens per second over the long run.

By renewal theory, the best round maximises its number of tokens minus lambda times its time. Lambda
is the best achievable rate in tokens/s. Here lambda is a running estimate (Dinkelbach's iteration).
The value of a drafted token is the calibrated probability that it and all before it are accepted.
Drafting goes on while the expected value of further tokens exceeds the price of a draft step
(`value.drafting_on`). Verifying no draft is always an option. A drafter that saves no time is
probed only rarely, so it costs next to nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from statistics import median_low

import numpy as np

from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile, KnownCosts, LiveCosts
from specdec.options import BY_BLOCK
from specdec.policies.after_prompt import AfterPrompt
from specdec.policies.lately import Lately
from specdec.policies.looks import Looks, ReadingTimes
from specdec.policies.same_size import SameSize
from specdec.policies.tree import N_WIDE, TreeGrowth, TreePrices, source_of
from specdec.policies.value import CENTRES, allocate, extra_time, level
from specdec.policies.walk import (
    FIRST_GAP,
    N_PROBED,
    REBUILD_ROUNDS,
    DrafterOdds,
    NotAsked,
    ThroughputWalk,
    offset_of,
)
from specdec.types import Draft, Policy, Round, Walk

_RATE_ROUNDS = 20.0  # rounds that the estimate of lambda remembers
_PROBE_WEIGHT = 3.0
_PROBE_SHARE = 0.004  # largest share of time for probing
# Share of all tokens gained by drafts above which probing gets more time, and that share of time.
_AHEAD, _PROBE_SHARE_AHEAD = 0.04, 0.02
_PROBE_AGES = 6  # rounds by which a failed probe ages a drafter's plan
_IDLE_ROUNDS = 32  # interval, in rounds, at which a drafter that is not asked is reconsidered
_FIRST_DOUBT = 512  # most rounds until a step that seems too long to ever pay is timed again
_MOST_ALONE = 32  # rounds without a draft that are learnt from together
_LOSS_TOKENS, _LOSS_SHARE = 2.0, 0.003  # allowed loss: tokens, plus a share of emitted tokens
# Further share of allowed loss within which a probe that gained tokens resumes drafting.
_LOSS_MORE = 0.0015
_READ_OF_WON = 0.1  # share of the gained tokens that reading for a probe may cost
_KNOWN = 48.0  # judged tokens, with decay, from which a drafter counts as known
_TRUST_TOKENS = 3.0  # tokens that a new drafter may cost; each judged token adds one
_MOVED = 0.3  # change of a drafter's log-odds after which its plan is rebuilt
_ROW_MEMORY = 0.1  # weight of the newest share of a step that further rows take
_STEPS_SEEN = 32  # newest times of a drafter's step that count
_FLAT = 0.15  # price of a further row, in tokens, above which a tree is no better than a chain
_CHAIN_ROWS = 4  # rows that a chain would fill
_ROW_SHARE = 0.04  # first guess of a further row's time in a draft step, as a share of the step
_CHANGED = 1.2  # change of the plain decode's time, as a ratio, that resets lambda
_PAID = frozenset({"draft", "mtp", "eagle3"})  # drafters whose tokens cost a draft step


class Throughput(Policy):
    """The policy for the costs in `profile`.

    `costs` are the profile's costs, corrected while serving. Without them the profile stays fixed.
    `steps_s` has the seconds of a step of each of several paid drafters, and is corrected too.
    """

    name = "throughput"
    p_top_k = 0
    prices_reading = True

    def __init__(
        self,
        profile: CostProfile,
        calibration: Calibration | None = None,
        *,
        n_max: int | None = None,
        costs: LiveCosts | None = None,
        steps_s: dict[str, float] | None = None,
    ) -> None:
        self.n_max = profile.n_max - 1 if n_max is None else n_max
        self._costs: LiveCosts = costs or KnownCosts(profile, self.n_max + 1)
        self._costs.reach(self.n_max + 1)
        self.calibration = calibration or Calibration()
        self._sources: dict[str, DrafterOdds] = {}
        self._steps_s = {} if steps_s is None else steps_s
        self._walks: dict[str, ThroughputWalk] = {}
        # lambda = tokens / seconds, both decaying. It starts at the rate of plain decoding.
        self._tokens = 4.0
        self._n_tokens = 0
        self._n_rounds = 0
        self._alone_s: list[float] = []  # rounds without a draft that are not learnt from yet
        self._beside = 0  # rows of other sequences in each batch
        self._steps_seen: dict[str, deque[float]] = {}  # by drafter, the kept time first
        self._step_shared_by = 1  # sequences that one draft decode serves
        self._row_share = _ROW_SHARE
        self._won = 0.0  # tokens gained over plain decoding in the same time
        self._seconds = 4.0 * self._costs.planned[0]
        self._n_plans, self._plain_s = self._costs.n_plans, self._costs.times[0]
        self._had_no_unit = self._costs.is_relative
        self._same, self._after_prompt, self._lately = SameSize(), AfterPrompt(), Lately()
        self._looks, self._reading = Looks(), ReadingTimes()
        self._saved_tokens = 0.0  # saved by a batch as large as the last one

    @property
    def costs(self) -> LiveCosts:
        """T(n), corrected by the rounds so far."""
        if self._alone_s:
            self._learn_alone()
        return self._costs

    @property
    def times(self) -> Sequence[float]:
        return self.costs.times

    @property
    def trees(self) -> Throughput:
        return self

    @property
    def rate(self) -> float:
        """lambda: the running estimate of tokens per second, never below plain decoding's."""
        return max(self._tokens / self._seconds, self._plain_rate)

    @property
    def _budget(self) -> float:
        """Tokens that speculation may still lose before it must prove itself; negative: it must."""
        return self._won + _LOSS_TOKENS + _LOSS_SHARE * self._n_tokens

    @property
    def rest_of_looks(self) -> int:
        return 0 if self._beside else self._looks.rest

    def postponed(self, walk: Walk, source: str, n_tokens: int) -> Walk | None:
        """A probe waits until the time of reading the prompt fits what speculation may lose."""
        reading_s = self._reading.expected_s(source, n_tokens, self._step_of(source))
        if not (isinstance(walk, ThroughputWalk) and walk.is_probe) or self._costs.is_relative:
            return None
        known = self._sources[source]
        if known.may_pay and known.n_judged and n_tokens <= known.gap + _IDLE_ROUNDS:
            return None  # the gap between probes is priced already, when a probe has failed
        price = self.rate * reading_s + (walk.n_probed - 1) * known.step
        # What is known of the drafter from earlier texts need not be found out by a loss.
        known_tokens = _LOSS_TOKENS if self.calibration.n_judged(source) >= _KNOWN else 0.0
        unspent = self._budget - known_tokens - (1.0 - _READ_OF_WON) * max(0.0, self._won)
        allowed = max(0.0, unspent)
        if price <= allowed:
            return None
        self._walks.pop(source, None)
        reason = (
            f"reading {n_tokens} tokens of the text first takes the time of {price:.1f} tokens, "
            f"and drafts may cost {allowed:.1f}"
        )
        if self._beside:  # the drafter may have read the texts of other sequences
            return NotAsked(reason, 0)
        known.until = self._n_rounds + _IDLE_ROUNDS
        known.not_asked = NotAsked(reason, _IDLE_ROUNDS - 1)
        return known.not_asked

    def expect(self, sources: Sequence[str]) -> None:
        for source in sources:
            if source in self._sources:  # the same policy goes on
                continue
            known = self._sources[source] = DrafterOdds()
            known.regimes = self.calibration.regimes(source)
            self._rebuild(known, source)

    def prompt_read(self) -> None:
        if not self._beside:
            self._after_prompt.begins()

    def may_ask(self, source: str) -> bool:
        """False if drafts of `source` cannot pay, and no probe is due.

        Such a probe only times a step, so it needs no rows of earlier tokens.
        """
        known = self._sources.get(source)
        return known is None or known.may_pay or known.until <= self._n_rounds

    def begin(self, limit: int, source: str) -> Walk:
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = DrafterOdds()
        if self._n_plans != self._costs.n_plans:
            self._think_anew()
        ahead = known.until - self._n_rounds  # rounds that do not ask it, including this one
        if known.not_asked is not None and ahead > 0 and ahead % _IDLE_ROUNDS:
            known.not_asked.rest = (ahead - 1) % _IDLE_ROUNDS
            return known.not_asked
        if self._alone_s:
            self._learn_alone()
        known.regimes = self.calibration.regimes(source)
        moved_by = abs(offset_of(known.regimes) - known.offset)
        if known.age >= REBUILD_ROUNDS or moved_by > _MOVED:
            self._rebuild(known, source)
        if not (known.may_pay or known.until):
            self._wait_for_probe(known, known.step + known.block)
        ahead = known.until - self._n_rounds
        limit = min(limit, len(known.price) - 1)
        is_probe = False
        self._walks.pop(source, None)
        known.not_asked = None
        if limit > 0 and (known.onwards[0][0] <= known.block or self._budget < 0.0):
            if known.step + known.block > 0.0 and ahead > 0:
                rest = (ahead - 1) % _IDLE_ROUNDS
                known.not_asked = NotAsked(self._off_reason(known), rest)
                return known.not_asked
            is_probe = True
        walk = ThroughputWalk(
            self._affordable(limit, known), source, known, self.calibration, is_probe,
            self._priced_now(known.price, source),
        )  # fmt: skip
        self._walks[source] = walk
        return walk

    def _priced_now(self, price: list[float], source: str) -> list[float]:
        """`price` by drafted tokens, less what a batch as large as the last one saves.

        It is higher in the first rounds after a prompt, and if batches took longer lately.
        """
        if not (self._beside or (self._after_prompt.is_over and self._lately.last_factor == 1.0)):
            price = self._priced_alone(price)
        same = self._same.n_rows - 1 - self._beside
        if not self._saved_tokens or not 0 <= same < len(price):
            return price
        price = [*price]
        # After plain decoding, a lone draft of n-grams changes the size twice: now, and when plain
        # decoding goes on. Drafters that spend steps draft in most rounds, or in none.
        is_lone = same == 0 and source not in _PAID and source not in BY_BLOCK
        n_changes = 2 if is_lone else 1
        price[same] -= n_changes * self._saved_tokens
        return price

    def _priced_alone(self, price: list[float]) -> list[float]:
        """`price` in the first rounds after a prompt, and by what batches took lately."""
        after_prompt = self._after_prompt
        if not after_prompt.is_over and (factor := after_prompt.factor) > 1.0:
            return [factor * tokens for tokens in price]
        if (factor := self._lately.factor(self._n_rounds)) > 1.0:
            more, times = (factor - 1.0) * self.rate, self._costs.planned
            return [price[0], *(p + more * times[n] for n, p in enumerate(price[1:], 1))]
        return price

    def _time(self, round_: Round) -> None:
        """Learn from the seconds of a round's decode, if they are unusual now."""
        if self._beside or self._costs.is_relative:
            return
        planned, n = self._costs.planned, round_.n_drafted
        usual_s = planned[n] if n < len(planned) else planned[-1]
        if not self._after_prompt.is_over:
            self._after_prompt.observe(round_.verify_s, usual_s)
        elif n:
            self._lately.observe(round_.verify_s, usual_s, self._n_rounds)

    def _think_anew(self) -> None:
        """Make every drafter's plan anew, since the planned batch times changed."""
        self._n_plans = self._costs.n_plans
        for known in self._sources.values():
            known.age, known.not_asked = REBUILD_ROUNDS, None
            if known.may_pay:  # else `_rebuild` finds whether it may now
                known.until = 0
        before_s, self._plain_s = self._plain_s, self._costs.times[self._beside]
        if max(before_s, self._plain_s) > _CHANGED * min(before_s, self._plain_s):
            self._seconds = self._tokens / self._plain_rate
            self._won = 0.0  # was counted by a wrong time

    def _affordable(self, limit: int, known: DrafterOdds) -> int:
        """Cap the draft so that its cost fits the trust in the drafter, but not below a probe."""
        price, step = known.price, known.step
        budget = _TRUST_TOKENS + known.n_judged - known.block
        if limit <= N_PROBED or price[limit] + limit * step <= budget:
            return limit
        n = limit
        while n > N_PROBED and price[n] + n * step > budget:
            n -= 1
        return n

    def _rebuild(self, known: DrafterOdds, source: str) -> None:
        self._saved_tokens = 0.0 if self._beside else self.rate * self._same.saved_s
        price = self.rate * extra_time(np.array(self._costs.planned), 1 + self._beside)
        step = self.rate * self._step_of(source) / self._step_shared_by
        could_pay = known.may_pay
        known.rebuild(price, step if source in _PAID else 0.0, step if source in BY_BLOCK else 0.0)
        if known.may_pay and not could_pay:
            known.gap, known.until = FIRST_GAP, 0

    # -- trees -----------------------------------------------------------------------------------

    def growth(self, walk: Walk, source: str, n_nodes: int, n_deep: int) -> TreeGrowth | None:
        """A tree for the walk just begun; None if a chain is as good.

        It has at most `n_nodes` nodes worth verifying, none of them deeper than `n_deep` tokens.
        A tree verifies many rows that a chain would not fill. So it needs a T(n) that is flat.
        """
        if self._beside or not isinstance(walk, ThroughputWalk) or walk.is_probe:
            return None
        known, times, rate = self._sources[source], self._costs.planned, self.rate
        n = min(n_nodes, self.n_max, len(times) - 1)
        wide = min(n, N_WIDE)
        if wide <= _CHAIN_ROWS:
            return None
        slope = rate * (times[wide] - times[_CHAIN_ROWS]) / (wide - _CHAIN_ROWS)
        if slope > _FLAT:
            return None
        price = [rate * (time_s - times[0]) for time_s in times[: n + 1]]
        price = self._priced_now(price, source)
        budget = _TRUST_TOKENS + known.n_judged - known.block
        while n > N_PROBED and price[n] - price[0] > budget:
            n -= 1
        seen = np.array(known.seen)
        follow = float(seen @ CENTRES / seen.sum())
        calibration, regimes = self.calibration, known.regimes

        def calibrated(rank: int, p: float) -> float:
            q = calibration.usual(source_of(source, rank), p)
            if rank:
                return q
            return sum([w * q * odds / (1.0 - q + q * odds) for w, odds in regimes])

        prices = TreePrices(price[: n + 1], known.step, known.step * self._row_share)
        return TreeGrowth(prices, calibrated, follow, n_deep)

    def grown(self, walk: Walk, growth: TreeGrowth, n_steps: int, n_rows: int) -> None:
        """Give the walk the tree's value, after its `n_steps` draft steps of `n_rows` nodes."""
        if isinstance(walk, ThroughputWalk):
            nodes, value = growth.chosen()
            prices = growth.prices
            spent = n_steps * prices.step + (n_rows - n_steps) * prices.row
            walk.grew(len(nodes), sum([node.reached for node in nodes]), value, spent)

    def _see_tree(self, round_: Round) -> None:
        """Learn from the successors that were verified beside the likeliest ones."""
        draft = round_.draft
        for rank, p, right in draft.seen_in_tree(round_.emitted):
            if rank:
                self.calibration.observe(source_of(draft.source, rank), p, right)

    def _without_rows(self, draft: Draft, draft_s: float) -> float:
        """The seconds of a tree's draft steps, if each had expanded one node. Learns the rest."""
        usual_s = draft.n_steps * self._step_of(draft.source)
        if not draft.n_extra_rows or usual_s <= 0.0:
            return draft_s
        share = draft_s / usual_s - 1.0  # of a step, for all further rows
        newest = min(1.0, max(0.0, share * draft.n_steps / draft.n_extra_rows))
        self._row_share += _ROW_MEMORY * (newest - self._row_share)
        return draft_s / (1.0 + self._row_share * draft.n_extra_rows / draft.n_steps)

    def learn(self, round_: Round) -> None:
        draft = round_.draft
        if draft.tokens or not self._after_prompt.is_over:
            self._time(round_)
        if not (self._walks or draft.tokens or draft.dropped or draft.others or draft.n_steps):
            self._n_rounds += 1
            self._alone_s.append(round_.verify_s)
            self._looks.emitted(1)
            if round_.draft_s > 0.0:
                self._look(round_)
            if len(self._alone_s) >= _MOST_ALONE:
                self._learn_alone()
            return
        source = draft.source
        walk = self._walks.get(source)
        if draft.others:
            self.overhear(draft.others, round_.emitted)
        evidence = round_.evidence
        for p, accepted in evidence:
            self.calibration.observe(source, p, accepted)
        if draft.parents:
            self._see_tree(round_)
        self.calibration.elapse_all(len(round_.emitted))
        expected = float(len(round_.emitted))
        self.settle(source, round_, len(evidence))
        if walk is not None and walk.limit > 0 and walk.n_best == round_.n_drafted:
            expected = 1.0 + walk.total_best
        self.account(
            round_.n_drafted + 1,
            draft.n_steps,
            len(round_.emitted),
            steps_s=self._steps_of(draft),
            n_expected=expected,
            verify_s=round_.verify_s,
            rollback_s=round_.rollback_s,
            draft_s=self._without_rows(draft, round_.draft_s),
        )
        if draft.catch_up_s:
            self._has_read(draft, walk)
        elif not draft.n_steps and round_.draft_s > 0.0:
            self._look(round_)

    def _look(self, round_: Round) -> None:
        """Learn what a round without draft steps cost and gained."""
        if self._beside or self._costs.is_relative:
            return
        self._looks.looked(round_.draft_s * self._plain_rate)
        if round_.n_drafted:
            took = (round_.verify_s + round_.rollback_s) * self._plain_rate
            self._looks.gained(len(round_.emitted) - took - self._saved_tokens)

    def _has_read(self, draft: Draft, walk: Walk | None) -> None:
        """Learn how long reading took. A probe's is a loss, as far as drafts may lose more."""
        is_probe = isinstance(walk, ThroughputWalk) and walk.is_probe
        others_s = sum([other.catch_up_s for other in draft.others])
        self._reading.took(draft.source, draft.catch_up_s - others_s)
        for other in draft.others:
            self._reading.took(other.source, other.catch_up_s)
        if is_probe and not self._costs.is_relative:
            spent = draft.catch_up_s * self._plain_rate
            self._won -= min(spent, max(0.0, self._budget + _LOSS_TOKENS))

    def overhear(
        self,
        others: Sequence[Draft],
        emitted: Sequence[int],
        walks: Mapping[str, Walk] | None = None,
    ) -> None:
        """Learn from the drafts that were not chosen, by comparing them with `emitted`.

        Otherwise a drafter that was poor once would never be chosen again. `walks` are the walks of
        these drafts by drafter; pass them if several sequences share the batch.
        """
        for draft in others:
            self._time_step(draft)
            for p, right in draft.judged_by(emitted):
                self.calibration.observe(draft.source, p, right)
            begun: Walk | None = self._walks.pop(draft.source, None)
            walk = begun if walks is None else walks.get(draft.source)
            if isinstance(walk, ThroughputWalk) and walk.limit > 0:
                known = self._sources[draft.source]
                self._judge(known, walk, 0.0, False)

    def settle(self, source: str, round_: Round, n_judged: int, walk: Walk | None = None) -> None:
        """Learn what a draft was worth.

        `walk` is the sequence's own walk, if several share the batch. Without it, the walk last
        begun for `source` is used. The caller must call the calibration's `observe` and `elapse`,
        and `account`, itself.
        """
        self._time_step(round_.draft)
        begun = self._walks.pop(source, None)
        walk = begun if walk is None else walk
        if not (isinstance(walk, ThroughputWalk) and walk.limit > 0):
            return
        known = self._sources[source]
        known.n_judged += n_judged
        times, n_drafted = np.array(self._costs.planned), round_.n_drafted
        steps_s = self._steps_of(round_.draft) / self._step_shared_by
        extra_s = float(extra_time(times, 1 + self._beside)[n_drafted]) + steps_s
        has_gained = len(round_.emitted) - 1 > extra_s * self._plain_rate
        self._judge(known, walk, round_.draft.catch_up_s, has_gained)

    # -- several sequences in a batch --------------------------------------------------------------

    def lengths(
        self,
        chains: Sequence[tuple[str, Sequence[float]]],
        n_rows: int,
        *,
        n_beside: int = 0,
        are_equal: bool = False,
    ) -> Sequence[int]:
        """The lengths that pay for all sequences together: the most probable tokens first."""
        reached = [self._reached(source, probs) for source, probs in chains]
        times, rate = self.costs.planned[:n_rows], self.rate
        if are_equal:
            return (level(reached, times, rate),) * len(chains)
        return allocate(reached, times, rate, n_beside=n_beside)

    def _reached(self, source: str, probs: Sequence[float]) -> list[float]:
        """Calibrated probabilities, by token, that it and all tokens before it are accepted."""
        calibrated = [self.calibration.probability(source, p) for p in probs]
        return [*accumulate(calibrated, mul)]

    def learn_together(
        self,
        rounds: Sequence[tuple[Round, Mapping[str, Walk]]],
        draft_s: float,
        *,
        is_priced: bool,
    ) -> None:
        for round_, walks in rounds:
            source, evidence = round_.draft.source, round_.evidence
            if round_.draft.others:
                self.overhear(round_.draft.others, round_.emitted, walks)
            for p, accepted in evidence:
                self.calibration.observe(source, p, accepted)
            self.calibration.elapse(source, len(round_.emitted))
            walk = walks.get(source)
            self.settle(source, round_, len(evidence), walk)
            if round_.draft.catch_up_s:
                self._has_read(round_.draft, walk)
        if is_priced and rounds:
            first = rounds[0][0]
            self.account(
                sum([1 + round_.n_drafted for round_, _ in rounds]),
                max([round_.draft.n_steps for round_, _ in rounds]),
                sum([len(round_.emitted) for round_, _ in rounds]),
                verify_s=first.verify_s,
                rollback_s=first.rollback_s,
                draft_s=draft_s,
            )

    def _step_of(self, source: str) -> float:
        """Seconds of a step of this drafter: its own if it was timed, or the costs' only one."""
        return self._steps_s.get(source) or self._costs.draft_step_s

    def _steps_of(self, draft: Draft) -> float:
        """Seconds of all draft steps of a round, those of drafts that were not chosen included."""
        if not self._steps_s:  # one drafter: this is called in each round
            return draft.n_steps * self._costs.draft_step_s
        n_others = sum([other.n_steps for other in draft.others])
        own_s = (draft.n_steps - n_others) * self._step_of(draft.source)
        return own_s + sum([d.n_steps * self._step_of(d.source) for d in draft.others])

    def _time_step(self, draft: Draft) -> None:
        """Learn the seconds of a drafter's step, if they were timed apart from others' steps."""
        if draft.step_s > 0:
            kept = self._steps_s.get(draft.source)
            newest = deque([kept] if kept else [], maxlen=_STEPS_SEEN)
            seen = self._steps_seen.setdefault(draft.source, newest)
            seen.append(draft.step_s)
            # Two steps that agree outweigh a disturbed one, also the kept one. Other programs only
            # make steps longer, so a shorter one counts at once.
            self._steps_s[draft.source] = median_low(seen)

    def account(
        self,
        n_rows: int,
        n_steps: int,
        n_emitted: int,
        *,
        verify_s: float,
        draft_s: float,
        steps_s: float | None = None,
        rollback_s: float = 0.0,
        n_expected: float | None = None,
    ) -> None:
        """Learn from one decode of `n_rows` rows, after `n_steps` draft decodes.

        `steps_s` are the usual seconds of these draft decodes. None: each is a step of the costs.
        `n_emitted` tokens were gained. `n_expected`, if given, is their expected number, which
        makes lambda less noisy than the actual number.
        """
        if self._alone_s:
            self._learn_alone()
        self._n_rounds += 1
        tried = self._costs.tried
        is_retry = n_rows in tried or 1 + self._beside in tried
        self._observe(n_rows, verify_s, rollback_s, n_steps, draft_s)
        keep = 1.0 - 1.0 / _RATE_ROUNDS
        self._costs.reach(n_rows)
        usual_s = n_steps * self._costs.draft_step_s if steps_s is None else steps_s
        took = self._costs.times[n_rows - 1] + usual_s
        self._n_tokens += n_emitted
        self._looks.emitted(n_emitted)
        if not is_retry:  # retries of doubted sizes have a budget of their own
            self._won += n_emitted - took * self._plain_rate
        self._tokens = self._tokens * keep + (n_emitted if n_expected is None else n_expected)
        self._seconds = self._seconds * keep + took

    def _observe(
        self, n_rows: int, verify_s: float, rollback_s: float, n_steps: int, draft_s: float
    ) -> None:
        self._costs.observe(n_rows, verify_s, rollback_s, n_steps, draft_s)
        self._same.observe(n_rows, verify_s)
        if self._had_no_unit and not self._costs.is_relative:
            self._had_no_unit = False
            self._seconds = self._tokens * self._costs.times[0]

    def _learn_alone(self) -> None:
        """Do what `account` does, for all pending rounds without a draft at once.

        Each decode empties the processor's caches. With a small model, this code would take three
        times as long if it ran after every single round.
        """
        alone_s, self._alone_s = self._alone_s, []
        n = len(alone_s)
        for verify_s in alone_s:
            self._observe(1, verify_s, 0.0, 0, 0.0)
        self.calibration.elapse_all(n)
        self._n_tokens += n
        keep = (1.0 - 1.0 / _RATE_ROUNDS) ** n
        come = (1.0 - keep) * _RATE_ROUNDS
        self._tokens = self._tokens * keep + come
        self._seconds = self._seconds * keep + come * self._costs.times[0]

    def share_batch(self, n_sequences: int) -> None:
        """Plan for batches of `n_sequences` sequences from now on.

        Each batch then has at least one row of each sequence, and one draft decode serves all.
        """
        if n_sequences - 1 != self._beside:
            self._learn_alone()
            self._after_prompt.ends()
            self._beside = n_sequences - 1
            self._step_shared_by = n_sequences
            self._costs.reach(self.n_max + n_sequences)
            self._seconds = self._tokens / self._plain_rate
            for known in self._sources.values():
                known.age, known.not_asked = REBUILD_ROUNDS, None

    @property
    def _plain_rate(self) -> float:
        """Tokens per second without speculation."""
        return (1 + self._beside) / self._costs.planned[self._beside]

    def _judge(
        self, known: DrafterOdds, walk: ThroughputWalk, catch_up_s: float, has_gained: bool
    ) -> None:
        weight = _PROBE_WEIGHT if walk.is_probe else 1.0
        for q in walk.qs:
            known.see(q, weight)
        if not walk.is_probe:
            known.age += 1
            known.gap, known.until = FIRST_GAP, 0
            return
        known.age += _PROBE_AGES
        # Drafting resumes after a probe that gained tokens, even while speculation is behind. It
        # does not resume if speculation is far behind.
        if (has_gained and self._budget > -_LOSS_TOKENS - _LOSS_MORE * self._n_tokens) or (
            walk.gain > walk.spent and self._budget >= 0.0
        ):
            known.gap, known.until = FIRST_GAP, 0  # no wait after a successful probe
            known.age = REBUILD_ROUNDS
            return
        # The price of asking a draft model includes the time in which it first read the prompt.
        self._wait_for_probe(known, walk.spent + self.rate * catch_up_s)

    def _wait_for_probe(self, known: DrafterOdds, spent: float) -> None:
        """Set the rounds until the next probe, which costs `spent` tokens.

        They grow with each failed probe, up to the time whose share a probe may take. If the
        drafter cannot pay, a probe only shows whether its step was measured rightly. Then all of
        that time passes at once, within a limit, because the step may have been far too long.
        """
        # Tokens in the time of one plain token, at the rate lambda.
        plain = self.rate / self._plain_rate
        share = _PROBE_SHARE_AHEAD if self._won > _AHEAD * self._n_tokens else _PROBE_SHARE
        longest = max(FIRST_GAP, int(spent / (plain * share)))
        if known.may_pay:
            known.gap = min(longest, max(known.gap * 2, longest // 5))
        else:
            known.gap = min(longest, max(_FIRST_DOUBT, 2 * known.gap))
            known.age = REBUILD_ROUNDS
        known.until = self._n_rounds + 1 + known.gap  # this round is not counted yet

    def _off_reason(self, known: DrafterOdds) -> str:
        if not known.may_pay:
            return "drafts would cost more time than they save even if all their tokens were right"
        times = self._costs.times
        return (
            f"drafts would cost more time than they save, since a decode of 2 tokens takes "
            f"{times[1] / times[0]:.2f} times as long as one of 1; tried again now and then"
        )
