"""A kept value that is corrected by what is seen. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median_low

from offload.times.repeated import half_spread

_MOST = 32  # values that count, the newest ones


class RecentMedian:
    """The lower median of a kept value and of the values that were seen since, the last ones.

    The kept value counts as one of them. So two values that agree outweigh one that was disturbed,
    whether it was kept or seen. A shorter time counts at once, because other programs only make
    times longer.
    """

    def __init__(self, kept: float = 0.0) -> None:
        """`kept`: 0.0 if nothing is known yet."""
        self._values = deque([kept] if kept else [], maxlen=_MOST)

    @property
    def value(self) -> float:
        """The lower median, or 0.0 if nothing is known."""
        return median_low(self._values) if self._values else 0.0

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median, or 0.0 for fewer than two values."""
        return half_spread(self._values) or 0.0

    def see(self, value: float) -> None:
        self._values.append(value)

    def scale(self, factor: float) -> None:
        """Multiply all values, because their unit changes."""
        self._values = deque((factor * value for value in self._values), maxlen=_MOST)
