"""One disturbed measurement among several changes nothing that is decided by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from offload.times.repeated import MOST_FROM_STARTS, RepeatedRate, RepeatedTime, RepeatedValue

KINDS = pytest.mark.parametrize("kind", [RepeatedTime, RepeatedRate])
VALUE = st.floats(1e-6, 1e12)
FACTOR = st.floats(1e-4, 1e4)


def of(kind: type[RepeatedValue], *values: float) -> RepeatedValue:
    repeated = kind()
    for value in values:
        repeated = repeated.with_value(value)
    return repeated


@KINDS
@given(st.lists(VALUE, min_size=2, max_size=7), VALUE, FACTOR, st.data())
def test_one_disturbed_value_moves_the_value_within_the_range_of_the_others(
    kind: type[RepeatedValue], others: list[float], own: float, factor: float, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(others)))
    own = min(max(own, min(others)), max(others))  # what a quiet machine gives
    for value in (own, own * factor):
        values = [*others[:at], value, *others[at:]]
        assert min(others) <= of(kind, *values).value <= max(others)


@KINDS
@given(VALUE, FACTOR, st.integers(3, MOST_FROM_STARTS), st.data())
def test_one_disturbed_value_among_equal_ones_changes_nothing(
    kind: type[RepeatedValue], value: float, factor: float, n: int, data: st.DataObject
) -> None:
    values = [value] * n
    values[data.draw(st.integers(0, n - 1))] *= factor
    assert of(kind, *values).value == value


@given(VALUE, VALUE)
def test_of_two_values_the_faster_one_counts(a: float, b: float) -> None:
    assert of(RepeatedTime, a, b).value == min(a, b)
    assert of(RepeatedRate, a, b).value == max(a, b)


@KINDS
def test_values_settle_when_three_agree(kind: type[RepeatedValue]) -> None:
    settled = [of(kind, *[1.0] * n).is_settled() for n in range(1, 5)]
    assert settled == [False, False, True, True]
    assert [of(kind, *[1.0, 20.0] * n).is_settled() for n in (1, 2, 3)] == [False, False, True]
    assert of(kind, 1.0, 20.0, 1.0).is_settled(most=3)
    assert not kind().is_settled()


@KINDS
def test_the_newest_values_are_kept(kind: type[RepeatedValue]) -> None:
    assert of(kind, *range(1, 20)).values == tuple(range(12, 20))


@KINDS
def test_a_doubted_value_counts_until_there_is_another(kind: type[RepeatedValue]) -> None:
    doubted = kind().with_value(9.0, is_doubted=True).with_value(8.0, is_doubted=True)
    assert doubted.values == (9.0, 8.0)
    assert not doubted.with_value(8.0, is_doubted=True).is_settled()
    clean = doubted.with_value(1.0)
    assert (clean.values, clean.is_doubted) == ((1.0,), False)
    assert clean.with_value(9.0, is_doubted=True).values == (1.0,)


def n_starts(repeated: RepeatedValue, day: str, *, is_doubted: bool) -> tuple[int, RepeatedValue]:
    """How many of 100 starts of a day measure, and the values after them."""
    n = 0
    for _ in range(100):
        if repeated.is_due(day):
            repeated = repeated.with_value(9.0, is_doubted=is_doubted, day=day)
            n += 1
    return n, repeated


@KINDS
@pytest.mark.parametrize("n_clean", [0, 1])
def test_a_busy_machine_measures_five_times_and_then_once_a_day(
    n_clean: int, kind: type[RepeatedValue]
) -> None:
    n, busy = n_starts(of(kind, *[1.0] * n_clean), "2026-01-01", is_doubted=True)
    assert (n, busy.value) == (MOST_FROM_STARTS - n_clean, 1.0 if n_clean else 9.0)
    assert busy.is_settled()
    n, busy = n_starts(busy, "2026-01-02", is_doubted=True)
    assert n == 1
    clean = busy.with_value(1.0, day="2026-01-03")
    assert (clean.values, clean.is_doubted) == ((1.0,) * (1 + n_clean), False)


@KINDS
def test_a_quiet_day_after_busy_ones_settles(kind: type[RepeatedValue]) -> None:
    _, busy = n_starts(kind(), "2026-01-01", is_doubted=True)
    n, quiet = n_starts(busy, "2026-01-02", is_doubted=False)
    assert (n, quiet.values) == (3, (9.0,) * 3)
    assert not quiet.is_due("2026-01-03")


def after_sessions(repeated: RepeatedValue, *seen: float) -> RepeatedValue:
    for value in seen:
        repeated = repeated.with_seen(value)
    return repeated


@KINDS
@given(VALUE, st.lists(VALUE, max_size=20))
def test_sessions_never_outvote_starts(
    kind: type[RepeatedValue], value: float, seen: list[float]
) -> None:
    after = after_sessions(of(kind, *[value] * 3), *seen)
    assert (after.value, after.n) == (value, 3)


@KINDS
def test_contradicting_sessions_make_one_start_measure(kind: type[RepeatedValue]) -> None:
    three = of(kind, *[10.0] * 3)
    assert after_sessions(three, 5.0, 10.0, 10.5).is_settled(), "one of three is disturbed"
    assert after_sessions(three, 10.5, 10.5, 10.5).is_settled(), "they agree"
    contradicted = after_sessions(three, 5.0, 5.0, 5.0)
    assert not contradicted.is_settled()
    assert contradicted.is_due("2026-01-01")
    refuted = contradicted.with_value(9.9, day="2026-01-01")
    assert (refuted.n, refuted.seen, refuted.is_settled()) == (4, (), True)
    confirmed = contradicted.with_value(5.5, day="2026-01-01")
    assert (confirmed.values, confirmed.is_settled()) == ((5.5,), False)


@KINDS
def test_a_busy_machine_that_sessions_contradict_measures_once_a_day(
    kind: type[RepeatedValue],
) -> None:
    contradicted = after_sessions(of(kind, *[10.0] * 5), 5.0, 5.0, 5.0)
    n, after = n_starts(contradicted, "2026-01-01", is_doubted=True)
    assert (n, after.value) == (1, 10.0)
    assert after.is_due("2026-01-02")


@KINDS
def test_values_of_an_earlier_version_count_as_starts(kind: type[RepeatedValue]) -> None:
    form = TypeAdapter[RepeatedValue](kind)
    earlier = form.validate_json('{"values": [1.0, 1.0, 7.0, 9.0, 20.0], "is_doubted": false}')
    assert earlier == kind((1.0, 1.0, 7.0, 9.0, 20.0))
    assert earlier.is_settled()


def test_the_spread_is_half_the_interquartile_range_over_the_median() -> None:
    assert of(RepeatedTime, 1.0).spread is None
    assert of(RepeatedTime).spread is None
    assert of(RepeatedTime, 1.0, 2.0, 3.0, 4.0, 5.0).spread == pytest.approx(1 / 3)
    assert of(RepeatedTime).value == 0.0


@KINDS
@given(st.lists(VALUE, max_size=8), st.booleans())
def test_values_survive_a_file(
    kind: type[RepeatedValue], values: list[float], doubted: bool
) -> None:
    form = TypeAdapter[RepeatedValue](kind)
    repeated = kind(tuple(values), doubted, len(values), "2026-01-02", tuple(values[:3]))
    assert form.validate_json(form.dump_json(repeated)) == repeated


@KINDS
def test_a_rate_that_changes_all_the_time_is_not_measured_by_each_start(
    kind: type[RepeatedValue],
) -> None:
    """A disk in a cloud, for example. Afterwards one start a day measures."""
    repeated, n_measured = kind(), 0
    for start in range(100):
        now, later = (10.0, 5.5) if start % 2 else (5.5, 10.0)
        if repeated.is_due("2026-11-30"):
            repeated = repeated.with_value(now, day="2026-11-30")
            n_measured += 1
        repeated = repeated.with_seen(later)
    assert n_measured <= MOST_FROM_STARTS
    assert repeated.is_due("2026-12-01")
