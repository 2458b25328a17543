"""Measured costs of split layers, as arrays of times by number of rows. Pure.

Each measurement is one side's time for some experts of equally many rows. A line over the numbers
of experts gives the fixed time, which is paid once. One expert's time follows from the rest.
Times between measured numbers of rows are interpolated, and never fall as rows increase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.split.division import SplitCosts

MOST_ROWS = 64


@dataclass(frozen=True)
class SideTimes:
    """One side's times: seconds of one expert by its rows, and seconds that are paid once."""

    by_rows_s: Mapping[int, float]
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ValueError for rows out of range, or for times that are negative or infinite."""
        rows, seconds = [*self.by_rows_s], [*self.by_rows_s.values(), self.fixed_s]
        if not rows or not all(1 <= n <= MOST_ROWS for n in rows):
            raise ValueError(f"times of {sorted(rows)} rows are none of experts")
        if not all(0.0 <= s < math.inf for s in seconds):
            raise ValueError(f"{seconds} are no times in seconds")

    def array(self) -> NDArray[np.float64]:
        """Return seconds of one expert of 0, 1, ... rows, up to the most rows measured."""
        rows = sorted(self.by_rows_s)
        seconds = [self.by_rows_s[n] for n in rows]
        at = np.arange(max(rows[-1], 1) + 1)
        known = np.interp(at, [0, *rows], [0.0, *seconds]) if rows[0] > 1 else np.interp(
            at, rows, seconds
        )  # fmt: skip
        known[0] = 0.0
        return np.maximum.accumulate(known)


@dataclass(frozen=True)
class MeasuredCosts:
    """The measured costs of one kind of layer, in seconds."""

    host: SideTimes
    device: SideTimes
    copy_s: float  # seconds of one expert's copy, while the CPU computes
    host_slowdown: float = 1.0  # factor on the CPU's times while the link copies
    link_slowdown: float = 1.0  # factor on the link's times while the CPU computes
    kinds: tuple[float, ...] = (1.0,)  # each kind's share of an expert, in the order of copying

    def __post_init__(self) -> None:
        """Raise ValueError unless these are times, slowdowns and shares."""
        if not 0.0 <= self.copy_s < math.inf:
            raise ValueError(f"{self.copy_s} s is no time of a copy")
        if not all(1.0 <= slow < math.inf for slow in (self.host_slowdown, self.link_slowdown)):
            raise ValueError(f"{self.host_slowdown} or {self.link_slowdown} is no slowdown")
        if not self.kinds or min(self.kinds) <= 0 or not math.isclose(sum(self.kinds), 1.0):
            raise ValueError(f"{self.kinds!r:.80} are no shares of an expert")

    @property
    def words(self) -> str:
        """A clause for messages: times of an expert of one row on either side, and of its copy."""
        host_s, device_s = self.host.array()[1], self.device.array()[1]
        link_s = self.copy_s / self.link_slowdown
        return (
            f"an expert takes the CPU {host_s * 1e6:.0f} us, the device {device_s * 1e6:.0f} us "
            f"and the link {link_s * 1e6:.0f} us; beside each other the CPU takes "
            f"{self.host_slowdown:.2f} times as long and the link {self.link_slowdown:.2f}"
        )

    def costs(self) -> SplitCosts:
        """Return these costs as arrays, for the split."""
        return SplitCosts(
            self.host.array(),
            self.device.array(),
            self.host.fixed_s,
            self.device.fixed_s,
            self.copy_s,
            self.host_slowdown,
            self.link_slowdown,
            self.kinds,
        )


def side_times(measured: Mapping[int, Sequence[tuple[int, float]]]) -> SideTimes:
    """Return one side's times, from measured (experts, seconds) by rows.

    Each number of rows that was measured with several numbers of experts gives a line. The fixed
    time is the median of these lines' times at no experts, or 0 if there is no line. Raises
    ValueError if nothing was measured.
    """
    if not measured or not all(measured.values()):
        raise ValueError("a side's times need a measurement at each number of rows")
    lines = [points for points in measured.values() if len({n for n, _ in points}) > 1]
    fixed_s = float(np.median([_at_none(points) for points in lines])) if lines else 0.0
    by_rows_s = {
        rows: float(np.median([max(0.0, s - fixed_s) / n for n, s in measured[rows]]))
        for rows in sorted(measured)
    }
    return SideTimes(by_rows_s, fixed_s)


def _at_none(points: Sequence[tuple[int, float]]) -> float:
    """Return the seconds at no experts on the line fitted to `points` (experts, seconds).

    Neither the result nor the line's slope is below 0.
    """
    numbers = np.array([n for n, _ in points], np.float64)
    seconds = np.array([s for _, s in points])
    spread = numbers - numbers.mean()
    slope = max(0.0, float(spread @ seconds) / float(spread @ spread))
    return max(0.0, float(seconds.mean() - slope * numbers.mean()))


def slowdown(alone_s: Sequence[float], beside_copies_s: Sequence[float]) -> float:
    """Return a side's median time beside the other's work, over its time alone; at least 1."""
    return max(1.0, float(np.median(beside_copies_s) / np.median(alone_s)))
