"""One drafter's plan for its drafts, and the decision on one draft, token by token.

`throughput` keeps a `DrafterOdds` for each drafter, and begins a walk for each draft.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from specdec.costs.calibration import Calibration
from specdec.policies.value import (
    CENTRE_OF,
    LEVEL,
    N_CENTRES,
    N_LEVELS,
    drafting_on,
    longest_of_use,
    moved,
)

N_PROBED = 3  # tokens that a probe drafts while they are likely
FIRST_GAP = 4  # rounds before the first probe of a drafter that stopped paying
REBUILD_ROUNDS = 24  # rounds after which a drafter's plan is made anew
_GROW = 1.0 / 0.985  # growth of the weight of observed probabilities, per token
_DEAR_STEP = 0.15  # price of a draft step, in tokens, above which a probe drafts one token
_LAST_LEVEL = N_LEVELS - 1


class DrafterOdds:
    """One drafter's calibrated probabilities, and the plan for its drafts.

    `seen` has decaying counts of the probabilities, by `value.CENTRES`. The plan was made from them
    `age` rounds ago. `onwards` is the value of drafting further tokens, and `price` the cost. The
    plan assumes that the first drafted token costs `block` tokens, that each one costs `step`
    tokens more, and that the log-odds are off by `offset`. Only drafts of whole blocks cost a
    `block`, and their `step` is 0.
    `may_pay` is False if drafts would cost more than they gain even if all tokens were accepted.
    While `not_asked` is set, the drafter is not asked before round `until`. Each failed probe
    doubles `gap`, the number of rounds until the next probe.
    """

    def __init__(self) -> None:
        # The prior assumes that an unseen drafter is decent. A few observations outweigh it.
        self.seen = [0.25] * N_CENTRES
        self.seen[-5:] = [0.5, 0.5, 0.5, 0.5, 0.25]
        self.scale = 1.0
        self.onwards: list[list[float]] = []
        self.price: list[float] = []
        self.step = self.block = 0.0
        self.may_pay = True
        self.age = REBUILD_ROUNDS
        self.gap = FIRST_GAP
        self.until = 0
        self.n_judged = 0
        self.not_asked: NotAsked | None = None
        self.regimes: list[tuple[float, float]] = [(1.0, 1.0)]
        self.offset = 0.0

    def see(self, q: float, weight: float) -> None:
        # The weight of new counts grows, so earlier counts decay without an update.
        self.scale *= _GROW
        self.seen[CENTRE_OF[int(q * 1000)]] += weight * self.scale

    def rebuild(self, price: NDArray[np.float64], step: float, block: float = 0.0) -> None:
        weights = np.array(self.seen) / self.scale
        self.seen, self.scale = weights.tolist(), 1.0
        weights = moved(weights / weights.sum(), self.regimes)
        longest = longest_of_use(price, step)
        self.may_pay = longest * (1.0 - step) - price[longest] > block
        price = price[: 1 + max(N_PROBED, longest)]
        self.onwards = drafting_on(price, step, weights).tolist()
        self.offset = offset_of(self.regimes)
        self.price = price.tolist()
        self.step, self.block = step, block
        self.age = 0


def offset_of(regimes: list[tuple[float, float]]) -> float:
    """The log of the mean odds factor by which a drafter's probabilities are off now."""
    return (
        math.log(sum([w * o for w, o in regimes])) if len(regimes) > 1 else math.log(regimes[0][1])
    )


class ThroughputWalk:
    """Decides the length of one draft, by the tokens gained over verifying nothing.

    Steps already drafted are spent. Only further steps and the verification count as costs.
    """

    __slots__ = (
        "_calibration",
        "_known",
        "_name",
        "_n_probed",
        "_odds",
        "_onwards",
        "_price",
        "_products",
        "_regimes",
        "_tree_price",
        "_tree_spent",
        "best",
        "is_probe",
        "limit",
        "n",
        "n_best",
        "product",
        "qs",
        "total",
        "total_best",
        "wants",
    )
    rest = 0

    def __init__(
        self,
        limit: int,
        name: str,
        known: DrafterOdds,
        calibration: Calibration,
        is_probe: bool,
        price: list[float],
    ) -> None:
        """`price` has the price of verifying 0, 1, 2, ... drafted tokens now, in tokens."""
        self.limit = limit
        self._name = name
        self._known = known
        self._calibration = calibration
        self._price = price
        self._onwards = known.onwards
        self._regimes = [o for _, o in known.regimes]
        self._products = [w for w, _ in known.regimes]
        self._n_probed = 1 if known.step > _DEAR_STEP else N_PROBED
        self._odds = self._regimes[0] if len(self._regimes) == 1 else 0.0
        self.is_probe = is_probe
        self.n = self.n_best = 0
        self.best = -price[0]  # value of `n_best` tokens
        self.product = 1.0
        self.total = 0.0
        self.total_best = 0.0  # expected accepted tokens of `n_best`
        self.qs: list[float] = []
        self.wants = limit > 0
        self._tree_spent = self._tree_price = -1.0  # negative: a chain

    def feed(self, p: float) -> bool:
        q = self._calibration.usual(self._name, p)
        self.qs.append(q)
        not_q = 1.0 - q
        if self._odds:
            self.product *= q * self._odds / (not_q + q * self._odds)
            product = self.product
        else:
            self._products = products = [
                x * q * o / (not_q + q * o)
                for x, o in zip(self._products, self._regimes, strict=True)
            ]
            self.product = product = sum(products)
        self.total += product
        self.n = n = self.n + 1
        value = self.total - self._price[n]
        if value > self.best:
            self.best = value
            self.n_best = n
            self.total_best = self.total
        if n >= self.limit:
            self.wants = False
            return False
        at = -math.log(product) / LEVEL if product > 0.0 else _LAST_LEVEL
        row = self._onwards[n]
        if at < _LAST_LEVEL:
            level = int(at)
            onwards = row[level] + (at - level) * (row[level + 1] - row[level])
        else:
            onwards = row[_LAST_LEVEL]
        self.wants = self.total + onwards > self.best or (
            self.is_probe and n < self._n_probed and self.product > 0.2
        )
        return self.wants

    @property
    def n_probed(self) -> int:
        """Tokens that a probe drafts at least, if they are likely."""
        return self._n_probed

    @property
    def gain(self) -> float:
        return self.best + self._price[0]

    @property
    def spent(self) -> float:
        """The price of the steps drafted so far, in tokens."""
        if self._tree_spent >= 0.0:
            return self._tree_spent
        return self._known.block + self.n * self._known.step if self.n else 0.0

    @property
    def price(self) -> float:
        """The price of verifying the kept tokens, in tokens."""
        return self._known.price[self.n_best] if self._tree_price < 0.0 else self._tree_price

    def grew(self, n_nodes: int, expected: float, value: float, spent: float) -> None:
        """Take a tree in place of the chain.

        `n_nodes` are worth verifying, and `expected` tokens of them are accepted. That is worth
        `value` tokens, after draft steps that cost `spent`. A block's pass costs its price more.
        """
        self.n_best, self.total_best, self.best = n_nodes, expected, value
        self._tree_spent, self._tree_price = self._known.block + spent, expected - self.gain

    @property
    def reason(self) -> str:
        if self.limit <= 0:
            return "no room for a draft"
        kind = "probe: " if self.is_probe else ""
        return f"{kind}{self.n_best} of {self.n} drafted gain {self.gain:.2f} tokens"


class NotAsked:
    """The walk of a drafter that is not asked in this round and in `rest` further rounds."""

    __slots__ = ("reason", "rest")
    wants = False
    n_best = 0
    gain = spent = price = 0.0

    def __init__(self, reason: str, rest: int) -> None:
        self.reason = reason
        self.rest = rest

    def feed(self, p: float) -> bool:
        return False
