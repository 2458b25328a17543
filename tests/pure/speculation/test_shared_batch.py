"""Draft lengths chosen together for requests that share a batch, in the simulator."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation.shared_batch import SharedPlay, simulate_shared
from lab.simulation.simulate import synthetic_trace
from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput
from specdec.policies.value import extra_time


def copies(n_experts: int, n_used: int, fixed: float) -> list[float]:
    """T(n) in units of T(1) where the distinct experts of a batch cross a link."""
    share = n_used / n_experts
    copied = [(1 - (1 - share) ** n) / share for n in range(1, 65)]
    return [fixed + (1 - fixed) * c for c in copied]


CURVES = {
    "4 of 64 experts": copies(64, 4, 0.0),
    "4 of 64 experts, half of T(1) resident": copies(64, 4, 0.5),
    "4 of 16 experts": copies(16, 4, 0.0),
    "CPU up to 16 tokens, then streamed": [min(n, 16.0) + 0.02 * n for n in range(1, 65)],
    "all weights streamed, then compute": [1 + 0.01 * n + max(0, n - 16) * 0.1 for n in range(64)],
    "compute": [1 + 0.2 * n for n in range(64)],
}
TRANSFER_BOUND = list(CURVES)[:5]


def play(curve: str, kinds: list[str]) -> SharedPlay:
    times = CURVES[curve]
    profile = CostProfile(tuple(times), 0.03 * times[0])
    traces = [synthetic_trace(400, seed=7 + i, kinds=(kind,)) for i, kind in enumerate(kinds)]
    return simulate_shared(traces, profile, Throughput(profile, refresh=False))


@pytest.mark.parametrize("curve", TRANSFER_BOUND)
def test_lengths_chosen_together_gain_where_transfers_bound_the_time(curve: str) -> None:
    assert play(curve, ["code", "prose"] * 4).rate > 1.1 * 8 / CURVES[curve][7]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("kinds", [["prose"] * 8, ["code"] * 2 + ["noise"] * 6], ids="-".join)
def test_nothing_is_lost_where_little_can_be_had(curve: str, kinds: list[str]) -> None:
    assert play(curve, kinds).rate > 0.95 * 8 / CURVES[curve][7]


@given(steps=st.lists(st.floats(0, 2), min_size=3, max_size=40), n_sequences=st.integers(1, 8))
def test_a_sequences_share_is_its_own_rows_or_less(steps: list[float], n_sequences: int) -> None:
    times = 1.0 + np.cumsum(steps)
    n = min(n_sequences, len(times))
    extra = extra_time(times, n)
    assert len(extra) == len(times) - n + 1
    assert extra[0] == 0.0
    assert (extra >= 0).all()
    assert (extra <= times[n - 1 :] - times[n - 1]).all()
    if n == 1:
        assert extra.tolist() == (times - times[0]).tolist()
