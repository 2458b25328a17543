"""A value that was measured several times, of which the middle one counts. Pure.

Other programs only make a machine slower, so of two values in the middle the faster one counts. One
disturbed value among three or more changes nothing beyond the range of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median, median_high, median_low, quantiles
from typing import ClassVar, Self

MOST_FROM_STARTS = 5  # values after which a start measures no further one
_MOST_VALUES = 8  # newest values that are kept; serving adds values when starts do so no more
_LEAST_SETTLED = 3
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

    values: tuple[float, ...] = ()
    is_doubted: bool = False  # other programs took much of the CPUs whenever it was measured

    is_rate: ClassVar[bool] = False

    @property
    def n(self) -> int:
        """The number of values."""
        return len(self.values)

    @property
    def value(self) -> float:
        """The value in the middle, or 0.0 if nothing was measured."""
        if not self.values:
            return 0.0
        return median_high(self.values) if self.is_rate else median_low(self.values)

    @property
    def spread(self) -> float | None:
        """Half the interquartile range over the median. None: there is only one value."""
        return half_spread(self.values)

    def is_settled(self, most: int = MOST_FROM_STARTS) -> bool:
        """True if no start needs to measure again: values agree, or there are `most` of them."""
        if self.n >= most:
            return True
        spread = self.spread
        agrees = spread is not None and spread <= _MOST_SPREAD
        return self.n >= _LEAST_SETTLED and agrees and not self.is_doubted

    def with_value(self, value: float, *, is_doubted: bool = False) -> Self:
        """Return these values with a further one.

        `is_doubted`: other programs took much of the CPUs meanwhile. Doubted values are kept until
        there is one that is not, which replaces them.
        """
        if is_doubted and self.values and not self.is_doubted:
            return self
        kept = self.values if self.is_doubted == is_doubted else ()
        return replace(self, values=(*kept, value)[-_MOST_VALUES:], is_doubted=is_doubted)

    def with_seen(self, value: float) -> Self:
        """Return these values with one that serving saw. It is as doubted as they are."""
        return self.with_value(value, is_doubted=self.is_doubted)


@dataclass(frozen=True)
class RepeatedTime(RepeatedValue):
    """Seconds. Of two times in the middle the shorter one counts."""


@dataclass(frozen=True)
class RepeatedRate(RepeatedValue):
    """Amounts per second. Of two rates in the middle the higher one counts."""

    is_rate: ClassVar[bool] = True
