"""The median of a histogram as Prometheus' text has it."""

from __future__ import annotations

from collections.abc import Sequence


def median(buckets: Sequence[tuple[float, float]]) -> float:
    """Of (upper bound, how many were not above it), by straight lines between the bounds."""
    half = buckets[-1][1] / 2 if buckets else 0.0
    low = n_below = 0.0
    for bound, n in buckets:
        if n >= half > n_below:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (half - n_below) / (n - n_below)
        low, n_below = bound, n
    return 0.0
