"""Experts that are copied for later, as the link has time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.hybrid.promoting import n_promotions

seconds = st.floats(0.0, 10.0)


@given(seconds, seconds, st.integers(0, 100))
def test_as_many_as_fit_and_no_more(idle_s: float, copy_s: float, most: int) -> None:
    n = n_promotions(idle_s, copy_s, most)
    assert 0 <= n <= most
    assert n * copy_s <= idle_s * (1 + 1e-9)
    if n < most:
        assert (n + 1) * copy_s > idle_s * (1 - 1e-9), "one more would fit"


def test_a_busy_link_has_time_for_none_and_a_copy_that_takes_none_always_has() -> None:
    assert n_promotions(0.0, 0.001, 8) == 0
    assert n_promotions(0.0, 0.0, 8) == 8
    assert n_promotions(0.0025, 0.001, 8) == 2
    assert n_promotions(1.0, 0.001, 8) == 8
