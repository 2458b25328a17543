"""The policies: simple rules, and the default policy on published curves and in stress cases."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from types import FrameType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from stress import SAYINGS, stress, stress_cases

from lab.simulation import (
    DraftTrace,
    constant_rate,
    fixed_oracle,
    published_curves,
    simulate,
    synthetic_trace,
)
from offload.times.learner import Learner
from offload.times.table import CostTable, DecodeTime, Way
from specdec.costs.calibration import Bins, Calibration
from specdec.costs.profile import CostProfile
from specdec.policies import walk
from specdec.policies.rules import Fixed, PMin
from specdec.policies.throughput import Throughput
from specdec.policies.value import CENTRES, N_CENTRES, drafting_on, moved
from specdec.types import Decision, Draft, Policy, Round

# -- rules -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "limit", "probs", "n_fed", "n_kept"),
    [
        (PMin(16, 0.75), 16, (0.9, 0.8, 0.3, 0.9), 3, 2),
        (PMin(16, 0.75), 16, (0.001,), 1, 0),
        (PMin(16, 0.5, n_min=3), 16, (0.9, 0.9, 0.1), 3, 0),
        (PMin(16, 0.5, n_min=3), 16, (0.9, 0.9, 0.9, 0.1), 4, 3),
        (Fixed(4), 9, (0.01,) * 9, 4, 4),
        (Fixed(4), 2, (0.01,) * 9, 2, 2),
        (Fixed(0), 9, (1.0,) * 9, 0, 0),
    ],
)
def test_rules_say_how_many_are_sampled_and_kept(
    policy: Policy, limit: int, probs: tuple[float, ...], n_fed: int, n_kept: int
) -> None:
    walk, n = policy.begin(limit, "draft"), 0
    while walk.wants and n < len(probs):
        walk.feed(probs[n])
        n += 1
    assert (n, walk.n_best) == (n_fed, n_kept)


# -- published curves ------------------------------------------------------------------------------

CURVES = published_curves()
N_TOKENS = 2000
KINDS = {
    "code": ("code",),
    "prose": ("prose",),
    "noise": ("noise",),
    "switching": ("code", "prose"),
}
DECIDING = re.compile(r"specdec.(policies|costs).\w+\.py$")
CONFIDENCES = (1.0, 1.6, 0.6)  # calibrated, over-confident, under-confident


def with_draft(profile: CostProfile, share: float) -> CostProfile:
    """The profile with a draft whose step takes a share of T(1)."""
    return replace(profile, draft_step_s=share * profile.step_s[0])


@cache
def trace(kind: str, confidence: float, seed: int = 11) -> DraftTrace:
    return synthetic_trace(N_TOKENS, seed=seed, kinds=KINDS[kind], confidence=confidence)


def others() -> dict[str, Policy]:
    return {"fixed 4": Fixed(4), "fixed 8": Fixed(8), "p-min": PMin(16, 0.75)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("curve", CURVES)
def test_throughput_is_near_the_fixed_oracle_and_never_loses(curve: str, kind: str) -> None:
    for confidence, share in zip(CONFIDENCES, (0.02, 0.05, 0.12), strict=True):
        profile = with_draft(CURVES[curve], share)
        text = trace(kind, confidence)
        rate = simulate(text, profile, Throughput(profile)).rate
        oracle = fixed_oracle(text, profile, min(24, profile.n_max - 1)).rate
        assert rate >= 0.97 * oracle, f"confidence {confidence}: {rate / oracle:.3f} of the oracle"
        plain = 1 / profile.step_s[0]
        assert rate >= 0.99 * plain, f"confidence {confidence}: {rate / plain:.3f} of plain"


def unseen_curve(rng: np.random.Generator) -> CostProfile:
    """A curve between two published ones, on a faster or slower device, with noise of 3 %."""
    ends = [CURVES[name].step_s for name in rng.choice(sorted(CURVES), 2, replace=False)]
    size, share = min(map(len, ends)), rng.uniform()
    low, high = (np.log(np.array(end[:size]) / end[0]) for end in ends)
    between = np.exp(share * low + (1.0 - share) * high)
    at = 1.0 + np.arange(size) * np.exp(rng.uniform(-0.5, 0.5))  # bends come sooner or later
    times = 1.0 + (np.interp(at, np.arange(1, size + 1), between) - 1.0) * np.exp(
        rng.uniform(-0.7, 0.7)
    )
    times *= np.exp(rng.normal(0.0, 0.03, size))
    return CostProfile(tuple((times / times[0]).tolist()), float(rng.choice([0.02, 0.05, 0.12])))


@pytest.mark.parametrize("kind", KINDS)
def test_throughput_is_near_the_oracle_on_curves_it_was_not_made_with(kind: str) -> None:
    """The oracle knows the best length of each segment, also if two kinds of text alternate.

    `-s` shows the worst of 12 curves.
    """
    ratios, to_plain = [], []
    for seed in range(1000, 1012):
        rng = np.random.default_rng(seed)
        profile, confidence = unseen_curve(rng), CONFIDENCES[seed % 3]
        text = synthetic_trace(4000, seed=seed, kinds=KINDS[kind], confidence=confidence)
        rate = simulate(text, profile, Throughput(profile)).rate
        ratios.append(rate / fixed_oracle(text, profile, profile.n_max - 1).rate)
        to_plain.append(rate)
    found = f"least {min(ratios):.3f}, mean {np.mean(ratios):.3f} of the oracle"
    print(f"{kind}: {found}, least {min(to_plain):.3f} of plain")
    assert min(ratios) >= 0.98
    assert min(to_plain) >= 0.99


@pytest.mark.parametrize("curve", CURVES)
def test_throughput_beats_every_other_policy_in_the_mean(curve: str) -> None:
    profile = with_draft(CURVES[curve], 0.05)
    logs: dict[str, list[float]] = defaultdict(list)
    for kind in KINDS:
        text = trace(kind, 1.0, seed=5)
        ours = simulate(text, profile, Throughput(profile)).rate
        for name, policy in others().items():
            logs[name].append(math.log(ours / simulate(text, profile, policy).rate))
    for name, ratios in logs.items():
        assert sum(ratios) >= 0, f"{name} is better by {-sum(ratios) / len(ratios):.3f}"


def test_a_step_of_own_layers_that_becomes_slow_shortens_drafts() -> None:
    """The step was measured to be fast. Serving learns its time, in which rows are taken in."""
    curve = CURVES["deepseek-r1-0528-numa"]
    entries = {n: DecodeTime(s, n_timed=1) for n, s in enumerate(curve.step_s, 1)}
    lengths = []
    for share in (0.02, 0.1, 0.3, 0.8):
        learner = Learner(
            CostTable(ways={Way.FIXED: entries}), curve.n_max, lambda n: (Way.FIXED,),
            draft_step_s=0.02 * curve.step_s[0],
        )  # fmt: skip
        policy = Throughput(curve, costs=learner)
        run = simulate(trace("code", 1.0), with_draft(curve, share), policy, source="mtp")
        lengths.append(run.n_steps / run.n_rounds)
        assert run.rate >= 0.97 / curve.step_s[0]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1.1 * lengths[1] > 1.5 * lengths[2] > 10 * lengths[3], lengths


def test_glm_whose_batch_of_two_never_pays_is_exploited() -> None:
    profile = with_draft(CURVES["glm-4.6-rpc"], 0.05)
    text = trace("code", 1.0)
    run = simulate(text, profile, Throughput(profile))
    assert run.rate > 1.8 / profile.step_s[0]


def test_a_linear_cost_makes_it_choose_nothing_and_cost_nothing() -> None:
    # Measured on two CPU cores: T(2)/T(1) = 1.6, T(4)/T(1) = 2.8.
    steps = [1.0, 1.6, 2.2, 2.8] + [2.8 + 0.62 * k for k in range(1, 13)]
    profile = CostProfile(tuple(steps), 0.1)
    run = simulate(trace("prose", 1.0), profile, Throughput(profile))
    assert run.rate >= 0.99
    assert run.n_drafted < 0.05 * run.n_tokens


def test_a_simulated_fixed_policy_is_the_constant_rate() -> None:
    profile = with_draft(CURVES["deepseek-r1-0528-numa"], 0.05)
    text = synthetic_trace(3000, seed=1)
    simulated = simulate(text, profile, Fixed(3)).rate
    assert simulated == pytest.approx(constant_rate(text, profile, 3, 0, 3000), rel=2e-3)


@pytest.mark.parametrize(("kind", "most"), [("code", 34), ("prose", 59)])
def test_deciding_a_drafted_token_takes_few_calls(kind: str, most: float) -> None:
    """Calls of Python and native functions are counted, also in the refresh of T(n).

    `scripts/lab/run round-cost` shows the microseconds that they take.
    """
    profile = with_draft(CURVES["deepseek-r1-0528-q4_x"], 0.05)
    text = synthetic_trace(3000, seed=1, kinds=(kind,))
    n_calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal n_calls
        if event in ("call", "c_call") and DECIDING.search(frame.f_code.co_filename):
            n_calls += 1

    policy = Throughput(profile)
    sys.setprofile(count)
    try:
        run = simulate(text, profile, policy)
    finally:
        sys.setprofile(None)
    assert n_calls <= most * run.n_steps


@pytest.mark.parametrize("kinds", [("code",), ("prose",), ("noise",), ("code", "prose")])
def test_where_larger_batches_go_another_way_the_best_fixed_length_is_reached(
    kinds: tuple[str, ...],
) -> None:
    # Batches of 1 to 3 tokens are streamed and larger ones run on the CPU, so T(4) is below T(1).
    timed = {1: 12.0, 2: 23.0, 3: 25.0, 4: 7.4, 8: 8.2, 16: 12.8, 33: 23.0, 64: 24.0}
    times_ms = np.interp(range(1, 65), list(timed), list(timed.values()))
    jagged = CostProfile(tuple((times_ms / 1e3).tolist()), draft_step_s=2e-4)
    text = synthetic_trace(3000, seed=5, kinds=kinds)
    best = fixed_oracle(replace(text, segments=((0, "all"),)), jagged, 16).rate
    assert simulate(text, jagged, Throughput(jagged)).rate >= best


@pytest.mark.parametrize("n_alone", [1, 7, 100])
def test_rounds_without_a_draft_count_alike_learnt_together_or_one_by_one(n_alone: int) -> None:
    profile = CostProfile((1.0, 1.1, 1.2, 1.3), draft_step_s=0.01)
    together, singly = Throughput(profile), Throughput(profile)
    for policy in (together, singly):
        for _ in range(10):  # a rate far above plain decoding's
            policy.account(4, 3, 4, verify_s=1.3, draft_s=0.03)
    rate = together.rate
    for _ in range(n_alone):
        together.learn(Round(Draft((), (), "draft", Decision(0, "")), 0, (1,), 0.0, 1.0))
        singly.account(1, 0, 1, verify_s=1.0, draft_s=0.0)
    assert together.costs.times[0] == pytest.approx(1.0)  # learns what is pending
    assert together.rate == pytest.approx(singly.rate)
    assert 1.0 <= together.rate < rate


# -- texts that change, and probabilities that say little ------------------------------------------


@pytest.mark.parametrize("saying", SAYINGS)
def test_a_text_that_stays_as_it_is_is_learnt_and_plain_decoding_kept(saying: str) -> None:
    scores = stress(stress_cases(range(3), periods=(0,), sayings=(saying,)))
    assert min(s.to_plain for s in scores) >= 0.99
    assert min(s.to_oracle for s in scores) >= 0.95
    assert np.median([s.to_oracle for s in scores]) >= 0.985


def test_switching_every_200_tokens_loses_at_most_one_percent_to_plain_decoding() -> None:
    scores = stress(stress_cases(range(10), n_tokens=2000, periods=(200,)))
    # The least ratio would be 0.986 without a bound on the loss by speculation.
    assert min(s.to_plain for s in scores) >= 0.99
    # The oracle knows each segment in advance, so 1 is out of reach. A policy that never changes
    # its regime reaches 0.957.
    assert np.mean([s.to_oracle for s in scores]) >= 0.96


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
    form = TypeAdapter(dict[str, Bins])
    again = Calibration(form.validate_json(form.dump_json(calibration.bins)))
    assert again.probability("draft", 0.4) == calibration.probability("draft", 0.4)
    data = form.dump_python(calibration.bins)
    with pytest.raises(ValidationError, match="chances of regimes sum to 9"):
        form.validate_python({"draft": data["draft"] | {"regimes": [1.0] * 9}})
    added_later = {"slope", "often", "regimes", "elapsed", "n_observed"}
    old = {name: value for name, value in data["draft"].items() if name not in added_later}
    form.validate_python({"draft": old})


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

    monkeypatch.setattr(walk, "drafting_on", counted)
    rng = np.random.default_rng(3)
    text = DraftTrace((0.3,) * 3000, tuple((rng.random(3000) < 0.2).tolist()))
    run = simulate(text, profile, policy)
    assert run.rate >= 0.99
    assert 0 < n_built <= 4 + 2 * run.n_steps  # once every 16 rounds would be 187
    assert n_built < 100
