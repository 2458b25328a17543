"""Choices by scores of which those of missing experts are lowered, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offload.schedule.cached_choice import (
    ChoiceCounts,
    MeanRange,
    RouteOptions,
    Scores,
    best,
    choose,
    penalties,
)

N_EXPERTS = 12
seeds = st.integers(0, 1 << 32)


def scores_of(seed: int, n_tokens: int = 3) -> Scores:
    return np.random.default_rng(seed).normal(size=(n_tokens, N_EXPERTS)).astype(np.float32)


def cached_of(seed: int, n: int) -> NDArray[np.bool_]:
    found = np.zeros(N_EXPERTS, np.bool_)
    found[np.random.default_rng(seed).permutation(N_EXPERTS)[:n]] = True
    return found


@given(seeds, st.integers(0, N_EXPERTS), st.floats(0, 1), st.integers(0, 5))
def test_choices_are_those_of_a_loop(seed: int, n_cached: int, strength: float, kept: int) -> None:
    scores, cached = scores_of(seed), cached_of(seed, n_cached)
    penalty = penalties(cached, 3.0, strength)
    found = choose(scores, penalty, kept, 4)
    for token, row in enumerate(scores):
        order = sorted(range(N_EXPERTS), key=lambda e: -row[e])
        own = order[: min(kept, 4)]
        lowered = {e: row[e] if e in own else np.float32(row[e] + penalty[e]) for e in order}
        wanted = sorted(range(N_EXPERTS), key=lambda e: -lowered[e])[:4]
        assert found[token].tolist() == wanted
        assert set(own) <= set(wanted)


@given(seeds, st.floats(0, 1))
def test_no_choice_and_no_order_changes_if_all_are_in_slots(seed: int, strength: float) -> None:
    scores = scores_of(seed)
    whole = penalties(np.ones(N_EXPERTS, np.bool_), 5.0, strength)
    assert not whole.any(), "scores keep all their bits"
    assert np.array_equal(choose(scores, whole, 0, 4), best(scores, 4))


def test_masked_experts_stay_masked_and_are_no_part_of_the_range() -> None:
    scores = np.array([[1.0, -np.inf, 0.5, 0.0], [-np.inf] * 4], np.float32)
    cached = np.array([False, True, True, False])
    assert choose(scores[:1], penalties(cached, 2.0, 1.0), 0, 3).tolist() == [[2, 0, 3]]
    ranges = MeanRange()
    assert ranges.mean == 0.0
    ranges.see(scores)
    assert (ranges.n_tokens, ranges.mean) == (1, 1.0)
    ranges.see(np.array([[0.0, 3.0, 1.0, 1.0]], np.float32))
    assert ranges.mean == pytest.approx(2.0)


def test_a_preference_without_effect_has_a_reason() -> None:
    """Which is right: such a preference changes no choice."""
    assert RouteOptions(1.0, 2).no_effect_reason(0) == "", "a model without experts"
    for n_kept, n_used in ((2, 1), (2, 2), (9, 8)):
        why = RouteOptions(1.0, n_kept).no_effect_reason(n_used)
        assert why.startswith(f"--route-keep {n_kept} leaves ")
        scores, cached = scores_of(n_kept), cached_of(n_kept, 5)
        lowered = choose(scores, penalties(cached, 9.0, 1.0), n_kept, n_used)
        assert np.array_equal(lowered, best(scores, n_used))
    assert RouteOptions(1.0, 1).no_effect_reason(2) == ""
    assert "the one expert" in RouteOptions(1.0, 2).no_effect_reason(1)


def test_counts_compare_with_the_routers_own_choices() -> None:
    counts = ChoiceCounts()
    scores = np.array([[4.0, 3.0, 2.0, 1.0]], np.float32)
    cached = np.array([False, False, True, True])
    counts.see(0, scores, penalties(cached, 3.0, 1.0), cached, 1, 2)  # 4, 0, 2, 1 after the penalty
    assert (counts.n_choices, counts.n_kept) == (2, 1)
    assert (counts.n_cached, counts.n_own_cached) == (1, 0)
    assert counts.ranges[0].mean == 3.0
