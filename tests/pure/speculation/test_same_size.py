"""The price of another batch size, which `throughput` learns while it decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.trees import Sizes, load, measured_curve, replay_chain, replay_fixed, replay_trees
from specdec.policies.same_size import SameSize

# Milliseconds of the embedded target's decodes if its dense weights cross a link of 1 GB/s or of
# 400 MB/s (docs/results.md).
CURVES = {
    "1 GB/s": measured_curve({1: 2.8, 2: 3.5, 4: 3.9, 8: 5.2, 16: 7.6}),
    "400 MB/s": measured_curve({1: 4.7, 2: 5.4, 4: 6.1, 8: 7.1, 16: 10.1}),
}
STEP = 0.05  # draft step in units of T(1)
FIXED = [(n, 0.0) for n in (1, 2, 4, 8)] + [(16, p) for p in (0.5, 0.75, 0.9)]


@given(st.lists(st.sampled_from([1, 2, 5]), min_size=60), st.floats(0.0, 1.0))
def test_what_the_same_size_saves_is_learnt_from_any_order(sizes: list[int], change: float) -> None:
    same, last, n_both = SameSize(), 0, {n: [0, 0] for n in sizes}
    for n in sizes:
        same.observe(n, 1.0 + 0.1 * n + change * (n != last))
        n_both[n][n == last] += 1
        last = n
    is_known = any(min(counts) >= 3 for counts in n_both.values())
    # The first decode of all counts as another size.
    assert same.saved_s == pytest.approx(change if is_known else 0.0, abs=1e-9)


def test_a_disturbed_decode_hardly_moves_what_the_same_size_saves() -> None:
    same = SameSize()
    for n in [1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2, 1, 1, 2]:
        same.observe(n, 1.0)
    same.observe(1, 100.0)
    assert same.saved_s < 0.2


def test_slower_repeats_save_nothing() -> None:
    same = SameSize()
    for n in [1, 2, 2, 1, 1, 2, 2, 1, 1, 2, 2, 1, 1]:
        same.observe(n, 2.0 if n == same.n_rows else 1.0)
    assert same.saved_s == 0.0


@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("rate", list(CURVES))
@pytest.mark.parametrize("change", [0.0, 0.1, 0.3])
def test_the_default_is_no_slower_than_the_best_fixed_setting(
    mode: str, rate: str, change: float
) -> None:
    """Fixed lengths repeat one size, so they seldom pay for a change."""
    trees, curve, sizes = load()[mode], CURVES[rate], Sizes(change=change)
    best = max(replay_fixed(trees, curve, STEP, sizes, n, p) for n, p in FIXED)
    chain = replay_chain(trees, curve, STEP, sizes).rate / best
    tree = replay_trees(trees, curve, STEP, sizes).rate / best
    print(f"{rate} {mode}, change {change}: chains {chain:.3f}, trees {tree:.3f}")
    assert chain > 0.99
    assert tree > 1.02
