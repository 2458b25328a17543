"""Decides which models are opened and closed, from plain numbers. Pure.

Models that requests wait for are opened in the order in which they were asked for. If there is no
room, a model without requests is closed, the least recently used one first. If all have requests,
the least recently used one is held: it takes no new requests, and is closed when its requests have
ended. A model is not held before it has been open for as long as its start took, so starts take at
most half of the time, whoever asks for what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The state of a model's engine process."""

    CLOSED = "closed"
    OPENING = "opening"
    OPEN = "open"
    CLOSING = "closing"


@dataclass(frozen=True)
class Standing:
    """A model as the decision sees it. Times are of one clock, in seconds.

    `asked_s` is the time since which the model is wanted, or None. An open model with requests is
    not held before `keeps_until_s`.
    """

    name: str
    phase: Phase = Phase.CLOSED
    is_busy: bool = False
    used_s: float = 0.0
    asked_s: float | None = None
    keeps_until_s: float = 0.0


@dataclass(frozen=True)
class Decision:
    """Models to open and to close now. Each change leads to a new decision, and so does the time
    `look_again_s`.

    Models of `hold` take no new requests until they are closed or no longer in `hold`. Models of
    `rest` are closed because nobody has used them, those of `close` because others need their room.
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    hold: frozenset[str] = frozenset()
    look_again_s: float | None = None


Fits = Callable[[Sequence[str]], bool]
"""True if these models fit together."""


def decide(
    models: Sequence[Standing], fits: Fits, now_s: float, idle_s: float | None = None
) -> Decision:
    """Return what to do at `now_s`. `idle_s`: seconds without a request after which a model rests.

    A model that is alone always fits: its own start says what is wrong if it does not.
    """
    rest, later = _resting(models, now_s, idle_s)
    staying = [m for m in models if m.phase in (Phase.OPENING, Phase.OPEN) and m.name not in rest]
    leaving = [m.name for m in models if m.phase is Phase.CLOSING] + rest
    wanted = [m for m in models if m.phase is Phase.CLOSED and m.asked_s is not None]
    opened: list[str] = []
    closed: list[str] = []
    held: list[str] = []

    def has_room(*more: str) -> bool:
        names = [*(m.name for m in staying), *opened, *more]
        return len(names) == 1 or fits(names)

    for model in sorted(wanted, key=lambda m: (m.asked_s or 0.0, m.name)):
        if has_room(model.name, *leaving):
            opened.append(model.name)
            continue
        # This model waits, and so do those that were asked for later.
        victims = [m for m in staying if m.phase is Phase.OPEN and m.asked_s is None]
        for victim in sorted(victims, key=lambda m: (m.is_busy, m.used_s, m.name)):
            if has_room(model.name):
                break
            if victim.is_busy and now_s < victim.keeps_until_s:
                later.append(victim.keeps_until_s)
                continue
            staying.remove(victim)
            (held if victim.is_busy else closed).append(victim.name)
        break
    return Decision(
        tuple(opened), tuple(closed), tuple(rest), frozenset(held), min(later, default=None)
    )


def _resting(
    models: Sequence[Standing], now_s: float, idle_s: float | None
) -> tuple[list[str], list[float]]:
    """Return the models that nobody has used for `idle_s`, and the times of the others' turns."""
    if idle_s is None:
        return [], []
    idle = [m for m in models if m.phase is Phase.OPEN and not m.is_busy and m.asked_s is None]
    due = {m.name: m.used_s + idle_s for m in idle}
    return (
        [name for name, at_s in due.items() if at_s <= now_s],
        [at_s for at_s in due.values() if at_s > now_s],
    )
