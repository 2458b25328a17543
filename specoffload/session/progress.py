"""The type of functions that are told how far opening a session has come.

Their arguments are the name of a step, and the finished fraction of it.
"""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]


def ignore(step: str, done: float) -> None:
    """An `OnProgress` that does nothing."""
