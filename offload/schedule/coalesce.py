"""Fewer, longer copies: neighbouring experts of one weight into neighbouring slots. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offload.schedule.commands import Copy


class Span(NamedTuple):
    """Copy experts `expert`..`expert + n - 1` of a weight into slots `slot`..`slot + n - 1`."""

    arena: int
    slot: int
    weight: int
    expert: int
    n: int
    after: int | None  # the last use that has to have finished; None: nobody ever read the slots


def coalesce(copies: Iterable[Copy], max_pieces: int | None = None) -> list[Span]:
    """The copies in their order, neighbours joined.

    Only copies that follow each other are joined, so nothing overtakes what is needed earlier.
    `max_pieces`: the longest span, since one long copy delays the first cut that waits for a part
    of it (bytes ÷ slot size). The `after` of a span is the latest of its copies'.
    """
    if max_pieces is not None and max_pieces < 1:
        raise ValueError(f"a span needs room for one piece, not {max_pieces}")
    spans: list[Span] = []
    for arena, slot, (weight, expert), _, _, after in copies:
        if spans:
            last = spans[-1]
            n = last.n
            if (
                last.slot + n == slot
                and last.expert + n == expert
                and last.weight == weight
                and last.arena == arena
                and (max_pieces is None or n < max_pieces)
            ):
                latest = last.after if after is None else max(after, last.after or 0)
                spans[-1] = Span(arena, last.slot, weight, last.expert, n + 1, latest)
                continue
        spans.append(Span(arena, slot, weight, expert, 1, after))
    return spans


def max_pieces(span_bytes: int, slot_bytes: int) -> int:
    """Pieces of `slot_bytes` in a span of at most `span_bytes`, but at least one."""
    return max(1, span_bytes // slot_bytes)
