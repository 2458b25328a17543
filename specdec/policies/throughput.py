"""`throughput`, the default: the most tokens per second over the long run (DESIGN section 5).

By renewal theory the best round is the one that maximises its tokens minus lambda times its
time, where lambda is the best rate achievable, here a running estimate (Dinkelbach's iteration).
A token of p is worth its calibrated chance of being reached and accepted. Costs may be jagged, so
drafting goes on while any larger batch could still pay if the next tokens are as good as hoped.
Verifying nothing is always a candidate, and a drafter that has not paid is asked only now and
then, so that a hopeless one costs (nearly) nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.calibration import Calibration
from specdec.profile import CostProfile
from specdec.refresh import LiveCosts
from specdec.types import Round, Walk

_RATE_ROUNDS = 40.0  # rounds that the estimate of lambda remembers
_HOPE = 0.7  # how far hope lies between the drafter's usual probability and certainty
_GAIN_ROUNDS = 12.0  # rounds that a drafter's average gain remembers
_FIRST_GAP, _LAST_GAP = 4, 32  # rounds between probes of a drafter that does not pay


@dataclass(slots=True)
class _Source:
    """What is known of one drafter."""

    gain: float = 0.0  # mean of a drafted round's gain over a plain one, in tokens
    n_rounds: int = 0
    usual_p: float = 0.9  # mean calibrated probability of its tokens
    gap: int = _FIRST_GAP
    wait: int = 0  # rounds until the next probe while it does not pay


class ThroughputWalk:
    """One draft. `_price[j]` is lambda (T(rows + j) + j d) for j drafted tokens, relative to
    j = 0; `_hope[k]` the expected length of k further tokens as good as hoped."""

    __slots__ = (
        "_bins",
        "_hope",
        "_price",
        "_step",
        "best",
        "limit",
        "n",
        "n_best",
        "product",
        "reason",
        "sum_p",
        "total",
        "wants",
    )

    def __init__(
        self,
        limit: int,
        price: NDArray[np.float64],
        step: float,
        hope: NDArray[np.float64],
        calibrated: _Calibrated,
    ) -> None:
        self.limit = limit
        self._price = price
        self._step = step
        self._hope = hope
        self._bins = calibrated
        self.n = self.n_best = 0
        self.best = 0.0
        self.product = 1.0
        self.total = 0.0
        self.sum_p = 0.0
        self.wants = limit > 0 and self._may_gain()
        self.reason = "no larger batch can pay" if limit > 0 else "no room for a draft"

    def _may_gain(self) -> bool:
        """Whether a larger batch beats the best so far if the next tokens are as hoped.

        What was drafted is paid, whether verified or not, so it is added back.
        """
        n = self.n
        values = self.product * self._hope[: self.limit - n] - self._price[n + 1 : self.limit + 1]
        return bool(self.total + values.max() + n * self._step > self.best)

    def feed(self, p: float) -> bool:
        q = self._bins.probability(p)
        self.sum_p += q
        self.product *= q
        self.total += self.product
        self.n = n = self.n + 1
        value = self.total - (self._price[n] - n * self._step)
        if value > self.best:
            self.best = float(value)
            self.n_best = n
        if n >= self.limit:
            self.wants = False
        else:
            self.wants = self._may_gain()
        return self.wants

    @property
    def gain(self) -> float:
        return self.best

    @property
    def net_gain(self) -> float:
        """The gain less the time of drafting, in tokens: may be negative."""
        return self.best - self.n * self._step


class _Calibrated:
    __slots__ = ("_calibration", "_source")

    def __init__(self, calibration: Calibration, source: str) -> None:
        self._calibration = calibration
        self._source = source

    def probability(self, p: float) -> float:
        return self._calibration.probability(self._source, p)


class _Off:
    """The walk of a drafter that is not asked."""

    __slots__ = ("reason",)
    wants = False
    n_best = 0
    gain = 0.0

    def __init__(self, reason: str) -> None:
        self.reason = reason

    def feed(self, p: float) -> bool:
        return False


class Throughput:
    """The policy over a profile. `paid` names the drafters whose tokens cost a draft step."""

    name = "throughput"

    def __init__(
        self,
        profile: CostProfile,
        calibration: Calibration | None = None,
        *,
        n_max: int | None = None,
        paid: frozenset[str] = frozenset({"draft"}),
        refresh: bool = True,
    ) -> None:
        self.n_max = profile.n_max - 1 if n_max is None else n_max
        self.costs = LiveCosts(profile, self.n_max + 1)
        self.calibration = calibration or Calibration()
        self._paid = paid
        self._refresh = refresh
        self._sources: dict[str, _Source] = {}
        self._walk: ThroughputWalk | None = None
        # lambda = tokens / seconds, both decaying; it starts as plain decoding
        self._tokens = 4.0
        self._seconds = 4.0 * self.costs.times[0]
        self._prices: tuple[int, NDArray[np.float64]] | None = None

    @property
    def rate(self) -> float:
        """lambda: the running estimate of tokens per second."""
        return self._tokens / self._seconds

    def begin(self, limit: int, source: str) -> Walk:
        known = self._sources.get(source)
        if known is None:
            known = self._sources[source] = _Source()
        self._walk = None
        limit = min(limit, self.n_max)
        step_s = self.costs.draft_step_s if source in self._paid else 0.0
        if step_s > 0 and known.gain < 0:
            known.wait -= 1
            if known.wait >= 0:
                return _Off(self._why_off(known))
        rate = self.rate
        times = self._times()
        price = rate * (times[: limit + 1] - times[0] + step_s * _COUNT[: limit + 1])
        walk = ThroughputWalk(
            limit,
            price,
            rate * step_s,
            _hoped(known.usual_p)[: max(1, limit)],
            _Calibrated(self.calibration, source),
        )
        self._walk = walk
        return walk

    def learn(self, round_: Round) -> None:
        draft = round_.draft
        source, walk = draft.source, self._walk
        for p, accepted in round_.evidence:
            self.calibration.observe(source, p, accepted)
        if walk is not None and walk.limit > 0:
            self._judge(self._sources[source], walk)
        if self._refresh:
            self.costs.observe(round_.n_drafted + 1, round_.verify_s, draft.n_steps, round_.draft_s)
        keep = 1.0 - 1.0 / _RATE_ROUNDS
        took = self.costs.times[round_.n_drafted] + draft.n_steps * self.costs.draft_step_s
        self._tokens = self._tokens * keep + len(round_.emitted)
        self._seconds = self._seconds * keep + took

    def _judge(self, known: _Source, walk: ThroughputWalk) -> None:
        known.n_rounds += 1
        weight = max(1.0 / known.n_rounds, 1.0 / _GAIN_ROUNDS)
        known.gain += weight * (walk.net_gain - known.gain)
        if walk.n:
            known.usual_p += max(1.0 / (known.n_rounds + 2), 0.05) * (
                walk.sum_p / walk.n - known.usual_p
            )
        if known.gain >= 0:
            known.gap = _FIRST_GAP
        elif walk.net_gain < 0:
            known.gap = min(_LAST_GAP, known.gap * 2)
        known.wait = known.gap

    def _times(self) -> NDArray[np.float64]:
        if self._prices is None or self._prices[0] != self.costs.version:
            self._prices = (self.costs.version, np.array(self.costs.times))
        return self._prices[1]

    def _why_off(self, known: _Source) -> str:
        times = self.costs.times
        return (
            f"off: T(2)/T(1) is {times[1] / times[0]:.2f}, drafting gained {known.gain:+.2f} "
            f"tokens a round; asked again in {known.wait} rounds"
        )


_COUNT = np.arange(1024, dtype=np.float64)
_HOPED: dict[int, NDArray[np.float64]] = {}


def _hoped(usual_p: float) -> NDArray[np.float64]:
    """Expected accepted tokens of the next 1, 2, ... tokens, each of a hoped-for probability."""
    index = int(100 * (usual_p + _HOPE * (1.0 - usual_p)))
    found = _HOPED.get(index)
    if found is None:
        found = _HOPED[index] = np.cumsum((index / 100.0) ** _COUNT[1:])
    return found
