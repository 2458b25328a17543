"""The published draft-length rules, against values recomputed from the published curves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulate import buildable, named_policies
from lab.simulation import published_curves, published_values
from specdec.build import build_policy
from specdec.costs.profile import CostProfile
from specdec.errors import BadProfile
from specdec.options import BY_P, PRICED, PolicyName, SpecOptions
from specdec.policies.cost_curve import PUBLISHED, CurveFamily, fit
from specdec.policies.published import (
    Bandit,
    Costs,
    Fitted,
    PMinKept,
    PMins,
    Ratio,
    Speed,
    flat_threshold,
    rising_threshold,
)
from specdec.types import Decision, Draft, Policy, Round

R1 = "deepseek-r1-0528-q4_x"
GLM = "glm-4.6-rpc"
MISTRAL = "mistral-large-2411"
V3 = "deepseek-v3-0324-pp-sweep"


def constant(policy: Policy, p: float, limit: int) -> tuple[int, int]:
    """Tokens sampled and tokens kept, if each token has the probability `p`."""
    walk, n = policy.begin(limit, "draft"), 0
    while walk.wants:
        walk.feed(p)
        n += 1
    return n, walk.n_best


# Tokens sampled and kept, by the probability of each token.
V1 = {
    0.1: (1, 0), 0.3: (1, 0), 0.5: (1, 0), 0.6: (1, 0), 0.7: (2, 0), 0.8: (3, 0),
    0.9: (5, 0), 0.95: (26, 24), 0.99: (64, 64), 1.0: (64, 64),
}  # fmt: skip
V3A_RTX = {
    0.1: (1, 0), 0.3: (2, 0), 0.5: (3, 1), 0.6: (3, 1), 0.7: (4, 2), 0.8: (6, 3),
    0.9: (12, 8), 0.95: (20, 15), 0.99: (32, 32), 1.0: (32, 32),
}  # fmt: skip
V3A_M1 = {
    0.1: (1, 0), 0.3: (1, 0), 0.5: (2, 0), 0.6: (2, 0), 0.7: (3, 0), 0.8: (4, 0),
    0.9: (5, 3), 0.95: (6, 4), 0.99: (32, 32), 1.0: (32, 32),
}  # fmt: skip
V3B_RTX = {
    0.1: (1, 1), 0.3: (2, 1), 0.5: (3, 2), 0.6: (4, 2), 0.7: (5, 3), 0.8: (6, 4),
    0.9: (10, 6), 0.95: (20, 16), 0.99: (32, 32), 1.0: (32, 32),
}  # fmt: skip


@pytest.mark.parametrize("p", V1)
def test_v1_and_v2_sample_and_keep_as_published(p: float) -> None:
    assert constant(PMins(published_values(V3)), p, 64) == V1[p]
    assert constant(Fitted(PUBLISHED), p, 64) == V1[p]


@pytest.mark.parametrize("p", V3A_RTX)
def test_v3a_samples_and_keeps_as_published(p: float) -> None:
    rtx = Speed(published_values("rtx5000ada-qwen2.5-coder-32b-v3a"), 353.540, "a")
    m1 = Speed(published_values("m1ultra-qwen2.5-coder-32b-v3a"), 231.948, "a")
    assert constant(rtx, p, 32) == V3A_RTX[p]
    assert constant(m1, p, 32) == V3A_M1[p]


@pytest.mark.parametrize("p", V3B_RTX)
def test_v3b_keeps_one_token_more_than_it_priced(p: float) -> None:
    draft = published_values("rtx5000ada-qwen2.5-coder-0.5b-draft")
    policy = Speed(published_values("rtx5000ada-qwen2.5-coder-32b-v3b"), draft[0], "b")
    assert constant(policy, p, 32) == V3B_RTX[p]


@pytest.mark.parametrize(("draft_speed", "n_sampled"), [(1.8, 1), (1.9, 3), (19.0, 3)])
def test_v3_looks_ahead_only_as_far_as_draft_steps_are_worth_it(
    draft_speed: float, n_sampled: int
) -> None:
    """With P 0.9 two more drafts pay if 0.9 * (22 - 2 * 10 / draft_speed) exceeds 10."""
    for variant in ("a", "b"):
        policy = Speed((10.0, 10.0, 10.0, 22.0), draft_speed, variant, n_max=4)
        walk = policy.begin(3, "draft")
        n = 0
        while walk.wants:
            walk.feed(1.0 if n else 0.9)
            n += 1
        assert n == n_sampled


@pytest.mark.parametrize(
    ("curve", "p", "kept"),
    [
        (R1, 0.5, (0, 0, 0)),
        (R1, 0.7, (2, 2, 2)),
        (R1, 0.9, (12, 12, 12)),
        (R1, 0.95, (27, 27, 27)),
        (GLM, 0.9, (0, 18, 18)),
        (GLM, 0.95, (0, 48, 48)),
        (GLM, 0.99, (0, 63, 63)),
        (MISTRAL, 0.7, (2, 2, 2)),
        (MISTRAL, 0.9, (28, 28, 28)),
    ],
)
def test_v4_keeps_as_published_with_each_look_ahead(
    curve: str, p: float, kept: tuple[int, ...]
) -> None:
    costs = published_values(curve)
    assert tuple(constant(Costs(costs, ahead), p, 64)[1] for ahead in (0, 1, 6)) == kept


def test_v1_and_v3a_keep_a_draft_at_the_limit_whole_and_v3b_keeps_the_best() -> None:
    costs = published_values(V3)
    assert constant(PMins(costs, n_max=2), 0.7, 64) == (2, 2)
    assert constant(PMins(costs, n_max=3), 0.7, 64) == (2, 0)
    speeds = published_values("rtx5000ada-qwen2.5-coder-32b-v3a")
    assert constant(Speed(speeds, 353.54, "a", n_max=3), 0.5, 64) == (3, 3)
    assert constant(Speed(speeds, 353.54, "b", n_max=3), 0.5, 64) == (3, 2)


@pytest.mark.parametrize(
    ("family", "parameters", "rmse"),
    [
        ("exponential", (0.5327, 0.1433, 0.2361), 0.01738),
        ("power", (0.8464, 0.3709, 0.0219), 0.0094),
        ("rational", (2.6288, 3.996, 0.1761), 0.00187),
    ],
)
def test_the_fits_equal_the_published_ones(
    family: CurveFamily, parameters: tuple[float, ...], rmse: float
) -> None:
    found = fit(published_values("fit_y_data"), family)
    assert (round(found.a, 4), round(found.b, 4), round(found.c, 4)) == parameters
    assert round(found.rmse, 5) == rmse


def test_the_rational_thresholds_equal_the_published_ones() -> None:
    expected = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.834, 4: 0.7023, 5: 0.6145, 8: 0.4683, 16: 0.3308}
    for m, value in {**expected, 32: 0.2558, 63: 0.2172}.items():
        assert PUBLISHED.threshold(m) == pytest.approx(value, abs=6e-5)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ((0.5,) * 7, "at least 8 are needed"),
        ((0.9,) * 10 + (0.1,) * 10, "follows these costs"),
        (tuple(0.1 + 0.01 * i for i in range(20)), "follows these costs"),
    ],
)
def test_costs_without_a_falling_curve_are_refused(costs: tuple[float, ...], message: str) -> None:
    with pytest.raises(BadProfile, match=message):
        fit(costs)
    profile = CostProfile.from_normalised((1.0, 1.0, 1.0, *costs))
    options = SpecOptions(policy=PolicyName.RATIONAL, given={"policy": "--spec-policy"})
    with pytest.raises(BadProfile, match="--spec-policy rational: .*p-mins reads"):
        build_policy(options, profile)


def test_the_old_p_min_loop_keeps_the_token_that_it_stops_at() -> None:
    for p, kept in ((0.001, 1), (0.9, 16)):
        assert constant(PMinKept(16, 0.75), p, 16)[1] == kept
    assert PMinKept(1, 0.75).begin(9, "draft").limit == 1


def outcome(n_drafted: int, n_accepted: int, seconds: float = 1.0) -> Round:
    draft = Draft((1,) * n_drafted, (0.5,) * n_drafted, "draft", Decision(n_drafted, ""))
    return Round(draft, n_accepted, (1,) * (n_accepted + 1), 0.0, seconds)


def test_the_thresholds_of_ratios_are_a_ramp_and_a_half() -> None:
    assert [round(rising_threshold(n), 3) for n in (1, 4, 8, 20)] == [0.3, 0.386, 0.5, 0.5]
    assert {flat_threshold(n) for n in range(1, 20)} == {0.5}


@pytest.mark.parametrize("is_flat", [False, True])
def test_ratio_lengthens_accepted_blocks_and_shortens_the_others(is_flat: bool) -> None:
    policy = Ratio(n_max=8, is_flat=is_flat)
    for _ in range(60):
        policy.learn(outcome(policy.length, policy.length))
    assert policy.length == 8
    for _ in range(60):
        policy.learn(outcome(policy.length, 0))
    assert policy.length == 1


def test_a_third_of_accepted_tokens_lengthens_blocks_only_by_the_ramp() -> None:
    """The prompt about chess of #10466: longer blocks paid down to a ratio of a third."""
    lengths = {}
    for is_flat in (False, True):
        policy = Ratio(n_max=8, is_flat=is_flat, start=1)
        for i in range(60):
            policy.learn(outcome(policy.length, policy.length if i % 5 < 2 else 0))
        lengths[is_flat] = policy.length
    assert lengths[False] > lengths[True] == 1


def test_the_bandit_finds_the_arm_with_the_most_tokens_per_second() -> None:
    policy = Bandit(n_max=8, seed=3)
    chosen = []
    for _ in range(400):
        m = policy.begin(8, "draft").limit
        chosen.append(m)
        policy.learn(outcome(m, min(m, 3), 1.0 + 0.1 * m))
    assert max(set(chosen[200:]), key=chosen[200:].count) == 3


def test_the_bandit_forgets_what_was_true_long_ago() -> None:
    """Drafts of 4 tokens pay in the first 1,000 rounds, and not after them."""
    bandit = Bandit(4, arms=(0, 4), seed=1)
    lengths = []
    for i in range(1500):
        n = bandit.begin(8, "draft").limit
        bandit.learn(outcome(n, n if i < 1000 else 0, 1.0 + 0.1 * n))
        lengths.append(n)
    assert sum(lengths[900:1000]) > 4 * 80
    assert sum(lengths[1200:]) < 4 * 60


def test_the_bandit_credits_the_length_that_was_drafted() -> None:
    bandit = Bandit(4, arms=(0, 2, 4), seed=1)

    def play(limit: int, n: int) -> None:
        bandit.begin(limit, "draft")
        bandit.learn(outcome(n, n))

    for n in (0, 2, 4):
        play(8, n)
    for _ in range(60):
        play(0, 0)  # the drafter has no proposal
    assert len({bandit.begin(8, "draft").limit for _ in range(3)}) == 1  # one arm a round
    played = []
    for _ in range(50):
        played.append(bandit.begin(8, "draft").limit)
        play(8, played[-1])
    assert played.count(4) > 35


@pytest.mark.parametrize("name", sorted(PRICED))
def test_policies_with_prices_draft_no_more_than_was_measured(name: PolicyName) -> None:
    costs = (1.0, 1.0, 1.0, *published_values("fit_y_data"))
    short = CostProfile.from_normalised(costs[:30])
    assert build_policy(SpecOptions(policy=name, n_max=100), short).n_max == 29
    assert build_policy(SpecOptions(policy=name, n_max=2), short).n_max == 2
    long = CostProfile.from_normalised(costs + costs[-1:] * 40)
    assert build_policy(SpecOptions(policy=name), long).n_max == 63


@pytest.mark.parametrize("name", sorted(BY_P))
def test_rules_read_probabilities_over_as_many_candidates_as_asked(name: PolicyName) -> None:
    curve = published_curves()[R1]
    for top_k in (0, 10):
        assert build_policy(SpecOptions(policy=name, p_top_k=top_k), curve).p_top_k == top_k


@given(
    name=st.sampled_from(sorted(PolicyName)),
    curve=st.sampled_from(sorted(published_curves())),
    probs=st.lists(st.floats(0.0, 1.0), min_size=64, max_size=64),
    limit=st.integers(0, 63),
)
def test_no_policy_keeps_more_than_it_sampled_or_may(
    name: PolicyName, curve: str, probs: list[float], limit: int
) -> None:
    profile = published_curves()[curve]
    try:
        policy = build_policy(SpecOptions(policy=name), profile)
    except BadProfile:
        return
    walk, n = policy.begin(limit, "draft"), 0
    while walk.wants:
        walk.feed(probs[n])
        n += 1
    assert 0 <= walk.n_best <= n <= min(limit, policy.n_max)
    assert walk.gain >= 0.0


def test_the_simulator_plays_every_published_policy() -> None:
    makes = named_policies()
    assert set(PolicyName) <= set(makes)
    smooth = {"r1": published_curves()[R1]}
    assert set(buildable(makes, smooth)) == set(makes)
