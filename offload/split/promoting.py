"""Experts that are copied for later while the link is idle. Pure.

A miss of a split layer is no wait but the CPU's work. So nothing is in a hurry to be copied, and a
copy that the link has no time for would delay those that a layer waits for, and take the memory
bandwidth that the CPU computes with.
"""

from __future__ import annotations

ANY_NUMBER = 1 << 30
WAITING_SHARE = 0.04  # of the steps' time


class PromotionBudget:
    """Copies that fit in a step's idle link time, else one at a time that makes a step wait.

    Where not even one fits, no step would ever have time for one, and the cache would learn
    nothing. The waiting that is then expected, the copy's time less the idle, is paid from a share
    of the steps' time. No more is saved than one copy takes: a long time in which nothing was worth
    a copy is not followed by a burst of waits. So the waits of any steps in a row are within the
    share of their time and one copy more.
    """

    def __init__(self, waiting_share: float = WAITING_SHARE) -> None:
        self._share = waiting_share
        self._saved_s = 0.0
        self._price_s = 0.0  # of each, as `most` said last

    def most(self, step_s: float, idle_s: float, copy_s: float) -> int:
        """Copies of `copy_s` for which the next step has time, after one of `step_s` in which the
        link was idle for `idle_s`."""
        self._price_s = 0.0
        if copy_s <= 0.0:
            return ANY_NUMBER
        self._saved_s = min(self._saved_s + self._share * step_s, copy_s)
        if idle_s >= copy_s:
            return min(int(idle_s / copy_s), ANY_NUMBER)
        price_s = copy_s - max(0.0, idle_s)
        if self._saved_s < price_s:
            return 0
        self._price_s = price_s
        return 1

    def spend(self, n: int) -> None:
        """So many are copied, of those that `most` allowed."""
        self._saved_s -= n * self._price_s
