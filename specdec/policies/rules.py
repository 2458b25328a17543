"""Policies that ignore costs: `fixed`, llama.cpp's `p-min`, and the draft limits of one request."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.options import P_TOP_K
from specdec.types import Policy, Round, Walk


class RuleWalk:
    """Drafts up to `limit` tokens, until one is less likely than `p_min`.

    The unlikely token is not kept. A draft of fewer than `n_min` tokens is dropped.
    """

    __slots__ = ("_n", "_n_min", "_p_min", "_product", "_sums", "limit", "n_best", "reason")
    rest = 0
    spent = price = 0.0  # rules price nothing

    def __init__(self, limit: int, reason: str, p_min: float = 0.0, n_min: int = 0) -> None:
        self.limit = limit
        self.n_best = 0
        self.reason = reason
        self._p_min, self._n_min = p_min, n_min
        self._n = 0
        self._product = 1.0
        self._sums = [0.0]  # expected accepted tokens by draft length

    @property
    def wants(self) -> bool:
        return self._n < self.limit

    def feed(self, p: float) -> bool:
        if p < self._p_min:
            self.reason = f"p {p:.2f} below {self._p_min:g}"
            self.limit = self._n
            return False
        self._n += 1
        self._product *= p
        self._sums.append(self._sums[-1] + self._product)
        self.n_best = self._n if self._n >= self._n_min else 0
        return self._n < self.limit

    @property
    def gain(self) -> float:
        """Expected number of accepted tokens. Costs are unknown here, so none are subtracted."""
        return self._sums[self.n_best]


class Fixed(Policy):
    """Drafts `n_max` tokens each time. 4 suits general text, 8 to 15 code (llama.cpp #10466)."""

    name = "fixed"
    p_top_k = 0

    def __init__(self, n_max: int = 4) -> None:
        self.n_max = n_max

    def begin(self, limit: int, source: str) -> RuleWalk:
        limit = min(limit, self.n_max)
        return RuleWalk(limit, f"fixed length of {limit}")

    def learn(self, round_: Round) -> None:
        pass


class PMin(Policy):
    """llama.cpp's rule: draft while each token's own probability is at least `p_min`."""

    name = "p-min"
    p_top_k = P_TOP_K

    def __init__(self, n_max: int = 16, p_min: float = 0.75, n_min: int = 0) -> None:
        self.n_max, self.p_min, self.n_min = n_max, p_min, n_min

    def begin(self, limit: int, source: str) -> RuleWalk:
        return RuleWalk(min(limit, self.n_max), "longest draft", self.p_min, self.n_min)

    def learn(self, round_: Round) -> None:
        pass


# -- the limits of one request ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DraftBounds:
    """A request's limits of drafts (llama-server's speculative.*). None: the policy decides.

    `n_max` is the largest number of tokens of a draft. Drafts of fewer than `n_min` tokens are
    dropped. A draft ends before the first token whose probability is below `p_min`.
    """

    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None

    @property
    def needs_policy(self) -> bool:
        """True if a limit depends on the drafted tokens, not on their number alone."""
        return self.n_min is not None or self.p_min is not None

    def n_allowed(self, probs: tuple[float, ...]) -> int:
        """The number of tokens before the first whose probability in `probs` is below `p_min`."""
        p_min = self.p_min or 0.0
        return next((i for i, p in enumerate(probs) if p < p_min), len(probs))

    def kept(self, n: int) -> int:
        """Returns `n`, or 0 if `n` is below `n_min`."""
        return n if n >= (self.n_min or 0) else 0


NO_BOUNDS = DraftBounds()


def bounded(policy: Policy, bounds: DraftBounds) -> Policy:
    """Returns `policy` limited by the `n_min` and `p_min` of `bounds`.

    For a `PMin` policy they replace its own values. The caller applies `bounds.n_max`.
    """
    if not bounds.needs_policy:
        return policy
    if isinstance(policy, PMin):
        n_min = policy.n_min if bounds.n_min is None else bounds.n_min
        p_min = policy.p_min if bounds.p_min is None else bounds.p_min
        return PMin(policy.n_max, p_min, n_min)
    return _Bounded(policy, bounds)


class _Bounded(Policy):
    def __init__(self, policy: Policy, bounds: DraftBounds) -> None:
        self._policy, self._bounds = policy, bounds
        self.name, self.n_max, self.p_top_k = policy.name, policy.n_max, policy.p_top_k
        self.prices_reading = policy.prices_reading

    def begin(self, limit: int, source: str) -> Walk:
        return _BoundedWalk(self._policy.begin(limit, source), self._bounds)

    @property
    def rest_of_looks(self) -> int:
        return self._policy.rest_of_looks

    def may_ask(self, source: str) -> bool:
        return self._policy.may_ask(source)

    def postponed(self, walk: Walk, source: str, n_tokens: int) -> Walk | None:
        inner = walk.within if isinstance(walk, _BoundedWalk) else walk
        return self._policy.postponed(inner, source, n_tokens)

    def learn(self, round_: Round) -> None:
        self._policy.learn(round_)


class _BoundedWalk:
    """A policy's walk that ends before the first token less likely than the request's `p_min`."""

    __slots__ = ("_bounds", "_is_over", "_p_min", "_walk")

    def __init__(self, walk: Walk, bounds: DraftBounds) -> None:
        self._walk, self._bounds = walk, bounds
        self._p_min = bounds.p_min or 0.0
        self._is_over = False

    @property
    def within(self) -> Walk:
        """The policy's own walk."""
        return self._walk

    @property
    def wants(self) -> bool:
        return self._walk.wants and not self._is_over

    def feed(self, p: float) -> bool:
        self._is_over = p < self._p_min
        return not self._is_over and self._walk.feed(p)

    @property
    def n_best(self) -> int:
        return self._bounds.kept(self._walk.n_best)

    @property
    def gain(self) -> float:
        return self._walk.gain if self.n_best else 0.0

    @property
    def spent(self) -> float:
        return self._walk.spent

    @property
    def price(self) -> float:
        return self._walk.price

    @property
    def reason(self) -> str:
        if self._is_over:
            return f"a token below the request's p of {self._p_min:g}; {self._walk.reason}"
        return self._walk.reason

    @property
    def rest(self) -> int:
        return self._walk.rest
