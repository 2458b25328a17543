"""Expected hits equal those of a simulated cache, and stay within their bounds."""

from __future__ import annotations

import numpy as np
import pytest
from cache_play import simulated_hits
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from offload.routing.routing import HALF_LIFE_STEPS, SHARES, recorded_hits
from offload.schedule.cache import Lrfu

Recorded = tuple[NDArray[np.int64], int]


@st.composite
def recordings(draw: st.DrawFn) -> Recorded:
    """Draws skewed routing [n_tokens, n_layers, n_used], and the number of experts."""
    n_experts = draw(st.integers(2, 12))
    n_used = draw(st.integers(1, min(4, n_experts)))
    n_tokens, n_layers = draw(st.integers(2, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    scores = rng.standard_normal((n_tokens, n_layers, n_experts))
    scores += draw(st.sampled_from([0.0, 2.0])) * rng.standard_normal((n_layers, n_experts))
    return np.argsort(scores, axis=-1)[:, :, :n_used], n_experts


def played(routing: NDArray[np.int64], n_experts: int, n_slots: int, n_last: int) -> float:
    n_tokens, n_layers, n_used = routing.shape
    rule = Lrfu(HALF_LIFE_STEPS * n_layers, n_used)
    cuts = [
        (token >= n_tokens - n_last, [(layer, expert) for expert in ids])
        for token, layers in enumerate(routing.tolist())
        for layer, ids in enumerate(layers)
    ]
    return simulated_hits(rule, n_slots, cuts, holds_used=False)


@given(recordings(), st.data())
@settings(deadline=None)
def test_one_pass_finds_the_hits_of_a_cache_that_is_played(
    recorded: Recorded, data: st.DataObject
) -> None:
    routing, n_experts = recorded
    n_tokens, n_layers, _ = routing.shape
    n_last = n_tokens - 1
    n_pieces = n_layers * n_experts
    # With more slots, the model may count an expert's first use as a hit. No real cache can do
    # that.
    n_touched = sum(len(np.unique(routing[:, layer])) for layer in range(n_layers))
    first = len(np.unique(routing[0] + n_experts * np.arange(n_layers)[:, None]))
    n_slots = data.draw(st.integers(1, max(1, min(first, n_touched))))
    found = recorded_hits(routing, n_experts, (n_slots / n_pieces,), n_last=n_last)
    expected = played(routing, n_experts, n_slots, n_last)
    assert found.mean() == pytest.approx(expected, abs=1e-9)


@given(recordings())
@settings(deadline=None)
def test_more_slots_never_hit_less_and_all_slots_hit_all(recorded: Recorded) -> None:
    routing, n_experts = recorded
    found = recorded_hits(routing, n_experts, (0.0, *SHARES, 1.0))
    assert found.shape == (routing.shape[1], len(SHARES) + 2)
    assert np.all(np.diff(found, axis=1) >= -1e-12)
    assert np.all(found[:, 0] == 0.0)
    assert found[:, -1] == pytest.approx(1.0)
