"""Measured costs as arrays and as text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.schedule.believed import believed, contradict
from offload.schedule.division import (
    HOST,
    MOST_ROWS,
    MOST_SLOWDOWN,
    MeasuredCosts,
    SideTimes,
    side_times,
    slowdown,
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
def test_arrays_never_fall(side: SideTimes) -> None:
    array = side.array()
    assert array[0] == 0
    assert (np.diff(array) >= 0).all()
    assert len(array) == max(side.by_rows_s) + 1


ROWS = (1, 2, 4, 8, 16)
steps = st.lists(st.integers(10, 1000), min_size=5, max_size=5)


def _clean(of_first: int, more: list[int]) -> dict[int, float]:
    """Times that rise by at most as much for each row as the first row takes."""
    rises = [of_first * n * step / 1000 for n, step in zip((0, 1, 2, 4, 8), more, strict=True)]
    return {n: 1e-6 * (of_first + sum(rises[: i + 1])) for i, n in enumerate(ROWS)}


@given(st.integers(1, 10**4), steps)
@example(1, [10, 10, 10, 10, 897])  # the last size alone costs as much for a row as the first
def test_arrays_pass_through_times_that_agree(of_first: int, more: list[int]) -> None:
    clean = _clean(of_first, more)
    array = SideTimes(clean).array()
    assert {n: array[n] for n in ROWS} == pytest.approx(clean)
    assert not contradict(clean)


@given(st.integers(1, 10**4), steps, st.sampled_from(ROWS), st.floats(1.0, 1e6))
def test_one_disturbed_time_spoils_no_other(
    of_first: int, more: list[int], disturbed: int, factor: float
) -> None:
    """Its own becomes that of a neighbour. The last time has no larger neighbour."""
    clean = _clean(of_first, more)
    array = SideTimes(clean | {disturbed: factor * clean[disturbed]}).array()
    for n in ROWS:
        is_last = n == disturbed == ROWS[-1]
        most_s = 8 * clean[n] if is_last else clean[min(2 * n, ROWS[-1])]
        assert clean[max(n // 2, 1)] * (1 - 1e-9) <= array[n] <= most_s * (1 + 1e-9)


def test_a_thread_that_was_interrupted_is_not_believed_and_is_timed_again() -> None:
    """Times of a first start on a busy machine, of which the third was interrupted."""
    spoilt = {1: 10e-6, 2: 25e-6, 4: 7319e-6, 8: 34e-6}
    assert believed(spoilt) == {1: 10e-6, 2: 25e-6, 4: 34e-6, 8: 34e-6}
    assert contradict(spoilt)
    assert believed({1: 10e-6, 2: 25e-6, 4: 7319e-6})[4] == pytest.approx(100e-6)
    twice = spoilt | {8: 7400e-6}
    assert believed(twice) == pytest.approx({1: 10e-6, 2: 25e-6, 4: 100e-6, 8: 400e-6})
    assert contradict(twice)
    assert believed({1: 10e-6, 2: 25e-6, 4: 0.0}) == {1: 10e-6, 2: 10e-6, 4: 10e-6}


@given(st.integers(1, 10**4), steps, st.sampled_from((4, 8)), st.floats(1.0, 1e6))
def test_two_disturbed_times_spoil_little(
    of_first: int, more: list[int], disturbed: int, factor: float
) -> None:
    """Two neighbours are too long, so the times do not fall."""
    clean = _clean(of_first, more)
    spoilt = clean | {n: factor * clean[n] for n in (disturbed, 2 * disturbed)}
    array = SideTimes(spoilt).array()
    for n in ROWS:
        assert array[n] <= 16 * max(1, n // disturbed) * clean[n] * (1 + 1e-9)


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


def test_a_huge_slowdown_is_cut_and_timed_again() -> None:
    """Only other programs slow a side down by so much while the other one works."""
    assert slowdown([1e-3, 1e-3], [1.5e-3, 1.5e-3]) == 1.5
    assert slowdown([1e-3, 1e-3], [0.5e-3, 0.5e-3]) == 1.0
    assert slowdown([1e-3, 1e-3], [0.224, 0.224]) == MOST_SLOWDOWN
    side = SideTimes({1: 1e-3}, 0.0)
    assert not MeasuredCosts(side, side, 1e-3, 1.5, 2.0).is_doubtful
    assert MeasuredCosts(side, side, 1e-3, 1.5, MOST_SLOWDOWN).is_doubtful
    assert MeasuredCosts(side, side, 1e-3, MOST_SLOWDOWN, 1.0).is_doubtful


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
