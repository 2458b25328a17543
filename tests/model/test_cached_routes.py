"""The lab's replay of routers that prefer cached experts, and its tables in docs/hybrid.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab import cached_routes as script
from lab.hybrid_model import DRAWN, N_LAYERS, N_TOKENS, draw
from lab.synth.published import published_facts
from offload.routing.routing import recorded_hits
from offload.schedule.cached_choice import RouteOptions
from offload.times.hits import misses_left

ROUTER = script.Router(64, 4, "softmax")


@pytest.fixture(scope="module")
def text() -> script.RouterScores:
    return script.drawn(ROUTER, "prose")


def test_without_a_preference_the_hits_are_those_of_the_rule(text: script.RouterScores) -> None:
    routing = draw(64, 4, DRAWN["prose"], N_TOKENS, N_LAYERS)
    hits = recorded_hits(routing, 64, script.SHARES, n_last=N_TOKENS // 2).mean(axis=0)
    for share, expected in zip(script.SHARES, hits.tolist(), strict=True):
        its = script.replay(text, share, RouteOptions())
        assert its.kept == 1.0
        # The replay looks at the slots once for each token, and the rule at each layer.
        assert 1.0 - its.misses == pytest.approx(expected, abs=0.04)


def test_a_choice_that_is_not_kept_saves_at_most_one_miss(text: script.RouterScores) -> None:
    """So misses fall to 0.6 with 95 % kept only where at most 12.5 % miss."""
    for share in script.SHARES:
        exact = script.replay(text, share, RouteOptions()).misses
        kept = [script.replay(text, share, RouteOptions(s)) for s in (0.05, 0.25, 1.0)]
        assert [its.kept for its in kept] == sorted((its.kept for its in kept), reverse=True)
        assert [its.misses for its in kept] == sorted((its.misses for its in kept), reverse=True)
        for its in kept:
            assert 0.0 <= its.misses < exact
            assert exact - its.misses <= 1.0 - its.kept + 0.03


def test_all_choices_are_kept_if_all_are_left_to_the_router(text: script.RouterScores) -> None:
    assert script.replay(text, 0.25, RouteOptions(1.0, n_kept=4)).kept == 1.0


def test_the_strongest_preference_keeps_as_much_as_was_asked(text: script.RouterScores) -> None:
    most = script.strongest(text, 0.4)
    assert 0.0 < most < 1.0
    assert script.replay(text, 0.4, RouteOptions(most)).kept >= script.LEAST_KEPT
    assert script.replay(text, 0.4, RouteOptions(most + 0.05)).kept < script.LEAST_KEPT


def test_groups_and_gates_are_those_of_the_models() -> None:
    z = np.array([[3.0, 0.0, 2.0, 2.0, -1.0, 9.0, 0.0, 0.5]])
    grouped = script.Router(8, 2, "sigmoid", 4, 2).selected_by(z)
    # The groups' two best: 0.95 + 0.5, 0.88 + 0.88, 0.27 + 1, 0.5 + 0.62.
    assert np.isfinite(grouped).tolist() == [[True, True, True, True, False, False, False, False]]
    assert script.Router(8, 2, "softmax").selected_by(z).sum() == pytest.approx(1.0)
    assert np.array_equal(script.Router(8, 2, "none").selected_by(z), z.astype(np.float32))


@pytest.mark.parametrize("title", script.GATES)
def test_a_models_rows_are_the_pages(title: str, tmp_path: Path) -> None:
    page = script.PAGE.read_text(encoding="utf-8").splitlines()
    facts = published_facts(title, tmp_path)
    router = script.router_of(title, facts)
    assert (router.n_groups > 1) == (title == "DeepSeek-R1")
    row = script.miss_row(title, "prose", script.drawn(router, "prose"), script.SHARES[-1])
    assert row in page, "run scripts/lab/run cached-routes"
    assert script.speed_row(title, facts, "drifting") in page


@pytest.mark.parametrize("share", script.SHARES)
def test_the_recorded_rows_are_the_pages(share: float) -> None:
    assert script.recorded().scores.shape == (N_TOKENS, 3, 16)
    row = script.miss_row(script.PAIR, "recorded", script.recorded(), share)
    assert row in script.PAGE.read_text(encoding="utf-8").splitlines()


def test_the_guess_of_a_plan_lies_among_drawn_misses(tmp_path: Path) -> None:
    facts = published_facts("Qwen3-235B-A22B", tmp_path)
    router = script.router_of("Qwen3-235B-A22B", facts)
    for strength in script.STRENGTHS:
        left = []
        for routing in script.ROUTINGS:
            for share in script.SHARES:
                its = script.drawn(router, routing)
                exact = script.replay(its, share, RouteOptions()).misses
                left.append(script.replay(its, share, RouteOptions(strength)).misses / exact)
        guess = misses_left(RouteOptions(strength), facts.n_experts_used)
        assert min(left) <= guess <= max(left)


def test_with_few_slots_a_plan_guesses_more_misses_than_were_drawn() -> None:
    """DeepSeek-R1 on 24 GiB has slots for 4 %: 0.43 and 0.46 of the misses are left on the page."""
    left = [misses_left(RouteOptions(1.0), 8, share) for share in (0.01, 0.02, 0.04, 1 / 16, 0.5)]
    assert left == sorted(left, reverse=True)
    assert 0.46 <= left[2] <= 0.6
    assert left[3] == left[4] == misses_left(RouteOptions(1.0), 8)
