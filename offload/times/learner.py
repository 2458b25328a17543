"""Corrects the cost table while serving, and finds ways that have become faster. Pure.

A *way* is how a decode computes the weights in host memory (`Way` in offload/times/table.py), and a
*size* is a batch size in tokens. Decodes correct the table's times
(offload/times/corrections.py). Now and then a *trial* computes a few decodes of a size in another
way. Each size saves a hundredth of its time for trials, and a trial ends when the savings are used
up. So a way that takes three times as long is tried every few hundred decodes. Faster ways are
tried more often, slower ones more rarely.

A kept time may also be too short, for example if it was kept before the machine became slower. The
size then looks cheap, so it would be decoded most. Two decodes in a row that agree better with the
other sizes replace the time.

While the machine is busy, the time of a size may come to contradict the times of other sizes. For
example, a larger batch takes less. Such a size is *doubted*. It looks slow, so no drafts of this
size would be made, and its time would never be corrected. Therefore drafts are planned with the
least plausible time of the size, if that risks little. If the next decode of the size agrees with
the other sizes, its time is corrected. Otherwise the time stays.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from statistics import median

from offload.times.corrections import Corrections
from offload.times.recent import RecentMedian
from offload.times.table import (
    CONTRADICTS,
    PAYS,
    CostTable,
    DecodeTime,
    Way,
    agreeing,
    contradicting,
    is_believed,
    n_conflicts,
)
from offload.units import milliseconds

_BUFFERED = 8  # decodes that are learnt from at once, as CPU caches are cold between decodes
_REWIND_RATE = 0.03  # learning rate of a rewind's time
_OUTLIER = 3.0  # cap on the ratio of a rewind's time to its decode's
_N_SCALED = 8  # decodes; the shortest of them gives the seconds of a relative table's unit
_RISKED = 0.01  # share of the time that trials may cost, and share that doubted sizes may cost
_CREDIT = 1.0  # decodes that trials of a way may cost in advance, at the start and after a surprise
_DOUBTS_CREDIT = 2.0  # decodes that doubted sizes may cost in advance
# Ratio of a size's last decodes to what other sizes allow, from which nothing is kept.
_BUSY = 3.0
_MOST_REPLACED = 3  # cap on replacing a size's time; what contradicts after that is no mistake
_REVIEW = 32  # refreshes between searches for contradictions
_MOST_RETRIES = 40  # cap on counted retries; each doubles the price of the next
_TRIAL = 8  # decodes compared in a trial, with as many before it
_BETWEEN = 64  # least decodes of a size between two trials
_PRIOR = 8.0  # weight of no change, in decodes, if sizes without decodes follow the decoded ones
_HOPELESS = 3  # decodes after which a trial ends if all were slower than the usual way
_SURPRISE = 1.15  # ratio of a size's time to its usual one at which all ways are tried again
_STEADY = 128  # least decodes of a size between two surprises

WaysOf = Callable[[int], Sequence[Way]]  # batch size -> the ways in which it may be computed


_WORDS = {
    Way.IN_PLACE: "by the CPU",
    Way.STREAMED: "on the GPU with streamed experts",
    Way.SPLIT: "by CPU and GPU together",
    Way.DENSE: "on the GPU with streamed weights",
    Way.FIXED: "as --min-batch says",
}


@dataclass
class _WayTrial:
    """A trial of `way` for one size. `context` is open until it ends."""

    way: Way
    context: ExitStack = field(default_factory=ExitStack)
    times_s: list[float] = field(default_factory=list)  # of the decodes that are compared


@dataclass
class _SizeState:
    """The state of one batch size while serving."""

    way: Way
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TRIAL))
    n_since: int = 0  # decodes since the last trial
    saved: dict[Way, float] = field(default_factory=dict)  # savings for trials by way, in decodes
    last_tried: dict[Way, int] = field(default_factory=dict)  # number of each way's last trial
    lost: set[Way] = field(default_factory=set)  # ways that lost a trial since the last surprise
    trial: _WayTrial | None = None
    short_s: float = 0.0  # seconds of the last decode, if they show that the time is too short
    is_fresh: bool = True  # True if the next decode builds its graph, so that it is not compared
    usual_s: float = 0.0  # median seconds at the last surprise or change of way
    n_steady: int = 0  # decodes since the last surprise


class Learner:
    """T(n) and the way of each batch size. Each call of `took` corrects them.

    `times[n-1]` is T(n) in seconds. `tried` holds the doubted sizes that drafts may use, and their
    least plausible seconds. `planned` is `times` with these seconds for the sizes in `tried`.
    `n_plans` counts changes of the sizes in `tried` and corrections of times that were too short.
    `n_retries` counts decodes of sizes in `tried`, `n_trials` trials of ways, and `n_changes`
    changed ways.
    """

    def __init__(
        self,
        table: CostTable,
        n_max: int,
        ways: WaysOf,
        *,
        draft_step_s: float = 0.0,
        relative: bool = False,
        on_ways: Callable[[], None] = lambda: None,
        trying: Callable[[], AbstractContextManager[None]] = nullcontext,
        say: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Start with the times of `table` for batches of up to `n_max` tokens.

        `ways(n)` returns the ways in which a batch of n tokens may be computed, the usual one
        first. `relative`: the table is in units of T(1) until the first decode. `on_ways` is
        called when the ways of sizes without decodes may have changed. `trying` returns a context
        that is open during a trial. The way of a size has changed when it is entered, and may have
        changed when it is left. Trials of several sizes overlap. `say` gets sentences for the user.
        """
        self._table, self._ways = table, ways
        self._on_ways, self._trying, self._say = on_ways, trying, say
        self.draft_step_s, self.is_relative = draft_step_s, relative
        self._steps = RecentMedian(draft_step_s)
        self._replay = 0.0  # mean ratio of a rewind's time to its decode's
        self._corrections = Corrections()
        self._chosen: list[Way] = []
        self._sizes: dict[int, _SizeState] = {}
        self._pending: list[tuple[int, Way, float]] = []
        self._n_scaled = 0 if relative else _N_SCALED  # decodes that found the table's unit
        self._settled: dict[Way, float] = {}  # common levels when unused sizes were chosen
        self._n_replaced: dict[int, int] = {}  # doubted sizes whose times were replaced
        self._doubted: dict[int, int] = {}  # doubted size -> retries that did not end the doubt
        self._most: dict[int, float] = {}
        self._least: dict[int, float] = {}
        self._served_s = self._risked_s = 0.0
        self._n_refreshes = 0
        self.n_plans = self.n_retries = self.n_trials = self.n_changes = 0
        self.tried: dict[int, float] = {}
        self.times: list[float] = []
        self.planned = self.times
        self.reach(n_max)

    @property
    def draft_step_spread(self) -> float:
        """Half the interquartile range of a draft step's times over their median; 0.0: unknown."""
        return self._steps.spread

    # -- known times -------------------------------------------------------------------------------

    def way(self, n: int) -> Way:
        """Return the way of the next decode of `n` tokens."""
        size = self._sizes.get(n)
        if size is not None:
            return size.way if size.trial is None else size.trial.way
        return self._chosen[n - 1] if n <= len(self._chosen) else self._ways(n)[0]

    def expected_s(self, n: int, way: Way) -> float:
        """Return the expected seconds of a decode of `n` tokens that is computed in this way."""
        return self._corrections.seconds(way, n)

    def reach(self, n_max: int) -> None:
        """Extend the known batch sizes up to `n_max` tokens."""
        first = len(self.times) + 1
        if n_max < first:
            return
        known = {
            n: [way for way in self._ways(n) if self._table.has(way)]
            for n in range(first, n_max + 1)
        }
        for way in dict.fromkeys(way for ways in known.values() for way in ways):
            self._settled.setdefault(way, 0.0)
            curve_s, measured = self._table.curve(n_max, (way,)), self._table.measured(way)
            for n, ways in known.items():
                if way in ways:
                    self._corrections.reach(way, n, curve_s[n - 1], is_measured=n in measured)
        self._chosen += [self._fastest(n, ways) for n, ways in known.items()]
        self._restate()
        self._review()

    def _fastest(self, n: int, known: Sequence[Way]) -> Way:
        usual = known[0]
        return min(known, key=lambda w: self.expected_s(n, w) * (1.0 if w is usual else 1 / PAYS))

    # -- learning ----------------------------------------------------------------------------------

    def took(self, n: int, seconds: float) -> None:
        """Learn from a decode of `n` tokens that took `seconds` in the way of `way(n)`.

        Ignores times that are not positive and sizes that are not known.
        """
        if seconds <= 0.0:
            return
        if n > len(self.times):
            return
        if self._n_scaled < _N_SCALED:
            self._scale(n, seconds)
        size = self._sizes.get(n)
        if size is None:
            size = self._sizes[n] = _SizeState(self._chosen[n - 1])
        self._served_s += seconds
        is_fresh, size.is_fresh = size.is_fresh, False
        if size.trial is not None:
            self._judge(n, size, seconds, is_fresh=is_fresh)
            return
        if n in self._doubted and self._retried(n, size.way, seconds):
            return
        if self._was_short(n, size, seconds):
            return
        if is_fresh and size.recent_s:  # the graph was built again because a trial had ended
            if size.last_tried:
                last = max(size.last_tried, key=lambda w: size.last_tried[w])
                size.saved[last] -= max(0.0, seconds / median(size.recent_s) - 1.0)
            return
        self._pending.append((n, size.way, seconds))
        size.recent_s.append(seconds)
        size.n_since += 1
        if len(self._pending) >= _BUFFERED:
            self._refresh()
        if size.n_since % _TRIAL == 0 and len(self._corrections.base_s) > 1:
            self._perhaps_try(n, size)

    def observe(
        self, n: int, verify_s: float, rollback_s: float, n_draft_steps: int, draft_s: float
    ) -> None:
        """Learn the costs of drafting and of rewinding from one step.

        `n_draft_steps` steps of a drafter took `draft_s` seconds. The decode of `n` tokens took
        `verify_s` seconds, and rewinding the rejected tokens took `rollback_s` seconds.
        """
        if n_draft_steps:
            self._steps.see(draft_s / n_draft_steps)
            self.draft_step_s = self._steps.value
        if n > 1 and verify_s > 0.0 and (rollback_s or self._replay):
            share = min(rollback_s / verify_s, _OUTLIER)
            self._replay += _REWIND_RATE * (share - self._replay)

    def _scale(self, n: int, seconds: float) -> None:
        """Find the seconds of the table's unit: the least that one of the first decodes implies."""
        factor = seconds / self.times[n - 1]
        self._n_scaled += 1
        if self.is_relative or factor < 1.0 / CONTRADICTS:
            self._corrections.scale(factor)
            if self.is_relative:
                self._steps.scale(factor)
                self.draft_step_s = self._steps.value
            self.is_relative = False
            self._restate()
            self._review()

    def _refresh(self) -> None:
        """Learn from the pending decodes."""
        pending, self._pending = self._pending, []
        self._corrections.see(pending)
        self._settle_unused()
        self._restate()
        self._n_refreshes += 1
        if self._n_refreshes % _REVIEW == 0:
            self._review()
        else:
            self._plan()

    def _settle_unused(self) -> None:
        """Choose new ways for sizes that were never decoded, if a way's factor changed by 10 %."""
        levels = {way: self._corrections.common_level(way) for way in self._settled}
        if len(levels) < 2 or max(abs(x - self._settled[w]) for w, x in levels.items()) < 0.1:
            return
        self._settled = levels
        before = list(self._chosen)
        for n in range(1, len(self._chosen) + 1):
            if n not in self._sizes:
                known = [way for way in self._ways(n) if self._corrections.knows(way, n)]
                self._chosen[n - 1] = self._fastest(n, known)
        if before != self._chosen:
            self._on_ways()

    def _restate(self) -> None:
        """Compute T(n) of all sizes again. This runs every few decodes, so it has to be fast."""
        of_ways = {way: self._corrections.all_seconds(way) for way in self._corrections.base_s}
        if len(of_ways) == 1:
            (self.times,) = of_ways.values()
        else:
            self.times = [of_ways[way][i] for i, way in enumerate(self._chosen)]
        if self._replay:
            replay = 1.0 + self._replay
            self.times[1:] = [t * replay for t in self.times[1:]]

    # -- other ways --------------------------------------------------------------------------------

    def _perhaps_try(self, n: int, size: _SizeState) -> None:
        """Begin a trial if another way is expected to win, or is due and enough is saved for it."""
        others = [w for w in self._ways(n) if w is not size.way and self._corrections.knows(w, n)]
        if not others or len(size.recent_s) < _TRIAL:
            return
        now_s = median(size.recent_s)
        self._perhaps_doubt(size, now_s)
        extra = {w: self.expected_s(n, w) / now_s - 1.0 for w in others}
        # A slow way may be much slower than expected, so its trial needs more savings.
        price = {w: e * max(1.0, e / 2.0) for w, e in extra.items()}
        for w in others:
            saved = size.saved.get(w, _CREDIT) + _TRIAL * _RISKED / len(others)
            size.saved[w] = min(saved, max(_CREDIT, price[w]))
        promising = [w for w in others if extra[w] < PAYS - 1.0 and w not in size.lost]
        due = [w for w in others if size.n_since >= _BETWEEN and price[w] <= size.saved[w]]
        if not (promising or due):
            return
        other = min(promising or due, key=lambda w: (size.last_tried.get(w, 0), extra[w]))
        size.trial, size.is_fresh = _WayTrial(other), True
        self.n_trials += 1
        size.last_tried[other] = self.n_trials
        size.trial.context.enter_context(self._trying())

    def reconsider(self, way: Way) -> None:
        """Make `way` due for a trial at each size that was decoded in another way.

        Call it if the way has probably become faster than its times say.
        """
        for size in self._sizes.values():
            if size.way is not way:
                size.lost.discard(way)
                size.saved[way] = math.inf  # `_perhaps_try` lowers it to the trial's price
                size.n_since = max(size.n_since, _BETWEEN)

    def _perhaps_doubt(self, size: _SizeState, now_s: float) -> None:
        """Make all ways due for a trial if the size's time differs markedly from its usual one."""
        size.n_steady += _TRIAL
        size.usual_s = size.usual_s or now_s
        low_s, high_s = sorted((now_s, size.usual_s))
        if high_s >= _SURPRISE * low_s and size.n_steady >= _STEADY:
            size.usual_s, size.n_steady, size.n_since = now_s, 0, _BETWEEN
            size.lost.clear()
            size.saved = {way: max(saved, _CREDIT) for way, saved in size.saved.items()}

    def _judge(self, n: int, size: _SizeState, seconds: float, *, is_fresh: bool) -> None:
        """Learn from one decode of a trial.

        The trial ends if it has enough decodes, costs too much, or cannot win.
        """
        trial = size.trial
        assert trial is not None
        before_s, way, times_s = median(size.recent_s), trial.way, trial.times_s
        extra = seconds / before_s - 1.0
        size.saved[way] -= extra
        if not is_fresh:
            times_s.append(seconds)
        is_hopeless = len(times_s) >= _HOPELESS and min(times_s) > before_s
        if len(times_s) < _TRIAL and extra <= size.saved[way] and not is_hopeless:
            return
        size.trial, size.n_since, size.is_fresh = None, 0, True
        self._corrections.see([(n, way, s) for s in times_s or [seconds]])
        if len(times_s) < _TRIAL or median(times_s) >= PAYS * before_s:
            size.lost.add(way)
        else:
            self._change(n, size, trial, before_s)
        trial.context.close()

    def end_trials(self) -> None:
        """End all trials without a result. Call it before decodes that `took` is not told about."""
        for size in self._sizes.values():
            if size.trial is not None:
                trial, size.trial = size.trial, None
                size.n_since, size.is_fresh = 0, True
                trial.context.close()

    def _change(self, n: int, size: _SizeState, trial: _WayTrial, before_s: float) -> None:
        """Make the way that won `trial` the way of batches of `n` tokens from now on."""
        way, before, found_s = trial.way, size.way, median(trial.times_s)
        size.way, size.recent_s = way, deque(trial.times_s, maxlen=_TRIAL)
        size.usual_s, size.is_fresh = found_s, False
        # If the machine changed during the trial, the previous way may still be the faster one.
        size.n_since, size.saved[before] = _BETWEEN, _CREDIT
        self._chosen[n - 1] = way
        self.n_changes += 1
        tokens = "1 token" if n == 1 else f"{n} tokens"
        self._say(
            f"batches of {tokens} are computed {_WORDS[way]} from now on: {milliseconds(found_s)} "
            f"instead of {milliseconds(before_s)} {_WORDS[before]}"
        )

    # -- doubted sizes -----------------------------------------------------------------------------

    def _review(self) -> None:
        """Find the sizes that are doubted now, and choose those that drafts may use."""
        seconds = dict(enumerate(self.times, 1))
        most = agreeing(seconds)
        doubted = [n for n, s in seconds.items() if s > CONTRADICTS * most[n]]
        self._doubted = {n: self._doubted.get(n, 0) for n in doubted}
        self._most = most if doubted else {}
        self._least = least_plausible(self._most, self._doubted)
        self._plan()

    def _left_s(self) -> float:
        """Return the seconds that decodes of doubted sizes may still cost."""
        return _RISKED * self._served_s - self._risked_s + _DOUBTS_CREDIT * min(self.times)

    def _plan(self) -> None:
        """Choose the doubted sizes that drafts may use, within the seconds that may be risked."""
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
        """Judge a doubted size by one decode. Return True if `seconds` replaces the size's time."""
        is_tried, most_s = n in self.tried, self._most[n]
        self.n_retries += is_tried
        n_replaced = self._n_replaced.get(n, 0)
        # If short times went on lowering the base, and long ones went on raising the factors, the
        # times of all other sizes would rise without end.
        is_shorter = seconds < self.times[n - 1]  # long times may be another program's fault
        contradicts = (
            is_shorter
            and n_replaced < _MOST_REPLACED
            and is_believed(seconds, self.times[n - 1], most_s)
        )
        # Only a time below the size's level shows that the level is wrong. A time between the level
        # and the present price is another program's fault, as the price's surplus is.
        is_replaced = contradicts and seconds < self._corrections.kept_s(way, n)
        if contradicts:
            self._n_replaced[n] = n_replaced + 1
            self._corrections.distrust(way, n)
        if is_tried and seconds > CONTRADICTS * most_s:
            self._risked_s += seconds - self.tried[n]
            self._doubted[n] = min(self._doubted[n] + 1, _MOST_RETRIES)
        if is_replaced:
            # The base time is corrected, since it was wrong from the start. The factors describe
            # only the machine's present state.
            self._corrections.correct(way, n, seconds)
            self._restate()
            self._review()
        elif is_tried:
            self._plan()
        return is_replaced

    def _was_short(self, n: int, size: _SizeState, seconds: float) -> bool:
        """Return True if `seconds` replaces a time that was too short from the start.

        Two decodes in a row have to contradict fewer other sizes than the time does. Otherwise the
        size would look cheap, and most decodes would be of this size. No decodes of other sizes
        would then show that the machine is not busy.
        """
        before_s, size.short_s = size.short_s, 0.0
        n_replaced, known_s = self._n_replaced.get(n, 0), self._corrections.kept_s(size.way, n)
        if seconds <= CONTRADICTS * known_s or n_replaced >= _MOST_REPLACED:
            return False
        others = self._corrections.known_s(size.way)
        others.pop(n, None)
        if n_conflicts(n, seconds, others) >= n_conflicts(n, known_s, others):
            return False
        if not before_s:
            size.short_s = seconds
            return False
        self._n_replaced[n] = n_replaced + 1
        self._corrections.correct(size.way, n, min(before_s, seconds))
        self._interpolate_again(size.way, n)
        self._restate()
        self._review()
        self.n_plans += 1
        return True

    def _interpolate_again(self, way: Way, n: int) -> None:
        """Let sizes that were neither measured nor decoded follow the corrected time of `n`."""
        if n not in self._table.measured(way):
            return
        entries = dict(self._table.ways[way])
        entries[n] = replace(entries[n], seconds=self._corrections.base_s[way][n - 1])
        table = replace(self._table, ways={**self._table.ways, way: entries})
        self._corrections.follow(way, table.curve(len(self.times), (way,)))

    # -- the table to store ------------------------------------------------------------------------

    def table(self, date: str) -> CostTable:
        """Return the corrected table. Sizes that were decoded count as timed on `date` (ISO).

        A size keeps its old time if the old time agreed with other sizes and the new one
        contradicts them. Another program then probably kept the machine busy. If a decoded size
        agrees with the others, its count of retries is reset.
        """
        if self._pending:
            self._refresh()
        seen = self._corrections.n_seen()
        decoded, before = dict(seen), self._table
        while True:
            corrected = self._corrected(decoded, date)
            contradict = [
                (way, n)
                for way in corrected.ways
                for n in self._contradicting(corrected, way, decoded) - set(before.doubted(way))
                if (way, n) in decoded and n in before.measured(way)
            ]
            if not contradict:
                break
            for at in contradict:
                del decoded[at]
        for way, entries in corrected.ways.items():
            seconds = {n: entry.seconds for n, entry in entries.items()}
            for n in entries.keys() - set(contradicting(seconds)):
                if (way, n) in seen:
                    entries[n] = replace(entries[n], n_retried=0)
        return corrected

    def _contradicting(
        self, corrected: CostTable, way: Way, decoded: Mapping[tuple[Way, int], int]
    ) -> set[int]:
        """Return the sizes of which the new time, or the last decodes, contradict the others."""
        seconds = {n: entry.seconds for n, entry in corrected.measured(way).items()}
        busy = {
            n
            for n, most_s in agreeing(seconds).items()
            if (way, n) in decoded and self._corrections.recent_s(way, n) > _BUSY * most_s
        }
        return busy.union(corrected.doubted(way))

    def _corrected(self, decoded: Mapping[tuple[Way, int], int], date: str) -> CostTable:
        """Return the table with new times of the `decoded` sizes. Their values: numbers of decodes.

        Other sizes of a way change by the mean factor by which its decoded sizes have changed since
        they were measured. This factor is always of the measured times. So many sessions, each with
        an error of its own, never add up.
        """
        old, seen = self._table.without_modelled().ways, self._corrections.n_seen()
        ways: dict[Way, dict[int, DecodeTime]] = {}
        for way in (way for way in Way if way in old or any(w is way for w, _ in decoded)):
            sizes = {n: n_seen for (w, n), n_seen in decoded.items() if w is way}
            times = {n: self._decoded_entry(way, n, n_seen, date) for n, n_seen in sizes.items()}
            entries = old.get(way, {})
            changes = {
                n: (math.log(times[n].seconds / times[n].first_s), n_seen)
                for n, n_seen in sizes.items()
                if n in entries
            }
            factor = math.exp(_mean_change(changes.values()))
            for n, e in entries.items():
                if n not in times:
                    follows = changes and (way, n) not in seen
                    moved = replace(e, seconds=e.first_s * factor, measured_s=e.first_s)
                    times[n] = moved if follows else e
            for n in sizes.keys() - entries.keys():
                times[n] = replace(times[n], measured_s=times[n].seconds / factor)
            ways[way] = dict(sorted(times.items()))
        return replace(self._table, ways=ways)

    def _decoded_entry(self, way: Way, n: int, n_seen: int, date: str) -> DecodeTime:
        """Return the entry of a size that was decoded `n_seen` times."""
        seconds = self._corrections.kept_s(way, n)
        before = self._table.measured(way).get(n)
        if before is None:
            return DecodeTime(seconds, n_timed=n_seen, date=date)
        # Streamed dense weights save seconds of a price, and not of an entry.
        seconds += before.seconds - self._table.best(n, (way,))[1]
        is_wrong = self._corrections.is_distrusted(way, n)  # so nothing follows from its change
        return replace(
            before,
            seconds=seconds,
            n_timed=before.n_timed + n_seen,
            measured_s=0.0 if is_wrong else before.first_s,
            date=date,
        )


def _mean_change(changes: Collection[tuple[float, int]]) -> float:
    """The mean of changes, each with its number of decodes, and with a prior of no change."""
    return sum(n * change for change, n in changes) / (sum(n for _, n in changes) + _PRIOR)


def least_plausible(most: Mapping[int, float], doubted: Collection[int]) -> dict[int, float]:
    """Return the least plausible seconds of each doubted size.

    `most`: seconds by size. The least plausible time is that of the next smaller size that is not
    doubted. If there is none, it is the time of the next larger one, divided by the number of
    batches of the doubted size that make up the larger one.
    """
    least_s: dict[int, float] = {}
    below_s = 0.0
    for n in sorted(most):
        if n not in doubted:
            below_s = most[n]
        elif below_s:
            least_s[n] = below_s
        else:
            above = next((m for m in sorted(most) if m > n and m not in doubted), n)
            least_s[n] = most[above] / -(-above // n)
    return least_s
