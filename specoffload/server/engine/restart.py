"""When a dead engine process is started again: pure decisions over plain numbers."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """Exponential backoff; a process that stayed ready for `healthy_after_s` clears the count."""

    limit: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0

    def count(self, n_failures: int, ready_for_s: float | None) -> int:
        """Failures in a row after one more; `ready_for_s` is None when it never became ready."""
        if ready_for_s is not None and ready_for_s >= self.healthy_after_s:
            return 1
        return n_failures + 1

    def delay_s(self, n_failures: int) -> float | None:
        """Seconds to wait before the next start; None: too many failures in a row, give up."""
        if n_failures > self.limit:
            return None
        exponent = min(n_failures - 1, 32)  # beyond, 2**n only grows past any max_delay_s
        return min(self.max_delay_s, self.first_delay_s * 2.0**exponent)


def describe_exit(exit_code: int | None) -> str:
    """`was killed by SIGABRT` or `exited with code 3`; codes are multiprocessing's."""
    if exit_code is None:
        return "is in an unknown state"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
