"""When an engine process that says nothing has to be ended: pure decisions over plain numbers.

It tells of each step, and a step is a token of every answer or a batch of a prompt. Silence
means that C does not come back: nothing but the end of the process helps then.
"""

from __future__ import annotations

from dataclasses import dataclass

_PROMPTS = 10  # a batch of a prompt may take so many times as long as a token


@dataclass(frozen=True)
class Watchdog:
    """`limit_s` seconds of silence while answers are written, ten times that while a prompt is
    read; 0: never."""

    limit_s: float = 120.0

    def allowed_s(self, *, reads_prompts: bool) -> float:
        return self.limit_s * (_PROMPTS if reads_prompts else 1)

    def is_hung(self, silent_s: float, *, reads_prompts: bool) -> bool:
        return self.limit_s > 0 and silent_s > self.allowed_s(reads_prompts=reads_prompts)

    @property
    def look_s(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.limit_s / 4)
