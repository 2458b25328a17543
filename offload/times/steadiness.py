"""Decides whether a measured figure means something. Pure.

All commands that measure ask here before they print a figure. Every value has a relative spread,
and the spreads of a quotient's parts add up. From `_MOST_SPREAD` on, the uncertainty of a figure is
as large as the figure. The figure is then not printed, and a sentence says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

_MOST_SPREAD = 1.0


def relative_range(values: Sequence[float]) -> float:
    """Return (largest − smallest) / median of repetitions; 0 for fewer than two."""
    if len(values) < 2 or (middle := median(values)) <= 0.0:
        return 0.0
    return (max(values) - min(values)) / middle


def is_steady(*spreads: float) -> bool:
    """Return True if a figure means something whose parts have these relative spreads."""
    return sum(spreads) < _MOST_SPREAD


def if_steady(figure: float, *spreads: float) -> float | None:
    """Return `figure` if it means something, else None. `spreads`: relative, of its parts."""
    return figure if is_steady(*spreads) else None


def speed_words(speeds: Sequence[float], typical: float, digits: int = 1) -> str:
    """Return `typical` as text, or the range of `speeds` if they are too different for it."""
    if is_steady(relative_range(speeds)):
        return f"{typical:.{digits}f}"
    return f"{min(speeds):.{digits}f} to {max(speeds):.{digits}f}"


def spread_words(spread: float) -> str:
    """Return a relative spread as text: ±12%, or in words if a percentage would mean nothing."""
    return f"by ±{spread:.0%}" if is_steady(spread) else "by more than their median"
