"""Slots get the room of resident layers for splits only where counted hits are expected to pay."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_machine import R1

from offload.plan.guessed_hits import hit_rate
from offload.plan.machine import TYPICAL, Sharing, expected_hits
from offload.plan.sharing import PlannedWork, expected_s
from offload.plan.split_room import LEAST_SAVED, MeasuredDecode, hit_words, measured_s, split_room
from offload.routing.routing import HitCurve

DAY = date(2026, 3, 1)
RESIDENT, SLOTS = Sharing(400, n_resident=12), Sharing(3472)
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


@given(st.floats(0, 1))
def test_room_is_given_where_the_model_expects_enough_less_time(hit: float) -> None:
    work = replace(R1, hits=with_hits((0.234, hit)))
    found = split_room(
        TYPICAL, work, PlannedWork(), without=(RESIDENT, 4096), with_room=(SLOTS, 4096)
    )
    before_s, after_s = (
        expected_s(TYPICAL, work, PlannedWork(), sharing, 4096, hybrid=True)
        for sharing in (RESIDENT, SLOTS)
    )
    assert found.pays == (after_s <= (1 - LEAST_SAVED) * before_s)
    assert "counted on 2026-03-01 over 900 tokens" in found.why
    if hit > 0.9:
        assert found.pays
        assert "12 layers give up GPU memory" in found.why
    if hit < 0.1:
        assert not found.pays


times = st.floats(1e-4, 1e2)


@given(st.floats(0, 1), times, times)
def test_where_decodes_of_both_were_measured_these_decide(
    hit: float, without_s: float, with_s: float
) -> None:
    work = replace(R1, hits=with_hits((0.234, hit)))
    decodes = MeasuredDecode(RESIDENT, without_s), MeasuredDecode(SLOTS, with_s)
    # No prompt, so that nothing is modelled.
    found = split_room(
        TYPICAL, work, PlannedWork(n_prompt=0), without=(RESIDENT, 4096), with_room=(SLOTS, 4096),
        decodes=decodes,
    )  # fmt: skip
    assert found.saved == pytest.approx(1 - with_s / without_s)
    assert found.pays == (found.saved > 0)
    assert f"{with_s * 1e3:.1f} ms with it, {without_s * 1e3:.1f} ms without" in found.why
    for known in decodes:
        modelled, half = (
            split_room(
                TYPICAL, work, PlannedWork(), without=(RESIDENT, 4096), with_room=(SLOTS, 4096),
                decodes=known_decodes,
            )
            for known_decodes in ((), (known,))
        )  # fmt: skip
        assert half == modelled


def test_of_decodes_the_last_by_a_sharing_alike_counts() -> None:
    decodes = [MeasuredDecode(Sharing(400 + 10 * i, n_resident=12), 1.0 + i) for i in range(3)]
    assert measured_s(decodes, RESIDENT) == 3.0
    assert measured_s(decodes, replace(RESIDENT, n_resident=11)) is None
    assert measured_s(decodes, replace(RESIDENT, n_dense_streamed=1)) is None
    assert measured_s(decodes, RESIDENT.with_slots(340)) is None
    assert measured_s([], RESIDENT) is None
