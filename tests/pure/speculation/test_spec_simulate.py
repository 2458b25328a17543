"""The default policy in the simulator: what it must hold on every published curve."""

from __future__ import annotations

import math
import re
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from types import FrameType

import numpy as np
import pytest

from lab.simulation.simulate import (
    DraftTrace,
    constant_rate,
    fixed_oracle,
    parse_trace,
    simulate,
    synthetic_trace,
)
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import published_curves
from specdec.errors import SpecDecError
from specdec.policies.rules import Fixed, PMin
from specdec.policies.throughput import Throughput
from specdec.types import Policy

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
    """The oracle knows the best length of each segment, so of both texts if they alternate.

    `-s` shows the worst of 24 curves.
    """
    ratios, to_plain = [], []
    for seed in range(1000, 1024):
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


def test_glm_whose_batch_of_two_never_pays_is_exploited() -> None:
    profile = with_draft(CURVES["glm-4.6-rpc"], 0.05)
    text = trace("code", 1.0)
    run = simulate(text, profile, Throughput(profile))
    assert run.rate > 1.8 / profile.step_s[0]


def test_a_linear_cost_makes_it_choose_nothing_and_cost_nothing() -> None:
    # What two CPU cores measured: T(2)/T(1) = 1.6, T(4)/T(1) = 2.8.
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "0 probabilities"),
        ('{"p": 0.5}', "line 1"),
        ('{"p": 0.5, "accepted": true}\nnonsense', "line 2"),
        ('{"p": 1.5, "accepted": true}', "line 1"),
    ],
)
def test_a_damaged_trace_is_refused_with_its_place(text: str, message: str) -> None:
    with pytest.raises(SpecDecError, match=message):
        parse_trace(text)


@pytest.mark.parametrize(("kind", "most"), [("code", 34), ("prose", 59)])
def test_deciding_a_drafted_token_takes_few_calls(kind: str, most: float) -> None:
    """Calls of functions, Python's and native ones, the dynamic programme and the refresh of T(n)
    included. `scripts/lab/run round-cost` says what they take in microseconds."""
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
    # Batches of 1 to 3 tokens stream, larger ones are the CPU's: T(4) is less than T(1).
    timed = {1: 12.0, 2: 23.0, 3: 25.0, 4: 7.4, 8: 8.2, 16: 12.8, 33: 23.0, 64: 24.0}
    times_ms = np.interp(range(1, 65), list(timed), list(timed.values()))
    jagged = CostProfile(tuple((times_ms / 1e3).tolist()), draft_step_s=2e-4)
    text = synthetic_trace(4000, seed=5, kinds=kinds)
    best = max(simulate(text, jagged, Fixed(m)).rate for m in range(17))
    assert simulate(text, jagged, Throughput(jagged)).rate >= best
    # Serving, sizes whose times contradict others are timed again: that takes 1 % at most.
    assert simulate(text, jagged, Throughput(jagged)).rate >= 0.99 * best
