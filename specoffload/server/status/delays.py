"""The time that tokens take from the engine to their clients' sockets, as a histogram. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

BOUNDS_S = (
    *(50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 700e-6),
    *(1e-3, 1.5e-3, 2e-3, 3e-3, 5e-3, 7e-3, 10e-3, 20e-3, 50e-3, 0.1, 1.0),
)


class Delays:
    """Counts by upper bound, as Prometheus' histograms have them."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, delay_s: float) -> None:
        self._counts[bisect_left(BOUNDS_S, delay_s)] += 1
        self.sum_s += delay_s

    def buckets(self) -> Iterator[tuple[str, int]]:
        """(upper bound in seconds, number of those not above it), the last of them "+Inf"."""
        n = 0
        for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], self._counts, strict=True):
            n += count
            yield bound, n
