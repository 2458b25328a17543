"""Divides device memory among models that are open together."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.router.planning import PlannedAlone, least_level, needs_of
from specoffload.server.router.sharing import Needs, Room, share


def test_two_large_models_get_half_each() -> None:
    found = share({"a": Needs(4, 90, 10), "b": Needs(6, 80, 10)}, Room(24, 64), 2)
    assert found.device_bytes == {"a": 12, "b": 12}
    assert found.fits(["a", "b"])


def test_a_large_model_gets_what_a_small_one_cannot_use() -> None:
    found = share({"a": Needs(4, 90, 10), "b": Needs(1, 2, 0)}, Room(24, 64), 2)
    assert found.device_bytes == {"a": 22, "b": 2}


def test_a_model_that_needs_more_than_half_gets_it() -> None:
    found = share({"a": Needs(16, 90, 10), "b": Needs(3, 80, 10)}, Room(24, 64), 2)
    assert found.device_bytes == {"a": 16, "b": 8}


def test_models_that_do_not_fit_together_are_opened_alone() -> None:
    found = share({"a": Needs(16, 90, 10), "b": Needs(9, 80, 10)}, Room(24, 64), 2)
    assert found.device_bytes == {}
    assert not found.fits(["a", "b"])
    assert found.fits(["a"])
    of_host = share({"a": Needs(1, 2, 40), "b": Needs(1, 2, 30)}, Room(24, 64), 2)
    assert not of_host.fits(["a", "b"])


def test_models_without_a_plan_are_counted_only() -> None:
    found = share({"a": Needs(16, 90, 10)}, Room(24, 64), 2)
    assert found.fits(["a", "unknown", "other"])  # the pool counts them (--models-max)


def test_kept_prompts_get_what_weights_leave() -> None:
    needs = {"a": Needs(1, 2, 30, 100), "b": Needs(1, 2, 20, 5), "c": Needs(1, 2, 10, 100)}
    found = share(needs, Room(24, 80), 2, shelf_bytes=100)
    assert found.prompt_bytes == {"a": 10, "b": 5, "c": 10}  # a and b leave 30, also for a shelf
    assert found.shelf_bytes == 10
    assert found.fits(["a", "b"])
    assert share({"a": Needs(1, 2, 30, 100)}, Room(24, 80), 2, shelf_bytes=100).shelf_bytes == 100


def test_models_that_leave_no_room_for_prompts_are_opened_alone() -> None:
    needs = {"a": Needs(1, 2, 30, 100), "b": Needs(1, 2, 30, 100)}
    assert share(needs, Room(24, 70), 2).fits(["a", "b"])  # 4 for each
    assert share(needs, Room(24, 66), 2).device_bytes == {}
    few = {"a": Needs(1, 2, 33, 0), "b": Needs(1, 2, 33, 0)}
    assert share(few, Room(24, 66), 2).fits(["a", "b"])


def test_models_of_one_device_and_of_several_share_each_device() -> None:
    planned = {
        "two": PlannedAlone(12, 36, 5, 7, (24, 12)),
        "one": PlannedAlone(6, 20, 5, 7, (24,)),
        "ram": PlannedAlone(0, 0, 5, 7),
    }
    needs, room, devices = needs_of(planned, 100)
    assert room == Room(36, 100)
    assert needs == {
        "two": Needs(12, 36, 5, 7),
        "one": Needs(9, 30, 5, 7),  # a quarter of its device
        "ram": Needs(0, 0, 5, 7),
    }
    found = share(needs, room, 2, devices=devices)
    two, one, ram = (found.share_of(name) for name in ("two", "one", "ram"))
    assert two is not None
    assert one is not None
    assert ram is not None
    assert (two.each_device_bytes, one.each_device_bytes) == ((12, 6), (12,))
    assert ram.each_device_bytes == ()


@pytest.mark.parametrize("least", range(1, 17))
def test_the_least_level_that_works_is_found_in_a_few_tries(least: int) -> None:
    tried = []

    def works(level: int) -> bool:
        tried.append(level)
        return level >= least

    assert least_level(works) == least
    assert len(tried) <= 4


SIZES = st.integers(0, 40)
NEEDS = st.builds(
    lambda least, more, host, prompts: Needs(least, least + more, host, prompts),
    SIZES, SIZES, SIZES, SIZES,
)  # fmt: skip
DEVICES = st.lists(st.integers(1, 40), max_size=3).map(tuple)
PLANNED = st.builds(
    lambda least, more, devices: PlannedAlone(
        min(sum(devices), least), min(sum(devices), least + more), 1, 1, devices
    ),
    SIZES, SIZES, DEVICES,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from("abcdef"), PLANNED, max_size=6), st.integers(0, 4))
def test_no_device_is_divided_among_more_than_it_has(
    planned: dict[str, PlannedAlone], most: int
) -> None:
    needs, room, devices = needs_of(planned, 1000)
    found = share(needs, room, most, devices=devices)
    for name, its in planned.items():
        got = found.share_of(name)
        if got is None or not its.devices:
            continue
        assert len(got.each_device_bytes) == len(its.devices)
    for n in range(2, len(needs) + 1):
        for names in combinations(needs, n):
            parts = [
                (got.each_device_bytes, devices[name])
                for name in names
                if (got := found.share_of(name)) is not None and devices[name]
            ]
            if found.fits(names):
                used = sum(max(a / b for a, b in zip(*both, strict=True)) for both in parts)
                assert used <= 1 + 1e-9


@given(
    st.dictionaries(st.sampled_from("abcdef"), NEEDS, max_size=6),
    st.builds(Room, SIZES, SIZES),
    st.integers(0, 4),
    SIZES,
)
def test_shares_work_and_any_that_fit_stay_in_the_room(
    needs: dict[str, Needs], room: Room, most: int, shelf_bytes: int
) -> None:
    found = share(needs, room, most, shelf_bytes)
    for name, its_bytes in found.device_bytes.items():
        assert needs[name].least_device_bytes <= its_bytes <= needs[name].most_device_bytes
    for n in range(2, len(needs) + 1):
        for names in combinations(needs, n):
            if not found.fits(names):
                continue
            assert sum(found.device_bytes[name] for name in names) <= room.device_bytes
            host_bytes = [needs[name].host_bytes + found.prompt_bytes[name] for name in names]
            shelf = found.shelf_bytes if n < len(needs) else 0
            assert sum(host_bytes) + shelf <= room.host_bytes


@given(
    st.dictionaries(st.sampled_from("abcd"), NEEDS, min_size=2, max_size=4),
    st.builds(Room, SIZES, st.just(1000)),
)
def test_models_whose_least_fits_all_together_are_all_open(
    needs: dict[str, Needs], room: Room
) -> None:
    if sum(its.least_device_bytes for its in needs.values()) <= room.device_bytes:
        found = share(needs, room, 0)
        assert found.fits(list(needs))
        used = sum(found.device_bytes.values())
        can_use = sum(its.most_device_bytes for its in needs.values())
        assert used > min(room.device_bytes, can_use) - len(needs)  # rounded down to whole bytes
