"""`rational`: v2, the table of v1 replaced by a fitted curve (A19, A20, B06)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from specdec.errors import BadProfile
from specdec.policies.p_mins import RECALIBRATION_POWER, ThresholdWalk
from specdec.types import Round

Family = Literal["exponential", "power", "rational"]
FAMILIES: tuple[Family, ...] = ("exponential", "power", "rational")
_START: dict[Family, tuple[float, float, float]] = {
    "exponential": (0.5, 0.1, 0.2),
    "power": (0.5, 0.5, 0.2),
    "rational": (0.5, 1.0, 0.2),
}
LEAST_TO_FIT = 8  # points that three parameters can be fitted to
N_FUDGED = 3  # the first entries are above 1 and follow no curve: 1.0 stands for them


@dataclass(frozen=True)
class Fit:
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
        return float(curve(self.family, x, self.a, self.b, self.c)[0])


# What the published data for DeepSeek-V3 fits to (A19), used where nothing was measured.
PUBLISHED = Fit("rational", 2.6288, 3.996, 0.1761, 0.00187)


def curve(
    family: Family, x: NDArray[np.float64], a: float, b: float, c: float
) -> NDArray[np.float64]:
    """The three families of A20."""
    if family == "exponential":
        return np.asarray(a * np.exp(-b * x) + c)
    if family == "power":
        return np.asarray(a * (x + 1.0) ** -b + c)
    return np.asarray(a / (x + b) + c)


def fit(y: Sequence[float], family: Family = "rational") -> Fit:
    """Least squares over y[0], y[1], ...: normalised costs from the fourth on.

    Raises BadProfile for costs that no curve of the family follows.
    """
    from scipy.optimize import curve_fit

    x = np.arange(len(y), dtype=np.float64)
    data = np.asarray(y, dtype=np.float64)

    def f(x: NDArray[np.float64], a: float, b: float, c: float) -> NDArray[np.float64]:
        return curve(family, x, a, b, c)

    if len(y) < LEAST_TO_FIT:
        raise BadProfile(
            f"{len(y)} batch sizes from {N_FUDGED + 1} on are too few to fit a curve to; "
            f"{LEAST_TO_FIT} are needed"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a covariance that is not asked for
        try:
            (a, b, c), _ = curve_fit(f, x, data, p0=_START[family], maxfev=20_000)
        except RuntimeError as e:
            raise BadProfile(f"no {family} curve follows these costs") from e
    # Elsewhere a pole lies between or beside the batch sizes, or the curve does not fall.
    if not (np.isfinite((a, b, c)).all() and a >= 0 and b > 0):
        raise BadProfile(f"no falling {family} curve follows these costs (b = {b:.3g})")
    rmse = float(np.sqrt(np.mean((curve(family, x, a, b, c) - data) ** 2)))
    return Fit(family, float(a), float(b), float(c), rmse)


class Rational:
    name = "rational"

    def __init__(
        self, fitted: Fit = PUBLISHED, n_max: int = 64, power: float = RECALIBRATION_POWER
    ) -> None:
        self.fit = fitted
        self.n_max = n_max
        self._power = power
        self._thresholds = [fitted.threshold(m) for m in range(n_max + 6)]

    def begin(self, limit: int, source: str) -> ThresholdWalk:
        return ThresholdWalk(min(limit, self.n_max), self._thresholds.__getitem__, self._power)

    def learn(self, round_: Round) -> None:
        pass
