"""When an engine process that says nothing is unwell, and when it has to be ended: pure decisions
over plain numbers.

It tells of each step, and a step is a token of every answer or a batch of a prompt. Silence
means that C does not come back: nothing but the end of the process helps then. A second thread
tells every second that the process runs, so a step of minutes is not taken for a stopped process.
"""

from __future__ import annotations

from dataclasses import dataclass

HEARTBEAT_S = 1
_PROMPTS = 10  # a batch of a prompt may take so many times as long as a token


@dataclass(frozen=True)
class Watchdog:
    """`limit_s` seconds of silence while answers are written, ten times that while a prompt is
    read; 0: never. Without a heartbeat for `pulse_s` seconds, the process does not run."""

    limit_s: float = 120.0
    pulse_s: float = 10.0

    def allowed_s(self, *, reads_prompts: bool) -> float:
        return self.limit_s * (_PROMPTS if reads_prompts else 1)

    def is_hung(self, silent_s: float, *, reads_prompts: bool) -> bool:
        return self.limit_s > 0 and silent_s > self.allowed_s(reads_prompts=reads_prompts)

    def symptom(self, quiet_s: float, silent_s: float | None, *, reads_prompts: bool) -> str | None:
        """The trouble of a process whose last heartbeat was `quiet_s` ago, and which has told of no
        step for `silent_s` (None: it has nothing to do). None while it may be well."""
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
            "is started again (--watchdog)"
        )

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.limit_s / 4)
