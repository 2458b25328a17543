"""Times split layers again after decodes, and corrects the costs that divide them.

offload/times/split_corrections.py decides what is timed and what follows from it. The timings may
take a share of the decodes' time, as trials of other ways do. The share is larger until everything
was timed twice, because then two times outweigh a kept one that is wrong.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from offload.errors import OffloadError
from offload.schedule.division import MeasuredCosts
from offload.stream.split_measuring import SplitSides, may_wait, time_once_more
from offload.times.split_corrections import SplitCorrections, largest_ratio
from specdec.decoding.loop import StepReport

_FIRST_SHARE = 0.02  # share of the decodes' time for timings until all were repeated twice
_SHARE = 0.002  # the same afterwards
_CREDIT = 1.0  # decodes that timings may cost in advance
_STEP_SHARE = 0.25  # cap on timings after one step, as a share of its decode's time
# Steps in a row without a timing, while one for a batch of another size was repeated least often.
# Otherwise the larger ones of two sizes that alternate would use up the whole budget.
_MOST_WAITED = 4
_LARGE = 1.5  # ratio of corrected to earlier costs from which split decodes may be much faster

Sides = Sequence[tuple[str, SplitSides]]  # split layers with the names of their devices

log = logging.getLogger("specoffload.speculation")


class TimingBudget:
    """Decides when a timing may run, by the time that decodes took and timings have cost."""

    def __init__(self) -> None:
        self._allowed_s = self._spent_s = self._decode_s = 0.0

    def decoded(self, seconds: float, *, is_first: bool) -> None:
        """Count a decode. `is_first`: not every timing was repeated twice yet."""
        self._decode_s = seconds
        self._allowed_s += (_FIRST_SHARE if is_first else _SHARE) * seconds

    @property
    def is_left(self) -> bool:
        """True if another timing may run."""
        return self._spent_s < self._allowed_s + _CREDIT * self._decode_s

    def spend(self, seconds: float) -> None:
        self._spent_s += seconds


class SplitRetiming:
    """Repeats timings of split layers within a share of the decodes' time."""

    def __init__(
        self,
        costs: Mapping[str, MeasuredCosts],
        take_sides: Callable[[], Sides],
        on_costs: Callable[[Mapping[str, MeasuredCosts]], None],
        on_large: Callable[[], None],
        *,
        is_confirmed: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start with `costs` by the name of the device.

        `take_sides` returns the split layers of the last decode. `on_costs` is called with the
        costs by which layers are divided from now on, and `on_large` if they changed much.
        `is_confirmed`: the costs were repeated not long ago, so timings get the smaller share.
        """
        self._take_sides, self._on_costs, self._on_large = take_sides, on_costs, on_large
        self._clock = clock
        self._corrections = {name: SplitCorrections(kept) for name, kept in costs.items()}
        self._costs = dict(costs)
        self._reconsidered = dict(costs)  # the costs at the last large change
        self._budget = TimingBudget()
        self._has_first_share = not is_confirmed
        self._has_failed = False
        self._waits_with = 0  # tokens of the batch after which timings wait; 0: they do not
        self._n_waited = 0

    @property
    def costs(self) -> dict[str, MeasuredCosts]:
        """The corrected costs with their spreads, by the name of the device."""
        return {name: each.costs_to_keep() for name, each in self._corrections.items()}

    @property
    def copies_s(self) -> dict[str, float]:
        """The seconds of an expert's copy while the CPU rests, by the name of the device."""
        return {
            name: copy_s
            for name, corrections in self._corrections.items()
            if (copy_s := corrections.seen_copy_s) is not None
        }

    @property
    def n_timings(self) -> int:
        return sum(corrections.n_seen for corrections in self._corrections.values())

    @property
    def is_first(self) -> bool:
        """True until each timing was repeated twice."""
        return any(corrections.is_first for corrections in self._corrections.values())

    def on_step(self, report: StepReport) -> None:
        """Time split layers of the step's decode again, if the budget allows it."""
        for _, seconds in report.decodes:
            self._budget.decoded(seconds, is_first=self._has_first_share)
        if self._has_failed or len(report.decodes) != 1 or report.read or not self._budget.is_left:
            return
        ((n_tokens, decode_s),) = report.decodes
        # A graph with all tokens of the only decode was the last one that libllama built.
        if n_tokens == self._waits_with and self._n_waited < _MOST_WAITED:
            self._n_waited += 1
            return
        sides = [
            (side, self._corrections[name])
            for name, side in self._take_sides()
            if side.n_tokens == n_tokens and name in self._corrections
        ]
        if n_tokens != self._waits_with and sides and all(may_wait(*pair) for pair in sides):
            self._waits_with = n_tokens
            return
        self._waits_with, self._n_waited = 0, 0
        for side, corrections in sides:
            self._time(side, corrections, _STEP_SHARE * decode_s / len(sides))
        self._has_first_share &= self.is_first
        self._use()

    def _time(self, sides: SplitSides, corrections: SplitCorrections, most_s: float) -> None:
        """Repeat timings until they took `most_s` or the budget is spent, at least one."""
        began_s = self._clock()
        try:
            while not self._has_failed and self._budget.is_left:
                start_s = self._clock()
                time_once_more(sides, corrections)
                end_s = self._clock()
                self._budget.spend(end_s - start_s)
                if end_s - began_s >= most_s:
                    break
        except OffloadError as e:
            self._has_failed = True
            log.warning("split layers are not timed again in this session: %s", e)

    def _use(self) -> None:
        """Divide layers by the corrected costs, if they differ from those in use."""
        changed = {
            name: costs
            for name, corrections in self._corrections.items()
            if (costs := corrections.changed()) is not None
        }
        if not changed:
            return
        self._costs |= changed
        self._on_costs(self._costs)
        before = self._reconsidered
        if any(
            largest_ratio(corrections, before[name]) >= _LARGE
            for name, corrections in changed.items()
        ):
            self._reconsidered = dict(self._costs)
            self._on_large()
