"""Fewer, longer copies: neighbouring experts of one layer into neighbouring slots. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from offload.schedule.commands import Copy


class Span(NamedTuple):
    """Copy experts `expert`..`expert + n - 1` of a group into slots `slot`..`slot + n - 1`."""

    pool: int
    slot: int
    group: int
    expert: int
    n: int
    after: int | None  # the last use that has to have finished; None: nobody ever read the slots


def coalesce(copies: Iterable[Copy]) -> list[Span]:
    """The copies in their order, neighbours joined.

    Only copies that follow each other are joined, so nothing overtakes what is needed earlier.
    The `after` of a span is the latest of its copies'.
    """
    spans: list[Span] = []
    for pool, slot, (group, expert), _, _, after in copies:
        if spans:
            last = spans[-1]
            n = last.n
            if (
                last.slot + n == slot
                and last.expert + n == expert
                and last.group == group
                and last.pool == pool
            ):
                latest = last.after if after is None else max(after, last.after or 0)
                spans[-1] = Span(pool, last.slot, group, last.expert, n + 1, latest)
                continue
        spans.append(Span(pool, slot, group, expert, 1, after))
    return spans
