"""The slot that a request gets, and from where its prompt's beginning comes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

SIMILAR = 0.1  # of a prompt: less in common is chance, a template's first words
_MUCH_LOST = 0.5  # of what a slot holds: from here on it is worth to be kept elsewhere
_WORTH_TOKENS = 16  # in common: fewer are evaluated faster than copied


class Source(Enum):
    """Where the tokens come from that a prompt need not have evaluated."""

    NONE = "none"
    OWN = "the slot itself"
    SLOT = "another slot"
    STORE = "host memory"


@dataclass(frozen=True)
class SlotState:
    """A slot as the choice sees it, for one prompt."""

    number: int
    is_busy: bool
    n_held: int
    n_reusable: int  # tokens of the prompt that it need not evaluate
    n_shareable: int  # that another slot can take over from it
    last_used: int

    def without_reuse(self) -> SlotState:
        """For a prompt of which nothing that is held may be used."""
        return replace(self, n_reusable=0, n_shareable=0)


@dataclass(frozen=True)
class Choice:
    """Run in slot `number`, whose beginning comes from `source`; `other` is that slot's number.

    With `keep` the slot holds much that the prompt has no use for: it is kept elsewhere first.
    """

    number: int
    source: Source
    other: int = -1
    keep: bool = False


def choose(
    slots: Sequence[SlotState],
    n_prompt: int,
    n_stored: int,
    wanted: int = -1,
    similar: float = SIMILAR,
) -> Choice | None:
    """The slot for a prompt of `n_prompt` tokens, of which host memory holds `n_stored`; None when
    all are busy. `wanted` is the number of the only one that will do (-1: any). `similar` is the
    least share of the prompt that an idle slot must hold to be chosen for it; 0: none is.

    The longest beginning wins, and of equal ones that which copies least. A slot that would lose
    much by it is copied to an empty one instead.
    """
    idle = [slot for slot in slots if not slot.is_busy and wanted in (-1, slot.number)]
    if not idle:
        return None
    own = max(idle, key=lambda s: (s.n_reusable, s.n_held == s.n_reusable, -s.number))
    is_similar = similar > 0 and own.n_reusable >= max(1.0, similar * n_prompt)
    n_own = own.n_reusable if is_similar else 0
    place = min(idle, key=lambda s: (s.n_held > 0, s.last_used, s.number))
    others = [s for s in slots if s.number != place.number and s.n_shareable >= _WORTH_TOKENS]
    shared = max(others, key=lambda s: s.n_shareable, default=None)
    n_shared = 0 if shared is None else shared.n_shareable
    if n_stored >= _WORTH_TOKENS and n_stored > max(n_own, n_shared):
        return Choice(place.number, Source.STORE, keep=_loses_much(place, 0))
    splits = _loses_much(own, n_own) and not place.n_held and n_shared == n_own
    if shared is not None and (n_shared > n_own or splits):
        return Choice(place.number, Source.SLOT, shared.number, keep=_loses_much(place, 0))
    if n_own:
        return Choice(own.number, Source.OWN, keep=_loses_much(own, n_own))
    return Choice(place.number, Source.NONE, keep=_loses_much(place, 0))


def _loses_much(slot: SlotState, n_reused: int) -> bool:
    """True if much of what the slot holds would be lost."""
    lost = slot.n_held - n_reused
    return lost >= _WORTH_TOKENS and lost > _MUCH_LOST * slot.n_held
