"""Progress of the opening of a session: which step it is at, and what fraction of it is done."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]


def ignore(step: str, done: float) -> None:
    """An `OnProgress` that does nothing."""
