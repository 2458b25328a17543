"""The default context is the largest that fits memory and makes requests hardly slower."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offload.plan.context_choice import LEAST_CTX, MOST_LOSS, choose_context


def same_s(n_ctx: int) -> float:
    return 10.0


def times(by_size: dict[int, float | None]) -> Callable[[int], float | None]:
    return lambda n_ctx: by_size[n_ctx]


def test_the_models_own_context_is_taken_if_it_costs_nothing() -> None:
    for own in (512, 2048, 4096, 40960, 163840):
        choice = choose_context(own, same_s)
        assert choice.n_ctx == own
        assert "all that the model was trained for" in choice.why
    assert choose_context(40999, same_s).n_ctx == 40960, "libllama takes whole blocks"


@pytest.mark.parametrize(
    ("at_16384", "wanted"),
    [(9.0, 16384), (10.0 / (1 - MOST_LOSS), 16384), (11.3, 8192), (None, 8192)],
)
def test_a_longer_context_may_cost_a_stated_share_of_the_speed(
    at_16384: float | None, wanted: int
) -> None:
    found = choose_context(20480, times({4096: 10.0, 8192: 10.5, 16384: at_16384, 20480: None}))
    assert found.n_ctx == wanted
    assert f"{wanted:,} tokens of the 20,480" in found.why
    assert f"{MOST_LOSS:.0%}" in found.why
    assert "--ctx-size" in found.why


def test_the_least_context_is_taken_if_nothing_longer_fits() -> None:
    found = choose_context(131072, lambda n_ctx: 10.0 if n_ctx == LEAST_CTX else None)
    assert found.n_ctx == LEAST_CTX
    assert "do not fit memory" in found.why
    assert choose_context(131072, lambda n_ctx: None).n_ctx == LEAST_CTX, "opening then says why"
