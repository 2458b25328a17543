"""Calibration: what a drafter's probability is worth, learnt from what the target accepted.

Binned Beta counts with decay, one set per drafter. The prior of a probability is itself, so an
unseen drafter is taken at its word. No peer has this (PEERS 7.1, 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specdec.errors import BadProfile

# Finer towards 1, where long drafts are decided.
EDGES = (
    *(i / 20 for i in range(1, 18)),
    *(0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995),
)
N_BINS = len(EDGES) + 1
_GRID = 1000
_BIN_OF = tuple(sum(1 for e in EDGES if i / _GRID >= e) for i in range(_GRID + 1))


def bin_of(p: float) -> int:
    """The bin of a probability; anything outside [0, 1] counts as the nearer end."""
    return _BIN_OF[min(_GRID, max(0, int(p * _GRID)))]


@dataclass(frozen=True)
class ReliabilityPoint:
    """One bin of a reliability plot: the drafter said `mean_p`, the target accepted `rate`."""

    mean_p: float
    rate: float
    weight: float  # decayed number of observations


class _Bins:
    __slots__ = ("accepted", "shift", "sum_p", "total")

    def __init__(self) -> None:
        self.total = [0.0] * N_BINS
        self.accepted = [0.0] * N_BINS
        self.sum_p = [0.0] * N_BINS
        self.shift = 0.0  # log-odds by which the drafter as a whole is off, the bins' prior


class Calibration:
    """Maps (drafter, p) to a probability of acceptance.

    `prior_weight` observations' worth of trust in the prior per bin; a bin's evidence halves
    every `half_life` observations of that bin.
    """

    def __init__(self, prior_weight: float = 8.0, half_life: float = 400.0) -> None:
        self._prior_weight = prior_weight
        self._keep = 0.5 ** (1.0 / half_life)
        self._sources: dict[str, _Bins] = {}

    def probability(self, source: str, p: float) -> float:
        """The calibrated probability that a token drafted with `p` is accepted."""
        bins = self._sources.get(source)
        if bins is None:
            return p
        i = bin_of(p)
        prior = shifted(p, bins.shift)
        w = self._prior_weight
        return (bins.accepted[i] + w * prior) / (bins.total[i] + w)

    def observe(self, source: str, p: float, accepted: bool) -> None:
        """One drafted token whose prefix was confirmed."""
        bins = self._sources.setdefault(source, _Bins())
        i = bin_of(p)
        k = self._keep
        prior = shifted(p, bins.shift)
        bins.total[i] = bins.total[i] * k + 1.0
        bins.accepted[i] = bins.accepted[i] * k + accepted
        bins.sum_p[i] = bins.sum_p[i] * k + p
        # One step of logistic regression on the intercept: bins without evidence follow it.
        bins.shift = min(6.0, max(-6.0, bins.shift + 0.1 * (accepted - prior)))

    def reliability(self, source: str) -> tuple[ReliabilityPoint, ...]:
        """The bins that have evidence, by rising p."""
        bins = self._sources.get(source)
        if bins is None:
            return ()
        return tuple(
            ReliabilityPoint(s / n, a / n, n)
            for s, a, n in zip(bins.sum_p, bins.accepted, bins.total, strict=True)
            if n > 0.5
        )

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(sorted(self._sources))

    def as_data(self) -> dict[str, Any]:
        """Plain data for JSON; `from_data` reads it."""
        return {
            name: {"total": b.total, "accepted": b.accepted, "sum_p": b.sum_p, "shift": b.shift}
            for name, b in self._sources.items()
        }

    @classmethod
    def from_data(cls, data: Any) -> Calibration:
        """Raises BadProfile when the counts are no counts."""
        calibration = cls()
        if not isinstance(data, dict):
            raise BadProfile("its calibration is no JSON object")
        for name, stored in data.items():
            bins = _Bins()
            try:
                lists = [[float(v) for v in stored[k]] for k in ("total", "accepted", "sum_p")]
                bins.total, bins.accepted, bins.sum_p = lists
                bins.shift = float(stored["shift"])
            except (KeyError, TypeError, ValueError) as e:
                raise BadProfile(f"its calibration of {name} is damaged: {e!r}") from e
            for total, accepted in zip(bins.total, bins.accepted, strict=False):
                if not 0 <= accepted <= total < math.inf:
                    raise BadProfile(f"its calibration of {name} accepts {accepted} of {total}")
            if {len(v) for v in lists} != {N_BINS} or not math.isfinite(bins.shift):
                raise BadProfile(f"its calibration of {name} has not {N_BINS} bins")
            calibration._sources[name] = bins
        return calibration


def shifted(p: float, shift: float) -> float:
    """`p` with its log-odds moved by `shift`."""
    if shift == 0.0:
        return p
    odds = math.exp(shift)
    return p * odds / (1.0 - p + p * odds)
