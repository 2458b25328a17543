"""Decides how much memory experts may take, from looks at the memory that is free. Pure.

Memory that this process will take later stays free until it is taken. Each purpose is counted
apart: the context, buffers of batches, kept prompts, and so on. Other memory of the process grows
without a plan (Python's heap, rows of logits, prepared graphs). It is not subtracted from the
memory that is left for a purpose.

A read takes its memory after it was admitted. So bytes that were admitted and not read yet count as
taken. At each look the capacity grows by only a part of the margin. So the next look comes before
the margin is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from offload.plan.host import CONTEXT, DRIVER, INPUTS, LOGITS, PINNED, SLOTS, too_little_words

MemoryBytes = Callable[[], int]
StalledS = Callable[[], float | None]  # seconds for which programs waited; None: unknown
IN_DECODES = (
    LOGITS,
    CONTEXT,
    SLOTS,
    PINNED,
    INPUTS,
    DRIVER,
)  # what decodes take, and opening a context
_WINDOW_S = 1.0  # least seconds between two measurements of pressure
_HIGH_SHARE = 0.25  # share of the time that programs wait, above which pressure is high
_REST_S = 10.0  # seconds after high pressure in which no more memory should be taken
_GROWTH_SHARE = 0.5  # share of the memory found free by which experts may grow at once
_STEP_SHARE = 0.25  # share of the margin by which experts may grow between two looks
_LEAST_STEP_BYTES = 16 << 20
_REMEMBERED_S = 600.0  # seconds for which memory that this process had is left free, at least


@dataclass(frozen=True)
class MemoryLimits:
    """The memory for streamed weights: at most `most_bytes`, and `free_bytes` stay free.

    `later_bytes` gets the tokens of the largest batch. It returns the memory that this process
    takes for such batches, and for anything else after loading, by purpose.
    """

    most_bytes: int
    others_bytes: int = 0  # streamed weights that are always in memory
    free_bytes: int = 0  # margin for other programs, and mapped weights
    later_bytes: Callable[[int], Mapping[str, int]] = lambda n_tokens: {}
    available: MemoryBytes | None = None  # memory that is free; None: nobody watches it
    own: MemoryBytes | None = None  # anonymous memory of this process; None: unknown
    stalled_s: StalledS = lambda: None  # seconds for which programs waited for memory

    @property
    def most_for_experts(self) -> int:
        return max(0, self.most_bytes - self.others_bytes)

    def start_bytes(self, n_tokens: int) -> int:
        """Bytes for experts now, if other streamed weights are in memory.

        `n_tokens`: tokens of the largest batch for which memory is left.
        """
        if self.available is None:
            return self.most_for_experts
        left = self.available() - self.free_bytes - sum(self.later_bytes(n_tokens).values())
        return min(self.most_for_experts, max(0, left))

    def too_little(self, n_tokens: int, least_bytes: int) -> str:
        """Return the sentence that says why experts cannot take `least_bytes` at the start."""
        return too_little_words(
            self.most_bytes,
            self.others_bytes,
            self.free_bytes,
            self.later_bytes(n_tokens),
            None if self.available is None else self.available(),
            least_bytes,
        )


class MemoryBudget:
    """The bytes that experts may take (`capacity_bytes`), adapted by `look`."""

    def __init__(
        self,
        limits: MemoryLimits,
        n_tokens: int,
        least_bytes: int,
        most_bytes: int,
        now: Callable[[], float],
    ) -> None:
        """Set the capacity as far as memory is free. It may be less than `least_bytes` only here.

        `n_tokens`: tokens of the largest batch for which memory is left.
        """
        self._limits = limits
        self._pressure = PressureWatch(limits.stalled_s, now)
        self._later = dict(limits.later_bytes(n_tokens))  # bytes in all, by purpose
        self._taken: dict[str, int] = {}  # the part of them that this process has taken
        self._highest_bytes = 0  # most memory besides experts so far
        self._own_bytes = limits.own() if limits.own is not None else 0
        self._most_others = RecentMost(now)  # memory of this process besides experts
        self._step_bytes = max(_LEAST_STEP_BYTES, int(_STEP_SHARE * limits.free_bytes))
        self.least_bytes = least_bytes
        self.most_bytes = min(most_bytes, limits.most_for_experts)
        self.capacity_bytes = min(most_bytes, limits.start_bytes(n_tokens))
        self.available_bytes = 0  # memory that was free at the last look after all reads
        # Experts may take more memory than this only after another look.
        self.checked_bytes = self.most_bytes if limits.available is None else 0

    def reserve(self, purpose: str, n_bytes: int) -> None:
        """Leave `n_bytes` in all for a purpose of this process, until it has taken them."""
        self._later[purpose] = max(n_bytes, self._later.get(purpose, 0))

    def others_bytes(self, in_memory_bytes: int) -> int | None:
        """Return the memory of this process besides `in_memory_bytes` of experts. None: unknown."""
        return None if self._limits.own is None else self._limits.own() - in_memory_bytes

    def took(self, purposes: Iterable[str], before_bytes: int, after_bytes: int) -> None:
        """Count growth of the memory besides experts as taken for the first purpose that lacks it.

        Memory that this process had before was counted then, so only what is above the highest
        value counts.
        """
        grown_bytes = after_bytes - max(before_bytes, self._highest_bytes)
        self._highest_bytes = max(self._highest_bytes, before_bytes, after_bytes)
        for purpose in purposes:
            taken_bytes = min(self.untaken_bytes(purpose), max(0, grown_bytes))
            self._taken[purpose] = self._taken.get(purpose, 0) + taken_bytes
            grown_bytes -= taken_bytes

    def untaken_bytes(self, purpose: str) -> int:
        """Return the bytes that are left free for a purpose."""
        return self._later.get(purpose, 0) - self._taken.get(purpose, 0)

    def look(self, used_bytes: int, unread_bytes: int, *, grow: bool = False) -> bool:
        """Adapt the capacity to the memory that is free. Returns True if experts must leave.

        `used_bytes`: experts in memory or being read. `unread_bytes`: the part of them that has no
        pages yet. Half of the margin may be taken by others before experts leave. The capacity
        rises only with `grow`.
        """
        limits, free_bytes = self._limits, self._limits.free_bytes
        assert limits.available is not None
        self.available_bytes = limits.available() - unread_bytes
        later_bytes = self._bytes_to_come(used_bytes - unread_bytes)
        spare_bytes = self.available_bytes - free_bytes - later_bytes
        if self._pressure.is_high():
            spare_bytes = min(spare_bytes, -free_bytes)
        must_leave = spare_bytes < -free_bytes // 2
        room_bytes = used_bytes + spare_bytes
        if not must_leave:
            room_bytes = max(room_bytes, used_bytes)
        wanted_bytes = self.capacity_bytes
        if grow and not self._pressure.rests:
            step_bytes = min(int(spare_bytes * _GROWTH_SHARE), self._step_bytes)
            wanted_bytes = max(wanted_bytes, used_bytes + step_bytes)
        self.capacity_bytes = max(self.least_bytes, min(wanted_bytes, room_bytes, self.most_bytes))
        self.checked_bytes = min(self.capacity_bytes, used_bytes + self._step_bytes)
        return must_leave

    def _bytes_to_come(self, in_memory_bytes: int) -> int:
        """Return the memory that this process will take, or had lately and may take again."""
        later_bytes = sum(self._later.values())
        others_bytes = self.others_bytes(in_memory_bytes)
        if others_bytes is None:
            return later_bytes
        most_bytes = self._most_others.with_value(others_bytes)
        untaken_bytes = later_bytes - sum(self._taken.values())
        # A purpose may take memory again that it gave back long ago.
        return max(most_bytes + untaken_bytes, self._own_bytes + later_bytes) - others_bytes


class RecentMost:
    """The largest recent value. Each value stays in the window for one to two periods."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._since_s = now, now()
        self._most = self._most_before = 0  # largest in this period, and in the previous one

    def with_value(self, value: int) -> int:
        """Add a value. Returns the largest one."""
        if self._now() - self._since_s > _REMEMBERED_S:
            self._since_s = self._now()
            self._most_before, self._most = self._most, 0
        self._most = max(self._most, value)
        return max(self._most, self._most_before)


class PressureWatch:
    """Looks at the kernel's pressure stall information from time to time."""

    def __init__(self, stalled_s: StalledS, now: Callable[[], float]) -> None:
        self._stalled_s, self._now = stalled_s, now
        self._last = now(), stalled_s()
        self._rests_until_s = -_REST_S

    def is_high(self) -> bool:
        """Measure pressure. Returns True at most once for each window of high pressure."""
        (then_s, before_s), now_s = self._last, self._now()
        if now_s - then_s < _WINDOW_S:
            return False
        total_s = self._stalled_s()
        self._last = now_s, total_s
        if total_s is None or before_s is None:
            return False
        is_high = total_s - before_s > _HIGH_SHARE * (now_s - then_s)
        if is_high:
            self._rests_until_s = now_s + _REST_S
        return is_high

    @property
    def rests(self) -> bool:
        """True for some time after high pressure."""
        return self._now() < self._rests_until_s
