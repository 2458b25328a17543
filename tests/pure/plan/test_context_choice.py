"""The default context is the largest that fits memory and costs little decode speed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offload.plan.context_choice import LEAST_CTX, MOST_LOSS, MOST_PROMPT_LOSS, choose_context
from offload.plan.ends import Speeds

SAME = Speeds(100.0, 10.0)


def speeds(by_size: dict[int, float | None]) -> Callable[[int], Speeds | None]:
    """The decode speeds as given, with the same speed of prompts."""
    found = {n: None if tps is None else Speeds(100.0, tps) for n, tps in by_size.items()}
    return lambda n_ctx: found[n_ctx]


def test_the_models_own_context_is_taken_if_it_costs_nothing() -> None:
    for own in (512, 2048, 4096, 40960, 163840):
        choice = choose_context(own, lambda n_ctx: SAME)
        assert choice.n_ctx == own
        assert "all that the model was trained for" in choice.why
    assert choose_context(40999, lambda n_ctx: SAME).n_ctx == 40960, "libllama takes whole blocks"


@pytest.mark.parametrize(
    ("at_16384", "wanted"),
    [(10.0, 16384), (10.0 * (1 - MOST_LOSS), 16384), (8.9, 8192), (None, 8192)],
)
def test_a_longer_context_may_cost_a_stated_share_of_the_speed(
    at_16384: float | None, wanted: int
) -> None:
    found = choose_context(20480, speeds({4096: 10.0, 8192: 9.5, 16384: at_16384, 20480: None}))
    assert found.n_ctx == wanted
    assert f"{wanted:,} tokens of the 20,480" in found.why
    assert f"{MOST_LOSS:.0%}" in found.why
    assert "--ctx-size" in found.why


@pytest.mark.parametrize(("prompts", "wanted"), [(50.0, 16384), (49.0, 8192)])
def test_a_longer_context_may_not_take_the_speed_of_prompts(prompts: float, wanted: int) -> None:
    """Without a ring, decodes are faster and prompts run on the CPU."""
    found = choose_context(
        20480, lambda n: None if n > 16384 else Speeds(prompts if n > 8192 else 100.0, 10.0 + n)
    )
    assert found.n_ctx == wanted
    assert f"{MOST_PROMPT_LOSS:.0%} of that of prompts" in found.why


def test_the_least_context_is_taken_if_nothing_longer_fits() -> None:
    found = choose_context(131072, lambda n_ctx: SAME if n_ctx == LEAST_CTX else None)
    assert found.n_ctx == LEAST_CTX
    assert "do not fit memory" in found.why
    assert choose_context(131072, lambda n_ctx: None).n_ctx == LEAST_CTX, "opening then says why"
