"""Divides device memory among models that are open together."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

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
    assert found.fits(["a", "unknown"])
    assert not found.fits(["a", "unknown", "other"])


SIZES = st.integers(0, 40)
NEEDS = st.builds(lambda least, more, host: Needs(least, least + more, host), SIZES, SIZES, SIZES)


@given(
    st.dictionaries(st.sampled_from("abcdef"), NEEDS, max_size=6),
    st.builds(Room, SIZES, SIZES),
    st.integers(0, 4),
)
def test_shares_work_and_any_that_fit_stay_in_the_room(
    needs: dict[str, Needs], room: Room, most: int
) -> None:
    found = share(needs, room, most)
    for name, its_bytes in found.device_bytes.items():
        assert needs[name].least_device_bytes <= its_bytes <= needs[name].most_device_bytes
    for n in range(2, len(needs) + 1):
        for names in combinations(needs, n):
            if not found.fits(names):
                continue
            assert not most or n <= most
            assert sum(found.device_bytes[name] for name in names) <= room.device_bytes
            assert sum(needs[name].host_bytes for name in names) <= room.host_bytes


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
