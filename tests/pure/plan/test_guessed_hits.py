"""Guessed hits: curves by number of experts, as sources have them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.times.hits import hit_rate, kept_hits, points_of
from offload.times.work import ModelWork, WeightWork

SIZES = (8, 16, 64, 128, 160, 256, 288, 384, 512, 896)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.001, 1), st.sampled_from(SIZES))
def test_hits_rise_with_the_slots_and_are_none_below_what_a_step_touches(
    share: float, more: float, in_use: float, n: int
) -> None:
    assert 0.0 <= hit_rate(share, in_use, n) <= hit_rate(max(share, more), in_use, n) <= 1.0
    if share <= in_use and share < 1:
        assert hit_rate(share, in_use, n) == 0.0


@pytest.mark.parametrize(
    ("n_experts", "n_used", "share", "least", "most"),
    [
        (512, 10, 0.125, 0.62, 0.67),  # Qwen3.8-Flash-Next: kekzl/imp #2061, llama.cpp #27861
        (512, 10, 0.25, 0.789, 0.81),
        (256, 8, 0.33, 0.333, 0.811),  # Qwen3.6-35B-A3B, cold and warm: JustVugg/colibri #1040
        (256, 8, 0.066, 0.071, 0.408),
        (256, 6, 0.125, 0.13, 0.64),  # DeepSeek-V4-Flash: FreeToken #174, nibor1896/Crow #30
        (288, 8, 0.35, 0.70, 0.81),
        (128, 8, 0.19, 0.70, 0.741),  # Qwen3-30B-A3B: kekzl/imp #1374
        (128, 8, 0.38, 0.85, 0.894),
        (128, 4, 0.03, 0.0, 0.085),  # gpt-oss-120b: Helldez/BigMoeOnEdge #33
        (16, 4, 0.5, 0.58, 0.83),  # the embedded pair, on code and on prose
    ],
)
def test_guesses_lie_between_what_sources_have(
    n_experts: int, n_used: int, share: float, least: float, most: float
) -> None:
    assert least <= hit_rate(share, n_used / n_experts, n_experts) <= most + 1e-3


def test_the_curve_depends_on_the_number_of_experts() -> None:
    at_a_third = {n: hit_rate(0.33, 0.03, n) for n in SIZES}
    assert at_a_third[512] == at_a_third[896] > at_a_third[256] == at_a_third[384]
    assert at_a_third[128] > at_a_third[256] > at_a_third[16] == at_a_third[8]
    assert all(points_of(n)[-1] == (1.0, 1.0) for n in SIZES)


def test_more_experts_used_leave_fewer_hits_to_few_slots() -> None:
    few = [hit_rate(0.05, used / 256, 256) for used in (2, 4, 8, 16)]
    assert few == sorted(few, reverse=True)
    assert few[0] > few[-1] == 0.0


def test_slots_never_hit_less_than_their_share() -> None:
    work = ModelWork(48, WeightWork(1e8, 1e8), WeightWork(1e8, 1e8), 48, WeightWork(1e6, 1e6), 8, 2)
    for n_experts, n_used in ((8, 2), (64, 8), (256, 8), (896, 16)):
        some = replace(work, n_experts=n_experts, n_used=n_used)
        for share in (0.1, 0.3, 0.6, 0.9):
            assert kept_hits(some, share, n_used) >= share - 1e-9


def test_hits_that_rounding_lifts_above_one_are_all_hits() -> None:
    """The excess over 1 is divided by the share of the other experts, which is nearly 0 here."""

    class Lifted:
        def at(self, share: float) -> float:
            return 1.0 + 1e-9

    part = WeightWork(1e8, 1e8)
    work = ModelWork(48, part, part, 48, part, 128, 8, hits=Lifted())  # type: ignore[arg-type]
    with np.errstate(all="raise"):
        assert kept_hits(work, 1.0 - 1e-15, 128.0) == 1.0
