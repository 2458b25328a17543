"""Calibration: maps a drafter's probabilities to chances of acceptance, learnt from the target.

Each drafter has binned Beta counts with decay. The prior of a bin follows a logistic fit to the
drafter's probabilities, which starts as the identity. So a new drafter's probabilities are
trusted.

The bins change slowly, but a text may suddenly become easier or harder for the drafter. A filter
over a hidden regime follows such changes. A regime is an offset that is added to the log-odds of
acceptance. It may change at any token, most likely to a regime that was frequent before.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Offset of the log-odds of acceptance in each regime.
_OFFSETS = (-4.5, -2.7, -1.5, -0.7, 0.0, 0.7, 1.5, 2.7, 4.5)
_ODDS = tuple(math.exp(x) for x in _OFFSETS)
_N_REGIMES = len(_ODDS)
_OFTEN = tuple(0.6 if x == 0.0 else 0.05 for x in _OFFSETS)
_CHANGE = 1.0 / 150.0  # chance per token of the text that the regime changes
_MET = 0.01  # weight of one observation in `Bins.often`
_DRIFT_TOKENS = 4  # tokens of text after which `_CHANGE` is applied
_MET_OBSERVED = 16  # observations after which `Bins.often` is updated
_UNLIKELY = 0.02
_LEAST, _MOST = 0.002, 0.998  # bounds of calibrated probabilities

# Edges of the bins, denser near 1, because such probabilities decide on long drafts.
EDGES = (
    *(i / 20 for i in range(1, 18)),
    *(0.9, 0.925, 0.95, 0.965, 0.98, 0.99, 0.995),
)
N_BINS = len(EDGES) + 1
_GRID = 1000
_BIN_OF = tuple(sum(1 for e in EDGES if i / _GRID >= e) for i in range(_GRID + 1))


_LOGIT = tuple(
    math.log(q / (1.0 - q)) for q in (min(_MOST, max(_LEAST, i / _GRID)) for i in range(_GRID + 1))
)
_TILT = 0.02
_PRIOR = 8.0  # weight of a bin's prior, in observations
_MOST_SHIFT, _MOST_SLOPE = 6.0, 2.0
_MOST_OBSERVED = 1e9  # decayed number of observations in a bin


@dataclass(frozen=True)
class ReliabilityPoint:
    """One bin of a reliability plot: the mean drafted probability, and the share accepted."""

    mean_p: float
    rate: float
    weight: float  # decayed number of observations


@dataclass
class Bins:
    """The counts learnt for one drafter. They are kept for later sessions.

    Raises ValueError for numbers that are never learnt, such as those of a damaged file.
    """

    total: list[float] = field(default_factory=lambda: [0.0] * N_BINS)
    accepted: list[float] = field(default_factory=lambda: [0.0] * N_BINS)
    sum_p: list[float] = field(default_factory=lambda: [0.0] * N_BINS)
    shift: float = 0.0  # number added to the drafter's log-odds in the bins' prior
    slope: float = 1.0  # factor of the drafter's log-odds in the bins' prior
    regimes: list[float] = field(default_factory=lambda: list(_OFTEN))  # chance of each now
    often: list[float] = field(default_factory=lambda: list(_OFTEN))  # long-term share of each
    elapsed: int = 0  # tokens of text for which `regimes` does not yet count `_CHANGE`
    n_observed: int = 0  # observations since the last update of `often`

    def __post_init__(self) -> None:
        sums = self.total, self.accepted, self.sum_p
        if {len(v) for v in sums} != {N_BINS}:
            raise ValueError(f"not {N_BINS} bins of sums")
        pairs = zip(self.accepted, self.total, strict=True)
        if not all(0 <= accepted <= n < _MOST_OBSERVED for accepted, n in pairs):
            raise ValueError("more tokens were accepted than observed, or observed than possible")
        pairs = zip(self.sum_p, self.total, strict=True)
        if not all(0 <= p <= n * (1 + 1e-6) + 1e-6 for p, n in pairs):
            raise ValueError("the mean of a bin's probabilities is not from 0 to 1")
        if self.elapsed < 0 or self.n_observed < 0:
            raise ValueError(f"{self.elapsed} tokens elapsed, {self.n_observed} were observed")
        if not (abs(self.shift) <= _MOST_SHIFT and 0.0 <= self.slope <= _MOST_SLOPE):
            raise ValueError(f"shift {self.shift} and slope {self.slope} are never learnt")
        for chances in (self.regimes, self.often):
            is_one = abs(sum(chances) - 1.0) <= 1e-6 and min(chances) >= 0.0
            if len(chances) != _N_REGIMES or not is_one:
                raise ValueError(f"{len(chances)} chances of regimes sum to {sum(chances)}")


class Calibration:
    """Maps a drafter's name and its probability of a token to the probability of acceptance.

    In each bin, the prior weighs as much as _PRIOR observations. The weight of an observation
    halves after `half_life` later observations in its bin.
    """

    def __init__(self, bins: dict[str, Bins] | None = None, *, half_life: float = 400.0) -> None:
        """Continue with `bins`, which are changed and may be kept."""
        self.bins = {} if bins is None else bins  # by drafter
        self._keep = 0.5 ** (1.0 / half_life)

    def probability(self, source: str, p: float) -> float:
        """The calibrated probability that a token drafted with `p` is accepted."""
        q = self.usual(source, p)
        return sum(w * q * odds / (1.0 - q + q * odds) for w, odds in self.regimes(source))

    def usual(self, source: str, p: float) -> float:
        """The calibrated probability without the present regime's offset."""
        bins = self.bins.get(source)
        if bins is None:
            return min(_MOST, max(_LEAST, p))
        at = _GRID if p >= 1.0 else int(p * _GRID) if p > 0.0 else 0
        i = _BIN_OF[at]
        prior = 1.0 / (1.0 + math.exp(-bins.shift - bins.slope * _LOGIT[at]))
        q = (bins.accepted[i] + _PRIOR * prior) / (bins.total[i] + _PRIOR)
        return _MOST if q > _MOST else q if q > _LEAST else _LEAST

    def n_judged(self, source: str) -> float:
        """Drafted tokens that were compared with the text, of which older ones count less."""
        bins = self.bins.get(source)
        return 0.0 if bins is None else sum(bins.total)

    def regimes(self, source: str) -> list[tuple[float, float]]:
        """(chance, factor of the odds) of each regime that is likely now; chances sum to 1."""
        bins = self.bins.get(source)
        if bins is None:
            return [(1.0, 1.0)]
        if bins.elapsed >= _DRIFT_TOKENS:
            _elapse(bins)
        likely = [(w, o) for w, o in zip(bins.regimes, _ODDS, strict=True) if w > _UNLIKELY]
        total = sum([w for w, _ in likely])
        return [(w / total, o) for w, o in likely] if len(likely) > 1 else [(1.0, likely[0][1])]

    def elapse(self, source: str, n_tokens: int) -> None:
        """Record that the text grew by `n_tokens`, in which the regime may have changed."""
        bins = self.bins.get(source)
        if bins is not None:
            bins.elapsed += n_tokens

    def elapse_all(self, n_tokens: int) -> None:
        """Call `elapse` for every source, including those that drafted nothing."""
        for bins in self.bins.values():
            bins.elapsed += n_tokens

    def observe(self, source: str, p: float, accepted: bool) -> None:
        """Learn from a drafted token whose predecessors in the draft were all accepted."""
        bins = self.bins.get(source)
        if bins is None:
            bins = self.bins[source] = Bins()
        at = _GRID if p >= 1.0 else int(p * _GRID) if p > 0.0 else 0
        i = _BIN_OF[at]
        k = self._keep
        logit = _LOGIT[at]
        prior = 1.0 / (1.0 + math.exp(-bins.shift - bins.slope * logit))
        q = (bins.accepted[i] + _PRIOR * prior) / (bins.total[i] + _PRIOR)
        _observe_regime(bins, _MOST if q > _MOST else q if q > _LEAST else _LEAST, accepted)
        bins.total[i] = bins.total[i] * k + 1.0
        bins.accepted[i] = bins.accepted[i] * k + accepted
        bins.sum_p[i] = bins.sum_p[i] * k + p
        # A step of logistic regression changes the prior. Bins without evidence return the prior.
        error = accepted - prior
        bins.shift = min(_MOST_SHIFT, max(-_MOST_SHIFT, bins.shift + 0.1 * error))
        bins.slope = min(_MOST_SLOPE, max(0.0, bins.slope + _TILT * error * logit))

    def reliability(self, source: str) -> tuple[ReliabilityPoint, ...]:
        """The bins with observations, by rising probability."""
        bins = self.bins.get(source)
        if bins is None:
            return ()
        return tuple(
            ReliabilityPoint(s / n, a / n, n)
            for s, a, n in zip(bins.sum_p, bins.accepted, bins.total, strict=True)
            if n > 0.5
        )

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(sorted(self.bins))


def _observe_regime(bins: Bins, q: float, accepted: bool) -> None:
    if bins.elapsed >= _DRIFT_TOKENS:
        _elapse(bins)
    # A regime multiplies the odds of q by its factor. Bayes' rule updates the regimes' chances.
    not_q = 1.0 - q
    if accepted:
        now = [w * o / (not_q + q * o) for w, o in zip(bins.regimes, _ODDS, strict=True)]
    else:
        now = [w / (not_q + q * o) for w, o in zip(bins.regimes, _ODDS, strict=True)]
    scale = 1.0 / sum(now)
    bins.regimes = [w * scale for w in now]
    bins.n_observed += 1


def _elapse(bins: Bins) -> None:
    if bins.n_observed >= _MET_OBSERVED:
        met = 1.0 - (1.0 - _MET) ** bins.n_observed
        bins.n_observed = 0
        bins.often = [
            o + met * (0.95 * w + 0.05 * p - o)
            for o, w, p in zip(bins.often, bins.regimes, _OFTEN, strict=True)
        ]
    if bins.elapsed:
        stay = (1.0 - _CHANGE) ** bins.elapsed
        bins.regimes = [o + stay * (w - o) for o, w in zip(bins.often, bins.regimes, strict=True)]
        bins.elapsed = 0
