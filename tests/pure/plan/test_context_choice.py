"""The default context is the largest that fits memory and makes requests hardly slower."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from offload.plan.context_choice import (
    AGENT_CTX,
    LEAST_CTX,
    MOST_LOSS,
    MOST_LOSS_FOR_AGENTS,
    RequestSeconds,
    choose_context,
)


def same_s(n_ctx: int) -> RequestSeconds:
    return RequestSeconds(10.0)


def times(
    by_size: dict[int, float | None], in_ram_s: float = 0.0
) -> Callable[[int], RequestSeconds | None]:
    def request_s(n_ctx: int) -> RequestSeconds | None:
        seconds = by_size[n_ctx]
        return None if seconds is None else RequestSeconds(seconds, in_ram_s)

    return request_s


def test_the_models_own_context_is_taken_if_it_costs_nothing() -> None:
    for own in (512, 2048, 4096, 40960, 163840):
        choice = choose_context(own, same_s)
        assert choice.n_ctx == own
        assert "all that the model was trained for" in choice.why
    assert choose_context(40999, same_s).n_ctx == 40960, "libllama takes whole blocks"


@pytest.mark.parametrize(
    ("at_16384", "in_ram_s", "wanted"),
    [
        (9.0, 0.0, 16384), (11.1, 0.0, 16384), (11.3, 0.0, 8192), (None, 0.0, 8192),
        (11.3, 12.0, 16384), (12.2, 20.0, 16384), (12.3, 20.0, 8192),
    ],
)  # fmt: skip
def test_a_longer_context_may_cost_a_stated_share_of_the_time_with_experts_in_ram(
    at_16384: float | None, in_ram_s: float, wanted: int
) -> None:
    by_size = {4096: 10.0, 8192: 10.5, 16384: at_16384, 20480: None}
    found = choose_context(20480, times(by_size, in_ram_s))
    assert found.n_ctx == wanted
    assert f"{wanted:,} tokens of the 20,480" in found.why
    assert f"{MOST_LOSS:.0%}" in found.why
    assert "--ctx-size" in found.why


def test_the_least_context_is_taken_if_nothing_longer_fits() -> None:
    found = choose_context(131072, lambda n_ctx: same_s(n_ctx) if n_ctx == LEAST_CTX else None)
    assert found.n_ctx == LEAST_CTX
    assert "do not fit memory" in found.why
    assert choose_context(131072, lambda n_ctx: None).n_ctx == LEAST_CTX, "opening then says why"


@pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.29, 0.35])
def test_agents_get_room_for_their_first_prompt_unless_it_costs_much(cost: float) -> None:
    def request_s(n_ctx: int) -> RequestSeconds:
        return RequestSeconds(10.0 / (1 - cost) if n_ctx >= AGENT_CTX else 10.0)

    for_one = choose_context(AGENT_CTX * 2, request_s)
    for_agents = choose_context(AGENT_CTX * 2, request_s, for_agents=True)
    if cost <= MOST_LOSS:
        assert for_agents == for_one
        assert for_one.n_ctx == AGENT_CTX * 2
        return
    assert for_one.n_ctx == AGENT_CTX // 2
    assert for_agents.n_ctx == (AGENT_CTX if cost <= MOST_LOSS_FOR_AGENTS else AGENT_CTX // 2)
    if for_agents.n_ctx == AGENT_CTX:
        assert f"this costs {cost:.0%} of the speed" in for_agents.why
        assert "first prompt of an agent" in for_agents.why
