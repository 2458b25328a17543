"""Falling curves through a table of batch costs: three families of three parameters.

The families and the published parameters are those of llama.cpp #10466, whose authors replaced a
table of thresholds by such a curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdec.errors import BadProfile

Family = Literal["exponential", "power", "rational"]
LEAST_TO_FIT = 8  # points that three parameters can be fitted to
N_FUDGED = 3  # the first entries are above 1 and follow no curve: 1.0 stands for them

_GRID = np.logspace(-3, 3, 241)  # of b
_GOLDEN = (np.sqrt(5.0) - 1.0) / 2.0
_N_GOLDEN = 50  # each narrows the bracket to 0.62 of it


@dataclass(frozen=True)
class CostCurve:
    """`f(x)` of a family with parameters a, b, c; x = 0 is the fourth entry of the table."""

    family: Family
    a: float
    b: float
    c: float
    rmse: float

    def threshold(self, m: int) -> float:
        """The break-even probability of a draft of m tokens."""
        if m < N_FUDGED:
            return 1.0
        x = np.array([m - N_FUDGED], dtype=np.float64)
        return float(self.a * _shape(self.family, x, np.array([self.b]))[0, 0] + self.c)


# What the data published for DeepSeek-V3 fits to, used where nothing was measured.
PUBLISHED = CostCurve("rational", 2.6288, 3.996, 0.1761, 0.00187)


def _shape(family: Family, x: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """[len(b), len(x)]: the curve with a = 1 and c = 0."""
    b = b[:, None]
    if family == "exponential":
        return np.asarray(np.exp(-b * x))
    if family == "power":
        return np.asarray((x + 1.0) ** -b)
    return np.asarray(1.0 / (x + b))


def fit(y: Sequence[float], family: Family = "rational") -> CostCurve:
    """Least squares over y[0], y[1], ...: normalised costs from the fourth on.

    Given b, the best a and c are a straight line's; so only b is searched for (variable
    projection, Golub and Pereyra 1973), over a grid and then by golden section.
    Raises BadProfile for costs that no curve of the family follows.
    """
    if len(y) < LEAST_TO_FIT:
        raise BadProfile(
            f"{len(y)} batch sizes from {N_FUDGED + 1} on are too few to fit a curve to; "
            f"{LEAST_TO_FIT} are needed"
        )
    data = np.asarray(y, dtype=np.float64)
    errors = _line(family, _GRID, data)[2]
    inner = 1 + int(errors[1:-1].argmin())
    # The error still falls at an end of the grid: a step or a straight line, and no such curve.
    if min(errors[0], errors[-1]) < errors[inner] * (1.0 - 1e-6) - 1e-18:
        raise BadProfile(f"no {family} curve follows these costs")
    b = _refined(family, data, inner)
    slope, level, error = (float(v[0]) for v in _line(family, np.array([b]), data))
    if slope < 0:
        raise BadProfile(f"no falling {family} curve follows these costs (a = {slope:.3g})")
    return CostCurve(family, slope, b, level, float(np.sqrt(error / len(data))))


def _line(
    family: Family, b: NDArray[np.float64], data: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The best a and c for each b, and the sum of squares that they leave."""
    shape = _shape(family, np.arange(len(data), dtype=np.float64), b)
    means = shape.mean(axis=1)
    centred = shape - means[:, None]
    variance = np.maximum((centred**2).sum(axis=1), 1e-300)
    slopes = centred @ (data - data.mean()) / variance
    levels = data.mean() - slopes * means
    left = data - (slopes[:, None] * shape + levels[:, None])
    return slopes, levels, (left**2).sum(axis=1)


def _refined(family: Family, data: NDArray[np.float64], near: int) -> float:
    """The b of least error between the neighbours of a point of the grid."""
    low, high = np.log(_GRID[near - 1]), np.log(_GRID[near + 1])
    for _ in range(_N_GOLDEN):
        step = _GOLDEN * (high - low)
        left, right = high - step, low + step
        errors = _line(family, np.exp([left, right]), data)[2]
        low, high = (low, right) if errors[0] < errors[1] else (left, high)
    return float(np.exp((low + high) / 2))
