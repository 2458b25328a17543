"""Which measured figures mean something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.times.steadiness import (
    if_steady,
    is_steady,
    relative_range,
    speed_words,
    spread_words,
)


def test_a_range_is_relative_to_the_median() -> None:
    assert relative_range([2.0, 4.0, 3.0]) == pytest.approx(2 / 3)
    assert relative_range([5.0]) == relative_range([]) == 0.0


def test_a_figure_whose_parts_spread_by_as_much_as_it_is_left_out() -> None:
    assert if_steady(34.34, 0.6, 0.3) == 34.34
    assert if_steady(34.34, 0.6, 0.4) is None


def test_a_spread_above_the_figure_is_told_in_words() -> None:
    assert spread_words(0.12) == "by ±12%"
    assert spread_words(87.94) == "by more than their median"


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=9))
def test_a_speed_is_one_number_or_its_range(speeds: list[float]) -> None:
    words = speed_words(speeds, speeds[0], digits=3)
    if is_steady(relative_range(speeds)):
        assert words == f"{speeds[0]:.3f}"
    else:
        assert words == f"{min(speeds):.3f} to {max(speeds):.3f}"
