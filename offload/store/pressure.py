"""Detects memory pressure: programs wait for memory for too much of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

StalledS = Callable[[], float | None]  # seconds for which programs waited; None: unknown
_WINDOW_S = 1.0  # least seconds between two measurements
_HIGH_SHARE = 0.25  # share of the time that programs wait, above which pressure is high
_REST_S = 10.0  # seconds after high pressure in which no more memory should be taken


class PressureWatch:
    """Looks at the kernel's pressure stall information from time to time."""

    def __init__(self, stalled_s: StalledS, now: Callable[[], float] = time.monotonic) -> None:
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
