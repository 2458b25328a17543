"""Prompts of any size are divided so that CPU and device end together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.division import HIT, HOST, STREAMED, SplitCosts, split_pairs
from offload.schedule.splitter import all_on_device, stay
from offload.stream.ways_in_use import WaysInUse
from offload.times.decodes import best_s, cpu_s, hybrid_s, streamed_s
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.min_batch import MinBatch
from offload.times.ways import Ways
from offload.times.work import ModelWork, WeightWork

N, K = 64, 4
COPY_S, ROW_S = 1e-3, 2e-5


def chosen(n_tokens: int, seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    """Each token's experts, of which some are chosen more often."""
    rng = np.random.default_rng(seed)
    scores = rng.random((n_tokens, N)) * rng.random(N)
    return scores.argpartition(-K, axis=1)[:, -K:].astype(np.int32)


@given(st.integers(65, 4096), st.integers(0, 20), st.floats(0.0, 0.5))
def test_both_sides_end_within_one_expert_of_each_other(
    n_tokens: int, seed: int, share: float
) -> None:
    ids = chosen(n_tokens, seed)
    rows = np.bincount(ids.ravel(), minlength=N)
    resident = np.random.default_rng(seed).random(N) < share
    costs = SplitCosts(
        np.arange(17) * ROW_S, np.arange(17) * 1e-8, 0.0, 0.0, COPY_S, kinds=(1 / 8,) * 8
    )
    kind = split_pairs(ids, resident, costs, rows).kind
    used = rows > 0
    assert np.all(kind[used & resident] == HIT)
    streamed, host = (used & ~resident & (kind == side) for side in (STREAMED, HOST))
    if streamed.any() and host.any():
        assert rows[streamed].min() >= rows[host].max(), "each copy takes equally long"
    cpu, link = rows[host].sum() * ROW_S, streamed.sum() * COPY_S
    if host.any():  # one expert more on the link would not end sooner
        assert cpu <= link + COPY_S + 1e-4
    if streamed.any():
        one = rows[streamed].min() * ROW_S
        assert link <= cpu + one + 1e-4


R1 = ModelWork(
    61, WeightWork(151e6, 250e6), WeightWork(760e6, 927e6), 58, WeightWork(26.5e6, 44.0e6), 256, 8
)


@pytest.mark.parametrize(("n_tokens", "gain"), [(128, 1.05), (512, 1.5), (1024, 1.2)])
def test_sharing_a_prompt_is_expected_to_beat_both_sides_alone(n_tokens: int, gain: float) -> None:
    """Both sides read RAM, which limits batches of 128 tokens."""
    slots = Sharing(100)
    alone = min(side(TYPICAL, R1, slots, n_tokens) for side in (cpu_s, streamed_s))
    shared = hybrid_s(TYPICAL, R1, slots, n_tokens)
    assert alone / shared > gain
    assert best_s(TYPICAL, R1, slots, n_tokens, hybrid=True) == shared


def test_prompts_are_shared_only_by_splitters_that_divide_them() -> None:
    ways = Ways(MinBatch(), may_split=True, splitter=stay)
    assert not ways.shares_prompts(512)
    divided = ways.splitting_by(all_on_device)
    assert divided.shares_prompts(65)
    assert not divided.shares_prompts(64), "the player splits these"
    assert not replace(divided, declined="a form is unknown").shares_prompts(65)


def test_a_trial_ends_with_the_ways_before_it_and_keeps_what_was_declined() -> None:
    before = Ways(MinBatch(), unsplit=frozenset({3}))
    ways = WaysInUse(before)
    with ways.trying(before.splitting_by(all_on_device)):
        assert ways.now.splits(2)
        assert not ways.now.splits(3)
        ways.decline("a form is unknown")
        assert not ways.now.splits(2)
    assert ways.now == replace(before, declined="a form is unknown")


def test_each_device_has_its_own_thresholds_and_splitter() -> None:
    one = Ways(MinBatch(5, 6))
    assert [one.min_batch_of(nth) for nth in (0, 1)] == [MinBatch(5, 6)] * 2
    each = replace(one, min_batches=(MinBatch(5, 6), MinBatch(9, 6)), splitters={1: all_on_device})
    assert [each.min_batch_of(nth).experts for nth in (0, 1)] == [5, 9]
    assert [each.splitter_of(nth) for nth in (0, 1)] == [stay, all_on_device]
