"""Decodes wait after more layers the fewer experts are missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.stream.layers_ahead import Waits, segments_of

N_LAYERS = 48
LAYER_S, WAIT_S = 125e-6, 10e-6  # a wait takes 10 µs more, which the host does not see


def seen(missing: float, n_decodes: int = 100, *, is_async: bool = True) -> Waits:
    """Return averages of decodes with one wait a layer. `missing`: share of layers with a miss."""
    waits = Waits(is_async=is_async)
    for n in range(n_decodes):
        n_missing = int(missing * N_LAYERS * (n + 1)) - int(missing * N_LAYERS * n)
        waits.saw(
            N_LAYERS, n_missing, 0, N_LAYERS, N_LAYERS * WAIT_S, N_LAYERS * (LAYER_S + WAIT_S)
        )
    return waits


def test_decodes_of_hits_wait_once() -> None:
    assert seen(0.0).choose(N_LAYERS) == N_LAYERS


@pytest.mark.parametrize("missing", [0.25, 0.5, 1.0])
def test_decodes_of_misses_wait_for_each_layer(missing: float) -> None:
    assert seen(missing).choose(N_LAYERS) == 1


def test_the_first_decodes_and_those_of_the_host_wait_for_each_layer() -> None:
    assert seen(0.0, 3).choose(N_LAYERS) == 1
    assert seen(0.0, is_async=False).choose(N_LAYERS) == 1
    assert seen(0.0).choose(1) == 1


def test_fewer_misses_mean_fewer_waits() -> None:
    chosen = [seen(missing).choose(N_LAYERS) for missing in (0.2, 0.05, 0.02, 0.003, 0.0)]
    assert chosen == sorted(chosen)
    assert len(set(chosen)) >= 4


def test_what_was_long_ago_is_forgotten() -> None:
    waits = seen(0.5)
    for _ in range(100):
        waits.saw(N_LAYERS, 0, 0, N_LAYERS, N_LAYERS * WAIT_S, N_LAYERS * (LAYER_S + WAIT_S))
    assert waits.choose(N_LAYERS) == N_LAYERS


@given(st.integers(0, N_LAYERS), st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_the_cost_is_that_of_each_case_by_its_chance(n_missing: int, n: int) -> None:
    waits = seen(n_missing / N_LAYERS)
    miss, wait_s, cost_s = n_missing / N_LAYERS, WAIT_S + 10e-6, 0.0
    for first in range(n - 1):  # the first layer with a missing expert
        n_repeated = n - 1 - first
        cost_s += (1 - miss) ** first * miss * n_repeated * (LAYER_S + wait_s)
    assert waits.cost_s(n, N_LAYERS) == pytest.approx((wait_s + cost_s) / n, rel=1e-3)


@given(st.integers(2, 60), st.integers(2, 60))
def test_each_layer_is_ahead_or_the_last_of_its_wait(n_layers: int, per_wait: int) -> None:
    ends = -1
    for first, end in segments_of(n_layers, per_wait):
        assert first == ends + 1
        assert end - first <= max(1, per_wait - 1) or per_wait >= n_layers
        ends = end
    assert ends >= n_layers - 2
    if per_wait >= n_layers:
        assert segments_of(n_layers, per_wait) == [(0, n_layers)]
