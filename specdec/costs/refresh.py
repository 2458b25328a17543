"""A profile kept true while serving: T(n) follows what the rounds take.

A round of n tokens tells something about every batch size (a longer context, a warmer machine)
and more about n. So there is one factor for all sizes and one for each, both decaying averages.
What the factors of the sizes in use share moves to the common one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specdec.costs.profile import CostProfile

_STALE_ROUNDS = 8
_OVERALL = 0.05
_SINGLE = 0.03
_COMMON = 0.15  # of what sizes in use share, moved at each refresh
_FADE = 0.9  # of how much a size is in use, at each refresh
_UNUSED = 0.02
_KNOWN_ROUNDS = 12  # observations after which a size that was uncertain is known
_OUTLIER = 3.0  # a step this much over its expectation was something else (a page fault, a probe)


class RefreshedCosts:
    """T(n) of a profile, refreshed by `observe`; `times[n-1]` follows a few rounds late."""

    def __init__(self, profile: CostProfile, n_max: int) -> None:
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
        # Sizes that were guessed, and how often they were seen since: the first rounds say most.
        self._guessed = {n: 0 for n in profile.uncertain if n <= n_max}

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

    def observe(self, n: int, verify_s: float, n_draft_steps: int, draft_s: float) -> None:
        """A verification of n rows took `verify_s`, and its drafting `draft_s`."""
        if n > len(self._base) or verify_s <= 0:
            return
        if not self._scaled:
            self._overall = verify_s / self._base[n - 1]
            self._draft_s *= self._overall
            self._scaled = True
            self._refresh()
        ratio = verify_s / self.times[n - 1]
        if ratio > _OUTLIER:
            ratio = _OUTLIER
        self._overall *= 1.0 + _OVERALL * (ratio - 1.0)
        if n in self._guessed:
            self._learn_guessed(n, ratio)
        else:
            self._single[n - 1] *= 1.0 + _SINGLE * (ratio - 1.0)
        self._in_use[n] = self._in_use.get(n, 0.0) + 1.0
        if n_draft_steps:
            step = draft_s / n_draft_steps
            rate = _SINGLE if self._draft_s > 0 else 1.0
            self._draft_s += rate * (min(step, _OUTLIER * (self._draft_s or step)) - self._draft_s)
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
            uncertain=tuple(n for n in sorted(self._guessed) if n <= len(steps)),
        )
