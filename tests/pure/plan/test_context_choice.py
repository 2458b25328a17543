"""The default context is the largest that fits memory and makes requests hardly slower."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.context_choice import (
    AGENT_CTX,
    LEAST_CTX,
    MOST_LOSS,
    MOST_LOSS_FOR_AGENTS,
    STRETCHED,
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
        assert "all that the model was trained for" in choice.reason
    assert choose_context(40999, same_s).n_ctx == 40960, "libllama takes whole blocks"


def test_a_context_that_rope_flags_stretch_is_not_called_the_models() -> None:
    whole = choose_context(8192, same_s, own=STRETCHED)
    assert (
        whole.reason == "context: 8,192 tokens, all that the rope flags stretch it to (--ctx-size)"
    )
    costly = times({8192: None, 4096: 1.0})
    assert "of the 8,192 that the rope flags" in choose_context(8192, costly, own=STRETCHED).reason


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
    assert f"{wanted:,} tokens of the 20,480" in found.reason
    assert f"{MOST_LOSS:.0%}" in found.reason
    assert "--ctx-size" in found.reason


def test_the_least_context_is_taken_if_nothing_longer_fits() -> None:
    found = choose_context(131072, lambda n_ctx: same_s(n_ctx) if n_ctx == LEAST_CTX else None)
    assert found.n_ctx == LEAST_CTX
    assert "do not fit memory" in found.reason
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
        assert f"this costs {cost:.0%} of the speed" in for_agents.reason
        assert "first prompt of an agent" in for_agents.reason


def test_prompts_that_a_request_hides_are_told() -> None:
    """With 131,072 tokens on 24 GiB, DeepSeek-R1's prompts have 60 % of their speed."""
    by_size = {
        4096: RequestSeconds(10.0, 0.0, 10.0, 5.0),
        8192: RequestSeconds(10.0, 0.0, 6.0, 5.1),
        16384: RequestSeconds(10.9, 0.0, 10.0, 5.1),
    }
    found = choose_context(16384, lambda n_ctx: by_size[n_ctx])
    assert found.n_ctx == 16384
    assert found.reason.endswith(
        "; on this machine it costs 40% of the speed of prompts, which --ctx-size 8192 gives back"
    )


SIZES = (4096, 8192, 16384, 32768, 65536)
SECONDS = st.floats(0.1, 100)
REQUESTS = st.lists(
    st.one_of(
        st.none(), st.builds(RequestSeconds, SECONDS, st.floats(0, 100), SECONDS, SECONDS)
    ),
    min_size=len(SIZES), max_size=len(SIZES),
).map(lambda requests: dict(zip(SIZES, requests, strict=True)))  # fmt: skip


def lost(request: RequestSeconds, other: RequestSeconds) -> tuple[float, float]:
    """Shares of the other's speed of prompts and of answers that a request loses."""
    return 1 - other.prompt_s / request.prompt_s, 1 - other.answer_s / request.answer_s


@given(REQUESTS, st.booleans())
def test_a_chosen_context_costs_a_tenth_or_says_what_it_costs_and_what_gives_it_back(
    by_size: Mapping[int, RequestSeconds | None], for_agents: bool
) -> None:
    found = choose_context(SIZES[-1], lambda n_ctx: by_size[n_ctx], for_agents=for_agents)
    request = by_size[found.n_ctx]
    if request is None or found.n_ctx == SIZES[0]:
        assert found.n_ctx == SIZES[0]
        return
    fitting = [by_size[n] for n in reversed(SIZES) if n <= found.n_ctx]
    fastest = min(filter(None, fitting), key=lambda other: other.prompt_s + other.answer_s)
    shares = lost(request, fastest)
    told = re.search(
        r"; on this machine it costs (.*), which --ctx-size (\d+) gives back$", found.reason
    )
    assert bool(told) == (max(shares) > MOST_LOSS)
    if told:
        for share, name in zip(shares, ("prompts", "answers"), strict=True):
            words = f"{share:.0%} of the speed of {name}"
            assert (words in told[1]) == (share > MOST_LOSS)
        cheaper = by_size[int(told[2])]
        assert cheaper is not None
        assert int(told[2]) < found.n_ctx
        assert max(lost(cheaper, fastest)) <= MOST_LOSS
