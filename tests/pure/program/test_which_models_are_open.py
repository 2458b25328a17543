"""Decides which models are opened and closed: rules, and properties of any course of events."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.router.decision import Phase, Standing, decide


def one(names: Sequence[str]) -> bool:
    return len(names) <= 1


def two(names: Sequence[str]) -> bool:
    return len(names) <= 2


def test_an_idle_model_is_closed_for_one_that_waits() -> None:
    models = [Standing("a", Phase.OPEN, used_s=5.0), Standing("b", asked_s=9.0)]
    found = decide(models, one, 10.0)
    assert (found.open, found.close, found.hold) == ((), ("a",), frozenset())
    closing = [Standing("a", Phase.CLOSING), Standing("b", asked_s=9.0)]
    assert decide(closing, one, 10.0).open == ()
    closed = [Standing("a"), Standing("b", asked_s=9.0)]
    assert decide(closed, one, 10.0).open == ("b",)


def test_a_busy_model_is_held_once_its_turn_is_over() -> None:
    busy = Standing("a", Phase.OPEN, is_busy=True, keeps_until_s=20.0)
    models = [busy, Standing("b", asked_s=9.0)]
    early = decide(models, one, 10.0)
    assert (early.close, early.hold, early.look_again_s) == ((), frozenset(), 20.0)
    late = decide(models, one, 20.0)
    assert (late.close, late.hold) == ((), frozenset({"a"}))


def test_the_least_recently_used_model_goes_first() -> None:
    models = [
        Standing("a", Phase.OPEN, used_s=3.0),
        Standing("b", Phase.OPEN, used_s=1.0),
        Standing("c", asked_s=9.0),
    ]
    assert decide(models, two, 10.0).close == ("b",)


def test_a_model_that_waits_longest_comes_first_and_others_wait_for_it() -> None:
    models = [
        Standing("a", Phase.OPEN, is_busy=True),
        Standing("b", asked_s=8.0),
        Standing("c", asked_s=9.0),
    ]
    fits_with_b_alone = {frozenset("ac"), frozenset("a"), frozenset("b"), frozenset("c")}
    found = decide(models, lambda names: frozenset(names) in fits_with_b_alone, 10.0)
    assert found.open == ()  # c would fit, but b has waited for longer
    assert found.hold == {"a"}


def test_a_model_that_nobody_uses_rests() -> None:
    models = [
        Standing("a", Phase.OPEN, used_s=1.0),
        Standing("b", Phase.OPEN, used_s=8.0),
        Standing("c", Phase.OPEN, used_s=0.0, is_busy=True),
    ]
    found = decide(models, lambda names: True, 10.0, idle_s=5.0)
    assert (found.rest, found.look_again_s) == (("a",), 13.0)
    assert decide(models, lambda names: True, 10.0).rest == ()


def test_a_model_alone_is_tried_even_if_nothing_fits() -> None:
    assert decide([Standing("a", asked_s=1.0)], lambda names: False, 2.0).open == ("a",)


TIMES = st.floats(0, 100)
STANDINGS = st.lists(
    st.builds(
        Standing,
        st.sampled_from("abcdef"),
        st.sampled_from(Phase),
        st.booleans(),
        TIMES,
        st.none() | TIMES,
        TIMES,
    ),
    unique_by=lambda model: model.name,
)


@given(STANDINGS, st.integers(1, 4), TIMES, st.none() | TIMES)
def test_never_too_many_are_open_and_none_with_requests_is_closed(
    models: list[Standing], most: int, now_s: float, idle_s: float | None
) -> None:
    found = decide(models, lambda names: len(names) <= most, now_s, idle_s)
    by_name = {model.name: model for model in models}
    up = [m for m in models if m.phase is not Phase.CLOSED]
    assert not found.open or len(up) + len(found.open) <= max(most, 1)
    for name in (*found.close, *found.rest):
        assert by_name[name].phase is Phase.OPEN
        assert not by_name[name].is_busy
    for name in found.hold:
        assert by_name[name].is_busy
        assert by_name[name].keeps_until_s <= now_s
    for name in found.open:
        assert by_name[name].phase is Phase.CLOSED
        assert by_name[name].asked_s is not None
    assert found.look_again_s is None or found.look_again_s > now_s
    waits = any(m.phase is Phase.CLOSED and m.asked_s is not None for m in models)
    if not waits:
        assert [*found.open, *found.close, *found.hold] == []


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5)), max_size=25),
    st.integers(1, 2),
)
def test_every_request_is_served_in_the_end(requests: list[tuple[str, int]], most: int) -> None:
    """Plays requests, each with a number of steps, against a server that opens in one step."""
    phases = dict.fromkeys("abc", Phase.CLOSED)
    keeps = dict.fromkeys("abc", 0.0)
    held: frozenset[str] = frozenset()
    waiting = [(name, steps, 0.0) for name, steps in requests]
    running: list[tuple[str, int]] = []
    for now in range(1000):
        now_s = float(now)
        for name in "abc":
            if phases[name] is Phase.OPENING:
                phases[name], keeps[name] = Phase.OPEN, now_s + 1
            elif phases[name] is Phase.CLOSING:
                phases[name] = Phase.CLOSED
        ready = [w for w in waiting if phases[w[0]] is Phase.OPEN and w[0] not in held]
        running += [(name, steps) for name, steps, _ in ready]
        waiting = [w for w in waiting if w not in ready]
        running = [(name, steps - 1) for name, steps in running if steps > 0]
        busy = {name for name, _ in running}
        standings = [
            Standing(
                name,
                phases[name],
                name in busy,
                0.0,
                None
                if phases[name] is Phase.OPEN
                else min((at for other, _, at in waiting if other == name), default=None),
                keeps[name],
            )
            for name in "abc"
        ]
        found = decide(standings, lambda names: len(names) <= most, now_s)
        held = found.hold
        for name in found.open:
            phases[name] = Phase.OPENING
        for name in found.close:
            phases[name] = Phase.CLOSING
        assert sum(phase is not Phase.CLOSED for phase in phases.values()) <= most
        if not waiting and not running:
            return
    raise AssertionError(f"still waiting: {waiting}")
