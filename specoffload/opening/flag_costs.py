"""Finds given flags without which the same machine would be faster, by planning without them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from offload.errors import DoesNotFit
from offload.notes import Note, NoteKind
from specoffload.config.resolution import Config
from specoffload.opening.context_size import request_seconds
from specoffload.opening.planner import Planner
from specoffload.opening.planning import Planned
from specoffload.opening.speeds import mtp_speed, prompt_words, speed_words

_COSTS = 1.05  # gain of speed from which a flag is named


@dataclass(frozen=True)
class FlagCost:
    """The plan without some of the given flags, which is faster than the plan with them."""

    flags: tuple[str, ...]  # as they were given
    planned: Planned  # without them
    now: Planned  # with them

    @property
    def note(self) -> Note:
        """A sentence for the user.

        It has both plans' speeds if the usual request takes over 5 % longer without the flags.
        """
        *first, last = self.flags
        names = f"{', '.join(first)} and {last}" if first else last
        them, ratios = "them" if first else "it", _ratios(self.planned, self.now)
        words = f"without {names}: {_words(self.planned, ratios)}"
        if request_seconds(self.planned).planned_s > _COSTS * request_seconds(self.now).planned_s:
            words += f"; with {them}: {_words(self.now, ratios)}"
        else:
            words += f": leave {them} out"
        return Note(NoteKind.FLAGS, words)


def _words(planned: Planned, ratios: Mapping[str, float]) -> str:
    """The speeds of prompts and answers, and of those answers that gain more than others."""
    more = []
    is_alike = ratios["decode_tps"] < _COSTS
    if is_alike and ratios["full_context_decode_tps"] >= _COSTS:
        more.append(f"{speed_words(planned, full_context=True)} at the end of the context")
    if is_alike and ratios["mtp_tps"] >= _COSTS and "mtp_decode_tps" in planned.expected:
        more.append(f"{mtp_speed(planned)} with drafts by its own layers")
    gains = f" ({', '.join(more)})" if more else ""
    return f"prompts {prompt_words(planned)} tokens/s, answers {speed_words(planned)}{gains}"


def flag_cost(config: Config, planner: Planner, n_ctx: int) -> FlagCost | None:
    """Return the fewest flags without which prompts or answers are over 5 % faster, if there are.

    The largest gain must exceed the largest loss of another speed. `n_ctx` is the context. If the
    plan without all flags that restrict plans is no faster, it is the only one that is made.
    Otherwise each flag is tried once: it stays if the others alone bring as much.
    """
    placing = config.placing
    if placing is None:
        return None
    now = planner.planned(n_ctx)

    def without(fields: Sequence[str]) -> Planned | None:
        with suppress(DoesNotFit):
            return planner.with_changes(placing.changes_without(fields)).planned(n_ctx)
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
    return FlagCost(placing.flags(left_out), best, now)


def _is_faster(planned: Planned, now: Planned) -> bool:
    """True if a speed is over 5 % higher, and by a larger factor than another one is lower."""
    ratios = _ratios(planned, now).values()
    return max(ratios) >= _COSTS and max(ratios) * min(ratios) >= 1.0


def _ratios(planned: Planned, other: Planned) -> dict[str, float]:
    """The speeds of a plan ÷ those of another plan: all that `plan` prints."""
    ours, theirs = _speeds(planned), _speeds(other)
    return {name: ours[name] / theirs[name] for name in ours}


def _speeds(planned: Planned) -> dict[str, float]:
    names = ("prefill_tps", "decode_tps", "full_context_decode_tps")
    speeds = {name: planned.expected[name] for name in names}
    return speeds | {
        "least_decode_tps": planned.least_decode_tps,
        "least_full_context_decode_tps": planned.least_full_context_decode_tps,
        # Without layers that draft, answers have the speed of plain decoding.
        "mtp_tps": planned.expected.get("mtp_decode_tps", planned.expected["decode_tps"]),
    }
