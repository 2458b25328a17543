"""Ways to use memory are chosen by expected time under uncertain hits, and by measured decodes."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from test_machine import R1

from offload.plan.ends import hit_words
from offload.plan.objective import (
    EVEN_WEIGHT,
    MOST_LOSS,
    MeasuredDecode,
    Objective,
    Seconds,
    by_measured,
    measured_s,
)
from offload.plan.placement import workload_of
from offload.plan.workload import DECODING, USUAL, PlannedWork
from offload.routing.routing import HitCurve
from offload.times.decodes import best_s, divided
from offload.times.hits import Sharing, expected_hits, hit_rate
from offload.times.machine import TYPICAL
from offload.times.prompts import prefill_s
from offload.times.work import even

DAY = date(2026, 3, 1)
RESIDENT, SLOTS = Sharing(400, n_resident=12), Sharing(3472)
BOTH = Sharing(np.array([400, 3472]), n_resident=np.array([12, 0]))
PIECES = R1.union(1)


def with_hits(*points: tuple[float, float]) -> HitCurve:
    return HitCurve(points, 900, DAY)


def test_without_counted_hits_the_guess_stands() -> None:
    share = SLOTS.n_slots / (58 * 256)
    assert expected_hits(R1, SLOTS, PIECES) == pytest.approx(hit_rate(share, PIECES / 256, 256))
    assert "(estimate; a run will measure it)" in hit_words(R1, SLOTS)


def test_layers_share_the_slots_so_that_hits_are_those_of_their_share() -> None:
    work = replace(R1, hits=with_hits((0.25, 0.6)))
    assert expected_hits(work, Sharing(58 * 64), PIECES) == pytest.approx(0.6)
    assert expected_hits(work, Sharing(29 * 64, n_resident=29), PIECES) == pytest.approx(0.6)
    assert "Speed assumes 60% of experts already on the GPU (counted on 2026-03-01" in hit_words(
        work, Sharing(58 * 64)
    )
    assert expected_hits(work, Sharing(0, n_resident=58), PIECES) == 1.0


@given(st.integers(8, 58 * 256), st.integers(1, 64))
def test_experts_used_equally_hit_as_often_as_they_have_a_slot(n_slots: int, n_tokens: int) -> None:
    sharing = Sharing(n_slots)
    share = n_slots / (58 * 256)
    assert expected_hits(even(R1), sharing, R1.union(n_tokens)) == pytest.approx(share)
    guessed, equal = (divided(TYPICAL, work, sharing, n_tokens) for work in (R1, even(R1)))
    rows = n_tokens * R1.n_used / R1.union(n_tokens)
    one_s = R1.expert.seconds(TYPICAL.vram_bytes_per_s, TYPICAL.gpu_flops, rows)
    # Hits stay on the device. So if few experts are missing, more hits leave the CPU less to do.
    more_s = 58 * max(0.0, equal.on_cpu - guessed.on_cpu) * one_s
    for hybrid in (False, True):
        least_s = best_s(TYPICAL, R1, sharing, n_tokens, hybrid=hybrid)
        equal_s = best_s(TYPICAL, even(R1), sharing, n_tokens, hybrid=hybrid)
        assert least_s <= (equal_s + hybrid * more_s) * (1 + 1e-9)


@pytest.mark.parametrize(("n_ctx", "n_prompt"), [(None, 4096), (512, 512), (131072, 8192)])
def test_plans_are_judged_by_a_prompt_of_the_contexts_length_up_to_8192(
    n_ctx: int | None, n_prompt: int
) -> None:
    assert workload_of(n_ctx).n_prompt == n_prompt


def test_the_objective_is_the_time_that_is_printed() -> None:
    workload = USUAL.workload(4096)
    assert (workload.n_prompt, workload.n_generated) == (4096, 1024)
    found = Objective(workload, splits=True).seconds(TYPICAL, R1, SLOTS, 2048)
    assert found.prompt_s == prefill_s(TYPICAL, R1, SLOTS, 4096, 2048, hybrid=True)
    assert found.decode_s == best_s(TYPICAL, R1, SLOTS, 1, hybrid=True)
    assert found.even_decode_s == best_s(TYPICAL, even(R1), SLOTS, 1, hybrid=True)
    assert found.decode_s < found.even_decode_s
    counted = replace(R1, hits=with_hits((0.25, 0.6)))
    only = Objective(workload, splits=True).seconds(TYPICAL, counted, SLOTS, 2048)
    assert only.even_decode_s == only.decode_s, "counted hits have one end"
    alone = Objective(DECODING.workload(4096)).seconds(TYPICAL, R1, SLOTS, 2048)
    assert (alone.prompt_s, alone.n_decodes) == (0.0, 1)


times = st.floats(1e-4, 1e2)
rows = arrays(float, st.tuples(st.just(3), st.integers(1, 12)), elements=times)


@given(rows, st.data())
def test_the_best_mean_is_chosen_among_ways_that_lose_little_at_the_low_end(
    drawn: np.ndarray, data: st.DataObject
) -> None:
    prompt_s, even_s, share = drawn
    decode_s = even_s * np.minimum(share, 1.0)
    fits = data.draw(arrays(bool, even_s.shape))
    if not fits.any():
        return
    seconds = Seconds(prompt_s, decode_s, even_s, 3.0)
    best = int(seconds.fastest(fits))
    assert fits[best]
    low_s = prompt_s + 3.0 * even_s
    mean_s = prompt_s + 3.0 * (EVEN_WEIGHT * even_s + (1 - EVEN_WEIGHT) * decode_s)
    least_s = low_s[fits].min()
    assert (1 - MOST_LOSS) * low_s[best] <= least_s * (1 + 1e-9)
    rivals = fits & ((1 - MOST_LOSS) * low_s <= least_s)
    assert mean_s[best] <= mean_s[rivals].min() * (1 + 1e-9)
    both = np.stack([fits, np.roll(fits, 1)])
    each = Seconds(*(np.stack([s, np.roll(s, 1)]) for s in (prompt_s, decode_s, even_s)), 3.0)
    assert mean_s[each.fastest(both)[0]] == mean_s[best], "each row has a choice of its own"


def test_a_stake_of_a_hundredth_wins_twice_the_speed_and_one_of_a_tenth_is_not_made() -> None:
    """Slots for Qwen3-235B's experts: 7.3 to 16 tokens/s, beside 7.4 for resident layers."""
    fits = np.array([True, True])
    small = Seconds(0.0, np.array([1 / 7.4, 1 / 16]), np.array([1 / 7.4, 1 / 7.3]), 1)
    assert small.fastest(fits) == 1
    large = Seconds(0.0, np.array([1 / 7.4, 1 / 16]), np.array([1 / 7.4, 1 / 6.7]), 1)
    assert large.fastest(fits) == 0


@given(times, times)
def test_where_decodes_of_both_were_measured_these_decide(without_s: float, with_s: float) -> None:
    decodes = MeasuredDecode(RESIDENT, without_s), MeasuredDecode(SLOTS, with_s)
    # No prompt, so that nothing is modelled.
    seconds = Objective(PlannedWork(n_prompt=0), splits=True).seconds(TYPICAL, R1, BOTH, 4096)
    fits = np.array([True, True])
    for chosen, its_s, other_s in ((0, without_s, with_s), (1, with_s, without_s)):
        found = by_measured(seconds, fits, decodes, BOTH, chosen)
        assert (found is not None) == (other_s < its_s)
        if found is not None:
            assert found.index == 1 - chosen
            assert (
                f"took {other_s * 1e3:.1f} ms with this plan, and {its_s * 1e3:.1f}" in found.reason
            )
    for known in decodes:
        assert by_measured(seconds, fits, (known,), BOTH, 0) is None
    assert by_measured(seconds, np.array([True, False]), decodes, BOTH, 0) is None


def test_of_decodes_the_last_by_a_sharing_alike_counts() -> None:
    decodes = [MeasuredDecode(Sharing(400 + 10 * i, n_resident=12), 1.0 + i) for i in range(3)]
    assert measured_s(decodes, RESIDENT) == 3.0
    assert np.isnan(measured_s(decodes, replace(RESIDENT, n_resident=11)))
    assert np.isnan(measured_s(decodes, replace(RESIDENT, n_dense_streamed=1)))
    assert np.isnan(measured_s(decodes, RESIDENT.with_slots(340)))
    assert np.isnan(measured_s([], RESIDENT))
