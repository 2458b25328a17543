"""Each place of a drafted block has its own scores, which follow the candidate before it."""

from __future__ import annotations

import numpy as np
import pytest

from offload.decode import Rows
from offload.plan.block_draft import BlockShape
from offload.sequences.block_draft import DraftedBlock

N_VOCAB, N_TOKENS, K = 20, 3, 2
NOTHING = np.zeros((0, 0), np.float32)


def shape(n_candidates: int = 0, *, has_confidence: bool = False) -> BlockShape:
    return BlockShape("dflash", N_TOKENS, 1, 0, False, n_candidates, has_confidence)


def lattice() -> DraftedBlock:
    """Two candidates for each place: tokens 4 and 7, then 5 and 9, then 1 and 3."""
    rows = [[4, 7, 1, 2, 1, 2], [5, 9, 10, 11, 20, 21], [1, 3, 30, 31, 40, 41]]
    scores = np.array(rows, np.float32)
    return DraftedBlock(shape(K), N_TOKENS, N_VOCAB, NOTHING, scores)


def scored(row: Rows) -> dict[int, float]:
    return {int(token): float(row[token]) for token in np.flatnonzero(np.isfinite(row))}


@pytest.mark.parametrize(
    ("index", "before", "found"),
    [
        (0, None, {4: 1, 7: 2}),
        (1, 4, {5: 10, 9: 11}),
        (1, 7, {5: 20, 9: 21}),
        (1, 6, {5: 10, 9: 11}),  # no candidate
        (2, 5, {1: 30, 3: 31}),
        (2, 9, {1: 40, 3: 41}),
    ],
)
def test_a_lattices_scores_are_those_after_the_candidate_before(
    index: int, before: int | None, found: dict[int, float]
) -> None:
    row, confidence = lattice().place(index, before)
    assert row.shape == (N_VOCAB,)
    assert scored(row) == found
    assert confidence is None


def test_each_place_has_its_own_logits_and_confidence() -> None:
    logits = np.arange(N_TOKENS * N_VOCAB, dtype=np.float32).reshape(N_TOKENS, N_VOCAB)
    scores = np.array([[0.9], [0.5], [0.25]], np.float32)
    for has_confidence in (True, False):
        block = DraftedBlock(
            shape(has_confidence=has_confidence), N_TOKENS, N_VOCAB, logits, scores
        )
        for index in range(N_TOKENS):
            row, confidence = block.place(index, None)
            assert np.array_equal(row, logits[index])
            assert confidence == (float(scores[index, 0]) if has_confidence else None)
