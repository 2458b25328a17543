"""Where streaming begins to pay, decided from measurements."""

from __future__ import annotations

from offload.plan.min_batch import NEVER, BothSides, choose


def sides(*rows: tuple[int, float, float]) -> list[BothSides]:
    return [BothSides(*row) for row in rows]


def test_the_threshold_is_where_streaming_pays_from_there_on() -> None:
    n, why = choose(sides((1, 1.0, 5.0), (4, 2.0, 5.0), (8, 6.0, 5.0), (16, 12.0, 6.0)))
    assert n == 8
    assert "8" in why
    assert "5000.0 ms" in why


def test_a_lucky_small_size_does_not_count() -> None:
    n, _ = choose(sides((1, 1.0, 0.5), (4, 2.0, 5.0), (8, 6.0, 5.0)))
    assert n == 8


def test_a_tie_goes_to_the_cpu() -> None:
    n, why = choose(sides((1, 1.0, 1.0), (8, 2.0, 1.99)))
    assert n == NEVER
    assert "never" in why


def test_where_streaming_always_pays_it_begins_at_one() -> None:
    assert choose(sides((1, 2.0, 1.0), (8, 9.0, 1.0)))[0] == 1
