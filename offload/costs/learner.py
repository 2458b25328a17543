"""Keeps the cost table true while serving, and finds ways that have become faster. Pure.

Every decode corrects the time of the way it went: a factor for the machine, one for the way and
one for the batch size. Now and then a few decodes go another way. At most a hundredth of the time
is risked for that, and a trial ends once it has cost its share.

A size whose time contradicts others, because the machine was busy when it was measured, would never
be drafted for and so never be corrected. It is planned with at the least time that the others allow
where that costs little. Its next decode decides: either it agrees with the others, or the kernels
are uneven and the longer time stands.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from offload.costs.table import (
    CONTRADICTS,
    PAYS,
    CostTable,
    Entry,
    Way,
    agreeing,
    is_believed,
)

_BUFFERED = 8  # decodes that are learnt from together, since caches are cold between decodes
_OF_MACHINE, _OF_WAY, _OF_SIZE = 0.03, 0.02, 0.03  # learning rates of the three factors
_SHARED = 0.15  # share of what sizes in use have in common that moves to their way's factor
_FADE, _UNUSED = 0.9, 0.02  # decay of how much a size is in use, and when it is forgotten
_KNOWN_AFTER = 12  # decodes after which a size that was never timed counts as known
_OUTLIER = 3.0  # ratio to the expectation from which on something else happened
_RISKED = 0.01  # share of the time that trials may cost
_CREDIT = 2.0  # decodes of the fastest size that may be risked at once
_REVIEW = 32  # refreshes between searches for contradictions
_MOST_RETRIES = 40  # the price of one more retry doubles with each
_TRIAL = 8  # decodes that are compared in a trial, and before it
_FIRST_TRIAL, _MOST_BETWEEN = 64, 1 << 14  # decodes of a size between its trials
_SURPRISE = 1.15  # ratio of a size's time to its usual one that puts every way in doubt
_STEADY = 128  # decodes of a size at least between two surprises

Ways = Callable[[int], Sequence[Way]]  # batch size -> the ways that it may go


@dataclass(frozen=True)
class Change:
    """Batches of `n_tokens` go another way from now on; seconds are medians of both."""

    n_tokens: int
    way: Way
    seconds: float
    before: Way
    before_s: float

    @property
    def words(self) -> str:
        tokens = "1 token" if self.n_tokens == 1 else f"{self.n_tokens} tokens"
        return (
            f"batches of {tokens} are computed {_WORDS[self.way]} from now on: "
            f"{self.seconds * 1e3:.1f} ms instead of {self.before_s * 1e3:.1f} ms "
            f"{_WORDS[self.before]}"
        )


_WORDS = {
    Way.IN_PLACE: "by the CPU",
    Way.STREAMED: "on the GPU with streamed experts",
    Way.SPLIT: "by CPU and GPU together",
    Way.DENSE: "on the GPU with streamed weights",
    Way.FIXED: "as --min-batch says",
}


@dataclass
class _Size:
    """The state of one batch size while serving."""

    way: Way
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TRIAL))
    n_since: int = 0  # decodes since the last trial
    wait: int = field(default_factory=lambda: _FIRST_TRIAL)
    n_changes: int = 0
    trial: Way | None = None
    trial_s: list[float] = field(default_factory=list)
    cost_s: float = 0.0  # extra seconds of the trial over the chosen way
    most_cost_s: float = 0.0
    n_lost: dict[Way, int] = field(default_factory=dict)  # trials in vain, by way
    is_fresh: bool = True  # the next decode builds its graph, and is not compared
    usual_s: float = 0.0  # its time when ways were last thought over
    n_steady: int = 0  # decodes since that time changed


class Learner:
    """T(n) and the way of each batch size, corrected by `took`.

    `times[n-1]` is T(n) in seconds; `planned` is the same but for doubted sizes that are to be
    tried, whose seconds are in `tried`. `n_plans` counts changes of that choice, `n_retries` the
    decodes that tried a size, `n_trials` and `n_changes` those of ways.
    """

    def __init__(
        self,
        table: CostTable,
        n_max: int,
        ways: Ways,
        *,
        draft_step_s: float = 0.0,
        relative: bool = False,
        on_ways: Callable[[int], None] = lambda n: None,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`ways(n)` are those that a batch of n may go, the usual one first. `relative`: the table
        is in units of T(1) until the first decode. `on_ways(n)` is told when the answers of `way`
        have changed, for the size n and perhaps others."""
        self._table, self._ways, self._n_table = table, ways, n_max
        self._measured = {way: frozenset(table.measured(way)) for way in table.ways}
        self._on_ways, self._say = on_ways, say
        self.draft_step_s, self.is_relative = draft_step_s, relative
        self._replay = 0.0  # mean time of taking rejected drafts back, over that of a decode
        self._machine = 1.0
        self._of_way: dict[Way, float] = {}
        self._base: dict[Way, list[float]] = {}
        self._of_size: dict[Way, list[float]] = {}
        self._chosen: list[Way] = []
        self._sizes: dict[int, _Size] = {}
        self._pending: list[tuple[int, Way, float]] = []
        self._in_use: dict[tuple[Way, int], float] = {}
        self._n_seen: dict[tuple[Way, int], int] = {}
        self._settled_way: dict[Way, float] = {}  # factors at which unused sizes were chosen
        self._doubted: dict[int, int] = {}  # size -> retries that found it as long as it stands
        self._most: dict[int, float] = {}
        self._least: dict[int, float] = {}
        self._served_s = self._risked_s = 0.0
        self._n_refreshes = 0
        self.n_plans = self.n_retries = self.n_trials = self.n_changes = 0
        self.last_change: Change | None = None
        self.tried: dict[int, float] = {}
        self.times: list[float] = []
        self.planned = self.times
        self.reach(n_max)

    # -- what is known -----------------------------------------------------------------------------

    def way(self, n: int) -> Way:
        """The way of the next decode of `n` tokens."""
        size = self._sizes.get(n)
        if size is not None:
            return size.way if size.trial is None else size.trial
        return self._chosen[n - 1] if n <= len(self._chosen) else self._ways(n)[0]

    def expected_s(self, n: int, way: Way) -> float:
        """Seconds of a decode of `n` tokens that goes this way."""
        factor = self._machine * self._of_way[way] * self._of_size[way][n - 1]
        return self._base[way][n - 1] * factor

    def reach(self, n_max: int) -> None:
        """Know batches of up to `n_max` tokens."""
        first = len(self.times) + 1
        if n_max < first:
            return
        for n in range(first, n_max + 1):
            known = [way for way in self._ways(n) if self._table.has(way)]
            for way in known:
                if way not in self._base:
                    self._base[way], self._of_size[way] = [], []
                    self._of_way[way] = self._settled_way[way] = 1.0
                seconds = self._table.best(n, (way,))[1]
                gap = n - 1 - len(self._base[way])
                self._base[way] += [seconds] * (gap + 1)
                self._of_size[way] += [1.0] * (gap + 1)
            self._chosen.append(self._fastest(n, known))
        self._restate()
        self._review()

    def _fastest(self, n: int, known: Sequence[Way]) -> Way:
        usual = known[0]
        return min(known, key=lambda w: self.expected_s(n, w) * (1.0 if w is usual else 1 / PAYS))

    # -- learning ----------------------------------------------------------------------------------

    def took(self, n: int, seconds: float) -> None:
        """A decode of `n` tokens went the way of `way(n)`, and nothing is under way."""
        if seconds <= 0.0:
            return
        if n > len(self.times):
            return
        if self.is_relative:
            self._scale(n, seconds)
        size = self._sizes.get(n)
        if size is None:
            size = self._sizes[n] = _Size(self._chosen[n - 1])
        self._served_s += seconds
        is_fresh, size.is_fresh = size.is_fresh, False
        if size.trial is not None:
            self._judge(n, size, seconds, is_fresh=is_fresh)
            return
        if n in self._doubted and self._retried(n, size.way, seconds):
            return
        if is_fresh and size.recent_s:
            return  # its graph was built
        self._pending.append((n, size.way, seconds))
        size.recent_s.append(seconds)
        size.n_since += 1
        if len(self._pending) >= _BUFFERED:
            self._refresh()
        if size.n_since % _TRIAL == 0 and len(self._base) > 1:
            self._perhaps_try(n, size)

    def observe(
        self, n: int, verify_s: float, rollback_s: float, n_draft_steps: int, draft_s: float
    ) -> None:
        """Drafting took `draft_s`, and taking rejected tokens of `n` rows back `rollback_s`."""
        if n_draft_steps:
            step_s = draft_s / n_draft_steps
            rate = _OF_SIZE if self.draft_step_s > 0 else 1.0
            most_s = _OUTLIER * (self.draft_step_s or step_s)
            self.draft_step_s += rate * (min(step_s, most_s) - self.draft_step_s)
        if n > 1 and verify_s > 0.0 and (rollback_s or self._replay):
            share = min(rollback_s / verify_s, _OUTLIER)
            self._replay += _OF_SIZE * (share - self._replay)

    def _scale(self, n: int, seconds: float) -> None:
        factor = seconds / self.times[n - 1]
        self._machine *= factor
        self.draft_step_s *= factor
        self.is_relative = False
        self._restate()
        self._review()

    def _refresh(self) -> None:
        """Learn from the pending decodes."""
        pending, self._pending = self._pending, []
        for n, way, seconds in pending:
            ratio = min(seconds / self.expected_s(n, way), _OUTLIER)
            n_seen = self._n_seen.get((way, n), 0)
            self._n_seen[way, n] = n_seen + 1
            if n_seen < _KNOWN_AFTER and n not in self._measured.get(way, ()):
                self._of_size[way][n - 1] *= 1.0 + (ratio - 1.0) / (3 + n_seen)
            else:
                self._of_size[way][n - 1] *= 1.0 + _OF_SIZE * (ratio - 1.0)
            self._of_way[way] *= 1.0 + _OF_WAY * (ratio - 1.0)
            self._machine *= 1.0 + _OF_MACHINE * (ratio - 1.0)
            self._in_use[way, n] = self._in_use.get((way, n), 0.0) + 1.0
        self._share()
        self._settle_unused()
        self._restate()
        self._n_refreshes += 1
        if self._n_refreshes % _REVIEW == 0:
            self._review()
        else:
            self._plan()

    def _share(self) -> None:
        """Move what the sizes in use of a way have in common to the way's factor."""
        for way, of_size in self._of_size.items():
            uses = {n: use for (w, n), use in self._in_use.items() if w is way}
            total = sum(uses.values())
            if not total:
                continue
            common = sum(use * math.log(of_size[n - 1]) for n, use in uses.items()) / total
            for n, use in uses.items():
                of_size[n - 1] *= math.exp(-_SHARED * common * min(1.0, use))
            self._of_way[way] *= math.exp(_SHARED * common)
        self._in_use = {at: _FADE * use for at, use in self._in_use.items() if use > _UNUSED}

    def _settle_unused(self) -> None:
        """Choose anew for sizes that were not decoded yet, once a way's factor has changed."""
        moved = [abs(math.log(f / self._settled_way[w])) for w, f in self._of_way.items()]
        if len(moved) < 2 or max(moved) < 0.1:
            return
        self._settled_way = dict(self._of_way)
        before = list(self._chosen)
        for n in range(1, len(self._chosen) + 1):
            if n not in self._sizes:
                known = [way for way in self._ways(n) if n <= len(self._base.get(way, ()))]
                self._chosen[n - 1] = self._fastest(n, known)
        if before != self._chosen:
            self._on_ways(0)

    def _restate(self) -> None:
        """T(n) of the chosen ways, all sizes at once: it is done every few decodes."""
        of_ways = {}
        for way, base in self._base.items():
            factor = self._machine * self._of_way[way]
            of_ways[way] = [b * s * factor for b, s in zip(base, self._of_size[way], strict=True)]
        if len(of_ways) == 1:
            (self.times,) = of_ways.values()
        else:
            self.times = [of_ways[way][i] for i, way in enumerate(self._chosen)]
        if self._replay:
            replay = 1.0 + self._replay
            self.times[1:] = [t * replay for t in self.times[1:]]

    # -- other ways --------------------------------------------------------------------------------

    def _left_s(self) -> float:
        """Seconds that may be risked now."""
        return _RISKED * self._served_s - self._risked_s + _CREDIT * min(self.times)

    def _perhaps_try(self, n: int, size: _Size) -> None:
        others = [w for w in self._ways(n) if w is not size.way and w in self._base]
        if not others or len(size.recent_s) < _TRIAL:
            return
        now_s = median(size.recent_s)
        self._perhaps_doubt(size, now_s)
        expected = {w: self.expected_s(n, w) for w in others}
        other = min(others, key=lambda w: (size.n_lost.get(w, 0), expected[w]))
        promises = expected[other] < PAYS * now_s and not size.n_lost.get(other)
        left_s = self._left_s()
        if not promises and (size.n_since < size.wait or expected[other] - now_s > left_s):
            return
        size.trial, size.trial_s, size.cost_s, size.is_fresh = other, [], 0.0, True
        size.most_cost_s = max(left_s / 2, min(left_s, 1.5 * (expected[other] - now_s)))
        self.n_trials += 1
        self._on_ways(n)

    def _perhaps_doubt(self, size: _Size, now_s: float) -> None:
        """Try all ways soon if a size's time is another than it was: the rates have changed."""
        size.n_steady += _TRIAL
        usual_s, size.usual_s = size.usual_s or now_s, size.usual_s or now_s
        if max(now_s, usual_s) < _SURPRISE * min(now_s, usual_s) or size.n_steady < _STEADY:
            return
        size.usual_s, size.n_steady, size.wait = now_s, 0, _TRIAL
        size.n_lost.clear()
        self._risked_s -= _CREDIT * now_s

    def _judge(self, n: int, size: _Size, seconds: float, *, is_fresh: bool) -> None:
        """A decode of a trial: it goes on until enough are compared, or it has cost too much."""
        assert size.trial is not None
        before_s, way = median(size.recent_s), size.trial
        size.cost_s += seconds - before_s
        if not is_fresh:
            size.trial_s.append(seconds)
        next_cost_s = size.cost_s + max(0.0, seconds - before_s)
        if len(size.trial_s) < _TRIAL and next_cost_s < size.most_cost_s:
            return
        size.trial, size.n_since = None, 0
        self._risked_s += max(0.0, size.cost_s)
        if size.trial_s:  # the trial is the best that is known of this way
            found_s = median(size.trial_s)
            self._of_size[way][n - 1] *= found_s / self.expected_s(n, way)
            self._n_seen[way, n] = self._n_seen.get((way, n), 0) + len(size.trial_s)
        if len(size.trial_s) < _TRIAL or median(size.trial_s) >= PAYS * before_s:
            size.wait, size.is_fresh = min(2 * size.wait, _MOST_BETWEEN), True
            size.n_lost[way] = size.n_lost.get(way, 0) + 1
            self._on_ways(n)
            return
        self.last_change = Change(n, way, median(size.trial_s), size.way, before_s)
        size.way, size.recent_s = way, deque(size.trial_s, maxlen=_TRIAL)
        size.usual_s = median(size.trial_s)
        self._chosen[n - 1] = way
        size.wait = min(2 * size.wait, _MOST_BETWEEN) if size.n_changes else _FIRST_TRIAL
        size.n_changes += 1
        self.n_changes += 1
        self._say(self.last_change.words)
        self._on_ways(n)

    # -- sizes in doubt ----------------------------------------------------------------------------

    def _review(self) -> None:
        """Find the sizes in doubt anew."""
        seconds = dict(enumerate(self.times, 1))
        most = agreeing(seconds)
        found = [n for n, s in seconds.items() if s > CONTRADICTS * most[n]]
        self._doubted = {n: self._doubted.get(n, 0) for n in found}
        self._most = most if found else {}
        self._least = least_plausible(self._most, self._doubted)
        self._plan()

    def _plan(self) -> None:
        """Choose the sizes in doubt to try: those that cost no more than may be risked."""
        tried: dict[int, float] = {}
        if self._doubted:
            left_s = self._left_s()
            for n, k in self._doubted.items():
                most_s = self.times[n - 1] if k else self._most[n]
                if (most_s - self._least[n]) * 2.0**k <= left_s:
                    tried[n] = self._least[n]
        self.planned = self.times
        if tried:
            self.planned = list(self.times)
            for n, least_s in tried.items():
                self.planned[n - 1] = least_s
        self.n_plans += tried.keys() != self.tried.keys()
        self.tried = tried

    def _retried(self, n: int, way: Way, seconds: float) -> bool:
        """Judge a doubted size by a decode of it; True if that replaces its time."""
        is_tried, most_s = n in self.tried, self._most[n]
        self.n_retries += is_tried
        is_replaced = is_believed(seconds, self.times[n - 1], most_s)
        if is_tried and seconds > CONTRADICTS * most_s:
            self._risked_s += seconds - self.tried[n]
            self._doubted[n] = min(self._doubted[n] + 1, _MOST_RETRIES)
        if is_replaced:
            # The base is corrected: a factor would be taken for what the machine does now.
            self._base[way][n - 1] *= seconds / self.expected_s(n, way)
            self._n_seen[way, n] = self._n_seen.get((way, n), 0) + 1
            self._restate()
            self._review()
        elif is_tried:
            self._plan()
        return is_replaced

    # -- to be kept --------------------------------------------------------------------------------

    def table(self, date: str) -> CostTable:
        """The table as it stands now; sizes that were decoded count as timed on `date`.

        A size whose time agreed with others before and contradicts them now keeps its old one:
        another program kept the machine busy.
        """
        if self._pending:
            self._refresh()
        ways: dict[Way, dict[int, Entry]] = {}
        for way, entries in self._table.without_modelled().ways.items():
            ways[way] = self._entries(way, entries, date) if way in self._base else entries
        found = replace(self._table, ways=ways)
        for way in ways:
            before = self._table.measured(way)
            for n in set(found.doubted(way)).difference(self._table.doubted(way)):
                if n in before:
                    ways[way][n] = before[n]
        return found

    def _entries(self, way: Way, entries: Mapping[int, Entry], date: str) -> dict[int, Entry]:
        found = {}
        common = self._machine * self._of_way[way]
        for n, entry in entries.items():
            known = n <= len(self._base[way])
            base_s = self._table.best(n, (way,))[1]
            factor = self.expected_s(n, way) / base_s if known else common
            found[n] = replace(entry, seconds=entry.seconds * factor)
        for (w, n), n_seen in self._n_seen.items():
            if w is way:
                before = found.get(n, Entry(self.expected_s(n, way)))
                found[n] = replace(before, n_timed=before.n_timed + n_seen, date=date)
        return dict(sorted(found.items()))


def least_plausible(most: Mapping[int, float], doubted: Collection[int]) -> dict[int, float]:
    """The least time of each doubted size, by its neighbours that are not: that of the one below,
    else a part of that of the one above."""
    found: dict[int, float] = {}
    below_s = 0.0
    for n in sorted(most):
        if n not in doubted:
            below_s = most[n]
        elif below_s:
            found[n] = below_s
        else:
            above = next((m for m in sorted(most) if m > n and m not in doubted), n)
            found[n] = most[above] / -(-above // n)
    return found
