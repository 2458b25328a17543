"""Drafts of whole blocks, whose price does not depend on their length, on published T(n)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.simulation import DraftTrace, published_curves, simulate, synthetic_trace
from specdec.costs.profile import CostProfile
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput

BLOCK = 15
CURVES = published_curves()


def text(*kinds: str) -> DraftTrace:
    return synthetic_trace(4000, seed=3, kinds=kinds)


def passing(curve: str, share: float) -> CostProfile:
    """The profile with a pass that takes a share of T(1)."""
    return replace(CURVES[curve], draft_step_s=share * CURVES[curve].step_s[0])


def priced(profile: CostProfile) -> Throughput:
    return Throughput(profile, n_max=min(BLOCK, profile.n_max - 1))


def best_fixed(trace: DraftTrace, profile: CostProfile) -> float:
    """The rate of the block's best constant length, which is known only afterwards."""
    lengths = range(min(BLOCK, profile.n_max - 1) + 1)
    return max([simulate(trace, profile, Fixed(m), "dflash", BLOCK).rate for m in lengths])


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("share", [0.05, 0.2])
def test_blocks_beat_their_best_fixed_length_on_mixed_text(curve: str, share: float) -> None:
    """Whole blocks have 3.3 tokens a round, about as many as published ones (llama.cpp #27342)."""
    profile, trace = passing(curve, share), text("code", "prose")
    whole = simulate(trace, profile, Fixed(BLOCK), "dflash", BLOCK)
    assert 3.2 < whole.n_tokens / whole.n_rounds < 3.6
    rate = simulate(trace, profile, priced(profile), "dflash", BLOCK).rate
    assert rate >= 1.05 * best_fixed(trace, profile)
    assert rate >= 1.05 / profile.step_s[0]


@pytest.mark.parametrize("kinds", [("prose",), ("noise",), ("code", "noise")])
@pytest.mark.parametrize("curve", CURVES)
def test_blocks_never_lose_to_plain_decoding(curve: str, kinds: tuple[str, ...]) -> None:
    for share in (0.05, 0.2, 1.0):
        profile = passing(curve, share)
        rate = simulate(text(*kinds), profile, priced(profile), "dflash", BLOCK).rate
        assert rate >= 0.99 / profile.step_s[0], f"a pass of {share} T(1)"


def test_the_length_of_a_block_does_not_depend_on_the_price_of_its_pass() -> None:
    """A dear pass is asked for more rarely, but a block that was drafted is cut as before.

    A drafter that spends the same time for each token drafts fewer of them.
    """
    trace, lengths = text("code"), {}
    for source in ("dflash", "mtp"):
        for share in (0.02, 0.3):
            profile = passing("mistral-large-2411", share)
            block = BLOCK if source == "dflash" else 0
            run = simulate(trace, profile, priced(profile), source, block)
            lengths[source, share] = run.n_drafted / max(1, run.n_rounds)
    assert lengths["dflash", 0.3] > 0.9 * lengths["dflash", 0.02]
    assert lengths["mtp", 0.3] < 0.6 * lengths["mtp", 0.02]


def test_a_pass_that_takes_longer_than_it_saves_is_tried_only_now_and_then() -> None:
    profile = passing("mistral-large-2411", 8.0)
    run = simulate(text("code"), profile, priced(profile), "dflash", BLOCK)
    assert 0 < run.n_steps < 0.01 * run.n_rounds
    assert run.rate >= 0.97 / profile.step_s[0]
    assert np.isfinite(run.rate)


@pytest.mark.parametrize(("share", "n_most"), [(0.1, 14), (2.5, 3)])
def test_a_new_drafters_first_block_costs_no_more_than_the_trust_in_it(
    share: float, n_most: int
) -> None:
    """Of 3 tokens, a pass takes its share, and each verified token 0.2 of a token."""
    profile = CostProfile(tuple(1.0 + 0.2 * n for n in range(BLOCK + 1)), draft_step_s=share)
    assert priced(profile).begin(BLOCK, "dflash").limit == n_most
