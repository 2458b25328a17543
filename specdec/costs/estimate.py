"""From timed decodes to T(n): which size to time next, and the best estimate of all. Pure.

Times of a busy machine are skewed: most are right, some far too long. So centres are taken, a size
is timed again until its repetitions agree or the time is up, and first if it contradicts other
sizes. What is still uncertain is drawn towards its neighbours and marked. A jump that repetitions
confirm is never smoothed away.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.costs.profile import Timed, contradicting

TOLERANCE = 0.03  # relative error of a median from which on repetitions agree
_JAGGEDNESS = 0.05  # by which T(n) may well differ from the line between its neighbours
_LEAST_RETRIES = 4  # times of a size that contradicts others
_DISTURBED = 1.3  # times the median: something else ran
_MAD_TO_SIGMA, _MEDIAN_TO_MEAN = 1.4826, 1.2533  # of a normal distribution

Samples = Mapping[int, Sequence[float]]  # batch size -> seconds of each repetition


@dataclass(frozen=True)
class Estimate:
    """T(1..n_max) in seconds; `uncertain` are sizes that were not timed, or whose repetitions do
    not agree."""

    step_s: tuple[float, ...]
    uncertain: tuple[int, ...]
    timed: tuple[Timed, ...] = ()


@dataclass(frozen=True)
class Wanted:
    """Sizes in the order in which they are timed, each `n_least` times and up to `n_most` times
    while its repetitions do not agree, within `budget_s`."""

    sizes: tuple[int, ...]
    n_least: int = 1
    n_most: int = 4
    budget_s: float = float("inf")


def typical(times: Sequence[float]) -> float:
    """The mean of what was not disturbed: texts have cheap tokens, and no decode is too fast."""
    most = _DISTURBED * statistics.median(times)
    return statistics.fmean([t for t in times if t <= most])


def relative_error(times: Sequence[float]) -> float:
    """Standard error of the median over the median; infinite for a single time."""
    if len(times) < 2:
        return float("inf")
    middle = statistics.median(times)
    if middle <= 0.0:
        return float("inf")  # a clock too coarse for it
    spread = statistics.median([abs(t - middle) for t in times])
    return _MEDIAN_TO_MEAN * _MAD_TO_SIGMA * spread / math.sqrt(len(times)) / middle


def next_size(samples: Samples, wanted: Wanted, spent_s: float) -> int | None:
    """The size to time next, or None when all agree or nothing more fits the time.

    Every size gets its first time before any gets its second. Then sizes go first that contradict
    others: they are timed until they agree with themselves or with the others. The first of all is
    timed whatever it takes.
    """
    counts = {n: len(samples.get(n, ())) for n in wanted.sizes}
    if not any(counts.values()):
        return wanted.sizes[0]
    left_s = wanted.budget_s - spent_s
    doubted = set() if min(counts.values()) < wanted.n_least else _contradicting(samples)
    open_ = [n for n in counts if _is_open(samples.get(n, ()), wanted, n in doubted)]
    fitting = [n for n in open_ if expected_s(samples, n) <= left_s]
    return min(fitting, key=lambda n: (n not in doubted, counts[n]), default=None)


def _is_open(times: Sequence[float], wanted: Wanted, doubted: bool) -> bool:
    """True if a size with these times is to be timed again."""
    if len(times) < wanted.n_least:
        return True
    most = max(wanted.n_most, _LEAST_RETRIES) if doubted else wanted.n_most
    if len(times) >= most or most == 1:
        return False
    return relative_error(times) > TOLERANCE or (doubted and len(times) < _LEAST_RETRIES)


def _contradicting(samples: Samples) -> set[int]:
    """The timed sizes whose median contradicts those of other sizes."""
    known = sorted(n for n, times in samples.items() if times)
    middle = {n: [statistics.median(samples[n])] for n in known}
    steps = [expected_s(middle, n) for n in range(1, known[-1] + 1)]
    return set(contradicting(steps)).intersection(known)


def expected_s(samples: Samples, n: int) -> float:
    """T(n) roughly: on the line through the sizes around it that were timed. Beyond them a token
    costs what it does between the last two: no less than nothing, and no more than one alone."""
    known = sorted(size for size in samples if samples[size])
    times = {size: statistics.median(samples[size]) for size in known}
    low = max((size for size in known if size <= n), default=known[0])
    high = min((size for size in known if size > n), default=None)
    if low == n:
        return times[n]
    if high is not None:
        return times[low] + (times[high] - times[low]) * (n - low) / (high - low)
    alone_s = times[known[0]] / known[0]
    slope_s = alone_s
    if len(known) > 1:
        before = known[-2]
        slope_s = min(alone_s, max(0.0, (times[low] - times[before]) / (low - before)))
    return times[low] + slope_s * (n - low)


def estimate(samples: Samples, n_max: int) -> Estimate:
    """Typical times where repetitions agree; the rest between its neighbours, and marked.

    A size whose repetitions have a relative error e is drawn to the line between the sizes around
    it that agree, the more the larger e is. One that was timed once only stays as it is, since
    costs have jumps, but counts as uncertain.
    """
    centres = {n: typical(times) for n, times in samples.items() if times}
    errors = {n: relative_error(samples[n]) for n in centres}
    firm = {n: centres[n] for n, e in errors.items() if e <= TOLERANCE or len(samples[n]) < 2}
    known = dict(centres)
    for n, error in errors.items():
        if n not in firm and firm:
            weight = _JAGGEDNESS**2 / (_JAGGEDNESS**2 + error**2)
            known[n] = weight * centres[n] + (1.0 - weight) * _between(firm, n, centres[n])
    sizes = sorted(known)
    steps = [expected_s({size: [known[size]] for size in sizes}, n) for n in range(1, n_max + 1)]
    uncertain = [n for n in range(1, n_max + 1) if errors.get(n, float("inf")) > TOLERANCE]
    timed = [Timed(n, len(samples[n]), _spread(samples[n])) for n in sizes if n <= n_max]
    return Estimate(tuple(steps), tuple(uncertain), tuple(timed))


def _spread(times: Sequence[float]) -> float:
    """Half of what lies between the quartiles, over the median."""
    if len(times) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / 2 / middle if middle > 0 else 0.0


def _between(firm: Mapping[int, float], n: int, otherwise: float) -> float:
    """The line between the neighbours of n; without one on both sides, `otherwise`."""
    low = max((size for size in firm if size < n), default=None)
    high = min((size for size in firm if size > n), default=None)
    if low is None or high is None:
        return otherwise
    return firm[low] + (firm[high] - firm[low]) * (n - low) / (high - low)
