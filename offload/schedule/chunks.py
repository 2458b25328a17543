"""A batch cut into chunks of tokens whose experts fit the slots. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Chunks = Literal["auto", "on", "off"]  # auto: where they are expected to be faster than the CPU


def most_chunks(n_tokens: int, n_used: int, n_slots: int, most_tokens: int) -> int:
    """The chunks that `chunks_of` makes at most, whatever the router chooses."""
    return -(-n_tokens // max(1, min(most_tokens, n_slots // n_used)))


def chunks_of(
    chosen: Sequence[Sequence[int]], n_slots: int, most_tokens: int
) -> list[tuple[int, int, list[int]]]:
    """(first token, end, experts in order) of each chunk.

    `chosen`: each token's experts. A chunk takes tokens as long as all their experts fit `n_slots`,
    up to `most_tokens`. Raises ValueError where one token's do not fit.
    """
    chunks: list[tuple[int, int, list[int]]] = []
    first, experts = 0, set[int]()
    for token, its in enumerate(chosen):
        together = experts.union(its)
        if len(together) > n_slots or token - first == most_tokens:
            chunks.append((first, token, sorted(experts)))
            first, together = token, set(its)
        if len(together) > n_slots:
            raise ValueError(
                f"one token uses {len(together)} experts, and there are {n_slots} slots"
            )
        experts = together
    if len(chosen):
        chunks.append((first, len(chosen), sorted(experts)))
    return chunks
