"""The default policy where the draft's probabilities say little and texts change."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.simulation.simulate import DraftTrace, constant_rate, simulate
from lab.simulation.stress import (
    SAYINGS,
    quantiles,
    random_curve,
    stress,
    stress_cases,
    stress_trace,
)
from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile
from specdec.policies import throughput
from specdec.policies.throughput import Throughput
from specdec.policies.value import CENTRES, N_CENTRES, drafting_on, moved


def test_stress_cases_are_the_same_for_the_same_seed() -> None:
    first, again = (list(stress_cases([3, 17], n_tokens=300)) for _ in range(2))
    assert first == again
    assert first[0].trace != first[2].trace


@pytest.mark.parametrize("saying", SAYINGS)
def test_a_text_that_stays_as_it_is_is_learnt_and_plain_decoding_kept(saying: str) -> None:
    scores = stress(stress_cases(range(6), periods=(0,), sayings=(saying,)))
    assert min(s.to_plain for s in scores) >= 0.99
    assert min(s.to_oracle for s in scores) >= 0.95
    assert quantiles([s.to_oracle for s in scores])[3] >= 0.985


def test_switching_every_200_tokens_loses_at_most_one_percent_to_plain_decoding() -> None:
    scores = stress(stress_cases(range(36), n_tokens=2000, periods=(200,)))
    # Without a bound on what speculation may lose it is 0.986.
    assert min(s.to_plain for s in scores) >= 0.99
    # Hindsight knows each segment, so 1 is out of reach. Without changing regimes it is 0.957.
    assert quantiles([s.to_oracle for s in scores])[4] >= 0.96


def test_a_first_draft_on_trust_is_short_where_it_would_cost_much() -> None:
    profile = CostProfile(tuple(1.0 + 0.2 * n for n in range(64)), 0.25)
    policy = Throughput(profile)
    walk = policy.begin(63, "draft")
    n = 0
    while walk.wants and n < 63:
        walk.feed(1.0)
        n += 1
    assert 3 <= n <= 12
    chances = np.random.default_rng(1).random(4000) < 0.8
    text = DraftTrace((1.0,) * 4000, tuple(chances.tolist()))
    run = simulate(text, profile, Throughput(profile))
    assert run.rate >= 0.97 * constant_rate(text, profile, 2, 0, 4000)


def follow(calibration: Calibration, rng: np.random.Generator, chance: float, n: int) -> None:
    for _ in range(n):
        calibration.elapse("draft", 1)
        calibration.observe("draft", 0.5, bool(rng.random() < chance))


def test_a_regime_that_was_met_before_is_recognised_in_a_few_tokens() -> None:
    calibration, rng = Calibration(), np.random.default_rng(5)
    for _ in range(10):
        follow(calibration, rng, 0.95, 200)
        assert calibration.probability("draft", 0.5) > 0.85
        follow(calibration, rng, 0.1, 200)
        assert calibration.probability("draft", 0.5) < 0.25
    for accepted in (True, True, True, True):
        calibration.elapse("draft", 1)
        calibration.observe("draft", 0.5, accepted)
    assert calibration.probability("draft", 0.5) > 0.6


def test_a_regime_nobody_observes_fades_to_what_is_usual() -> None:
    calibration, rng = Calibration(), np.random.default_rng(5)
    for _ in range(10):
        follow(calibration, rng, 0.95, 200)
        follow(calibration, rng, 0.1, 200)
    before = calibration.probability("draft", 0.5)
    calibration.elapse("draft", 1000)
    assert before + 0.05 < calibration.probability("draft", 0.5) < 0.85


def test_steady_acceptance_leaves_one_likely_regime_and_the_bins_to_answer() -> None:
    calibration, rng = Calibration(), np.random.default_rng(5)
    follow(calibration, rng, 0.7, 4000)
    chance, odds = max(calibration.regimes("draft"))
    assert (chance > 0.5, odds) == (True, 1.0)
    assert calibration.probability("draft", 0.5) == pytest.approx(0.7, abs=0.08)


def test_probabilities_that_say_nothing_are_recognised_in_bins_without_evidence() -> None:
    calibration, rng = Calibration(), np.random.default_rng(7)
    for _ in range(400):
        p = float(rng.choice([0.1, 0.3, 0.7, 0.97]))
        calibration.observe("draft", p, bool(rng.random() < 0.6))
    assert calibration.probability("draft", 0.88) - calibration.probability("draft", 0.22) < 0.25


def test_a_calibration_with_its_regimes_is_stored_and_damage_refused() -> None:
    calibration, rng = Calibration(), np.random.default_rng(5)
    follow(calibration, rng, 0.9, 300)
    data = calibration.as_data()
    again = Calibration.from_data(data)
    assert again.probability("draft", 0.4) == calibration.probability("draft", 0.4)
    data["draft"]["regimes"] = [1.0] * 9
    with pytest.raises(Exception, match="damaged"):
        Calibration.from_data(data)
    old = {k: v for k, v in calibration.as_data()["draft"].items() if k not in ("slope", "often")}
    Calibration.from_data({"draft": {k: v for k, v in old.items() if k != "regimes"}})


def test_moving_the_odds_keeps_the_mass_and_moves_the_mean() -> None:
    weights = np.full(N_CENTRES, 1.0 / N_CENTRES)
    same = moved(weights, [(1.0, 1.0)])
    assert same == pytest.approx(weights)
    for odds in (0.1, 5.0):
        out = moved(weights, [(0.3, 1.0), (0.7, odds)])
        assert out.sum() == pytest.approx(1.0)
        assert (out @ CENTRES > weights @ CENTRES) == (odds > 1.0)


def test_an_idle_drafter_is_not_thought_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = CostProfile((1.0, 1.9, 2.8, 3.7), 0.3)
    policy = Throughput(profile)
    n_built = 0

    def counted(*args: Any) -> NDArray[np.float64]:
        nonlocal n_built
        n_built += 1
        return drafting_on(*args)

    monkeypatch.setattr(throughput, "drafting_on", counted)
    rng = np.random.default_rng(3)
    text = DraftTrace((0.3,) * 3000, tuple((rng.random(3000) < 0.2).tolist()))
    run = simulate(text, profile, policy)
    assert run.rate >= 0.99
    assert 0 < n_built <= 4 + 2 * run.n_steps  # once every 16 rounds would be 187
    assert n_built < 100


def test_random_curves_have_their_shape() -> None:
    rng = np.random.default_rng(1)
    for kind in ("convex", "concave", "linear"):
        steps = np.diff(random_curve(rng, kind).step_s)
        bend = np.diff(steps)
        assert {"convex": (bend > 0).all(), "concave": (bend < 0).all()}.get(
            kind, bool(np.abs(bend).max() < 1e-9)
        )
    trace = stress_trace(rng, "half", 500, 100)
    assert set(trace.p) == {0.5}
    assert [s for s, _ in trace.segments] == [0, 100, 200, 300, 400]
    assert math.isclose(quantiles([1.0, 2.0, 3.0])[4], 2.0)
