"""An idle conversation leaves the cells in time: never more than twice the best in hindsight."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.slots.idle_rents import IdleRents, MoveCosts

SECONDS = st.floats(0.0, 10.0)
# One stay in the cells: what each decode of others is charged for it, until it is used again.
STAYS = st.lists(st.lists(SECONDS, max_size=30), min_size=1, max_size=8)


def spent_s(stays: list[list[float]], cost_s: float) -> list[float]:
    """Return the seconds of each stay under the rule: its rents, and the move out and back."""
    rents, found = IdleRents(), []
    for stay in stays:
        paid_s = 0.0
        for rent_s in stay:
            if rents.leaving({0: rent_s}, lambda _: cost_s):
                paid_s += cost_s
                break
            paid_s += rent_s
        rents.close(0)
        found.append(paid_s)
    return found


@given(STAYS, st.floats(0.001, 20.0))
def test_no_stay_costs_more_than_twice_the_best_choice(
    stays: list[list[float]], cost_s: float
) -> None:
    for stay, found_s in zip(stays, spent_s(stays, cost_s), strict=True):
        assert found_s <= 2.0 * min(sum(stay), cost_s) + 1e-9


@given(st.dictionaries(st.integers(0, 5), st.lists(SECONDS, min_size=10, max_size=10), min_size=2))
def test_accounts_do_not_depend_on_each_other(rents_s: dict[int, list[float]]) -> None:
    together, found = IdleRents(), []
    for step in range(10):
        each = {who: rents_s[who][step] for who in rents_s}
        found.append(set(together.leaving(each, lambda who: 3.0 + who)))
    for who, of_step in rents_s.items():
        alone = IdleRents()
        left = [bool(alone.leaving({who: s}, lambda who: 3.0 + who)) for s in of_step]
        assert left == [who in leaving for leaving in found]


def test_one_that_cannot_leave_is_asked_again_after_the_same_rent() -> None:
    rents = IdleRents()
    left = [bool(rents.leaving({0: 1.0}, lambda _: 3.5)) for _ in range(12)]
    assert left == [False, False, False, True] * 3


def test_nothing_leaves_that_costs_nothing() -> None:
    rents = IdleRents()
    assert not any(rents.leaving({0: 0.0}, lambda _: 0.0) for _ in range(5))


def test_costs_of_moves_are_estimated_and_then_measured() -> None:
    costs = MoveCosts(1e9)
    assert costs.seconds(10**9) == 2.0
    costs.took(10**9, 4.0, is_out=True)
    assert costs.seconds(10**9) == pytest.approx(5.0)
    costs.took(10**8, 0.2, is_out=False)
    assert costs.seconds(10**9) == pytest.approx(6.0)
    costs.took(10**9, 2.0, is_out=True)
    assert costs.seconds(10**9) == pytest.approx(5.0)
    costs.took(0, 1.0, is_out=True)
    assert costs.seconds(10**9) == pytest.approx(5.0)


@given(
    st.floats(0.01, 1.0), st.integers(1, 200), st.floats(0.0, 1.0), st.floats(0.5, 40.0),
    st.floats(0.0, 1.0),
)  # fmt: skip
def test_a_copy_during_several_decodes_costs_no_more_than_twice_the_best_choice(
    step_s: float, n_steps: int, share: float, cost_s: float, out_share: float
) -> None:
    """Each step of the copy takes as long as a decode, and the idle conversation pays for it."""
    rent_s, out_s = share * step_s, out_share * cost_s
    rents, spent_s, copied_s, leaves = IdleRents(), 0.0, 0.0, False
    lead_s = out_s * rent_s / step_s
    for _ in range(n_steps):
        if leaves and copied_s < out_s:
            copied_s = min(out_s, copied_s + step_s)
            spent_s += rent_s
            continue
        if leaves:
            break
        leaves = bool(rents.leaving({0: rent_s}, lambda _: cost_s, lambda _, __: lead_s))
        if not leaves:
            spent_s += rent_s
    is_out = leaves and copied_s >= out_s
    spent_s += cost_s if is_out else copied_s
    best_s = min(n_steps * rent_s, cost_s)
    assert spent_s <= 2.0 * best_s + 2.0 * step_s + 1e-9
