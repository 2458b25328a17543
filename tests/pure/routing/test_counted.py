"""Counted hits form a curve from no hits to all hits, and newer counts weigh more."""

from __future__ import annotations

from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.routing.routing import LEAST_TOKENS, SHARES, CountedHits, HitCurve, counted_hits

DAY, LATER = date(2026, 3, 1), date(2026, 4, 1)
RATES = st.lists(st.floats(0, 1), min_size=len(SHARES), max_size=len(SHARES)).map(tuple)


def counted(rates: tuple[float, ...], n_tokens: float = 1000.0, day: date = DAY) -> CountedHits:
    return CountedHits(64, 4, {3: rates, 4: rates}, n_tokens, day)


@given(RATES, st.floats(0, 1), st.floats(0, 1))
def test_a_curve_rises_from_none_to_all(rates: tuple[float, ...], a: float, b: float) -> None:
    curve = counted(rates).curve
    assert 0.0 <= curve.at(min(a, b)) <= curve.at(max(a, b)) + 1e-12 <= 1.0 + 1e-9
    assert (curve.at(0.0), curve.at(1.0), curve.at(2.0)) == (0.0, 1.0, 1.0)


def test_it_goes_through_its_points() -> None:
    curve = HitCurve(((0.25, 0.5), (0.5, 0.8)), 100, DAY)
    assert [curve.at(share) for share in (0.125, 0.25, 0.375, 0.5, 0.75)] == pytest.approx(
        [0.25, 0.5, 0.65, 0.8, 0.9]
    )
    assert curve.source == "counted on 2026-03-01 over 100 tokens"


@given(RATES, RATES, st.floats(64, 5000), st.floats(64, 1024))
def test_a_merge_lies_between_both_and_has_the_newer_day(
    old: tuple[float, ...], new: tuple[float, ...], before: float, since: float
) -> None:
    merged = counted(old, before).merged(counted(new, since, LATER))
    assert merged.counted_on == LATER
    assert since < merged.n_tokens <= before + since
    for mixed, one, other in zip(merged.layers[3], old, new, strict=True):
        assert min(one, other) - 1e-9 <= mixed <= max(one, other) + 1e-9


def test_layers_of_other_plans_are_kept() -> None:
    rates = (0.5,) * len(SHARES)
    old = CountedHits(64, 4, {1: rates, 2: rates}, 100.0, DAY)
    new = CountedHits(64, 4, {2: (1.0,) * len(SHARES), 7: rates}, 100.0, LATER)
    merged = old.merged(new)
    assert sorted(merged.layers) == [1, 2, 7]
    assert merged.layers[1] == rates
    assert 0.5 < merged.layers[2][0] < 1.0


def test_too_little_and_unlike_layers_are_not_counted() -> None:
    ids = np.zeros((LEAST_TOKENS, 2), np.int16)
    assert counted_hits({}, 8, DAY) is None
    assert counted_hits({0: ids[1:]}, 8, DAY) is None
    assert counted_hits({0: ids, 1: ids[:, :1]}, 8, DAY) is None
    found = counted_hits({0: ids + np.array([0, 1], np.int16), 5: ids + [2, 3]}, 8, DAY)
    assert found is not None
    assert (sorted(found.layers), found.n_used, found.n_tokens) == ([0, 5], 2, LEAST_TOKENS)
    assert found.curve.at(0.25) == pytest.approx(1.0)
