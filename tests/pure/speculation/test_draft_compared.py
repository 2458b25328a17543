"""How good a draft is: agreement, divergence and overlap, by position, and what they predict."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.costs.draft_quality import (
    LEAST_Q,
    TextCompared,
    block_lengths,
    block_lengths_of,
    by_position,
    compared,
    positions_of,
    sampled_tokens_per_round,
)
from specdec.costs.profile import CostProfile


def logits(*rows: list[float]) -> np.ndarray:  # type: ignore[type-arg]
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows)).astype(np.float32)


def a_text(agrees: list[bool], overlap: float = 0.5) -> TextCompared:
    n = len(agrees)
    return TextCompared(np.array(agrees), np.arange(n) / 10, np.full(n, overlap))


def test_agreement_divergence_and_overlap_of_known_distributions() -> None:
    found = compared(
        logits([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.1, 0.8, 0.1]),
        logits([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]),
    )
    assert found.agrees.tolist() == [True, False, False]
    last = np.log(1 / 6) / 10 + 0.8 * np.log(8 / 3)
    assert found.kl == pytest.approx([0, 0.3 * np.log(2.5), last], abs=1e-6)
    assert found.overlap == pytest.approx([1.0, 0.7, 0.5], abs=1e-6)


def test_a_token_that_the_draft_cannot_draft_leaves_the_divergence_finite() -> None:
    for draft in (logits([1.0, 0.0]), np.zeros((1, 1), np.float32)):
        found = compared(logits([0.5, 0.5]), draft)
        assert found.overlap == pytest.approx([0.5])
        assert found.kl == pytest.approx([0.5 * np.log(0.5) + 0.5 * np.log(0.5 / LEAST_Q)])


def test_positions_count_the_drafts_whose_earlier_tokens_were_right() -> None:
    # Drafts of 3 tokens begin at tokens 0, 3 and 4. The text ends before another one does.
    text = a_text([True, True, False, False, True, False, False])
    first, second, third = by_position([text], 3)
    assert (first.n_tokens, first.agreement) == (3, pytest.approx(2 / 3))
    assert (second.n_tokens, second.agreement) == (2, 0.5)
    assert (third.n_tokens, third.agreement, third.kl) == (1, 0.0, 0.2)
    assert by_position([a_text([False])], 2)[1].agreement is None


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=40), min_size=1, max_size=4))
def test_acceptance_by_position_gives_the_tokens_of_a_round(texts: list[list[bool]]) -> None:
    found = [a_text(text) for text in texts]
    positions = by_position(found, 4)
    n_right = sum((at.agreement or 0) * at.n_tokens for at in positions)
    (*_, longest) = block_lengths(found, CostProfile((1.0,) * 8), 4)
    assert longest.tokens_per_round == pytest.approx(1 + n_right / positions[0].n_tokens)


def test_lengths_are_priced_by_the_batch_and_the_draft_step() -> None:
    text = a_text([True, True, False] * 20)
    none, one, two, three = block_lengths([text], CostProfile((1.0, 1.1, 1.2, 1.3), 0.1), 8)
    assert (none.tokens_per_round, none.gain) == (1.0, 1.0)
    assert one.tokens_per_round == pytest.approx(1.5)
    assert two.tokens_per_round == three.tokens_per_round == 3.0
    assert two.gain == pytest.approx(3 / 1.4)
    assert three.gain < two.gain
    positions = by_position([a_text([True] * 60, overlap=0.5)], 8)
    assert sampled_tokens_per_round(positions, 2) == pytest.approx(1.75)


def test_accepted_tokens_take_the_place_of_agreement() -> None:
    """Of three drafts, one was right wholly, one in its first two tokens, and one in none."""
    first, second, third, fourth = positions_of([4, 2, 0], 4)
    assert (first.n_tokens, first.agreement) == (3, pytest.approx(2 / 3))
    assert (second.n_tokens, second.agreement) == (2, 1.0)
    assert (third.n_tokens, third.agreement) == (2, 0.5)
    assert (fourth.n_tokens, fourth.agreement) == (1, 1.0)
    assert {at.kl for at in (first, second)} == {at.overlap for at in (third, fourth)} == {None}
    assert positions_of([], 2)[1].agreement is None
    costs = CostProfile((1.0, 1.1, 1.2, 1.3, 1.4), 0.1)
    lengths = block_lengths_of([4, 2, 0], costs)
    assert [length.n_drafted for length in lengths] == [0, 1, 2, 3, 4], "as T(n) allows"
    assert [length.tokens_per_round for length in lengths] == pytest.approx(
        [1, 1 + 2 / 3, 1 + 4 / 3, 1 + 5 / 3, 3]
    )
    assert lengths[0].gain == 1.0
    assert lengths[2].gain == pytest.approx((1 + 4 / 3) / (1.2 + 2 * 0.1))


@given(st.lists(st.integers(0, 8), min_size=1, max_size=30))
def test_tokens_per_round_are_the_products_of_the_acceptance(accepted: list[int]) -> None:
    costs = CostProfile(tuple(1.0 for _ in range(16)))
    total, product = 1.0, 1.0
    for at, length in zip(
        positions_of(accepted), block_lengths_of(accepted, costs)[1:], strict=True
    ):
        product *= at.agreement or 0.0
        total += product
        assert length.tokens_per_round == pytest.approx(total)
