"""Progress while a session opens: the name of a step, and the fraction of it that is done."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]


def ignore(step: str, done: float) -> None:
    """An `OnProgress` that does nothing."""
