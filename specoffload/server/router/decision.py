"""Decides which models are opened and closed, from plain numbers. Pure.

Models that requests wait for are opened in the order in which they were asked for. If there is no
room, a model without requests is closed, the least recently used one first. If all have requests,
the least recently used one is held: it takes no new requests, and is closed when its requests have
ended. A model is not held before it has been open for as long as its start took, so starts take at
most half of the time, whoever asks for what.

A model that needs another one's room is checked first: its file is read and planned. So a file that
cannot be opened closes no model that works.

The list of models may be replaced at any time. Then an *old* version of a model, which has changed
or is gone, takes no new requests. It is closed when its requests have ended. The new version of the
same name waits for that.

    CLOSED ──opens──> OPENING ──is ready──> OPEN
       ^                 │                    │
       └──has closed── CLOSING <──is closed───┘
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


class EngineEvent(Enum):
    """What happens to a model's engine process."""

    OPENS = "opens"
    IS_READY = "is ready"
    IS_CLOSED = "is closed"
    HAS_CLOSED = "has closed"


_AFTER = {
    (Phase.CLOSED, EngineEvent.OPENS): Phase.OPENING,
    (Phase.OPENING, EngineEvent.IS_READY): Phase.OPEN,
    (Phase.OPENING, EngineEvent.IS_CLOSED): Phase.CLOSING,
    (Phase.OPEN, EngineEvent.IS_CLOSED): Phase.CLOSING,
    (Phase.CLOSING, EngineEvent.HAS_CLOSED): Phase.CLOSED,
}


def after(phase: Phase, event: EngineEvent) -> Phase:
    """Return the phase that follows. Raises KeyError for an event that the phase cannot have."""
    return _AFTER[phase, event]


@dataclass(frozen=True)
class Standing:
    """A model as the decision sees it. Times are of one clock, in seconds.

    `asked_s` is the time since which the model is wanted, or None. An open model with requests is
    not held before `keeps_until_s`. `name` tells versions of one model apart. An old version is
    `is_old`, and its successor is `is_blocked` while it runs. Only a model that `is_checked` may
    take the room of others.
    """

    name: str
    phase: Phase = Phase.CLOSED
    is_busy: bool = False
    used_s: float = 0.0
    asked_s: float | None = None
    keeps_until_s: float = 0.0
    is_old: bool = False
    is_blocked: bool = False
    is_checked: bool = True


@dataclass(frozen=True)
class PoolChanges:
    """Models to open and to close now. Each change leads to a new decision, and so does the time
    `look_again_s`.

    Models of `hold` take no new requests until they are closed or no longer in `hold`. Models of
    `rest` are closed because nobody has used them, those of `retire` because they are old, and
    those of `close` because `room_for` needs their room. `check` is to be checked before that.
    """

    open: tuple[str, ...] = ()
    close: tuple[str, ...] = ()
    rest: tuple[str, ...] = ()
    hold: frozenset[str] = frozenset()
    look_again_s: float | None = None
    retire: tuple[str, ...] = ()
    room_for: str | None = None
    check: str | None = None


Fits = Callable[[Sequence[str]], bool]
"""True if these models fit together."""


def decide(
    models: Sequence[Standing], fits: Fits, now_s: float, idle_s: float | None = None
) -> PoolChanges:
    """Return what to do at `now_s`. `idle_s`: seconds without a request after which a model rests.

    A model that is alone always fits: its own start says what is wrong if it does not.
    """
    old = [m for m in models if m.is_old and m.phase in (Phase.OPENING, Phase.OPEN)]
    rest, later = _resting([m for m in models if not m.is_old], now_s, idle_s)
    going = {*rest, *(m.name for m in models if m.is_old and m.phase is not Phase.CLOSED)}
    staying = [m for m in models if m.phase in (Phase.OPENING, Phase.OPEN) and m.name not in going]
    leaving = [m.name for m in models if m.phase is Phase.CLOSING and m.name not in going]
    leaving += sorted(going)
    wanted = [m for m in models if m.phase is Phase.CLOSED and m.asked_s is not None]
    opened: list[str] = []
    closed: list[str] = []
    held = [m.name for m in old if m.is_busy]
    room_for = check = None

    def has_room(*more: str) -> bool:
        names = [*(m.name for m in staying), *opened, *more]
        return len(names) == 1 or fits(names)

    for model in sorted(wanted, key=lambda m: (m.asked_s or 0.0, m.name)):
        if model.is_old or model.is_blocked:
            continue
        if has_room(model.name, *leaving):
            opened.append(model.name)
            continue
        # This model waits, and so do those that were asked for later.
        if not model.is_checked and not has_room(model.name):
            check = model.name
            break
        room_for = model.name
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
    return PoolChanges(
        tuple(opened),
        tuple(closed),
        tuple(rest),
        frozenset(held),
        min(later, default=None),
        tuple(m.name for m in old if not m.is_busy),
        room_for,
        check,
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
