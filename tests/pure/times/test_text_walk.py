"""The walk through a text that measurements decode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from offload.measuring import TextWalk


class Context:
    """Sequence 0 of a target that decodes nothing, and the batches that it was given."""

    can_rewind = True
    goes_back_by_checkpoints = False

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx, self.n_tokens = n_ctx, 0
        self.batches: list[list[int]] = []

    def length(self, sequence: int) -> int:
        return self.n_tokens

    def rewind(self, sequence: int, length: int) -> None:
        self.n_tokens = length

    def extend(self, sequence: int, tokens: Sequence[int], n_logits: int | None) -> None:
        self.n_tokens += len(tokens)
        assert self.n_tokens <= self.n_ctx
        self.batches.append(list(tokens))


@pytest.mark.timeout(10)  # a walk that does not start the text again would not end
def test_a_walk_starts_the_text_again_after_its_end() -> None:
    context = Context(64)
    walk = TextWalk(cast(Any, context), 0, range(5), depth=0, span=32)
    walk.lead(3, 3)
    walk.lead(12, 1)
    assert context.batches == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, *range(5), *range(5), 0]]


def test_a_walk_stays_between_its_depth_and_its_span() -> None:
    context = Context(64)
    walk = TextWalk(cast(Any, context), 0, range(100), depth=10, span=8)
    lengths = []
    for _ in range(5):
        walk.time_s(3)
        lengths.append(context.n_tokens)
    assert lengths == [13, 16, 13, 16, 13]
    assert context.batches[:3] == [[*range(10)], [10, 11, 12], [13, 14, 15]]
