"""Each rule of the schedule by itself, and small cases against brute force."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from functools import lru_cache

import pytest
from cache_play import Lru
from weights_machine import check

from offload.errors import DoesNotFit
from offload.schedule.cache import Lrfu
from offload.schedule.schedule import Schedule, _kept
from offload.schedule.slots import Copy, CutNeed, Piece


def dense(cut: int, weight: int) -> CutNeed:
    return CutNeed(cut, 0, ((weight, 0),))


def experts(cut: int, weight: int, *used: int) -> CutNeed:
    return CutNeed(cut, 0, tuple((weight, e) for e in used))


def whole(cut: int, weight: int, n: int) -> CutNeed:
    return CutNeed(cut, 0, tuple((weight, e) for e in range(n)), contiguous=True)


def schedule_of(n_slots: int, depth: int, guess_limit: int = 16) -> Schedule:
    return Schedule({0: n_slots}, Lru(), depth, guess_limit)


def evicted_by(schedule: Schedule, act: Callable[[], object]) -> list[Piece]:
    """The pieces that lose their slots while `act` runs."""
    before = dict(schedule.pools[0].where)
    act()
    return [piece for piece in before if piece not in schedule.pools[0].where]


def run(schedule: Schedule, needs: list[CutNeed]) -> list[Copy]:
    """Run one graph whose needs are all known at its start. Returns the copies in queue order."""
    schedule.begin(len(needs))
    for need in needs:
        schedule.need(need)
    copies: list[Copy] = []
    for need in needs:
        copies += schedule.issue(need.cut)
        copies += schedule.enter(need.cut).issued
        schedule.leave(need.cut)
        check(schedule)
    return copies


def test_two_slots_are_a_double_buffer() -> None:
    schedule = schedule_of(2, depth=1)
    needs = [dense(cut, cut) for cut in range(6)]
    schedule.begin(6)
    for need in needs:
        schedule.need(need)
    for cut in range(6):
        commands = schedule.issue(cut)
        copied = [(c.cut, c.after) for c in commands]
        # Cut k+1 is copied before cut k is computed, into the slot that cut k-1 (use k) has read.
        assert copied == (
            [(0, None), (1, None)] if not cut else [(cut + 1, cut)] if cut < 5 else []
        )
        assert schedule.enter(cut).issued == ()
        schedule.leave(cut)


def test_a_cached_piece_is_a_hit_without_a_copy_or_a_wait() -> None:
    schedule = schedule_of(4, depth=1)
    run(schedule, [experts(0, 1, 3, 5)])
    schedule.begin(1)
    schedule.need(experts(0, 1, 5, 3))
    assert schedule.ready(0)
    entered = schedule.enter(0)
    assert (entered.issued, entered.waits, entered.hits) == ((), (), 2)
    assert schedule.n_slots_by_state() == [2, 0, 0, 2, 0]


def test_a_right_guess_is_a_hit_that_has_to_be_waited_for() -> None:
    schedule = schedule_of(8, depth=2)
    schedule.begin(3)
    schedule.need(dense(0, 0))
    schedule.predict(experts(2, 1, 4))
    reasons = [c.reason for c in schedule.issue(0)]
    assert reasons == ["needed", "predicted"]
    schedule.need(experts(2, 1, 4, 6))
    entered = schedule.enter(2)
    assert entered.waits == ((1, 4), (1, 6))
    assert (entered.hits, entered.misses) == (1, 1)
    assert schedule.counters.prefetched_used == 1


def test_a_wrong_guess_goes_first_and_is_counted_as_wasted() -> None:
    schedule = schedule_of(3, depth=1)
    run(schedule, [experts(0, 1, 0)])
    schedule.begin(2)
    schedule.predict(experts(1, 1, 1))
    schedule.issue(0)
    schedule.need(experts(1, 1, 2, 3))
    evicted = evicted_by(schedule, lambda: schedule.enter(1).issued)
    assert evicted == [(1, 1)]  # not (1, 0), which has been used
    assert schedule.counters.prefetched_wasted == 1


def test_guesses_stay_within_their_limit_until_one_is_waited_for() -> None:
    schedule = schedule_of(20, depth=2, guess_limit=3)
    schedule.begin(3)
    schedule.predict(experts(1, 1, *range(8)))
    assert len(schedule.issue(0)) == 3
    assert schedule.issue(0) == []
    schedule.need(experts(1, 1, 0, 1))
    schedule.enter(1)
    schedule.predict(experts(2, 1, *range(10, 18)))
    assert [c.piece[1] for c in schedule.issue(1)] == [10, 11, 12]


def test_what_is_promoted_is_spread_over_the_graph_from_its_first_cut_on() -> None:
    schedule = schedule_of(8, depth=2)
    schedule.begin(4)
    schedule.promote([experts(3, 9, 1), experts(0, 9, 2)])
    copied: list[list[int]] = []
    for cut in range(4):
        commands = schedule.issue(cut)
        copied.append([c.piece[1] for c in commands])
        schedule.need(experts(cut, cut, 0))
        schedule.enter(cut)
        schedule.leave(cut)
        check(schedule)
    assert copied == [[1], [], [2], []]
    assert schedule.counters.n_promoted == 2


def test_what_a_cut_uses_in_slots_and_elsewhere_is_one_use_for_the_cache_rule() -> None:
    """A batch that uses nearly all experts counts as little as a prompt, even if some of them have
    no slots."""
    heard: list[tuple[int, int]] = []

    class Heard(Lru):
        def touched(self, pieces: Collection[Piece], now: int) -> None:
            heard.append((len(pieces), now))
            super().touched(pieces, now)

    schedule = Schedule({0: 8}, Heard(), 2)
    schedule.begin(3)
    schedule.need(experts(0, 0, 1, 2))
    schedule.enter(0, [(0, 3), (0, 4), (0, 5)])
    schedule.leave(0)
    schedule.need(experts(2, 2, 7))
    entered = schedule.enter(2)
    assert heard == [(5, 1), (1, 2)]
    assert entered.use == 2


def test_neighbouring_experts_get_neighbouring_slots() -> None:
    schedule = schedule_of(10, depth=1)
    run(schedule, [experts(0, 1, 20, 21, 22), experts(1, 1, 30), experts(2, 1, 40)])
    copies = run(schedule, [experts(0, 2, 9, 4, 5, 6, 7)])
    slot = {c.piece[1]: c.slot for c in copies}
    assert [slot[e] - slot[4] for e in (4, 5, 6, 7)] == [0, 1, 2, 3]


def test_whole_weights_alternate_between_two_regions() -> None:
    schedule = schedule_of(6, depth=1)
    copies = run(schedule, [whole(cut, cut, 3) for cut in range(4)])
    assert [c.slot for c in copies] == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert [c.after for c in copies] == [None] * 6 + [1] * 3 + [2] * 3


@pytest.mark.parametrize("n_slots", [6, 8, 10, 16, 30])
def test_a_dense_weight_that_recurs_is_not_flushed_just_before_its_use(n_slots: int) -> None:
    n, ring = 40, 3
    schedule = schedule_of(n_slots, depth=2)
    needs = [dense(cut, cut) for cut in range(n)]
    run(schedule, needs)
    for _ in range(3):
        copies = run(schedule, needs)
        # LRU would copy all 40 again. Without look-ahead, n - n_slots copies are the minimum.
        assert n - n_slots <= len(copies) <= n - n_slots + ring
        assert 0 not in [c.cut for c in copies]  # the first cut's copy could not be hidden


@pytest.mark.parametrize(("n_layers", "n_pinned"), [(3, 0), (4, 1), (7, 4)])
def test_whole_layers_are_pinned_past_a_ring_of_three(n_layers: int, n_pinned: int) -> None:
    needs = [whole(cut, cut, 8) for cut in range(20)]
    assert len(_kept(needs, 8 * n_layers + 5, 4)) == 8 * n_pinned
    schedule = schedule_of(8 * n_layers + 5, depth=4)
    run(schedule, needs)
    assert len(run(schedule, needs)) == 8 * (20 - n_pinned)


def decoded(n_slots: int, used: list[CutNeed]) -> Schedule:
    """A schedule after decodes with these needs. Its cache rule prefers pieces that decodes used
    to whole layers of 8 experts."""
    rule = Lrfu(100.0, n_used=1, n_scan=8)
    schedule = Schedule({0: n_slots}, rule, depth=3)
    for need in used:
        run(schedule, [need])
    return schedule


def anywhere(n_layers: int) -> list[CutNeed]:
    return [whole(cut, cut, 8)._replace(contiguous=False) for cut in range(n_layers)]


@pytest.mark.parametrize("n_prompts", [1, 4])
def test_whole_layers_that_may_lie_anywhere_leave_a_decodes_experts_where_they_are(
    n_prompts: int,
) -> None:
    """All slots except those of two layers keep their pieces, which are not copied again."""
    used = [experts(0, layer, 1, 3, 6) for layer in range(6)]
    schedule = decoded(34, used)
    kept = {piece: slot for piece, slot in schedule.pools[0].where.items()}
    assert len(kept) == 18 == 34 - 2 * 8
    for _ in range(n_prompts):
        copies = run(schedule, anywhere(6))
        assert kept.items() <= schedule.pools[0].where.items()
        assert not {copy.piece for copy in copies} & kept.keys()
        assert len(copies) <= 6 * 8 - len(kept)


def test_what_is_kept_beyond_a_decodes_experts_stays_from_one_prompt_to_the_next() -> None:
    """Otherwise each prompt would keep the last pieces it streamed, and evict kept pieces of the
    first layers."""
    schedule = decoded(34, [experts(0, 0, 1)])
    run(schedule, anywhere(6))
    run(schedule, anywhere(6))
    kept = schedule._kept[0][1]
    copies = [run(schedule, anywhere(6)) for _ in range(3)]
    assert all(len(c) <= 6 * 8 - len(kept) for c in copies)
    assert schedule._kept[0][1] == kept
    assert kept <= schedule.pools[0].where.keys()


def test_order_is_given_up_only_where_that_saves_more_than_a_piece_of_each_layer() -> None:
    groups = set(range(6))
    schedule = decoded(34, [experts(0, layer, 1, 3) for layer in range(6)])
    assert schedule.saves_out_of_order(0, groups, 8)
    few = decoded(34, [experts(0, layer, 1) for layer in range(6)])
    assert not few.saves_out_of_order(0, groups, 8)
    small = decoded(18, [experts(0, layer, 1, 3) for layer in range(6)])
    assert not small.saves_out_of_order(0, groups, 8), "all slots are needed to stream through"
    in_order = schedule_of(34, depth=3)
    run(in_order, [whole(cut, cut, 8) for cut in range(6)])
    assert not in_order.saves_out_of_order(0, groups, 8), "whole layers lie there in order"


def test_a_need_that_does_not_fit_says_by_how_much_and_changes_nothing() -> None:
    schedule = schedule_of(4, depth=1)
    schedule.begin(2)
    schedule.need(experts(0, 1, 0, 1, 2))
    schedule.need(experts(1, 2, 0, 1))
    schedule.issue(0)
    schedule.enter(0)
    before = list(schedule.pools[0].piece)
    with pytest.raises(DoesNotFit, match=r"needs 2 slots of pool 0, but it has 4, 3 of them"):
        schedule.enter(1)
    assert schedule.pools[0].piece == before
    schedule.leave(0)
    assert len(schedule.enter(1).slots) == 2


def fewest_copies(sequence: tuple[int, ...], n_slots: int) -> int:
    """The least number of copies for this sequence of pieces, found by trying every eviction."""

    @lru_cache(None)
    def best(at: int, cached: frozenset[int]) -> int:
        if at == len(sequence):
            return 0
        if sequence[at] in cached:
            return best(at + 1, cached)
        added = cached | {sequence[at]}
        if len(added) <= n_slots:
            return 1 + best(at + 1, added)
        return 1 + min(best(at + 1, added - {victim}) for victim in cached)

    return best(0, frozenset())


def test_known_cuts_are_served_with_as_few_copies_as_brute_force_finds() -> None:
    rng = random.Random(5)
    for _ in range(200):
        sequence = tuple(rng.randrange(5) for _ in range(rng.randint(1, 9)))
        for n_slots in (1, 2, 3, 4):
            schedule = schedule_of(n_slots, depth=0)
            schedule.begin(len(sequence))
            schedule.issue(0)
            for cut, weight in enumerate(sequence):
                schedule.need(dense(cut, weight))
            for cut in range(len(sequence)):
                schedule.enter(cut)
                schedule.leave(cut)
            copies = schedule.counters.streamed_experts
            assert copies == fewest_copies(sequence, n_slots), (sequence, n_slots)


@pytest.mark.parametrize("seed", range(5))
def test_each_piece_gets_its_own_slot_if_all_have_one(seed: int) -> None:
    rng, n_groups, n_experts = random.Random(seed), 3, 4
    homes = {group: group * n_experts for group in range(n_groups)}
    n_slots = n_groups * n_experts + rng.randint(0, 3)
    schedule = Schedule({0: n_slots}, Lrfu(4.0), 2, n_experts=n_experts, homes={0: homes})
    pieces = [(group, expert) for group in homes for expert in range(n_experts)]
    assert schedule.is_filling(0)
    for copies in schedule.fill(0, rng.sample(pieces, 3)):
        for copy in copies:
            schedule.arrived(0, copy.piece)
    for _ in range(6):
        schedule.begin(n_groups)
        for group in homes:
            experts = rng.sample(range(n_experts), rng.randint(1, n_experts))
            whole = tuple((group, expert) for expert in range(n_experts))
            contiguous = rng.random() < 0.3
            chosen = whole if contiguous else tuple((group, expert) for expert in experts)
            schedule.need(CutNeed(group, 0, chosen, contiguous))
            schedule.issue(group)
            slots = schedule.enter(group).slots
            assert slots == tuple(homes[group] + expert for _, expert in chosen)
            schedule.leave(group)
    if len(schedule.pools[0].where) == len(pieces):
        assert not schedule.is_filling(0)
        assert all(schedule.is_in_order(0, group, n_experts) for group in homes)
    schedule.abort()
    assert schedule.counters.evictions == 0
