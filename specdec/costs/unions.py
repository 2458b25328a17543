"""Cost curves of mixtures that leave out the experts of different tokens. Pure.

A verification batch of n tokens uses more experts than one token, because each token chooses its
own. The batch's *unions* are its number of experts, as a multiple of one token's experts. A curve
that was measured with the same token in each sequence has unions of 1. So it says what a further
row costs, and not what a verification batch costs.

llama.cpp's llama-batched-bench filled each sequence with token 0 until llama.cpp #15398. The curves
of llama.cpp #17034 are straight lines (docs/background.md, costs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from specdec.costs.profile import CostProfile

_LEAST_SIZES = 3  # batch sizes below which nothing can be said of a curve's form


@dataclass(frozen=True)
class CurveFit:
    """T(n) in units of T(1): `fixed` + `per_row` n + `per_union` (unions of n tokens - 1).

    `worst` is the greatest relative error of the fit. No term is negative.
    """

    fixed: float
    per_row: float
    per_union: float
    worst: float


def fit_curve(profile: CostProfile, unions: Sequence[float] = ()) -> CurveFit:
    """Fit a curve by least squares of relative errors; a straight line if `unions` is empty.

    `unions[n - 1]` is the number of experts that n tokens use, over those that one token uses.
    """
    t = np.array(profile.step_s) / profile.step_s[0]
    n = np.arange(1.0, len(t) + 1)
    columns = [np.ones(len(t)), n]
    if unions:
        columns.append(np.array(unions[: len(t)]) - 1.0)
    terms = np.array(columns).T / t[:, None]
    best, least = np.zeros(len(columns)), np.inf
    for k in range(1, len(columns) + 1):  # least squares without negative terms: try all subsets
        for chosen in combinations(range(len(columns)), k):
            factors = np.linalg.lstsq(terms[:, chosen], np.ones(len(t)), rcond=None)[0]
            error = float(((terms[:, chosen] @ factors - 1.0) ** 2).sum())
            if factors.min() >= 0.0 and error < least - 1e-12:
                best, least = np.zeros(len(columns)), error
                best[list(chosen)] = factors
    worst = float(np.abs(terms @ best - 1.0).max())
    fixed, per_row, *rest = best.tolist()
    return CurveFit(fixed, per_row, rest[0] if rest else 0.0, worst)


def with_unions(profile: CostProfile, unions: Sequence[float]) -> CostProfile:
    """Return the curve with the reads of different tokens' experts that it leaves out.

    The part of T(1) that does not grow with rows is assumed to be the reading of experts. It is
    made to grow as `unions`, minus the growth that the curve already has. The result is never below
    the curve. Curves of fewer than three sizes are returned unchanged. So are curves of models
    without experts, whose unions are all 1.
    """
    if profile.n_max < _LEAST_SIZES or max(unions, default=1.0) <= 1.0:
        return profile
    fit = fit_curve(profile, unions)
    missing = profile.step_s[0] * max(0.0, min(1.0, fit.fixed) - fit.per_union)
    step_s = tuple(
        t + missing * max(0.0, u - 1.0) for t, u in zip(profile.step_s, unions, strict=False)
    )
    return replace(profile, step_s=step_s)


def cheaper_than_one(profile: CostProfile) -> list[int]:
    """Return the batch sizes that take less time than one token, beyond rounding of three decimals.

    Their normalised cost is below 1/n. Batch 1 was then probably measured cold.
    """
    return [n for n, c in enumerate(profile.normalised, 1) if c + 0.0005 < 1.0 / n]
