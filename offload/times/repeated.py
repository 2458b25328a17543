"""A value that was measured several times, of which the middle one counts. Pure.

Other programs only make a machine slower, so of two values in the middle the faster one counts. One
disturbed value among three or more changes nothing beyond the range of the others.

Starts measure the values. What sessions saw is kept apart, because it may be another quantity, or
that of a busy machine: it only makes a start measure once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high, median_low, quantiles
from typing import ClassVar, Self

MOST_FROM_STARTS = 5  # starts that measure, whether their values count or not
MOST_VALUES = 8  # newest values that are kept
LEAST_SETTLED = 3
_MOST_SEEN = 3  # newest values of sessions that are kept
_MOST_SPREAD = 0.1  # up to which values agree


def half_spread(values: Sequence[float]) -> float | None:
    """Return half the interquartile range over the median, or None for fewer than two values."""
    middle = median(values) if len(values) > 1 else 0.0
    if not middle:
        return None
    low, _, high = quantiles(values, n=4, method="inclusive")
    return (high - low) / 2 / abs(middle)


@dataclass(frozen=True)
class RepeatedValue:
    """Measurements of one value, the newest last. Use `RepeatedTime` or `RepeatedRate`."""

    values: tuple[float, ...] = ()  # by starts
    is_doubted: bool = False  # other programs took much of the CPUs whenever it was measured
    n_tried: int = 0  # starts that measured, also without a value that counts; 0: an earlier file
    tried_on: str = ""  # day of the last of them
    seen: tuple[float, ...] = ()  # by sessions

    is_rate: ClassVar[bool] = False

    @property
    def n(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def value(self) -> float:
        """The value in the middle, or 0.0 if nothing was measured."""
        return self._middle(self.values) if self.values else 0.0

    @property
    def spread(self) -> float | None:
        """Half the interquartile range over the median. None: there is only one value."""
        return half_spread(self.values)

    @property
    def is_contradicted(self) -> bool:
        """True if as many sessions as starts, or three, saw a value that differs by over 10 %."""
        if not self.values or len(self.seen) < min(self.n, _MOST_SEEN):
            return False
        return abs(self._middle(self.seen) - self.value) > _MOST_SPREAD * abs(self.value)

    def is_settled(self, most: int = MOST_FROM_STARTS) -> bool:
        """True if no start needs to measure again: values agree, or `most` starts measured."""
        if not self.values or self.is_contradicted:
            return False
        spread = self.spread
        agrees = spread is not None and spread <= _MOST_SPREAD
        is_sure = self.n >= LEAST_SETTLED and agrees and not self.is_doubted
        return is_sure or self._n_tried >= most

    def is_due(self, day: str, most: int = MOST_FROM_STARTS) -> bool:
        """True if a start of this day measures.

        After `most` starts only one a day does, while values are doubted, contradicted or few.
        """
        if not self.values or self._n_tried < most:
            return not self.is_settled(most)
        is_weak = self.is_doubted or self.is_contradicted or self.n < min(most, LEAST_SETTLED)
        return is_weak and self.tried_on != day

    def with_value(self, value: float, *, is_doubted: bool = False, day: str = "") -> Self:
        """Return these values with a further one, which a start of this day measured.

        `is_doubted`: other programs took much of the CPUs meanwhile. Doubted values are kept until
        there is one that is not, which replaces them, and starts are counted anew. A value that
        agrees with contradicting sessions replaces earlier ones, too, and starts count on, because
        a rate that changes all the time would be measured by each of them.
        """
        tried = replace(self, n_tried=self._n_tried + 1, tried_on=day)
        if is_doubted and self.values:
            if not self.is_doubted:
                return tried
            return replace(tried, values=(*self.values, value)[-MOST_VALUES:])
        if self.is_doubted or self._is_outdated_by(value):
            n_tried = 1 if self.is_doubted else tried.n_tried
            return replace(tried, values=(value,), is_doubted=False, n_tried=n_tried, seen=())
        values = (*self.values, value)[-MOST_VALUES:]
        seen = () if self.is_contradicted else self.seen
        return replace(tried, values=values, is_doubted=is_doubted, seen=seen)

    def with_seen(self, value: float) -> Self:
        """Return these values with one that a session saw."""
        return replace(self, seen=(*self.seen, value)[-_MOST_SEEN:])

    @property
    def _n_tried(self) -> int:
        return max(self.n_tried, self.n)

    def _middle(self, values: Sequence[float]) -> float:
        return median_high(values) if self.is_rate else median_low(values)

    def _is_outdated_by(self, value: float) -> bool:
        """True if sessions contradict the values, and `value` is nearer to what they saw."""
        if not self.is_contradicted:
            return False
        return abs(value - self._middle(self.seen)) < abs(value - self.value)


@dataclass(frozen=True)
class RepeatedTime(RepeatedValue):
    """Seconds. Of two times in the middle the shorter one counts."""


@dataclass(frozen=True)
class RepeatedRate(RepeatedValue):
    """Amounts per second. Of two rates in the middle the higher one counts."""

    is_rate: ClassVar[bool] = True
