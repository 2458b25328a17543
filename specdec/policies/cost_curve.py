"""Smooth curves fitted to batch costs, for the policies `rational`, `exponential` and `power`.

The three families, their first guesses and the published parameters are from the discussion
llama.cpp #10466, whose authors replaced a table of thresholds by such a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdec.errors import BadProfile

CurveFamily = Literal["rational", "exponential", "power"]
N_UNFITTED = 3  # first entries of a table, which may exceed 1; the source replaces them by 1.0
LEAST_TO_FIT = 8  # fewest points for three parameters

_GRID = np.logspace(-3, 3, 241)  # values of b
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0
_N_GOLDEN = 50  # steps of the golden-section search; each keeps 62 % of the interval


@dataclass(frozen=True)
class CostCurve:
    """A fitted curve with parameters a, b and c, and its root mean square error.

    With x = m - 3 for a draft of m tokens: rational a / (x + b) + c, exponential a exp(-b x) + c,
    power a (x + 1)^-b + c.
    """

    family: CurveFamily
    a: float
    b: float
    c: float
    rmse: float

    def threshold(self, m: int) -> float:
        """The least probability of a whole draft of `m` tokens at which it pays."""
        if m < N_UNFITTED:
            return 1.0
        x = np.array([m - N_UNFITTED], dtype=np.float64)
        return float(self.a * _shape(self.family, x, np.array([self.b]))[0, 0] + self.c)


# The published fit for DeepSeek-V3-0324 with experts on the CPU.
PUBLISHED = CostCurve("rational", 2.6288, 3.996, 0.1761, 0.00187)


def fit(costs: Sequence[float], family: CurveFamily = "rational") -> CostCurve:
    """Fit a falling curve by least squares to the normalised costs of batches of 4, 5, ... tokens.

    For a given b the best a and c follow from a linear regression, so only b is searched for
    (variable projection, Golub and Pereyra 1973). Raises BadProfile if there are too few costs, or
    if no falling curve of the family has a least error.
    """
    if len(costs) < LEAST_TO_FIT:
        raise BadProfile(
            f"a curve cannot be fitted to {len(costs)} batch sizes from {N_UNFITTED + 1} tokens "
            f"on; at least {LEAST_TO_FIT} are needed"
        )
    data = np.asarray(costs, dtype=np.float64)
    errors = _regression(family, _GRID, data)[2]
    inner = 1 + int(errors[1:-1].argmin())
    # If the error still falls at an end of the grid, the costs are a step or a straight line.
    if min(errors[0], errors[-1]) < errors[inner] * (1.0 - 1e-6) - 1e-18:
        raise BadProfile(f"no {family} curve follows these costs")
    b = _refined(family, data, inner)
    slope, level, error = (float(v[0]) for v in _regression(family, np.array([b]), data))
    if slope < 0:
        raise BadProfile(f"no falling {family} curve follows these costs (a = {slope:.3g})")
    return CostCurve(family, slope, b, level, float(np.sqrt(error / len(data))))


def _shape(
    family: CurveFamily, x: NDArray[np.float64], b: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The curves [len(b), len(x)] with a = 1 and c = 0."""
    b = b[:, None]
    match family:
        case "exponential":
            return np.asarray(np.exp(-b * x))
        case "power":
            return np.asarray((x + 1.0) ** -b)
        case "rational":
            return np.asarray(1.0 / (x + b))


def _regression(
    family: CurveFamily, b: NDArray[np.float64], data: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The best a and c for each b, and the sums of squared errors; each [len(b)]."""
    shape = _shape(family, np.arange(len(data), dtype=np.float64), b)
    means = shape.mean(axis=1)
    centred = shape - means[:, None]
    variance = np.maximum((centred**2).sum(axis=1), 1e-300)
    slopes = centred @ (data - data.mean()) / variance
    levels = data.mean() - slopes * means
    errors = data - (slopes[:, None] * shape + levels[:, None])
    return slopes, levels, (errors**2).sum(axis=1)


def _refined(family: CurveFamily, data: NDArray[np.float64], near: int) -> float:
    """The b with the least error between the neighbours of grid point `near`."""
    low, high = np.log(_GRID[near - 1]), np.log(_GRID[near + 1])
    for _ in range(_N_GOLDEN):
        step = _GOLDEN * (high - low)
        left, right = high - step, low + step
        errors = _regression(family, np.exp([left, right]), data)[2]
        low, high = (low, right) if errors[0] < errors[1] else (left, high)
    return float(np.exp((low + high) / 2))
