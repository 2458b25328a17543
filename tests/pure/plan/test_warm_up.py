"""Slots after a warm-up: within the limit, else by another plan, else beyond the limit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFit
from offload.plan.found import FoundDevice, Kind, Wanted
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES, Plan, PlanRequest
from offload.plan.slot_layout import SlotKind, SlotLayout, SlotPool
from offload.plan.warm_up import WarmedUp
from offload.times.context_memory import ContextOptions

MIB, GIB = 1 << 20, 1 << 30
N_USED, N_SLOTS = 4, 40
POOL = SlotPool("experts", (SlotKind("gate", MIB, block_bytes=18),), N_SLOTS, 10, 64, N_USED)
PLAN = Plan((), 2000 * MIB, SlotLayout((POOL,), ()), (), reserve_bytes=500 * MIB)
LEAST = N_USED * MIB  # one token's experts
megabytes = st.integers(0, 4000).map(lambda n: n * MIB)


def warmed(unplanned_mib: int, asked_mib: int | None, free_gib: float = 20.0) -> WarmedUp:
    """The device after a warm-up that took `unplanned_mib` more than the plan."""
    used_bytes = (2500 + unplanned_mib) * MIB
    asked_bytes = None if asked_mib is None else asked_mib * MIB
    return WarmedUp("GPU0", PLAN, used_bytes, 0, int(free_gib * GIB), asked_bytes)


def test_slots_get_the_rest_of_the_limit() -> None:
    assert warmed(10, asked_mib=2540).room_bytes == 30 * MIB
    assert warmed(10, asked_mib=2540).fits
    assert not warmed(37, asked_mib=2540).fits  # three experts
    assert warmed(37, asked_mib=2540).unplanned_bytes == 37 * MIB


def test_without_a_limit_a_margin_stays_free() -> None:
    assert warmed(0, None, free_gib=3).room_bytes == 3 * GIB - MARGIN_BYTES
    assert not warmed(0, None, free_gib=1).fits


def test_what_is_allocated_later_has_no_slots() -> None:
    later = replace(warmed(0, asked_mib=2600), to_come_bytes=60 * MIB)
    assert later.room_bytes == 40 * MIB
    assert later.unplanned_bytes == 60 * MIB  # the plan's reserve is used up


def test_a_driver_that_reports_nothing_gives_slots_their_planned_size() -> None:
    silent = replace(warmed(0, asked_mib=2540), used_bytes=0)
    assert silent.room_bytes == PLAN.slot_bytes
    assert silent.fits


def test_slots_exceed_a_limit_by_what_the_driver_took() -> None:
    memory = warmed(300, asked_mib=2540)
    assert memory.exceeding_bytes() == N_SLOTS * MIB
    words = memory.exceeded_words(N_SLOTS * MIB)
    assert "2,840.0 MiB, more than --vram 2,540.0 MiB" in words
    assert "took 300.0 MiB" in words


def test_a_limit_is_exceeded_by_half_a_gibibyte_at_most() -> None:
    assert warmed(512 - 4, asked_mib=2500).exceeding_bytes() == LEAST
    with pytest.raises(DoesNotFit, match=r"took 509\.0 MiB more .* pass --vram 3077MiB$") as e:
        warmed(512 - 3, asked_mib=2500).exceeding_bytes()
    assert e.value.least_bytes == 3077 * MIB  # with an eighth of the 509 more


def test_a_full_device_has_another_remedy_than_a_flag() -> None:
    memory = warmed(600, asked_mib=2540, free_gib=0.5)
    with pytest.raises(DoesNotFit, match="only 3,100.0 MiB may be used: lower --ctx-size") as e:
        memory.exceeding_bytes()
    assert e.value.least_bytes is None
    assert "--vram" not in str(e.value)


@given(megabytes, megabytes, st.integers(0, 10 * GIB))
def test_the_named_size_is_enough(unplanned: int, asked: int, free_bytes: int) -> None:
    memory = WarmedUp("GPU0", PLAN, 2500 * MIB + unplanned, 0, free_bytes, asked)
    refused: DoesNotFit | None = None
    room_bytes = 0
    try:
        room_bytes = memory.room_bytes if memory.fits else memory.exceeding_bytes()
    except DoesNotFit as e:
        refused = e
    if refused is None:
        assert room_bytes >= LEAST
        assert room_bytes <= free_bytes - LEAST_FREE_BYTES
        assert memory.used_bytes + room_bytes <= asked + LEAST_FREE_BYTES
    elif refused.least_bytes is None:
        assert free_bytes - LEAST_FREE_BYTES < LEAST
    else:
        assert f"--vram {refused.least_bytes // MIB}MiB" in str(refused)
        assert replace(memory, asked_bytes=refused.least_bytes).fits


def test_a_second_plan_leaves_memory_to_the_driver() -> None:
    wanted = Wanted(ContextOptions(4096), PlanRequest(), device_bytes=2 * GIB)
    device = FoundDevice("GPU0", Kind.GPU, free_bytes=8 * GIB)
    assert device.room(wanted, 2 * GIB).budget_bytes == 2 * GIB
    left = replace(device, driver_bytes=300 * MIB).room(wanted, 2 * GIB)
    assert left.budget_bytes == 2 * GIB - 300 * MIB
    assert left.asked_bytes == 2 * GIB  # slots are sized by what was asked for
    assert re.search("300 MiB are left to the driver", left.reasons[-1])
