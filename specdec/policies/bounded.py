"""A request's own limits of its drafts, beneath whatever the policy decides.

llama-server's speculative.n_max, n_min and p_min of a request.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.policies.p_min import PMin
from specdec.types import Policy, Round, Walk


@dataclass(frozen=True, slots=True)
class DraftBounds:
    """Tokens of a draft at most and at least (a shorter one is dropped), and the least probability
    of each; None: as the policy has it."""

    n_max: int | None = None
    n_min: int | None = None
    p_min: float | None = None

    @property
    def needs_policy(self) -> bool:
        """True if a draft's length depends on more than the room there is."""
        return self.n_min is not None or self.p_min is not None

    def n_allowed(self, probs: tuple[float, ...]) -> int:
        """The number of a draft's tokens, of these probabilities, that may be kept."""
        p_min = self.p_min or 0.0
        return next((i for i, p in enumerate(probs) if p < p_min), len(probs))

    def kept(self, n: int) -> int:
        """`n` tokens, or none where that is too few."""
        return n if n >= (self.n_min or 0) else 0


NO_BOUNDS = DraftBounds()


def bounded(policy: Policy, bounds: DraftBounds) -> Policy:
    """`policy` within `bounds`. Rules of the same kind replace the policy's own."""
    if not bounds.needs_policy:
        return policy
    if isinstance(policy, PMin):
        n_min = policy.n_min if bounds.n_min is None else bounds.n_min
        p_min = policy.p_min if bounds.p_min is None else bounds.p_min
        return PMin(policy.n_max, p_min, n_min, p_top_k=policy.p_top_k)
    return _Bounded(policy, bounds)


class _Bounded:
    def __init__(self, policy: Policy, bounds: DraftBounds) -> None:
        self._policy, self._bounds = policy, bounds
        self.name, self.n_max, self.p_top_k = policy.name, policy.n_max, policy.p_top_k

    def begin(self, limit: int, source: str) -> Walk:
        return _BoundedWalk(self._policy.begin(limit, source), self._bounds)

    def learn(self, round_: Round) -> None:
        self._policy.learn(round_)


class _BoundedWalk:
    """The policy's walk, which is not shown a token that is too unlikely, nor any behind it."""

    __slots__ = ("_bounds", "_is_over", "_p_min", "_walk")

    def __init__(self, walk: Walk, bounds: DraftBounds) -> None:
        self._walk, self._bounds = walk, bounds
        self._p_min = bounds.p_min or 0.0
        self._is_over = False

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
        """0 for policies that do not price a draft's steps."""
        return getattr(self._walk, "spent", 0.0)

    @property
    def reason(self) -> str:
        if self._is_over:
            return f"a token below the request's p of {self._p_min:g}; {self._walk.reason}"
        return self._walk.reason

    @property
    def rest(self) -> int:
        return self._walk.rest
