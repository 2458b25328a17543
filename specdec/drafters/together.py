"""Drafts of several sequences by any drafter: in one batch where it can, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.types import BatchDrafter, Draft, Drafter, DraftRequest

ProposeMany = Callable[[Sequence[DraftRequest]], list[Draft]]


def propose_many_of(drafter: Drafter) -> ProposeMany:
    """Proposes for several requests. Found once: looking up a protocol takes as long as a
    round without a draft."""
    return drafter.propose_many if isinstance(drafter, BatchDrafter) else one_by_one(drafter)


def one_by_one(drafter: Drafter) -> ProposeMany:
    """The slow twin: each request by itself."""
    return lambda requests: [drafter.propose(*request) for request in requests]
