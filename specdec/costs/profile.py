"""A cost curve: T(n), the time of one target decode of n tokens, as policies read it.

n = 1 + drafted tokens. A curve is published, or comes from a measured cost table as the least time
over all ways of computing. specdec does not know cost tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.errors import BadProfile

# Bounds of times and costs in any unit. Within them, quotients neither overflow nor become 0.
_LEAST, _MOST = 1e-30, 1e30


@dataclass(frozen=True)
class Timed:
    """A batch size that was timed, not interpolated.

    `spread` is half the interquartile range, divided by T(n).
    """

    n: int
    n_repeats: int
    spread: float


@dataclass(frozen=True)
class CostProfile:
    """A cost curve: `step_s[n - 1]` is T(n) in seconds, or in units of T(1) if `relative`.

    `draft_step_s` is the time of one draft decode in the same unit (0: unknown or free). `timed`
    lists the measured sizes and is empty if they are not known. `title` tells people which model
    was measured on which device.
    """

    step_s: tuple[float, ...]
    draft_step_s: float = 0.0
    relative: bool = False
    timed: tuple[Timed, ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        """Raises BadProfile, which names the first entry that cannot be a time."""
        check_positive(self.step_s, "T(n)")
        if not 0 <= self.draft_step_s < _MOST:
            raise BadProfile(
                f"the draft step takes {self.draft_step_s} s, which is not a valid time"
            )
        for t in self.timed:
            if not (1 <= t.n <= len(self.step_s) and t.n_repeats > 0 and 0 <= t.spread < _MOST):
                raise BadProfile(
                    f"the size, repetitions or spread of batch size {t.n} are not valid"
                )

    @property
    def n_max(self) -> int:
        """The largest batch size of the curve."""
        return len(self.step_s)

    def time(self, n: int) -> float:
        """T(n); above `n_max` it is extrapolated by the slope of the curve's last quarter."""
        if n <= len(self.step_s):
            return self.step_s[n - 1]
        return self.step_s[-1] + (n - len(self.step_s)) * self._slope()

    def _slope(self) -> float:
        tail = self.step_s[-max(2, len(self.step_s) // 4) :]
        if len(tail) < 2:
            return self.step_s[0]
        return max(0.0, (tail[-1] - tail[0]) / (len(tail) - 1))

    @property
    def normalised(self) -> tuple[float, ...]:
        """Costs c[n] = T(n) / (n T(1)) for n = 1, 2, ... (llama.cpp #17034)."""
        return tuple(t / ((i + 1) * self.step_s[0]) for i, t in enumerate(self.step_s))

    def rises(self, tolerance: float) -> tuple[int, ...]:
        """Batch sizes n whose normalised cost is above that of n - 1 by more than `tolerance`."""
        c = self.normalised
        return tuple(i + 1 for i in range(1, len(c)) if c[i] > c[i - 1] * (1 + tolerance))

    @classmethod
    def from_normalised(cls, costs: Sequence[float]) -> CostProfile:
        """The curve with normalised costs c[1], c[2], ....

        Raises BadProfile unless c[1] is 1 and all costs are positive.
        """
        check_positive(costs, "the cost")
        if abs(costs[0] - 1.0) > 1e-6:
            raise BadProfile(f"entry 1 of the costs is {costs[0]}; normalised costs begin with 1")
        steps = tuple((i + 1) * c for i, c in enumerate(costs))
        return cls(steps, relative=True)


class LiveCosts(Protocol):
    """T(n) that is updated while a policy uses it, from the times that the policy reports."""

    draft_step_s: float
    times: list[float]  # T(n) at index n - 1
    planned: list[float]  # times to decide by; for doubted sizes, the least plausible time
    tried: dict[int, float]  # the doubted sizes among `planned`
    n_plans: int  # changes of `tried` so far
    n_retries: int  # decodes of a size in `tried`
    is_relative: bool  # True: times are in units of T(1), until the first decode

    def reach(self, n_max: int) -> None:
        """Extend the times to batches of up to `n_max` rows."""
        ...

    def observe(
        self, n: int, verify_s: float, rollback_s: float, n_draft_steps: int, draft_s: float
    ) -> None:
        """Learn from the seconds that a verification of n rows, its rewind and its draft took."""
        ...


class KnownCosts:
    """The costs of a curve that is known and does not change, as in simulations."""

    def __init__(self, profile: CostProfile, n_max: int) -> None:
        self._profile = profile
        self.draft_step_s, self.is_relative = profile.draft_step_s, False
        self.times = [profile.time(n) for n in range(1, n_max + 1)]
        self.planned, self.n_plans, self.n_retries = self.times, 0, 0
        self.tried: dict[int, float] = {}

    def reach(self, n_max: int) -> None:
        self.times += [self._profile.time(n) for n in range(len(self.times) + 1, n_max + 1)]

    def observe(
        self, n: int, verify_s: float, rollback_s: float, n_draft_steps: int, draft_s: float
    ) -> None:
        pass


def check_positive(values: Sequence[float], what: str) -> None:
    """Raises BadProfile with the position of the first value that is not positive and finite."""
    if not values:
        raise BadProfile(f"{what} has no entries; at least batch size 1 is needed")
    for i, value in enumerate(values):
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if not (good and _LEAST < value < _MOST):
            raise BadProfile(
                f"entry {i + 1} of {what} is {value!r:.40}; it must be a number above 0"
            )
