"""Believes measured times of an expert as far as they agree with each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

# An expert of n times as many rows takes at most n times as long, because its rows can be computed
# by turns. Twice of that is believed, because short times are noisy. So each further row takes at
# most as long as the first, and that is believed too.
_MOST_PER_ROW = 2.0
_DOUBTED = 8.0  # ratio of a measured time to the believed one, or the reverse, beyond noise


def believed(by_rows_s: Mapping[int, float]) -> dict[int, float]:
    """Return times by rows that never fall as rows increase, and that one bad time spoils little.

    Times that fall are replaced by their lower median, as in the isotonic regression with absolute
    errors (https://en.wikipedia.org/wiki/Isotonic_regression), so a single time that is too long or
    too short has no weight among others. Several long times in a row do not fall, so each time is
    also limited by the others of fewer rows, if two of them limit it. No larger size contradicts
    the last time. It is limited by the two before it, and is not lowered while its further rows
    each take at most the first time.
    """
    rows = sorted(by_rows_s)
    blocks: list[list[float]] = []
    for n in rows:
        blocks.append([by_rows_s[n]])
        while len(blocks) > 1 and median_low(blocks[-2]) > median_low(blocks[-1]):
            last = blocks.pop()
            blocks[-1] += last
    seconds = [median_low(block) for block in blocks for _ in block]
    for i in range(2, len(rows) - 1):
        limits_s = sorted(_most_s(rows[i], rows[j], seconds[j]) for j in range(i))
        if limits_s[0] > 0.0:  # times of 0 s limit nothing
            seconds[i] = min(seconds[i], limits_s[1])
    return dict(zip(rows, _with_limited_last(rows, seconds), strict=True))


def _most_s(n_rows: int, n_fewer: int, fewer_s: float) -> float:
    """Return the most seconds of `n_rows` rows that the time of fewer rows allows."""
    return _MOST_PER_ROW * n_rows / n_fewer * fewer_s


def _with_limited_last(rows: list[int], seconds: list[float]) -> list[float]:
    earlier = [*zip(rows, seconds, strict=True)][-3:-1]
    limits_s = [_most_s(rows[-1], n, s) for n, s in earlier]
    if not any(limits_s):  # times of 0 s come from subtraction, and limit nothing
        return seconds
    n_before, before_s = earlier[-1]
    one_row_s = seconds[0] / rows[0]
    most_s = max(*limits_s, before_s + (rows[-1] - n_before) * one_row_s)
    return [*seconds[:-1], min(seconds[-1], most_s)]


def contradict(by_rows_s: Mapping[int, float]) -> bool:
    """True if a measured time lies so far from the believed one that it has to be measured again.

    Other programs lengthen times while they run. Times of 0 s come from subtraction, and are not
    doubted.
    """
    known = believed(by_rows_s)
    pairs = [(s, known[n]) for n, s in by_rows_s.items() if s > 0.0 and known[n] > 0.0]
    return any(max(s, t) > _DOUBTED * min(s, t) for s, t in pairs)
