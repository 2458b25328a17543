"""The named policies against golden values from the published cost curves."""

from __future__ import annotations

import pytest

from specdec.costs.profile_io import published_values
from specdec.policies.bandit import Bandit
from specdec.policies.cost_curve import PUBLISHED, fit
from specdec.policies.fixed import Fixed
from specdec.policies.p_min import PMin
from specdec.policies.published import Costs, PMins, Ratio, Rational, Speed, ratio_threshold
from specdec.types import Decision, Draft, Policy, Round

R1 = "deepseek-r1-0528-q4_x"
GLM = "glm-4.6-rpc"
MISTRAL = "mistral-large-2411"
V3 = "deepseek-v3-0324-pp-sweep"


def constant(policy: Policy, p: float, limit: int) -> tuple[int, int]:
    """(sampled, kept) when every token has probability p."""
    walk = policy.begin(limit, "draft")
    n, wants = 0, walk.wants
    while wants:
        wants = walk.feed(p)
        n += 1
    return n, walk.n_best


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
def test_v1_and_v2_reproduce_the_reference_runs(p: float) -> None:
    assert constant(PMins(published_values(V3)), p, 64) == V1[p]
    assert constant(Rational(), p, 64) == V1[p]


@pytest.mark.parametrize("p", V3A_RTX)
def test_v3a_reproduces_the_reference_runs(p: float) -> None:
    rtx = Speed(published_values("rtx5000ada-qwen2.5-coder-32b-v3a"), 353.540, "a")
    m1 = Speed(published_values("m1ultra-qwen2.5-coder-32b-v3a"), 231.948, "a")
    assert constant(rtx, p, 32) == V3A_RTX[p]
    assert constant(m1, p, 32) == V3A_M1[p]


@pytest.mark.parametrize("p", V3B_RTX)
def test_v3b_reproduces_the_reference_runs(p: float) -> None:
    draft = published_values("rtx5000ada-qwen2.5-coder-0.5b-draft")
    policy = Speed(published_values("rtx5000ada-qwen2.5-coder-32b-v3b"), draft[0], "b")
    assert constant(policy, p, 32) == V3B_RTX[p]


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
def test_v4_reproduces_the_reference_runs(curve: str, p: float, kept: tuple[int, ...]) -> None:
    costs = published_values(curve)
    assert tuple(constant(Costs(costs, la), p, 64)[1] for la in (0, 1, 6)) == kept


def test_the_three_fits_are_reproduced_to_four_decimals() -> None:
    y = published_values("fit_y_data")
    found = [fit(y, family) for family in ("exponential", "power", "rational")]
    parameters = [(round(f.a, 4), round(f.b, 4), round(f.c, 4)) for f in found]
    assert parameters == [
        (0.5327, 0.1433, 0.2361),
        (0.8464, 0.3709, 0.0219),
        (2.6288, 3.996, 0.1761),
    ]
    assert [round(f.rmse, 5) for f in found] == [0.01738, 0.0094, 0.00187]


def test_the_rational_thresholds_are_the_documented_ones() -> None:
    expected = {0: 1.0, 1: 1.0, 2: 1.0, 3: 0.834, 4: 0.7023, 5: 0.6145, 8: 0.4683, 16: 0.3308}
    for m, value in {**expected, 32: 0.2558, 63: 0.2172}.items():
        assert PUBLISHED.threshold(m) == pytest.approx(value, abs=6e-5)


def test_p_min_drops_the_weak_token_and_its_old_rule_kept_it() -> None:
    walk = PMin(16, 0.75).begin(16, "draft")
    assert [walk.feed(p) for p in (0.9, 0.8, 0.3)] == [True, True, False]
    assert walk.n_best == 2
    old = PMin(16, 0.75, push_before_test=True).begin(16, "draft")  # llama.cpp's old loop
    old.feed(0.001)
    assert old.n_best == 1
    new = PMin(16, 0.75).begin(16, "draft")
    new.feed(0.001)
    assert new.n_best == 0


def test_p_min_drops_drafts_shorter_than_n_min() -> None:
    walk = PMin(16, 0.5, n_min=3).begin(16, "draft")
    for p in (0.9, 0.9):
        walk.feed(p)
    assert walk.n_best == 0
    walk.feed(0.9)
    assert walk.n_best == 3


def test_fixed_drafts_its_block_and_never_more_than_the_limit() -> None:
    assert constant(Fixed(4), 0.01, 9) == (4, 4)
    assert constant(Fixed(4), 0.01, 2) == (2, 2)
    assert constant(Fixed(0), 1.0, 9) == (0, 0)


def outcome(n_drafted: int, n_accepted: int, seconds: float = 1.0) -> Round:
    draft = Draft((1,) * n_drafted, (0.5,) * n_drafted, "draft", Decision(n_drafted, ""))
    return Round(draft, n_accepted, (1,) * (n_accepted + 1), 0.0, seconds)


def test_the_ratio_threshold_ramps_from_a_third_to_a_half() -> None:
    assert [round(ratio_threshold(n), 3) for n in (1, 4, 8, 20)] == [0.3, 0.386, 0.5, 0.5]


def test_ratio_lengthens_blocks_that_are_accepted_and_shortens_the_others() -> None:
    policy = Ratio(n_max=8)
    for _ in range(60):
        policy.learn(outcome(policy.length, policy.length))
    assert policy.length == 8
    for _ in range(60):
        policy.learn(outcome(policy.length, 0))
    assert policy.length == 1


def test_the_bandit_finds_the_arm_with_the_most_tokens_per_second() -> None:
    policy = Bandit(n_max=8, seed=3)
    chosen = []
    for _ in range(400):
        walk = policy.begin(8, "draft")
        m = walk.limit
        chosen.append(m)
        policy.learn(outcome(m, min(m, 3), 1.0 + 0.1 * m))
    assert max(set(chosen[200:]), key=chosen[200:].count) == 3


def test_the_bandit_forgets_what_was_true_long_ago() -> None:
    """Drafts of 4 pay at first and never again: it ends up drafting nothing nearly always."""
    bandit = Bandit(4, arms=(0, 4), seed=1)
    lengths = []
    for i in range(1500):
        n = bandit.begin(8, "draft").limit
        n_accepted = n if i < 1000 else 0
        draft = Draft((1,) * n, (0.9,) * n, "draft", Decision(n, ""))
        bandit.learn(Round(draft, n_accepted, (1,) * (n_accepted + 1), 0.1 * n, 1.0))
        lengths.append(n)
    assert sum(lengths[900:1000]) > 4 * 80
    assert sum(lengths[1200:]) < 4 * 60


def test_the_bandit_credits_what_was_played() -> None:
    bandit = Bandit(4, arms=(0, 2, 4), seed=1)

    def play(limit: int, n_drafted: int, n_accepted: int) -> None:
        bandit.begin(limit, "draft")
        draft = Draft((1,) * n_drafted, (0.9,) * n_drafted, "draft", Decision(n_drafted, ""))
        bandit.learn(Round(draft, n_accepted, (1,) * (n_accepted + 1), 0.0, 1.0))

    for n in (0, 2, 4):
        play(8, n, n)
    for _ in range(60):
        play(0, 0, 0)  # a drafter without a proposal
    lengths = [bandit.begin(8, "draft").limit for _ in range(3)]
    assert len(set(lengths)) == 1  # one arm a round, however many drafters ask
    played = []
    for _ in range(50):
        played.append(bandit.begin(8, "draft").limit)
        play(8, played[-1], played[-1])
    assert played.count(4) > 35
