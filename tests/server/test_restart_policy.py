"""When a dead engine process is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.engine.health import RestartPolicy, describe_exit

POLICY = RestartPolicy(limit=4, first_delay_s=0.5, max_delay_s=3.0, healthy_after_s=60.0)


def test_delays_double_up_to_the_largest_and_then_it_gives_up() -> None:
    assert [POLICY.delay_s(n) for n in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, None]


def test_only_a_process_that_stayed_ready_long_enough_clears_the_count() -> None:
    assert POLICY.count(3, ready_for_s=None) == 4
    assert POLICY.count(3, ready_for_s=59.9) == 4
    assert POLICY.count(3, ready_for_s=60.0) == 1


@given(st.lists(st.one_of(st.none(), st.floats(0, 200)), max_size=40))
def test_it_gives_up_exactly_after_limit_plus_one_quick_deaths_in_a_row(
    lives: list[float | None],
) -> None:
    n = quick = 0
    for life in lives:
        n = POLICY.count(n, life)
        quick = 1 if life is not None and life >= 60 else quick + 1
        assert (POLICY.delay_s(n) is None) == (quick > 4)


def test_exits_are_described_by_code_or_signal_name() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-6) == "was killed by SIGABRT"
    assert describe_exit(-200) == "was killed by signal 200"
