"""A profile kept true while serving: T(n) follows what the rounds take.

A round of n tokens tells something about every batch size (a longer context, a warmer machine)
and more about n. So there is one factor for all sizes and one for each, both decaying averages.
What the factors of the sizes in use share moves to the common one.

A size whose time contradicts others, because the machine was busy when it was measured, would never
be used and so never be corrected. Now and then it is planned with at the least time that the others
allow. Where that makes it worth using, a round is decoded with it, and its time decides: either it
agrees with the others and is taken, or the kernels are uneven and the longer time stands. Such
rounds may cost a hundredth of the time.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specdec.costs.profile import (
    CONTRADICTS,
    CostProfile,
    Timed,
    agreeing,
    contradicting,
    is_believed,
    least_plausible,
    today,
)

_STALE_ROUNDS = 8
_OVERALL = 0.05
_SINGLE = 0.03
_COMMON = 0.15  # of what sizes in use share, moved at each refresh
_FADE = 0.9  # of how much a size is in use, at each refresh
_UNUSED = 0.02
_KNOWN_ROUNDS = 12  # observations after which a size that was uncertain is known
_OUTLIER = 3.0  # a step this much over its expectation was something else (a page fault, a probe)
_RETRY_SHARE = 0.01  # of the time, for rounds of sizes in doubt
_RETRY_ROUNDS = 2.0  # and that many of the fastest rounds at once
_REVIEW_REFRESHES = 32  # refreshes between looks at whether sizes contradict each other
_MOST_RETRIES = 40  # the risk of a further one doubles with each


class RefreshedCosts:
    """T(n) of a profile, refreshed by `observe`; `times[n-1]` follows a few rounds late.

    `planned` is what to decide by: `times`, but for the sizes in doubt that are to be tried, whose
    seconds are `tried`. `n_plans` counts changes of that choice, and `n_retries` the rounds that
    tried a size. Without `retries` no size is doubted.
    """

    def __init__(self, profile: CostProfile, n_max: int, *, retries: bool = True) -> None:
        self._profile = profile
        self._base = [profile.time(n) for n in range(1, n_max + 1)]
        self._single = [1.0] * n_max
        self._overall = 1.0
        self._draft_s = profile.draft_step_s
        # A profile without seconds gets them from the first round.
        self._scaled = not profile.relative
        self.times = list(self._base)
        self._n_stale = 0
        self._in_use: dict[int, float] = {}  # size -> recent rounds of it
        self._n_seen: dict[int, int] = {}  # size -> rounds of it
        # Sizes that were guessed, and how often they were seen since: the first rounds say most.
        self._guessed = {n: 0 for n in profile.uncertain if n <= n_max}
        self._retries = retries
        self._doubted: dict[int, int] = {}  # size -> retries that found it as long as it stands
        # The longest times that do not contradict each other, and the least plausible ones of
        # sizes in doubt; both in units of the common factor, which changes.
        self._most: list[float] = []
        self._least: dict[int, float] = {}
        self.tried: dict[int, float] = {}
        self._served_s = self._risked_s = 0.0
        self._n_refreshes = 0
        self.n_plans = self.n_retries = 0
        self.planned = self.times
        self._review()

    @property
    def is_relative(self) -> bool:
        """True while the times are in units of T(1)."""
        return not self._scaled

    @property
    def draft_step_s(self) -> float:
        return self._draft_s

    def reach(self, n_max: int) -> None:
        """Know batches of up to `n_max` rows, as the profile goes on."""
        more = [self._profile.time(n) for n in range(len(self._base) + 1, n_max + 1)]
        self._base += more
        self._single += [1.0] * len(more)
        self.times += [t * self._overall for t in more]
        if more:
            self._review()

    def observe(self, n: int, verify_s: float, n_draft_steps: int, draft_s: float) -> None:
        """A verification of n rows took `verify_s`, and its drafting `draft_s`."""
        if n > len(self._base) or verify_s <= 0:
            return
        self._n_seen[n] = self._n_seen.get(n, 0) + 1
        if not self._scaled:
            self._overall = verify_s / self.planned[n - 1]
            self._draft_s *= self._overall
            self._scaled = True
            self._refresh()
            self._review()
        if n_draft_steps:
            step = draft_s / n_draft_steps
            rate = _SINGLE if self._draft_s > 0 else 1.0
            self._draft_s += rate * (min(step, _OUTLIER * (self._draft_s or step)) - self._draft_s)
        self._served_s += verify_s
        if n in self._doubted and self._retried(n, verify_s):
            return
        ratio = verify_s / self.times[n - 1]
        if ratio > _OUTLIER:
            ratio = _OUTLIER
        self._overall *= 1.0 + _OVERALL * (ratio - 1.0)
        if n in self._guessed:
            self._learn_guessed(n, ratio)
        else:
            self._single[n - 1] *= 1.0 + _SINGLE * (ratio - 1.0)
        self._in_use[n] = self._in_use.get(n, 0.0) + 1.0
        self._n_stale += 1
        if self._n_stale >= _STALE_ROUNDS:
            self._refresh()

    def _learn_guessed(self, n: int, ratio: float) -> None:
        seen = self._guessed[n] + 1
        self._single[n - 1] *= 1.0 + (ratio - 1.0) / (2 + seen)
        self.times[n - 1] = self._base[n - 1] * self._single[n - 1] * self._overall
        self._guessed[n] = seen
        if seen >= _KNOWN_ROUNDS:
            del self._guessed[n]

    def _share_common(self) -> None:
        """Give all sizes what those in use have in common, for that is the machine's."""
        uses, single = self._in_use, self._single
        total = sum(uses.values())
        if not total:
            return
        common = sum(w * math.log(single[n - 1]) for n, w in uses.items()) / total
        for n, w in uses.items():
            single[n - 1] *= math.exp(-_COMMON * common * min(1.0, w))
        self._overall *= math.exp(_COMMON * common)
        self._in_use = {n: _FADE * w for n, w in uses.items() if w > _UNUSED}

    def _refresh(self) -> None:
        self._share_common()
        overall = self._overall
        self.times = [b * s * overall for b, s in zip(self._base, self._single, strict=True)]
        self._n_stale = 0
        self._n_refreshes += 1
        if self._n_refreshes % _REVIEW_REFRESHES == 0:
            self._review()
        else:
            self._plan()

    # -- sizes in doubt --------------------------------------------------------------------------

    def _review(self) -> None:
        """Find the sizes in doubt anew."""
        if self._retries:
            found = contradicting(self.times)
            self._doubted = {n: self._doubted.get(n, 0) for n in found}
            self._most = [t / self._overall for t in agreeing(self.times)] if found else []
            self._least = least_plausible(self._most, self._doubted)
        self._plan()

    def _plan(self) -> None:
        """Decide which sizes in doubt to try: those that can cost no more than may be risked."""
        self.planned = self.times
        if not self._doubted:
            tried: dict[int, float] = {}
        else:
            left_s = _RETRY_SHARE * self._served_s - self._risked_s
            left_s += _RETRY_ROUNDS * min(self.times)
            tried = {}
            for n, k in self._doubted.items():
                least_s = self._least[n] * self._overall
                most_s = self.times[n - 1] if k else self._most[n - 1] * self._overall
                if (most_s - least_s) * 2.0**k <= left_s:
                    tried[n] = least_s
            if tried:
                self.planned = list(self.times)
                for n, least_s in tried.items():
                    self.planned[n - 1] = least_s
        self.n_plans += tried.keys() != self.tried.keys()
        self.tried = tried

    def _retried(self, n: int, verify_s: float) -> bool:
        """Judge a size in doubt by a round of it; True if its time is replaced by this one, which
        is shorter or agrees with the others."""
        is_tried, most_s = n in self.tried, self._most[n - 1] * self._overall
        self.n_retries += is_tried
        is_replaced = is_believed(verify_s, self.times[n - 1], most_s)
        if is_tried and verify_s > CONTRADICTS * most_s:
            self._risked_s += verify_s - self.tried[n]
            self._doubted[n] = min(self._doubted[n] + 1, _MOST_RETRIES)
        if is_replaced:
            # The base is corrected: a factor would be taken for what this machine does now.
            self.times[n - 1] = verify_s
            self._base[n - 1], self._single[n - 1] = verify_s / self._overall, 1.0
            self._guessed[n] = 1
            self._review()
        elif is_tried:
            self._plan()
        return is_replaced

    # -- to be kept ------------------------------------------------------------------------------

    def profile(self) -> CostProfile:
        """The profile as it stands now, to be stored."""
        self._refresh()
        steps = tuple(self.times[: self._profile.n_max])
        return replace(
            self._profile,
            step_s=steps,
            draft_step_s=self._draft_s,
            relative=self._profile.relative and not self._scaled,
            depths=(),
            draft_depths=(),
            uncertain=tuple(n for n in sorted(self._guessed) if n <= len(steps)),
            timed=self._timed(len(steps)),
        )

    def _timed(self, n_max: int) -> tuple[Timed, ...]:
        """The sizes timed so far, with the rounds that they had."""
        if not self._profile.timed:
            return ()  # nobody knows what was timed before
        timed, date = {t.n: t for t in self._profile.timed}, today()
        for n, n_seen in self._n_seen.items():
            if n <= n_max:
                before = timed.get(n, Timed(n, 0, 0.0))
                timed[n] = replace(before, n_repeats=before.n_repeats + n_seen, date=date)
        return tuple(t for _, t in sorted(timed.items()))
