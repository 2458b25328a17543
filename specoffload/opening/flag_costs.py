"""Finds given flags without which the same machine would be faster, by planning without them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from offload.errors import DoesNotFit
from offload.notes import Note, NoteKind
from specoffload.config.resolution import Config
from specoffload.opening.context_size import request_seconds
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned
from specoffload.opening.speeds import prompt_words, speed_words

_COSTS = 1.05  # gain of speed from which a flag is named


@dataclass(frozen=True)
class FlagCost:
    """The plan without some of the given flags, which is faster than the plan with them."""

    flags: tuple[str, ...]  # as they were given
    planned: Planned  # without them
    is_at_end: bool  # True: answers gain at the end of the context

    @property
    def note(self) -> Note:
        """A sentence for the user."""
        *first, last = self.flags
        names = f"{', '.join(first)} and {last}" if first else last
        at_end = ""
        if self.is_at_end:
            speed = speed_words(self.planned, full_context=True)
            at_end = f" ({speed} at the end of the context)"
        words = (
            f"without {names}: prompts {prompt_words(self.planned)} tokens/s, "
            f"answers {speed_words(self.planned)}{at_end}: leave {'them' if first else 'it'} out"
        )
        return Note(NoteKind.FLAGS, words)


def flag_cost(config: Config, planner: Planner) -> FlagCost | None:
    """Return the fewest flags without which prompts or answers are over 5 % faster, if there are.

    The usual request must take at most 5 % longer without them. `config` has a context. If the plan
    without all flags that restrict plans is no faster, it is the only one that is made. Otherwise
    each flag is tried once: it stays if the others alone bring as much.
    """
    placing = config.placing
    if placing is None:
        return None
    now = planner.planned(config.ctx_size)

    def without(fields: Sequence[str]) -> Planned | None:
        with suppress(DoesNotFit):
            return planner.with_changes(placing.changes_without(fields)).planned(config.ctx_size)
        return None

    left_out, most = placing.fields, without(placing.fields)
    if most is None or not _is_faster(most, now):
        return None
    best = most
    for name in placing.fields:
        fewer = tuple(field for field in left_out if field != name)
        planned = without(fewer) if fewer else None
        if planned is not None and min(_ratios(planned, most).values()) * _COSTS >= 1.0:
            left_out, best = fewer, planned
    ratios = _ratios(best, now)
    at_end = ratios["full_context_decode_tps"] >= _COSTS > ratios["decode_tps"]
    return FlagCost(placing.flags(left_out), best, at_end)


def _is_faster(planned: Planned, now: Planned) -> bool:
    if request_seconds(planned).planned_s > _COSTS * request_seconds(now).planned_s:
        return False
    return max(_ratios(planned, now).values()) >= _COSTS


def _ratios(planned: Planned, other: Planned) -> dict[str, float]:
    """The speeds of a plan ÷ those of another plan."""
    names = ("prefill_tps", "decode_tps", "full_context_decode_tps")
    found = {name: planned.expected[name] / other.expected[name] for name in names}
    return found | {"least_decode_tps": planned.least_decode_tps / other.least_decode_tps}
