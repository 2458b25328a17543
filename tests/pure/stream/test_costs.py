"""Measured costs as arrays and as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.division import (
    HOST,
    MOST_ROWS,
    MeasuredCosts,
    SideTimes,
    side_times,
    split_pairs,
)

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
def test_a_split_goes_by_the_measured_costs(costs: MeasuredCosts) -> None:
    arrays = costs.costs()
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
        {"host_slowdown": 0.9},
        {"link_slowdown": float("inf")},
        {"kinds": ()},
        {"kinds": (0.5, 0.4)},
        {"kinds": (1.5, -0.5)},
        {"kinds": (float("nan"),)},
    ],
    ids=str,
)
def test_numbers_that_are_no_measurement_are_refused(damage: dict[str, Any]) -> None:
    costs = MeasuredCosts(SideTimes({1: 1.0}), SideTimes({1: 1.0}), 1.0)
    with pytest.raises(ValueError, match="must be|must sum"):
        replace(costs, **damage)
    for by_rows_s, fixed_s in (({}, 0.0), ({0: 1.0}, 0.0), ({65: 1.0}, 0.0), ({1: 1.0}, -1.0)):
        with pytest.raises(ValueError, match="there must be times|times must be"):
            SideTimes(by_rows_s, fixed_s)


@pytest.mark.parametrize(
    ("slowdowns", "words"),
    [
        ((1.0, 1.0), "the CPU is as fast as alone and the link is as fast as alone"),
        ((1.0, 3.9), "the CPU is as fast as alone and the link takes 3.90 times as long"),
        ((1.25, 1.004), "the CPU takes 1.25 times as long and the link is as fast as alone"),
        ((1.005, 1.006), "the CPU is as fast as alone and the link takes 1.01 times as long"),
    ],
)
def test_a_side_that_is_not_slowed_down_is_as_fast_as_alone(
    slowdowns: tuple[float, float], words: str
) -> None:
    one_row = SideTimes({1: 250e-6}), SideTimes({1: 25e-6})
    said = MeasuredCosts(*one_row, 2e-3 * slowdowns[1], *slowdowns).words
    times, _, slowed = said.partition("; while both work, ")
    assert times == "an expert takes the CPU 250 us, the device 25 us and the link 2000 us"
    assert slowed == words
    assert "1.00 times" not in said
