"""The range of slots that kernels see, and what a plan says about layers without slots."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.plan.placement import Plan
from offload.plan.slot_layout import SlotKind, SlotLayout, SlotPool
from offload.schedule.batch import most_in_range, slot_range


@given(st.sets(st.integers(0, 299), min_size=1), st.integers(0, 500))
def test_a_band_holds_the_slots_and_there_are_few_of_them(slots: set[int], n_more: int) -> None:
    n_slots = max(slots) + 1 + n_more
    first, n = slot_range(sorted(slots), n_slots)
    assert 0 <= first <= min(slots)
    assert max(slots) < first + n <= n_slots
    step = max(1, n_slots // 16)
    assert first % step == 0
    assert n < max(slots) - min(slots) + 1 + 2 * step


def test_a_band_is_kept_while_it_holds_the_slots_and_is_not_much_too_wide() -> None:
    assert slot_range([20, 50], 160, (10, 60)) == (10, 60)
    assert slot_range([5, 50], 160, (10, 60)) == (0, 60), "slot 5 is outside"
    assert slot_range([20, 70], 160, (10, 60)) == (20, 60), "so is slot 70"
    assert slot_range([20, 25], 160, (10, 60)) == (20, 10), "a sixth is needed"


@pytest.mark.parametrize(
    ("n_rows", "row_blocks", "n_tokens", "most"),
    [
        (2048, 28, 4, 2396745),  # DeepSeek-V3's gate in Q4_K
        (2048, 224, 8192, 2340),  # DeepSeek-V3's gate in Q8_0, large prompt
        (1, 1, 1, 2**30 - 1),
    ],
)
def test_slots_that_the_matrix_kernel_can_be_shown(
    n_rows: int, row_blocks: int, n_tokens: int, most: int
) -> None:
    assert most_in_range(n_rows, row_blocks, n_tokens) == most
    tiles = math.ceil(n_rows / 128) * math.ceil(n_tokens / 64)  # GGML_ASSERT of mmq.cuh
    assert tiles * most * row_blocks < 2**30 <= tiles * (most + 1) * row_blocks


def tight(n_slots: int, min_batch: int | None) -> Plan:
    pool = SlotPool("experts", (SlotKind("up", 100, 10),), n_slots, 4, 64, 8)
    return Plan((), 0, SlotLayout((pool,)), ("a reason",), min_batch=min_batch)


def test_a_plan_says_what_becomes_of_batches_without_slots() -> None:
    pays = tight(40, min_batch=100).with_passes("auto")
    assert pays.pass_experts == 20
    assert pays.declined == ()
    assert pays.reasons[0] == "a reason"
    assert "in passes over 20 experts" in pays.reasons[1]
    said = pays.because("batches of another model are computed in passes over 3 experts")
    assert said.with_slots([64]).reasons == (
        "a reason",
        said.reasons[-1],
    )
    loses = tight(40, min_batch=None).with_passes("auto")
    assert loses.pass_experts == 0
    assert "the CPU computes batches that use more, which is faster" in loses.declined[0]
    assert tight(40, min_batch=None).with_passes("on").pass_experts == 20


def test_slots_measured_later_change_what_becomes_of_them() -> None:
    fewer = tight(40, min_batch=100).with_passes("auto").with_slots([16])
    assert fewer.pass_experts == 8
    assert len(fewer.reasons) == 2
    enough = fewer.with_slots([64])
    assert enough.pass_experts == 0
    assert enough.reasons == ("a reason",)
    assert enough.declined == ()
