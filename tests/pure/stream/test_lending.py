"""Slots that lie in a compute buffer: which are open, what closing drops, and where they lie."""

from __future__ import annotations

import random

import pytest
from cache_play import Lru
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFit
from offload.plan.lending import SlotTail
from offload.plan.slot_layout import SlotKind, SlotPool
from offload.schedule.lending import LentSlots
from offload.schedule.schedule import Schedule
from offload.schedule.slots import CLOSED, FREE, CutNeed


@given(
    n_lent=st.integers(0, 40),
    events=st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=30),
)
def test_no_slot_is_open_that_a_graph_has_reached(
    n_lent: int, events: list[tuple[bool, int]]
) -> None:
    slots = LentSlots(n_lent)
    assert slots.n_open == 0
    for is_planned, reached in events:
        if is_planned:
            slots.planned_small()
        n, before = min(reached, n_lent), slots.n_closed
        moved = slots.reached(n)
        assert moved == (slots.n_closed != before)
        assert n <= slots.n_closed <= n_lent
        assert slots.n_closed >= before or is_planned


def test_slots_open_only_after_a_small_plan() -> None:
    slots = LentSlots(10)
    slots.reached(3)
    assert slots.n_closed == 10
    slots.planned_small()
    slots.reached(3)
    assert slots.n_closed == 3
    slots.reached(5)
    slots.reached(2)
    assert slots.n_closed == 5, "the border stays where the largest small graph put it"


@given(
    n_own=st.integers(1, 40), stride=st.integers(256, 3000).map(lambda n: 34 * n),
    buffer_bytes=st.integers(0, 1 << 22), first_bytes=st.integers(0, 1 << 22),
)  # fmt: skip
def test_lent_slots_lie_behind_the_own_ones_and_open_ones_behind_small_graphs(
    n_own: int, stride: int, buffer_bytes: int, first_bytes: int
) -> None:
    kind = SlotKind("gate", stride, 34, 34)
    pool = SlotPool("experts", (kind,), n_own, 2, 32, 2, joined_bytes=stride)
    tail = SlotTail(pool, buffer_bytes)
    begins, n_touched = tail.own_bytes, tail.n_touched(first_bytes)
    assert n_own * stride <= begins < n_own * stride + 256
    assert (n_own + tail.n_lent) * stride <= begins + buffer_bytes
    assert (n_own + tail.n_lent + 1) * stride > begins + buffer_bytes
    if n_touched < tail.n_lent and first_bytes:
        assert (n_own + n_touched) * stride >= begins + first_bytes
    assert tail.n_open(first_bytes) == min(tail.n_lent - n_touched, max(0, 64 - n_own))


def check(schedule: Schedule, n_closed: int) -> None:
    slots = schedule.pools[0]
    states = list(slots.state)
    assert [state == CLOSED for state in states[slots.n_own :]] == [
        i < n_closed for i in range(slots.n_slots - slots.n_own)
    ]
    assert sorted(slots.free) == [i for i, state in enumerate(states) if state == FREE]
    assert slots.counts == [states.count(state) for state in range(5)]
    for piece, slot in slots.where.items():
        assert slots.piece[slot] == piece
        assert states[slot] not in (FREE, CLOSED)


@given(
    seed=st.integers(0, 10**6), n_own=st.integers(4, 12), n_lent=st.integers(1, 12),
    depth=st.integers(0, 4),
)  # fmt: skip
def test_a_closed_slot_holds_nothing_and_is_given_to_no_cut(
    seed: int, n_own: int, n_lent: int, depth: int
) -> None:
    rng = random.Random(seed)
    schedule = Schedule({0: n_own}, Lru(), depth, n_lent={0: n_lent})
    n_closed = n_lent
    for _ in range(12):
        if rng.random() < 0.5:
            n_closed = rng.randrange(n_lent + 1)
            before = dict(schedule.pools[0].where)
            schedule.close_slots(0, n_closed)
            gone = before.keys() - schedule.pools[0].where.keys()
            assert gone == {p for p, s in before.items() if n_own <= s < n_own + n_closed}
        check(schedule, n_closed)
        needs = [
            CutNeed(cut, 0, tuple((cut, e) for e in rng.sample(range(8), rng.randint(1, 4))))
            for cut in range(5)
        ]
        schedule.begin(len(needs))
        for need in needs:
            if rng.random() < 0.5:
                schedule.need(need)
        for need in needs:
            schedule.issue(need.cut)
            if need.cut not in schedule._needs:
                schedule.need(need)
            entered = schedule.enter(need.cut)
            assert not any(n_own <= slot < n_own + n_closed for slot in entered.slots)
            schedule.leave(need.cut)
            check(schedule, n_closed)


def test_closed_slots_are_no_room() -> None:
    schedule = Schedule({0: 2}, Lru(), 0, n_lent={0: 3})
    need = CutNeed(0, 0, ((0, 1), (0, 2), (0, 3)))
    schedule.begin(1)
    schedule.need(need)
    with pytest.raises(DoesNotFit, match="needs 3 slots of pool 0, but it has 2"):
        schedule.enter(0)
    schedule.close_slots(0, 1)
    schedule.begin(1)
    schedule.need(need)
    assert set(schedule.enter(0).slots) <= {0, 1, 3, 4}
    schedule.leave(0)


def test_a_layer_in_order_lies_in_own_slots() -> None:
    schedule = Schedule({0: 4}, Lru(), 0, n_lent={0: 4})
    schedule.close_slots(0, 0)
    for group in range(3):
        schedule.begin(1)
        schedule.need(CutNeed(0, 0, tuple((group, e) for e in range(4)), contiguous=True))
        assert schedule.enter(0).slots == (0, 1, 2, 3)
        schedule.leave(0)


BLOCKS = {"q4_K": 144, "q6_K": 210, "q8_0": 34, "f32": 4, "mxfp4": 17}


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from(sorted(BLOCKS)), st.integers(1, 300)), min_size=2, max_size=4
    )
)
def test_joined_kinds_do_not_overlap_and_strides_are_whole_blocks(
    kinds: list[tuple[str, int]],
) -> None:
    made = tuple(
        SlotKind(f"{i}", BLOCKS[name] * 256 * n, BLOCKS[name], BLOCKS[name])
        for i, (name, n) in enumerate(kinds)
    )
    pool = SlotPool("experts", made, 8, 4, 16, 2)
    joined = pool.joined()
    if not joined.joined_bytes:
        assert joined == pool
        return
    stride, at = joined.joined_bytes, 0
    for kind in made:
        assert joined.offsets()[kind.name] >= at
        at = joined.offsets()[kind.name] + kind.stride_bytes
        assert stride % kind.unit_bytes == 0
    assert at <= stride <= pool.slot_bytes * (1 + 1 / 16)
    assert joined.slot_bytes == stride
    assert joined.size_bytes == 8 * stride


def test_matrices_that_kernels_read_past_are_not_joined() -> None:
    kinds = (SlotKind("gate", 4096, 4, 4), SlotKind("down", 4096, 4, 4, is_overrun=True))
    pool = SlotPool("experts", kinds, 8, 4, 16, 2)
    assert pool.joined() == pool
