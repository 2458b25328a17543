"""A layer's pairs are computed once each, in passes that fit the slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.cache import Lrfu
from offload.schedule.division import HIT, HOST, STREAMED, SplitCosts
from offload.schedule.passes import (
    LEAST_GAIN,
    MOST_HOST_PAIRS,
    PairOrder,
    RowsWay,
    group_size,
    host_blocks,
    host_experts,
    in_order_of_use,
    most_passes,
    passes_of,
    ring_slots,
    soonest_host_experts,
)
from offload.schedule.schedule import Schedule
from offload.schedule.slots import NOWHERE, CutNeed, Piece

N = 16
IDS = st.lists(
    st.lists(st.integers(0, N - 1), min_size=3, max_size=3, unique=True), min_size=1, max_size=40
)
SLOTS = st.lists(st.sampled_from([NOWHERE, 1]), min_size=N, max_size=N)


@given(IDS, SLOTS, st.sets(st.integers(0, N - 1)), st.integers(1, N))
def test_each_used_expert_is_in_one_pass(
    ids: list[list[int]], there: list[int], coming: set[int], n_group: int
) -> None:
    slots = np.where(np.array(there) == NOWHERE, NOWHERE, np.arange(N))
    rows = np.bincount(np.array(ids).ravel(), minlength=N)
    passes = passes_of(rows, slots, coming, n_group)
    experts = [expert for one in passes for expert in one]
    assert sorted(experts) == rows.nonzero()[0].tolist()
    assert len(passes) <= most_passes(N, n_group)
    ready = [e for e in experts if slots[e] != NOWHERE and e not in coming]
    assert experts[: len(ready)] == ready, "experts that need no copy come first"
    assert all(len(one) <= n_group for one in passes if one != ready)
    missing = [e for e in experts if slots[e] == NOWHERE]
    assert missing == sorted(missing), "neighbours are copied together"


ROWS = st.lists(st.integers(0, 1500), min_size=N, max_size=N)
COMING = st.sets(st.integers(0, N - 1))


@given(ROWS, st.lists(st.sampled_from([HIT, STREAMED, HOST]), min_size=N, max_size=N), COMING)
def test_the_cpu_computes_what_a_splitter_gives_it_those_with_the_fewest_pairs_first(
    n_pairs: list[int], sides: list[int], coming: set[int]
) -> None:
    rows, kinds = np.array(n_pairs), np.array(sides, np.uint8)
    found = host_experts(kinds, rows, kinds == HIT, coming)
    left = {e for e in range(N) if rows[e] and kinds[e] == HOST} - coming - {*found}
    assert not {*found} & coming
    assert len(found) == len({*found})
    assert all(rows[e] > 0 and kinds[e] == HOST for e in found)
    assert rows[found].tolist() == sorted(rows[found])
    assert max(rows[found], default=0) <= min((rows[e] for e in left), default=MOST_HOST_PAIRS)


COSTS = st.builds(
    lambda pair_s, copy_s, slow, link_slow: SplitCosts(
        np.array([0.0, pair_s, 2 * pair_s]), np.zeros(3), 0.0, 0.0, copy_s, slow, link_slow
    ),
    st.floats(1e-6, 1e-3), st.floats(1e-4, 1e-1), st.floats(1.0, 2.0), st.floats(1.0, 2.0),
)  # fmt: skip
WAYS = st.builds(
    RowsWay, st.floats(0.0, 1e-2), st.floats(0.0, 1e-4), st.none() | st.floats(0.0, 1e-4),
    st.floats(0.0, 1.0),
)  # fmt: skip


def layer_s(
    rows: Sequence[int], its: Sequence[int], n_missing: int, costs: SplitCosts, way: RowsWay
) -> float:
    """Seconds of a layer whose device computes in no time and whose CPU computes experts `its`."""
    n_pairs = sum(rows[e] for e in its)
    in_one = n_pairs * way.row_s < 0.5e-3  # then one block has all pairs, not an eighth of them
    row_s = float(costs.host_s[1]) + 2 * (1.0 if in_one else way.last_share) * way.row_s
    first_row_s = float("inf") if way.first_row_s is None else way.first_row_s
    of_first_s = n_pairs * first_row_s * (8 if in_one else 1) if n_pairs else 0.0
    alone_s = n_pairs * row_s + min(way.begin_s, of_first_s) if its else 0.0
    copies_s = (n_missing - len(its)) * costs.copy_s + n_pairs * way.row_s
    slow, link_slow = costs.host_slowdown, costs.link_slowdown
    cpu_s = min(slow * alone_s, alone_s + (1 - 1 / slow) * copies_s)
    link_s = min(copies_s, copies_s / link_slow + (1 - 1 / link_slow) * cpu_s)
    return max(cpu_s, link_s)


@given(ROWS, st.lists(st.booleans(), min_size=N, max_size=N), COMING, COSTS, WAYS)
def test_both_sides_of_a_prompts_layer_end_as_soon_as_any_number_of_experts_allows(
    n_pairs: list[int], there: list[bool], coming: set[int], costs: SplitCosts, way: RowsWay
) -> None:
    rows, resident = np.array(n_pairs), np.array(there)
    found = soonest_host_experts(rows, resident, coming, costs, way)
    missing = [e for e in range(N) if n_pairs[e] and not there[e]]
    may = sorted(set(missing) - coming, key=lambda e: (n_pairs[e], e))
    may = [e for i, e in enumerate(may) if sum(n_pairs[o] for o in may[: i + 1]) <= MOST_HOST_PAIRS]
    ends = [layer_s(n_pairs, may[:n], len(missing), costs, way) for n in range(len(may) + 1)]
    assert found == may[: len(found)], "those with the fewest pairs, none of which is coming"
    if found:
        assert ends[len(found)] <= min(ends) * (1 + 1e-9)
        assert ends[len(found)] <= (1 - LEAST_GAIN) * ends[0] * (1 + 1e-9)
    else:
        assert min(ends) >= (1 - LEAST_GAIN) * ends[0] * (1 - 1e-9), (
            "the CPU would bring too little"
        )


def test_a_cpu_that_brings_less_than_a_fiftieth_is_not_asked() -> None:
    rows, nothing = np.full(100, 32), np.zeros(100, np.bool_)
    for times, wanted in ((90.0, 0), (40.0, 2), (1.0, 50)):
        costs = SplitCosts(np.array([0.0, times / 32]), np.zeros(2), 0.0, 0.0, 1.0)
        assert len(soonest_host_experts(rows, nothing, (), costs, RowsWay())) == wanted


def test_rows_that_take_long_over_the_link_leave_more_to_the_device() -> None:
    rows, nothing = np.full(64, 32), np.zeros(64, np.bool_)
    costs = SplitCosts(np.array([0.0, 1 / 32]), np.zeros(2), 0.0, 0.0, 1.0)
    each = [
        len(soonest_host_experts(rows, nothing, (), costs, way))
        for way in (RowsWay(), RowsWay(begin_s=8.0), RowsWay(row_s=1 / 64), RowsWay(begin_s=99.0))
    ]
    assert each == [32, 28, 25, 0]


def test_rows_that_come_in_blocks_leave_more_to_the_cpu() -> None:
    rows, nothing = np.full(64, 32), np.zeros(64, np.bool_)
    costs = SplitCosts(np.array([0.0, 1 / 32]), np.zeros(2), 0.0, 0.0, 1.0)
    ways = (RowsWay.over(64.0, 256, 1, 1, in_blocks=in_blocks) for in_blocks in (False, True))
    in_one, in_blocks = (len(soonest_host_experts(rows, nothing, (), costs, way)) for way in ways)
    assert in_one < in_blocks


def test_few_rows_are_expected_in_one_block() -> None:
    """Each further block would take the CPU's threads longer than the way."""
    way = RowsWay.over(1e6, 10_000, 1, 1, in_blocks=True)  # 1 us a row
    few, many = np.array([0, 100, 499]), np.array([500, 4096])
    assert way.host_s(few) == pytest.approx(few * 3e-6), "all rows, and results beside copies"
    assert way.host_s(many) == pytest.approx(many * 3e-6 / 8), "an eighth of both"


@given(st.lists(st.integers(0, 49), min_size=1, max_size=300))
def test_rows_are_numbered_in_the_order_of_their_first_use(of_pairs: list[int]) -> None:
    used, numbers = in_order_of_use(np.array(of_pairs, np.int32), 50)
    assert used.tolist() == list(dict.fromkeys(of_pairs))
    assert used[numbers].tolist() == of_pairs


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_blocks_have_whole_experts_and_all_pairs_in_order(n_pairs: list[int]) -> None:
    rows = np.array(n_pairs)
    blocks, ends = host_blocks(rows), rows.cumsum().tolist()
    assert [block.start for block in blocks] == [0, *(block.stop for block in blocks[:-1])]
    assert blocks[-1].stop == ends[-1]
    assert all(block.stop in ends for block in blocks)
    assert 1 <= len(blocks) <= 4
    # No expert's end is nearer to where a block should end.
    for share, at in zip((0.125, 0.5, 0.875), (0, 1, 2), strict=True):
        if len(blocks) == 4:
            assert abs(blocks[at].stop - share * ends[-1]) == min(
                abs(end - share * ends[-1]) for end in ends
            )


def test_the_first_and_the_last_block_are_short() -> None:
    """The CPU waits for the rows of the first one, and the device for the results of the last."""
    assert [block.stop for block in host_blocks(np.full(16, 10))] == [20, 80, 140, 160]


@given(IDS, st.integers(1, 7), st.integers(1, 60), st.permutations(range(3 * N)))
def test_launches_compute_each_pair_of_a_pass_once(
    ids: list[list[int]], most_pairs: int, most_slots: int, order: Sequence[int]
) -> None:
    chosen = np.array(ids, np.int32)
    pairs = PairOrder(chosen, N)
    experts = pairs.rows.nonzero()[0].tolist()
    slot_of = dict(zip(range(N), order, strict=False))
    launches = pairs.launches(experts, [slot_of[e] for e in experts], most_pairs, most_slots)
    found = np.concatenate([launch.pairs for launch in launches])
    assert sorted(found.tolist()) == list(range(chosen.size))
    for launch in launches:
        assert 0 < len(launch.pairs) <= most_pairs
        assert launch.slots.max() - launch.slots.min() < most_slots
        assert launch.experts.tolist() == chosen.ravel()[launch.pairs].tolist()
        assert launch.slots.tolist() == [slot_of[e] for e in launch.experts.tolist()]


@pytest.mark.parametrize(
    ("n_experts", "n_slots", "slot_mib", "n_group", "n_ring"),
    [
        (256, 900, 25, 16, 64),  # DeepSeek-R1: a sixteenth of a layer
        (256, 20, 25, 10, 20),  # two groups have to fit
        (384, 8, 24, 4, 8),  # one token's experts of Kimi-K2
        (128, 100, 2, 16, 32),  # small experts: a group has at least 32 MiB
        (8, 5, 100, 1, 2),  # Mixtral
        (16, 1, 1, 1, 1),
    ],
)
def test_a_group_is_a_part_of_the_slots(
    n_experts: int, n_slots: int, slot_mib: int, n_group: int, n_ring: int
) -> None:
    assert group_size(n_experts, n_slots, slot_mib << 20) == n_group
    assert ring_slots(n_experts, n_slots, n_group) == n_ring


def pieces(group: int, *experts: int) -> tuple[Piece, ...]:
    return tuple((group, expert) for expert in experts)


def play(schedule: Schedule, cut: int, experts: tuple[Piece, ...], ring: int = 0) -> int:
    """Compute a cut. Return the number of experts that were copied for it."""
    schedule.need(CutNeed(cut, 0, experts, ring=ring))
    return enter(schedule, cut)


def enter(schedule: Schedule, cut: int) -> int:
    """Compute a cut whose need is known. Return the number of experts copied before it."""
    copies = schedule.issue(cut)
    entered = schedule.enter(cut)
    schedule.leave(cut)
    return len(copies) + len(entered.issued)


def test_experts_of_prompts_pass_through_a_ring_and_the_others_stay() -> None:
    schedule = Schedule({0: 12}, Lrfu(10.0, 2, 14, N), 8, n_experts=N)
    where = schedule.pools[0].where
    schedule.begin(1)
    kept = pieces(0, *range(12))
    assert play(schedule, 0, kept) == 12
    schedule.begin(20)
    for cut in range(20):  # a layer of 40 experts in groups of two
        schedule.need(CutNeed(cut, 0, pieces(1, 2 * cut, 2 * cut + 1), ring=4))
    assert [enter(schedule, cut) for cut in range(20)] == [4, *[2] * 18, 0]
    schedule.scanned(pieces(1, *range(40)))
    assert len(set(where) & set(kept)) == 8, "only the ring's slots were evicted"
    schedule.begin(4)
    still = tuple(piece for piece in kept if piece in where)
    assert play(schedule, 0, still, ring=4) == 0, "a pass reads cached experts"
    assert play(schedule, 1, pieces(2, 0, 1), ring=4) == 2
    assert set(still) <= set(where)


def test_a_slot_whose_expert_is_used_otherwise_leaves_the_ring() -> None:
    schedule = Schedule({0: 4}, Lrfu(10.0, 2, 14, N), 8, n_experts=N)
    schedule.begin(1)
    play(schedule, 0, pieces(0, 0, 1, 2, 3))
    schedule.begin(2)
    for cut in range(2):
        schedule.need(CutNeed(cut, 0, pieces(1, cut), ring=2))
    assert [enter(schedule, cut) for cut in range(2)] == [2, 0]
    schedule.begin(1)
    assert play(schedule, 0, pieces(1, 0)) == 0, "a decode uses an expert of the ring"
    schedule.begin(2)
    play(schedule, 0, pieces(2, 0), ring=2)
    play(schedule, 1, pieces(2, 1), ring=2)
    assert (1, 0) in schedule.pools[0].where


def test_passes_count_as_one_use_of_the_cache_rule() -> None:
    rule = Lrfu(10.0, 2, 14, N)
    schedule = Schedule({0: 4}, rule, 8, n_experts=N)
    schedule.begin(3)
    for cut in range(3):
        play(schedule, cut, pieces(0, 2 * cut, 2 * cut + 1), ring=4)
    schedule.scanned(pieces(0, *range(6)))
    assert schedule.n_uses - rule.skipped == 1
    assert len({rule.rank((0, expert)) for expert in range(6)}) == 1
    assert rule.rank((0, 0)) == pytest.approx(0.1 - np.log2(6 / 2))


def test_the_first_experts_of_a_layer_are_copied_before_its_router_has_run() -> None:
    schedule = Schedule({0: 6}, Lrfu(10.0, 2, 14, N), 8, n_experts=N)
    schedule.begin(1)
    play(schedule, 0, pieces(0, *range(6)))
    schedule.begin(6)
    schedule.predict(CutNeed(3, 0, pieces(2, *range(N)), ring=4))
    play(schedule, 0, pieces(1, 0, 1), ring=4)
    schedule.issue(2)
    where = schedule.pools[0].where
    ahead = [piece for piece in where if piece[0] == 2]
    assert ahead == list(pieces(2, *range(len(ahead))))
    assert len(ahead) == 4, "they fill the ring"
    assert play(schedule, 3, tuple(ahead), ring=4) == 0
    assert play(schedule, 4, pieces(2, 8, 9), ring=4) == 2


def test_copies_ahead_take_slots_that_passes_have_used_longest_ago_first() -> None:
    """A copy waits for the last use of its slot, and all later copies wait with it."""
    schedule = Schedule({0: 6}, Lrfu(10.0, 2, 14, N), 8, n_experts=N)
    schedule.begin(1)
    play(schedule, 0, pieces(0, *range(6)))
    schedule.begin(9)
    for cut in range(3):  # the last pass reads the first slot of the ring again
        play(schedule, cut, pieces(1, 2 * cut, 2 * cut + 1), ring=4)
    play(schedule, 3, pieces(1, 2), ring=4)
    schedule.predict(CutNeed(8, 0, pieces(2, *range(N)), ring=4))
    uses = [copy.after for copy in schedule.issue(4)]
    assert len(uses) == 4
    assert uses == sorted(uses, key=lambda use: use or 0)
