"""The cost profile: T(n), the time of one target decode of n tokens, measured on this machine.

n = 1 + drafted tokens. Everything about speculation that depends on the machine is in here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from itertools import accumulate
from operator import add

from specdec.errors import BadProfile

# Of times and costs in any unit. Beyond, quotients of two of them are no numbers.
_LEAST, _MOST = 1e-30, 1e30

CONTRADICTS = 1.2  # times what the other sizes allow: more than noise
_SETTLED = 3  # retries at as many starts, after which a time that contradicts others is believed


@dataclass(frozen=True)
class ProfileKey:
    """The run that a profile is true of. Any difference makes it another profile."""

    model: str = ""  # hash of the target file
    draft: str = ""  # hash of the draft file, empty without one
    plan: str = ""
    threads: str = ""
    device: str = ""
    build: str = ""

    def difference(self, other: ProfileKey) -> str | None:
        """The first field that differs, in words; None when the keys are equal."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                return f"its {f.name} is {mine!r}, this run's is {theirs!r}"
        return None


@dataclass(frozen=True)
class Timed:
    """A batch size that was timed, not interpolated: how often at each depth, by how much of T(n)
    the middle half of the times lies around it, and when last (an ISO date).

    `n_retried` counts the starts that timed it again because it contradicted other sizes, and found
    it as long.
    """

    n: int
    n_repeats: int
    spread: float
    date: str = ""
    n_retried: int = 0


@dataclass(frozen=True)
class CostProfile:
    """`step_s[n-1]` is T(n) in seconds, or in units of T(1) when `relative`.

    `draft_step_s` is the time of one draft decode in the same unit, 0 when unknown or free.
    `depths` holds the T(n) at each context depth that `step_s` averages, and `draft_depths` the
    draft's time at each that `draft_step_s` averages. `uncertain` are sizes
    that were interpolated, timed once only, or timed on a machine that was busy with other work.
    `timed` are those that were measured, none where that is not known; `repetitions` how often each
    was to be, 0 where nobody said. `title` says for people what was measured on what.
    """

    step_s: tuple[float, ...]
    draft_step_s: float = 0.0
    key: ProfileKey = field(default_factory=ProfileKey)
    relative: bool = False
    depths: tuple[tuple[int, tuple[float, ...]], ...] = ()
    uncertain: tuple[int, ...] = ()
    timed: tuple[Timed, ...] = ()
    repetitions: int = 0
    title: str = ""
    draft_depths: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Raises BadProfile naming the first entry that is not a time."""
        check_positive(self.step_s, "T(n)")
        if not 0 <= self.draft_step_s < _MOST:
            raise BadProfile(f"the draft step takes {self.draft_step_s} s, which is no time")
        if self.draft_depths:
            check_positive([step_s for _, step_s in self.draft_depths], "the draft's step by depth")
        for depth, steps in self.depths:
            check_positive(steps, f"T(n) at depth {depth}")
        wrong = next((n for n in self.uncertain if not 1 <= n <= len(self.step_s)), None)
        if wrong is not None:
            raise BadProfile(f"batch size {wrong} is marked uncertain and is not in the profile")
        for t in self.timed:
            counts = t.n_repeats > 0 and t.n_retried >= 0
            if not (1 <= t.n <= len(self.step_s) and counts and 0 <= t.spread < _MOST):
                raise BadProfile(f"batch size {t.n} cannot have been timed as it is written")

    @property
    def n_max(self) -> int:
        """The largest batch measured."""
        return len(self.step_s)

    def fuller_than(self, other: CostProfile) -> str:
        """A few words on what this has and `other` lacks, empty where it lacks nothing: times that
        do not contradict each other, larger batches, or as many and more repetitions."""
        if self.n_max >= other.n_max and other.to_retry and not self.to_retry:
            return f"times that agree, those of the new one for {_batches(other.to_retry)} do not"
        if other.n_max >= self.n_max and self.to_retry and not other.to_retry:
            return ""
        if self.n_max > other.n_max:
            return f"batches of up to {self.n_max} tokens, the new one of up to {other.n_max}"
        known = self.repetitions and other.repetitions
        if known and self.n_max == other.n_max and self.repetitions > other.repetitions:
            return f"{self.repetitions} repetitions, the new one {other.repetitions}"
        return ""

    def time(self, n: int) -> float:
        """T(n); beyond the profile it continues as the last quarter of it rises."""
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
        """c[n] = T(n) / (n T(1)), c[1] = 1 (llama.cpp #17034)."""
        return tuple(t / ((i + 1) * self.step_s[0]) for i, t in enumerate(self.step_s))

    @property
    def tokens_per_s(self) -> tuple[float, ...]:
        """s[n] = n / T(n)."""
        return tuple((i + 1) / t for i, t in enumerate(self.step_s))

    @property
    def bumps(self) -> tuple[int, ...]:
        """Batch sizes n whose normalised cost is above that of n - 1: jagged kernels."""
        return self.rises(1e-9)

    def rises(self, tolerance: float) -> tuple[int, ...]:
        """Batch sizes n whose normalised cost is above that of n - 1 by more than `tolerance`."""
        c = self.normalised
        return tuple(i + 1 for i in range(1, len(c)) if c[i] > c[i - 1] * (1 + tolerance))

    @property
    def to_retry(self) -> tuple[int, ...]:
        """Sizes whose times contradict others, and are to be measured again until that has found
        them as long at several starts: kernels may be jagged."""
        settled = {t.n for t in self.timed if t.n_retried >= _SETTLED}
        return tuple(n for n in contradicting(self.step_s) if n not in settled)

    def retried(self, times_s: Mapping[int, tuple[float, int]]) -> CostProfile:
        """This profile with sizes of `to_retry` timed again at another start: each size's seconds
        and repetitions. A time that still contradicts the others has one retry more."""
        most, steps, date = agreeing(self.step_s), list(self.step_s), today()
        for n, (seconds, _) in times_s.items():
            if is_believed(seconds, steps[n - 1], most[n - 1]):
                steps[n - 1] = seconds
        still = set(contradicting(steps))
        timed = {t.n: t for t in self.timed}
        for n, (_, n_repeats) in times_s.items():
            before = timed.get(n, Timed(n, 0, 0.0))
            timed[n] = replace(
                before,
                n_repeats=before.n_repeats + n_repeats,
                date=date,
                n_retried=before.n_retried + 1 if n in still else 0,
            )
        found = tuple(t for _, t in sorted(timed.items()))
        return replace(self, step_s=tuple(steps), depths=(), timed=found)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Implausible entries: those to retry, else a batch cheaper than one token."""
        if sizes := self.to_retry:
            return (
                f"{_batches(sizes)} took longer than a larger batch, or than two smaller ones one "
                "after the other: this machine was busy meanwhile, or its kernels are uneven. They "
                "are timed again while answering, and at the next start",
            )
        n = next((i + 1 for i, t in enumerate(self.step_s) if t < self.step_s[0]), None)
        if n is None:
            return ()
        return (
            f"T({n}) is {self.step_s[n - 1] / self.step_s[0]:.2f} T(1): c[{n}] is below 1/{n}, so "
            "the speed at batch 1 was probably measured before the machine was warm",
        )

    @classmethod
    def from_normalised(cls, costs: Sequence[float], draft_step: float = 0.0) -> CostProfile:
        """From c[n]; `draft_step` in units of T(1). Raises BadProfile."""
        check_positive(costs, "the cost")
        if abs(costs[0] - 1.0) > 1e-6:
            raise BadProfile(f"entry 1 of the costs is {costs[0]}; normalised costs begin with 1")
        steps = tuple((i + 1) * c for i, c in enumerate(costs))
        return cls(steps, draft_step, relative=True)

    @classmethod
    def from_tokens_per_s(cls, speeds: Sequence[float], draft_step_s: float = 0.0) -> CostProfile:
        """From s[n] = n / T(n) in tokens per second. Raises BadProfile."""
        check_positive(speeds, "the speed")
        return cls(tuple((i + 1) / s for i, s in enumerate(speeds)), draft_step_s)


def today() -> str:
    """The ISO date that is kept with times measured now."""
    return datetime.now(UTC).date().isoformat()


def agreeing(times: Sequence[float]) -> list[float]:
    """The longest times T(1), T(2), ... up to `times` that do not contradict each other.

    A batch takes no longer than a larger one, nor than the two that it can be cut into. Whatever
    disturbs a measurement makes it longer, so the shorter of two times that contradict each other
    is believed.
    """
    low = list(accumulate(reversed(times), min))[::-1]
    for i in range(1, len(low)):
        low[i] = min(low[i], min(map(add, low[: (i + 1) // 2], low[i - 1 :: -1])))
    return low


def contradicting(times: Sequence[float]) -> list[int]:
    """Sizes n whose T(n), `times[n-1]`, is longer by more than noise than the others allow."""
    return [
        n
        for n, (t, most) in enumerate(zip(times, agreeing(times), strict=True), 1)
        if t > CONTRADICTS * most
    ]


def is_believed(retried_s: float, stated_s: float, most_s: float) -> bool:
    """True if a time measured again replaces the one in doubt: it agrees with the other sizes,
    which allow `most_s`, or is shorter by more than noise, since nothing makes a decode too fast.
    """
    return retried_s <= CONTRADICTS * most_s or CONTRADICTS * retried_s < stated_s


def least_plausible(most: Sequence[float], doubted: Collection[int]) -> dict[int, float]:
    """The least time of each doubted size, by the sizes next to it that are not; their times are
    `most`: that of the one below it, else a part of that of the one above."""
    found: dict[int, float] = {}
    below_s = 0.0
    for n, most_s in enumerate(most, 1):
        if n not in doubted:
            below_s = most_s
        elif below_s:
            found[n] = below_s
        else:
            above = next((m for m in range(n + 1, len(most) + 1) if m not in doubted), n)
            found[n] = most[above - 1] / -(-above // n)
    return found


def _batches(sizes: Sequence[int]) -> str:
    """The first few of many: batches of 2, 3, 8 tokens."""
    shown = ", ".join(map(str, sizes[:6]))
    return (
        f"batches of {shown} tokens" if len(sizes) < 7 else f"{len(sizes)} batches ({shown}, ...)"
    )


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
