"""The ways that are chosen by default never make a larger batch faster than a smaller one."""

from __future__ import annotations

import random

import pytest

from offload.plan.min_batch import (
    VERIFY_MOST,
    Times,
    choose,
)

NOISE = 0.03  # as much faster streaming must be to be chosen


def rising(draw: random.Random, n_most: int, slots: int) -> list[float]:
    """Times of 1 to `n_most` tokens that never fall, with steps where `slots` are used up."""
    time, out = draw.uniform(1, 40), []
    slope = draw.choice((0.0, 0.01, 0.3, 2.0))
    for n in range(1, n_most + 1):
        time += slope * draw.random() + (draw.uniform(0, 30) if n == slots else 0.0)
        out.append(time)
    return out


@pytest.mark.parametrize("seed", range(40))
def test_the_time_of_a_batch_does_not_fall_where_the_way_changes(seed: int) -> None:
    draw = random.Random(seed)
    slots = draw.choice((2, 4, 9, 30))
    cpu, streamed = rising(draw, VERIFY_MOST, 0), rising(draw, VERIFY_MOST, slots)
    if draw.random() < 0.5:  # too few slots for larger batches, which the CPU then computes
        streamed[slots:] = cpu[slots:]
    times = Times(dict(enumerate(cpu, 1)), dict(enumerate(streamed, 1)))
    chosen = choose({"experts": times}, VERIFY_MOST, 16, 4)
    taken = [
        (streamed if chosen.streams(n, experts=True) else cpu)[n - 1]
        for n in range(1, VERIFY_MOST + 1)
    ]
    for n, (before, after) in enumerate(zip(taken, taken[1:], strict=False), 1):
        assert after >= (1 - NOISE) * before, f"T({n + 1}) is {after:.2f} and T({n}) {before:.2f}"
