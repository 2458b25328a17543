"""Drafts that cost nothing but their verification, as n-grams do: what wrong ones may cost."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from specdec.costs.profile import CostProfile
from specdec.drafters.ngrams import match_probability
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Round

# Experts stream: a batch of four tokens copies almost as many experts as one of sixteen.
STEEP = CostProfile((1.0, 2.0, 3.0, *(3.9,) * 14))
_LIMIT = 16


class Text:
    """A text that is written with drafts of an n-gram drafter, by a clock of decodes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.policy = Throughput(STEEP)
        self.n_drafted = 0

    def write(self, n_tokens: int, chance: float) -> float:
        """Write tokens, of which a drafted one is right by `chance`. Returns plain decodes' time.

        That is the time that plain decoding takes, in units of what was taken.
        """
        took_s, n_written = 0.0, 0
        while n_written < n_tokens:
            n_right, seconds = self._round(chance)
            n_written += 1 + n_right
            took_s += seconds
        return n_written * STEEP.time(1) / took_s

    def _round(self, chance: float) -> tuple[int, float]:
        walk = self.policy.begin(_LIMIT, "suffix")
        probs, n = [match_probability(2 + i) for i in range(_LIMIT)], 0
        while walk.wants and n < _LIMIT:
            walk.feed(probs[n])
            n += 1
        is_right = [self._random.random() < chance for _ in range(n)]
        kept = walk.n_best
        n_right = next((i for i, right in enumerate(is_right[:kept]) if not right), kept)
        # A right token is 1, and the text consists of nothing else.
        tokens = [int(right) for right in is_right]
        dropped = tuple(zip(tokens[kept:], probs[kept:n], strict=True))
        decision = Decision(kept, walk.reason)
        draft = Draft(tuple(tokens[:kept]), tuple(probs[:kept]), "suffix", decision, dropped)
        verify_s = STEEP.time(1 + kept)
        self.policy.learn(Round(draft, n_right, (1,) * (n_right + 1), 0.0, verify_s))
        self.n_drafted += kept
        return n_right, verify_s


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_wrong_drafts_stop_after_a_few_tokens_were_lost(chance: float, seed: int) -> None:
    """A text of 200 tokens may lose 5 %: what is allowed at its start, and the draft beyond it."""
    assert Text(seed).write(200, chance) >= 0.95


def test_a_text_that_begins_to_repeat_itself_is_soon_drafted() -> None:
    ratios = []
    for seed in range(8):
        text = Text(seed)
        text.write(200, 0.3)
        n_before = text.n_drafted
        text.write(40, 0.97)
        assert text.n_drafted > n_before
        ratios.append(text.write(400, 0.97) / Text(seed).write(440, 0.97))
    assert fmean(ratios) >= 0.9
