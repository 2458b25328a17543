"""The draft-length rules that others published, as they published them. None is a default.

`p-mins` (v1), `rational` (v2, with its rivals `exponential` and `power`), `speed-a` and `speed-b`
(v3), `ratio-flat` and `ratio` are from the discussion llama.cpp #10466. `costs` (v4) is llama.cpp
#17034. `bandit` is the idea of ik_llama.cpp #1595. docs/background.md tells their story, and
docs/log.md compares them with the default policy.

All but the last three credit a draft only if it is accepted whole. P is the product of the drafted
tokens' probabilities, c[n] the normalised cost T(n) / (n T(1)) of a batch of n tokens.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence

from specdec.options import P_TOP_K
from specdec.policies.cost_curve import PUBLISHED, CostCurve
from specdec.policies.rules import RuleWalk
from specdec.types import Policy, Round

MAX_LOOKAHEAD = 5  # batch sizes that v1 to v3 try beyond the best one
RECALIBRATION_POWER = 1.02  # v1 and v2 raise each p to it, which lowers p; also a small margin


class ProductWalk(ABC):
    """Multiplies the drafted tokens' probabilities. Subclasses judge each new draft length."""

    __slots__ = ("_sums", "limit", "n", "n_best", "product", "reason", "wants")
    rest = 0
    spent = price = 0.0  # these rules share no unit of cost with other drafts

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n = self.n_best = 0
        self.product = 1.0
        self.wants = limit > 0
        self.reason = "" if limit > 0 else "no room for a draft"
        self._sums = [0.0]  # expected accepted tokens by draft length

    def feed(self, p: float) -> bool:
        self.n += 1
        self.product *= p
        self._sums.append(self._sums[-1] + self.product)
        self.wants = self._judge(p) and self.n < self.limit
        return self.wants

    @abstractmethod
    def _judge(self, p: float) -> bool:
        """Set `n_best` and `reason` after another token. Returns True to draft on."""

    @property
    def gain(self) -> float:
        return self._sums[self.n_best]


class _Published(Policy):
    """A rule that learns nothing from rounds."""

    p_top_k: int = P_TOP_K

    def learn(self, round_: Round) -> None:
        pass


# -- p-min before its mend -------------------------------------------------------------------------


class PMinKeptWalk(ProductWalk):
    __slots__ = ("_p_min",)

    def __init__(self, limit: int, p_min: float) -> None:
        super().__init__(limit)
        self._p_min = p_min

    def _judge(self, p: float) -> bool:
        self.n_best = self.n
        self.reason = f"p {p:.2f} against {self._p_min:g}"
        return p >= self._p_min


class PMinKept(_Published):
    """`p-min-kept`: llama.cpp's p-min loop before it was mended (reported in #10466).

    It keeps the unlikely token at which it stops, so no draft is empty.
    """

    name = "p-min-kept"

    def __init__(self, n_max: int = 16, p_min: float = 0.75) -> None:
        self.n_max, self._p_min = n_max, p_min

    def begin(self, limit: int, source: str) -> PMinKeptWalk:
        return PMinKeptWalk(min(limit, self.n_max), self._p_min)


# -- v1 and v2: P against thresholds ---------------------------------------------------------------


class ThresholdWalk(ProductWalk):
    """Keeps the longest draft whose P reaches its threshold.

    It stops when P is below the threshold `MAX_LOOKAHEAD` sizes past the best. A draft that reaches
    the limit is kept whole, whatever its P.
    """

    __slots__ = ("_p", "_thresholds")

    def __init__(self, limit: int, thresholds: Sequence[float]) -> None:
        super().__init__(limit)
        self._thresholds = thresholds
        self._p = 1.0

    def _judge(self, p: float) -> bool:
        if self.n >= self.limit:
            self.n_best, self.reason = self.n, "longest draft"
            return False
        self._p *= p**RECALIBRATION_POWER
        if self._p >= self._threshold(self.n):
            self.n_best = self.n
        bound = self._threshold(self.n_best + MAX_LOOKAHEAD)
        self.reason = f"P {self._p:.3f} against {bound:.3f}"
        return self._p >= bound

    def _threshold(self, m: int) -> float:
        return self._thresholds[min(m, len(self._thresholds) - 1)]


class PMins(_Published):
    """`p-mins`: v1. A draft of m tokens pays if P reaches c[m + 1], read from the measured table.

    `costs[m]` is c[m + 1].
    """

    name = "p-mins"

    def __init__(self, costs: Sequence[float], n_max: int = 64) -> None:
        self._costs, self.n_max = tuple(costs), n_max

    def begin(self, limit: int, source: str) -> ThresholdWalk:
        return ThresholdWalk(min(limit, self.n_max), self._costs)


class Fitted(_Published):
    """`rational`, `exponential`, `power`: v2. The table of v1 is replaced by a fitted curve."""

    def __init__(self, curve: CostCurve = PUBLISHED, n_max: int = 64) -> None:
        self.name: str = curve.family
        self.n_max = n_max
        self._thresholds = [curve.threshold(m) for m in range(n_max + MAX_LOOKAHEAD + 1)]

    def begin(self, limit: int, source: str) -> ThresholdWalk:
        return ThresholdWalk(min(limit, self.n_max), self._thresholds)


# -- v3: expected tokens per second of a whole draft -----------------------------------------------


class SpeedWalk(ProductWalk):
    """Keeps the draft with the greatest P * (tokens per second of its batch).

    v3a keeps a draft that reaches the limit whole. v3b keeps the best draft so far, and one token
    more, which its authors held to be free.
    """

    __slots__ = ("_best", "_best_speed", "_is_v3b", "_speeds", "_step")

    def __init__(self, limit: int, speeds: Sequence[float], step: float, is_v3b: bool) -> None:
        super().__init__(limit)
        self._speeds, self._step, self._is_v3b = speeds, step, is_v3b
        self._best = 0
        self._best_speed = speeds[0]

    def _judge(self, p: float) -> bool:
        go_on = self._improve()
        self.n_best = min(self._best + 1, self.n) if self._is_v3b else self._best
        self.reason = f"best {self._best_speed:.2f} t/s if accepted whole"
        return go_on

    def _improve(self) -> bool:
        m = self.n
        if m >= self.limit:
            if not self._is_v3b:
                self._best = m
            return False
        speed = self.product * self._speeds[m]
        if speed > self._best_speed:
            self._best, self._best_speed = m, speed
            return True
        last = min(len(self._speeds) - 1, self._best + MAX_LOOKAHEAD)
        return any(
            self.product * (self._speeds[j] - self._step * (j - m)) > self._best_speed
            for j in range(m + 1, last + 1)
        )


class Speed(_Published):
    """`speed-a`, `speed-b`: v3. `speeds[n - 1]` are tokens per second of a batch of n tokens.

    The draft makes `draft_speed` tokens per second. A step costs `speeds[0] / draft_speed`, which
    the source subtracts from tokens per second.
    """

    def __init__(
        self, speeds: Sequence[float], draft_speed: float, variant: str, n_max: int | None = None
    ) -> None:
        self.name = f"speed-{variant}"
        self._speeds = tuple(speeds)
        self.n_max = len(self._speeds) if n_max is None else n_max
        self._step = self._speeds[0] / draft_speed
        self._is_v3b = variant == "b"

    def begin(self, limit: int, source: str) -> SpeedWalk:
        return SpeedWalk(min(limit, self.n_max), self._speeds, self._step, self._is_v3b)


# -- v4: normalised costs with look-ahead ----------------------------------------------------------


class CostsWalk(ProductWalk):
    __slots__ = ("_costs", "_look_ahead")

    def __init__(self, limit: int, costs: Sequence[float], look_ahead: int) -> None:
        super().__init__(limit)
        self._costs, self._look_ahead = costs, look_ahead

    def _judge(self, p: float) -> bool:
        cost = self._costs[self.n]
        if self.product > cost:
            self.n_best = self.n
        self.reason = f"P {self.product:.3f} against cost {cost:.3f} of batch {self.n + 1}"
        return self.n - self.n_best <= self._look_ahead


class Costs(_Published):
    """`costs`: v4, with the tables GGML_BATCH_COSTS and GGML_MAX_LOOK_AHEAD of llama.cpp #17034.

    A draft of m tokens pays if P exceeds c[m + 1] = `costs[m]`. Drafting stops after more than
    `look_ahead` batch sizes beyond the best one. At most `len(costs) - 1` tokens are drafted.
    """

    name = "costs"

    def __init__(self, costs: Sequence[float], look_ahead: int = 0, n_max: int = 64) -> None:
        self._costs, self._look_ahead = tuple(costs), look_ahead
        self.n_max = min(n_max, len(self._costs) - 1)

    def begin(self, limit: int, source: str) -> CostsWalk:
        return CostsWalk(min(limit, self.n_max), self._costs, self._look_ahead)


# -- accepted over drafted tokens (DA/DN) ----------------------------------------------------------

_RATIO_KEPT = 0.8  # share of the running counts that each round keeps, so about five rounds count
_MIN_ROUNDS = 3  # rounds between two changes of the length


def rising_threshold(length: int) -> float:
    """The ratio below which a block of `length` tokens is too long: 0.3 at 1 to 0.5 from 8 on."""
    return 0.3 + 0.2 * min(length - 1, 7) / 7


def flat_threshold(length: int) -> float:
    """The ratio below which a block is too long: 0.5 at each length."""
    return 0.5


class Ratio(Policy):
    """`ratio`, `ratio-flat`: the block grows while accepted ÷ drafted tokens exceeds a threshold.

    Below the threshold it shrinks. The threshold of `ratio` rises with the length, that of
    `ratio-flat` is 0.5. No probabilities are read.
    """

    p_top_k = 0

    def __init__(self, n_max: int = 16, *, is_flat: bool = False, start: int = 4) -> None:
        self.name = "ratio-flat" if is_flat else "ratio"
        self.n_max = n_max
        self.length = min(start, n_max)
        self._threshold = flat_threshold if is_flat else rising_threshold
        self._drafted = self._accepted = 0.0
        self._n_rounds = 0

    def begin(self, limit: int, source: str) -> RuleWalk:
        limit = min(limit, self.length)
        return RuleWalk(limit, f"length {limit} by the share accepted so far")

    def learn(self, round_: Round) -> None:
        if not round_.n_drafted:
            return
        self._drafted = self._drafted * _RATIO_KEPT + round_.n_drafted
        self._accepted = self._accepted * _RATIO_KEPT + round_.n_accepted
        self._n_rounds += 1
        if self._n_rounds < _MIN_ROUNDS:
            return
        ratio, threshold = self._accepted / self._drafted, self._threshold(self.length)
        if ratio > threshold and self.length < self.n_max:
            self._change(1)
        elif ratio < threshold and self.length > 1:
            self._change(-1)

    def _change(self, by: int) -> None:
        self.length += by
        self._drafted = self._accepted = 0.0
        self._n_rounds = 0


# -- epsilon-greedy --------------------------------------------------------------------------------

ARMS = (0, 1, 2, 3, 4, 6, 8, 12, 16)
_EXPLORED = 0.15  # share of rounds with a random length
_BANDIT_KEPT = 0.95  # share of the sums that each round of an arm keeps


class Bandit(Policy):
    """`bandit`: epsilon-greedy over block lengths, by measured tokens per second.

    It reads neither costs nor probabilities. Sums decay, so that it notices another kind of text.
    """

    name = "bandit"
    p_top_k = 0

    def __init__(self, n_max: int = 16, arms: Sequence[int] = ARMS, seed: int = 0) -> None:
        self.n_max = n_max
        self._arms = [a for a in arms if a <= n_max]
        self._tokens = [0.0] * len(self._arms)
        self._seconds = [0.0] * len(self._arms)
        self._random = random.Random(seed)
        self._arm: int | None = None  # the arm of the current round, for all drafters of a chain

    def begin(self, limit: int, source: str) -> RuleWalk:
        if self._arm is None:
            self._arm = self._choose(sum(a <= limit for a in self._arms))
        limit = min(limit, self._arms[self._arm])
        return RuleWalk(limit, f"arm of {limit}")

    def _choose(self, n_arms: int) -> int:
        """The index of one of the first `n_arms`, which the batch has room for."""
        untried = [i for i, s in enumerate(self._seconds[:n_arms]) if s == 0.0]
        if untried:
            return untried[0]
        if self._random.random() < _EXPLORED:
            return self._random.randrange(n_arms)
        return max(range(n_arms), key=lambda i: self._tokens[i] / self._seconds[i])

    def learn(self, round_: Round) -> None:
        self._arm = None
        # A drafter may have proposed fewer tokens than the arm asked for.
        i = sum(a <= round_.n_drafted for a in self._arms) - 1
        self._tokens[i] = self._tokens[i] * _BANDIT_KEPT + len(round_.emitted)
        self._seconds[i] = self._seconds[i] * _BANDIT_KEPT + round_.draft_s + round_.verify_s
