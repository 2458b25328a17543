"""Grows a tree of drafted tokens by the value rule that chooses the lengths of chains.

A node is one drafted token after the tokens above it. `reached` is the probability that the
target's text takes the whole path to it. Verifying n nodes gains the sum of their `reached`, and
costs T(1 + n) - T(1). A child is never reached more often than its parent, so the n likeliest nodes
always form a tree. SpecExec (arXiv 2406.02532) and Sequoia (arXiv 2402.12374) verify trees of a
size chosen beforehand. Here the time of a decode decides the size, for each tree anew.

The draft model expands several nodes in one step, which is called a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

N_CHILDREN = 8  # successors of a node that are considered
N_WIDE = 16  # most nodes that one draft step expands
_LEAST_REACHED = 0.004  # nodes that are reached less often are dropped
_MOST_AHEAD = 4  # further levels that are valued together, because costs may jump between them
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class DraftNode:
    """A drafted token. `parent` is the index of the node above it, -1 for the text's last token.

    `p` is the draft's probability of the token after its parent. `rank` is its place among its
    parent's successors, 0 for the likeliest.
    """

    token: int
    parent: int
    p: float
    reached: float
    rank: int = 0
    depth: int = 1


@dataclass(frozen=True)
class TreePrices:
    """Prices in tokens.

    `verify[n]` is the price of verifying n nodes, `step` that of a draft step for one node, and
    `row` that of each further node in the step.
    """

    verify: Sequence[float]
    step: float
    row: float = 0.0


class TreeGrowth:
    """One tree as it grows. Call `add` for the root (-1), then for each node that `ahead` names."""

    def __init__(
        self,
        prices: TreePrices,
        calibrated: Callable[[int, float], float],
        follow: float,
        n_deep: int,
    ) -> None:
        """`calibrated(rank, p)` is the probability that a successor is accepted.

        `follow` is the usual probability that a node's likeliest successor is accepted. No node is
        deeper than `n_deep` tokens.
        """
        self.nodes: list[DraftNode] = []
        self.prices, self._calibrated, self._follow = prices, calibrated, follow
        self._n_deep = n_deep
        self._open: set[int] = set()  # nodes without successors yet, the deepest ones excluded

    def add(self, parent: int, successors: Sequence[tuple[int, float]]) -> None:
        """Add (token, p) of a node's successors, likeliest first."""
        above, depth = 1.0, 1
        if parent >= 0:
            above, depth = self.nodes[parent].reached, self.nodes[parent].depth + 1
        q = 1.0
        for rank, (token, p) in enumerate(successors[:N_CHILDREN]):
            # The calibration of each rank is learnt apart. A likelier token stays likelier.
            q = min(q, self._calibrated(rank, p))
            if rank and above * q < _LEAST_REACHED:
                break
            if depth < self._n_deep:
                self._open.add(len(self.nodes))
            self.nodes.append(DraftNode(token, parent, p, above * q, rank, depth))

    def ahead(self, n_most: int = N_WIDE) -> list[int]:
        """At most `n_most` nodes to expand in the next draft step, likeliest first.

        The list is empty if no step pays. What follows a node is guessed by `follow`, for up to
        four further levels.
        """
        nodes, prices, follow = self.nodes, self.prices, self._follow
        order = sorted(self._open, key=lambda i: (-nodes[i].reached, i))
        order = [i for i in order[: min(n_most, N_WIDE)] if nodes[i].reached * follow > prices.row]
        if not order:
            return []
        held = [node.reached for node in nodes]
        value, _, _ = _best(held, prices.verify)
        guessed: list[float] = []
        factor, spent = 1.0, 0.0
        for _ in range(_MOST_AHEAD):
            factor *= follow
            guessed += [nodes[i].reached * factor for i in order]
            spent += prices.step
            gained, _, least = _best(held + guessed, prices.verify)
            worth = [i for i in order if nodes[i].reached * follow >= least] or order[:1]
            if gained - value > spent + (len(worth) - 1) * prices.row + _TINY:
                self._open.difference_update(worth)
                return worth
        return []

    def chosen(self) -> tuple[tuple[DraftNode, ...], float]:
        """The nodes worth verifying, parents first, and their value in tokens.

        The parents' indices are those in the returned tuple.
        """
        order = sorted(range(len(self.nodes)), key=lambda i: (-self.nodes[i].reached, i))
        value, n, _ = _best([self.nodes[i].reached for i in order], self.prices.verify)
        kept = sorted(order[:n])
        new = {old: i for i, old in enumerate(kept)} | {-1: -1}
        nodes = [self.nodes[i] for i in kept]
        return (
            tuple(
                [DraftNode(x.token, new[x.parent], x.p, x.reached, x.rank, x.depth) for x in nodes]
            ),
            value,
        )


def _best(reached: Sequence[float], price: Sequence[float]) -> tuple[float, int, float]:
    """The greatest value of a set of nodes, their number, and the least `reached` among them."""
    best, n_best, least, total = -price[0], 0, 1.0, 0.0
    for n, p in enumerate(sorted(reached, reverse=True)[: len(price) - 1], 1):
        total += p
        if total - price[n] > best:
            best, n_best, least = total - price[n], n, p
    return best, n_best, least


def source_of(source: str, rank: int) -> str:
    """The name by which the calibration knows a drafter's successors of this rank."""
    return f"{source}-{rank}" if rank else source
