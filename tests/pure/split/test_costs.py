"""Measured costs as arrays and as text."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.split.costs import (
    MOST_ROWS,
    MeasuredCosts,
    SideTimes,
    from_json,
    side_times,
    slowdown,
    to_json,
)
from offload.split.division import HOST, split_pairs

seconds = st.integers(1, 10**6).map(lambda n: n * 1e-6)
sides = st.builds(
    SideTimes, st.dictionaries(st.integers(1, MOST_ROWS), seconds, min_size=1, max_size=8), seconds
)
slowdowns = st.floats(1.0, 8.0)
kinds = st.sampled_from([(1.0,), (2 / 3, 1 / 3), (0.3, 0.3, 0.4)])
measured = st.builds(MeasuredCosts, sides, sides, seconds, slowdowns, slowdowns, kinds)


@given(st.integers(1, 500), st.dictionaries(st.integers(1, 64), st.integers(1, 90), min_size=1))
def test_lines_through_what_was_measured_give_back_what_they_were_made_of(
    fixed_us: int, each_us: dict[int, int]
) -> None:
    points = {
        rows: [(n, (fixed_us + n * each) * 1e-6) for n in (2, 4, 8)]
        for rows, each in each_us.items()
    }
    found = side_times(points)
    assert found.fixed_s == pytest.approx(fixed_us * 1e-6, rel=1e-6)
    assert found.by_rows_s == pytest.approx({r: each * 1e-6 for r, each in each_us.items()})


def test_what_is_paid_once_is_of_rows_that_were_measured_at_several_numbers_of_experts() -> None:
    found = side_times({1: [(8, 12e-6), (64, 68e-6)], 2: [(32, 68e-6)], 4: [(16, 68e-6)]})
    assert found.fixed_s == pytest.approx(4e-6)
    assert found.by_rows_s == pytest.approx({1: 1e-6, 2: 2e-6, 4: 4e-6})


def test_noise_that_would_make_a_cost_negative_makes_it_nothing() -> None:
    found = side_times({1: [(1, 5e-6), (8, 4e-6)]})
    assert found.fixed_s >= 0
    assert found.by_rows_s[1] >= 0
    with pytest.raises(ValueError, match="need a measurement"):
        side_times({})


@given(sides)
def test_arrays_pass_through_the_measured_rows_and_never_fall(side: SideTimes) -> None:
    array = side.array()
    assert array[0] == 0
    assert (np.diff(array) >= 0).all()
    assert len(array) == max(side.by_rows_s) + 1
    so_far = 0.0
    for rows in sorted(side.by_rows_s):
        so_far = max(so_far, side.by_rows_s[rows])
        assert array[rows] == pytest.approx(so_far)


@given(measured)
def test_costs_go_to_text_and_back(costs: MeasuredCosts) -> None:
    again = from_json(json.loads(json.dumps(to_json(costs))))
    assert again == costs
    arrays = again.costs()
    assert (arrays.host_slowdown, arrays.link_slowdown) == (
        costs.host_slowdown,
        costs.link_slowdown,
    )
    assert arrays.kinds == costs.kinds
    split = split_pairs(np.array([[0, 1]], np.int32), np.array([True, False]), arrays)
    assert split.kind[1] <= HOST


@pytest.mark.parametrize(
    "damage",
    [
        {"copy_s": -1.0},
        {"copy_s": float("nan")},
        {"host": {"by_rows_s": {}, "fixed_s": 0.0}},
        {"host": {"by_rows_s": {"0": 1.0}, "fixed_s": 0.0}},
        {"host": {"by_rows_s": {"100000000": 1.0}, "fixed_s": 0.0}},
        {"device": {"by_rows_s": {"1": "fast"}, "fixed_s": 0.0}},
        {"device": {}},
        {"host_slowdown": 0.9},
        {"link_slowdown": float("inf")},
        {"link_slowdown": "none"},
        {"kinds": []},
        {"kinds": 3},
        {"kinds": [0.5, 0.4]},
        {"kinds": [1.5, -0.5]},
        {"kinds": [float("nan")]},
        {"kinds": [0.1] * 10},
    ],
    ids=str,
)
def test_text_that_is_no_measurement_is_refused(damage: dict[str, object]) -> None:
    whole = to_json(MeasuredCosts(SideTimes({1: 1.0}), SideTimes({1: 1.0}), 1.0))
    with pytest.raises((ValueError, KeyError, TypeError)):
        from_json(json.loads(json.dumps(whole | damage)))


def test_the_slowdown_is_a_quotient_of_medians_and_never_a_gain() -> None:
    assert slowdown([1.0, 1.1, 9.0], [2.2, 2.2, 2.2]) == pytest.approx(2.0)
    assert slowdown([1.0], [0.5]) == 1.0
