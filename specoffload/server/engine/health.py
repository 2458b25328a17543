"""Decides, from plain numbers, when to report, end and restart the engine process.

The engine process reports each step. A step is a token of every answer, or a batch of a prompt. If
the reports stop, native code does not return, and the process has to be ended. A second thread of
the process sends a heartbeat every second. Heartbeats tell a long step from a stopped process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

HEARTBEAT_S = 1
_PROMPT_FACTOR = 10  # a batch of a prompt may take this many times as long as a token


@dataclass(frozen=True)
class Watchdog:
    """Detects an engine process that hangs or does not run.

    The process hangs after `limit_s` seconds without a finished step (0: never). The limit is ten
    times as long while a prompt is read. The process does not run if `pulse_s` seconds pass without
    a heartbeat.
    """

    limit_s: float = 120.0
    pulse_s: float = 10.0

    def allowed_s(self, *, reads_prompts: bool) -> float:
        return self.limit_s * (_PROMPT_FACTOR if reads_prompts else 1)

    def is_hung(self, silent_s: float, *, reads_prompts: bool) -> bool:
        return self.limit_s > 0 and silent_s > self.allowed_s(reads_prompts=reads_prompts)

    def symptom(self, quiet_s: float, silent_s: float | None, *, reads_prompts: bool) -> str | None:
        """Describe what is wrong with the process, or return None while it may be well.

        `quiet_s`: seconds since the last heartbeat. `silent_s`: seconds since the last finished
        step (None: there is nothing to do).
        """
        if quiet_s > self.pulse_s:
            return (
                f"the engine process has given no sign of life for {quiet_s:.0f} s: it is stopped, "
                "or gets no processor time"
            )
        allowed_s = self.allowed_s(reads_prompts=reads_prompts)
        if silent_s is None or not self.limit_s or silent_s <= allowed_s / 2:
            return None
        return (
            f"the engine has been at one step for {silent_s:.0f} s; at {allowed_s:g} s its process "
            "is started again"
        )

    @property
    def look_s(self) -> float:
        """Seconds between two checks."""
        return min(1.0, self.limit_s / 4)


@dataclass(frozen=True)
class RestartPolicy:
    """Exponential backoff between restarts, up to `limit` failures in a row.

    A process that was ready for `healthy_after_s` seconds resets the number of failures.
    """

    limit: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0

    def count(self, n_failures: int, ready_for_s: float | None) -> int:
        """Return the number of failures in a row after one more failure.

        `ready_for_s`: seconds that the failed process was ready (None: it never became ready).
        """
        if ready_for_s is not None and ready_for_s >= self.healthy_after_s:
            return 1
        return n_failures + 1

    def delay_s(self, n_failures: int) -> float | None:
        """Seconds until the next start; None after too many failures in a row."""
        if n_failures > self.limit:
            return None
        exponent = min(n_failures - 1, 32)  # a float overflows far beyond that
        return min(self.max_delay_s, self.first_delay_s * 2.0**exponent)


def describe_exit(exit_code: int | None) -> str:
    """Return e.g. `was killed by SIGABRT` or `exited with code 3` for a code of multiprocessing."""
    if exit_code is None:
        return "is in an unknown state"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
