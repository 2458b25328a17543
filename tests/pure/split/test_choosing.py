"""Split or not, by batch size: at start by measurement, while serving by comparing."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.split.choosing import Watch, n_to_compare, split_sizes, words

times = st.dictionaries(st.integers(1, 64), st.floats(1e-3, 10.0), max_size=8)


@given(times, times, st.sets(st.integers(1, 64)))
def test_no_size_is_split_that_was_measured_slower(
    old_s: dict[int, float], split_s: dict[int, float], before: set[int]
) -> None:
    chosen = split_sizes(old_s, split_s, 64, before)
    for n in old_s.keys() & split_s.keys():
        if split_s[n] >= old_s[n]:
            assert n not in chosen
        if split_s[n] < 0.97 * old_s[n]:
            assert n in chosen
    both = old_s.keys() & split_s.keys()
    assert all(min(both) <= n <= max(both) for n in chosen)


def test_a_tie_keeps_what_is() -> None:
    old_s, split_s = {1: 1.0, 4: 1.0}, {1: 0.98, 4: 0.98}
    assert split_sizes(old_s, split_s, 64) == frozenset()
    assert split_sizes(old_s, split_s, 64, before=range(1, 5)) == {1, 2, 3, 4}
    assert split_sizes(old_s, split_s, 2, before=range(1, 5)) == {1, 2}


def test_the_choice_is_said_with_its_reason() -> None:
    old_s, split_s = {1: 0.2, 2: 0.3, 8: 0.3}, {1: 0.1, 2: 0.15, 8: 0.6}
    chosen = split_sizes(old_s, split_s, 64)
    assert words(chosen, old_s, split_s) == (
        "layers are split in batches of 1 to 3 tokens "
        "(at 1: 100.0 ms split, 200.0 ms by --min-batch alone)"
    )
    assert words((), {1: 0.1}, {1: 0.2}) == (
        "no layer is split: not faster by measurement "
        "(at 1: 200.0 ms split, 100.0 ms by --min-batch alone)"
    )
    assert words((), {}, {}) == "no layer is split: nothing was measured"


@given(st.floats(1e-4, 2.0))
def test_timing_one_token_leaves_time_for_further_sizes(one_s: float) -> None:
    most_s = min(max(2.0, 40 * one_s), 7.0)
    n = n_to_compare(1, one_s, most_s, 16)
    assert 3 <= n <= 16
    assert n == 3 or 4 * n * one_s <= most_s / 3 + 1e-9
    assert n_to_compare(8, one_s, most_s, 16) == 3


def served(
    watch: Watch, n_decodes: int, old_s: float, split_s: float, noise: float = 0.0, seed: int = 0
) -> float:
    """Seconds of all decodes of one token, in whatever way the watch says."""
    rng, total = random.Random(seed), 0.0
    for _ in range(n_decodes):
        seconds = (split_s if watch.splits(1) else old_s) * (1.0 + noise * rng.random())
        total += seconds
        watch.took(1, seconds)
    return total


def test_what_serves_slower_than_it_was_measured_is_given_up() -> None:
    watch = Watch({1})
    assert watch.splits(1)
    assert not watch.splits(2)
    served(watch, 100, old_s=1.0, split_s=4.0)
    assert not watch.splits(1)


@settings(deadline=None, max_examples=30)
@given(st.booleans(), st.floats(0.2, 5.0), st.integers(0, 99))
def test_in_the_long_run_it_is_as_fast_as_the_faster_way(
    split: bool, ratio: float, seed: int
) -> None:
    n = 6000
    total_s = served(Watch({1} if split else ()), n, 1.0, ratio, noise=0.05, seed=seed)
    best_s = min(1.0, ratio) * 1.025 * n
    worse = max(1.0, ratio) / min(1.0, ratio)
    # 64 decodes until the first trial, then 10 of them each time the wait has doubled.
    assert total_s <= best_s * 1.035 + (66 + 10 * 7) * (worse - 1.0) * min(1.0, ratio) * 1.05


def test_a_change_is_told_so_that_graphs_are_built_anew() -> None:
    watch, told = Watch(()), []
    for i in range(200):
        before = watch.splits(1)
        changed = watch.took(1, 0.5 if before else 1.0)
        assert changed == (watch.splits(1) != before)
        if changed:
            told.append((i, watch.splits(1)))
    assert told == [(64, True), (137, False), (145, True)]  # the last two: a trial of the other


@settings(deadline=None, max_examples=30)
@given(st.floats(2.0, 1e4), st.booleans())
def test_a_trial_of_a_way_that_is_slower_by_far_costs_as_much_as_two(
    ratio: float, split: bool
) -> None:
    """At most twice the time of its 8 decodes and one decode more, of which 64 come before."""
    watch = Watch({1} if split else ())
    total_s = served(watch, 73, *((ratio, 1.0) if split else (1.0, ratio)))
    assert watch.prefers(1) == split
    assert total_s <= 73 + 16 + ratio


def test_a_change_is_told_with_both_times() -> None:
    watch = Watch({1, 2})
    served(watch, 100, old_s=0.01, split_s=0.02)
    assert watch.last_change is not None
    assert watch.last_change.words == (
        "no layer is split in batches of 1 token from now on, faster while answering "
        "(at 1: 20.0 ms split, 10.0 ms by --min-batch alone)"
    )
    assert watch.splits(2)


def test_what_goes_back_and_forth_is_tried_more_and_more_rarely() -> None:
    """The other way is always the faster one, once it was gone over to."""
    watch, at = Watch(()), []
    for i in range(2000):
        before = watch.last_change
        split = watch.splits(1)
        watch.took(1, 1.0 if split != watch.prefers(1) else 2.0)
        if watch.last_change is not before:
            at.append(i)
    waits = [b - a for a, b in zip(at, at[1:], strict=False)]
    assert len(waits) >= 3
    assert all(b > 1.5 * a for a, b in zip(waits[1:], waits[2:], strict=False))


@given(
    old=st.lists(st.floats(1e-3, 1.0), min_size=64, max_size=64),
    split=st.lists(st.floats(1e-3, 1.0), min_size=64, max_size=64),
    measured=st.sets(st.integers(1, 64), min_size=1),
)
def test_the_chosen_way_never_makes_a_larger_batch_faster_than_a_smaller_one(
    old: list[float], split: list[float], measured: set[int]
) -> None:
    """Given that neither way alone does, and that both are linear between measured sizes."""
    sizes = sorted({1, *measured})
    old_s, split_s = (
        dict(
            zip(
                range(1, 65), np.interp(range(1, 65), sizes, sorted(way)[: len(sizes)]), strict=True
            )
        )
        for way in (old, split)
    )
    chosen = split_sizes(*({n: way[n] for n in sizes} for way in (old_s, split_s)), 64)
    took = [split_s[n] if n in chosen else old_s[n] for n in range(1, 65)]
    assert all(a <= b / 0.97 * (1 + 1e-9) for a, b in pairwise(took))
