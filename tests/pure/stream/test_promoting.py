"""Promoted experts are copied in the link's idle time, plus at most a share of the step time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.stream.split_path import PromotionBudget

seconds = st.floats(0.0, 10.0)
shares = st.floats(0.0, 0.2)
# Steps: seconds, the share of them in which the link is idle, and the number of useful copies.
steps = st.lists(st.tuples(seconds, st.floats(0.0, 1.0), st.integers(0, 4)), max_size=60)


@given(steps, st.floats(0.001, 10.0), shares)
def test_the_waits_of_any_steps_in_a_row_are_within_the_share_and_one_copy(
    of_steps: list[tuple[float, float, int]], copy_s: float, share: float
) -> None:
    budget = PromotionBudget(share)
    waits_s = []
    for step_s, idle, worth in of_steps:
        n = min(worth, budget.most(step_s, idle * step_s, copy_s))
        budget.spend(n)
        waits_s.append(max(0.0, n * copy_s - idle * step_s))
    for first in range(len(of_steps)):
        most_s = copy_s if first else 0.0  # the budget has no savings at the start
        for (step_s, _, _), wait_s in zip(of_steps[first:], waits_s[first:], strict=True):
            most_s += share * step_s - wait_s
            assert most_s >= -1e-9 * copy_s


@given(st.floats(0.01, 1.0), st.floats(0.0, 0.99), st.floats(0.01, 0.2))
def test_a_copy_longer_than_a_steps_idle_time_comes_as_often_as_the_share_pays(
    step_s: float, idle: float, share: float
) -> None:
    """A copy takes twice as long as a step."""
    copy_s, budget, n = 2 * step_s, PromotionBudget(share), 0
    n_steps = 400
    for _ in range(n_steps):
        most = budget.most(step_s, idle * step_s, copy_s)
        budget.spend(most)
        n += most
    price_s = copy_s - idle * step_s
    per_step = min(1.0, share * step_s / price_s)
    assert n >= int(n_steps * per_step) * 0.5
    assert n * price_s <= n_steps * share * step_s * (1 + 1e-9)
