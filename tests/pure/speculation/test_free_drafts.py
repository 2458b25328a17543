"""Drafts that cost nothing but their verification, as n-grams do: what wrong ones may cost."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

import numpy as np
import pytest

from lab.simulation import DraftTrace, Simulated, simulate
from specdec.costs.profile import CostProfile
from specdec.drafters.ngrams import match_probability
from specdec.policies.throughput import Throughput

# Experts stream: a batch of four tokens copies almost as many experts as one of sixteen.
STEEP = CostProfile((1.0, 2.0, 3.0, *(3.9,) * 14))


@dataclass(frozen=True)
class Matches(DraftTrace):
    """A text whose drafts continue matches of two tokens."""

    def p_of(self, at: int, place: int) -> float:
        return match_probability(2 + place)


def written(policy: Throughput, n_tokens: int, chance: float, seed: int) -> Simulated:
    """Write a text, of which a drafted token is right by `chance`."""
    is_right = np.random.default_rng(seed).random(n_tokens) < chance
    trace = Matches((0.0,) * n_tokens, tuple(is_right.tolist()))
    return simulate(trace, STEEP, policy, "suffix")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_wrong_drafts_stop_after_a_few_tokens_were_lost(chance: float, seed: int) -> None:
    """A text of 200 tokens may lose 5 %: what is allowed at its start, and the draft beyond it."""
    assert written(Throughput(STEEP), 200, chance, seed).rate * STEEP.time(1) >= 0.95


def test_a_text_that_begins_to_repeat_itself_is_soon_drafted() -> None:
    ratios = []
    for seed in range(8):
        policy = Throughput(STEEP)
        written(policy, 200, 0.3, seed)
        assert written(policy, 40, 0.97, seed + 8).n_drafted > 0
        fresh = written(Throughput(STEEP), 440, 0.97, seed + 16)
        ratios.append(written(policy, 400, 0.97, seed + 16).rate / fresh.rate)
    assert fmean(ratios) >= 0.9
