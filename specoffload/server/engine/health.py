"""Decides, from plain numbers, when the engine process is unwell, ended and restarted.

The engine process reports each step. A step is a token of every answer, or a batch of a prompt. If
the reports stop, native code does not return, and the process has to be ended. A second thread
sends a heartbeat every second, so that a step of minutes does not look like a stopped process.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

HEARTBEAT_S = 1
_PROMPT_FACTOR = 10  # a batch of a prompt may take this many times as long as a token


@dataclass(frozen=True)
class Watchdog:
    """Finds a process that hangs or does not run.

    After `limit_s` seconds without a step, ten times that while a prompt is read, the process is
    ended; 0: never. After `pulse_s` seconds without a heartbeat, the process does not run.
    """

    limit_s: float = 120.0
    pulse_s: float = 10.0

    def allowed_s(self, *, reads_prompts: bool) -> float:
        return self.limit_s * (_PROMPT_FACTOR if reads_prompts else 1)

    def is_hung(self, silent_s: float, *, reads_prompts: bool) -> bool:
        return self.limit_s > 0 and silent_s > self.allowed_s(reads_prompts=reads_prompts)

    def symptom(self, quiet_s: float, silent_s: float | None, *, reads_prompts: bool) -> str | None:
        """Describes what is wrong; None while the process may be well.

        The last heartbeat was `quiet_s` seconds ago, the last finished step `silent_s` (None: there
        is nothing to do).
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
    """Exponential backoff. A process that was ready for `healthy_after_s` clears the count."""

    limit: int = 5
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0
    healthy_after_s: float = 60.0

    def count(self, n_failures: int, ready_for_s: float | None) -> int:
        """Returns the failures in a row after one more; `ready_for_s` is None if the process never
        became ready."""
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
    """`was killed by SIGABRT` or `exited with code 3`; codes are multiprocessing's."""
    if exit_code is None:
        return "is in an unknown state"
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"
