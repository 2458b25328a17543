"""The type of functions that show the progress of opening a session.

Their arguments are the name of a step, and the finished fraction of that step.
"""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]


def ignore(step: str, done: float) -> None:
    """An `OnProgress` that does nothing."""
