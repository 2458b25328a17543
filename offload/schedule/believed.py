"""Believes measured times of an expert as far as they agree with each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

# An expert of n times as many rows takes at most n times as long, because its rows can be computed
# by turns. Twice of that is believed, because short times are noisy.
_MOST_PER_ROW = 2.0
_DOUBTED = 8.0  # ratio of a measured time to the believed one, or the reverse, beyond noise


def believed(by_rows_s: Mapping[int, float]) -> dict[int, float]:
    """Return times by rows that never fall as rows increase, and that one bad time spoils little.

    Times that fall are replaced by their lower median, as in the isotonic regression with absolute
    errors (https://en.wikipedia.org/wiki/Isotonic_regression), so a single time that is too long or
    too short has no weight among others. No larger size contradicts the last time. It is limited by
    the two before it.
    """
    rows = sorted(by_rows_s)
    blocks: list[list[float]] = []
    for n in rows:
        blocks.append([by_rows_s[n]])
        while len(blocks) > 1 and median_low(blocks[-2]) > median_low(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    seconds = [median_low(block) for block in blocks for _ in block]
    earlier = [*zip(rows, seconds, strict=True)][-3:-1]
    most_s = max((_MOST_PER_ROW * rows[-1] / n * s for n, s in earlier), default=0.0)
    if most_s > 0.0:
        seconds[-1] = min(seconds[-1], most_s)
    return dict(zip(rows, seconds, strict=True))


def contradict(by_rows_s: Mapping[int, float]) -> bool:
    """True if a measured time lies so far from the believed one that it has to be measured again.

    Other programs lengthen times while they run. Times of 0 s come from subtraction, and are not
    doubted.
    """
    known = believed(by_rows_s)
    pairs = [(s, known[n]) for n, s in by_rows_s.items() if s > 0.0 and known[n] > 0.0]
    return any(max(s, t) > _DOUBTED * min(s, t) for s, t in pairs)
