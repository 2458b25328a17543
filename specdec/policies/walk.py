"""The base of the policies' walks: it counts tokens and multiplies their probabilities."""

from __future__ import annotations

from abc import ABC, abstractmethod


class ProductWalk(ABC):
    """Feeds p after p; subclasses judge the new size in `_judge`.

    `n` is how many tokens were fed, `product` the probability that all of them are accepted,
    as the drafter says it.
    """

    __slots__ = ("_sums", "limit", "n", "n_best", "product", "reason", "wants")
    rest = 0

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.n = 0
        self.n_best = 0
        self.product = 1.0
        self.wants = limit > 0
        self.reason = "no room for a draft" if limit <= 0 else ""
        self._sums = [0.0]

    def feed(self, p: float) -> bool:
        self.n += 1
        self.product *= p
        self._sums.append(self._sums[-1] + self.product)
        self.wants = self._judge(p) and self.n < self.limit
        return self.wants

    @abstractmethod
    def _judge(self, p: float) -> bool:
        """Set `n_best` and `reason` for the token just fed; True to draft on."""

    @property
    def gain(self) -> float:
        """Expected accepted tokens: these policies know no common unit of cost."""
        return self._sums[self.n_best]
