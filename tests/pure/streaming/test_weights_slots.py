"""Slots, replacement policies, spans and guesses, each alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_machine import check_slots

from offload.routing import RoutingGuess, expected_union
from offload.schedule.batch import Fetch, fetch_of
from offload.schedule.cache import Lrfu, VictimQueue
from offload.schedule.commands import Copy, Span, coalesce
from offload.schedule.slots import (
    FREE,
    IN_USE,
    LOADING,
    NOWHERE,
    READY,
    STATES,
    IllegalMove,
    PoolSlots,
)

# -- slots ---------------------------------------------------------------------------------------


def test_a_slot_lives_from_free_to_in_use_and_back() -> None:
    slots = PoolSlots(2)
    story = [STATES[slots.state[0]]]
    for step in (
        lambda: slots.load(0, (7, 3)),
        lambda: slots.landed(0),
        lambda: slots.acquire([0], use=1),
        lambda: slots.release([0]),
        lambda: slots.evict(0),
    ):
        step()
        check_slots(slots)
        story.append(STATES[slots.state[0]])
    assert story == [*STATES, "ready", "free"]
    assert slots.last_use == [1, 0]  # eviction forgets the piece, not who may still be reading it


def test_illegal_moves_say_what_was_tried() -> None:
    slots = PoolSlots(2)
    with pytest.raises(IllegalMove, match="slot 0 is free and cannot become ready"):
        slots.landed(0)
    slots.load(0, (1, 1))
    with pytest.raises(IllegalMove, match=r"piece \(1, 1\) is already in slot 0"):
        slots.load(1, (1, 1))
    with pytest.raises(IllegalMove, match="loading and cannot become in use"):
        slots.acquire([0], 1)
    slots.landed(0)
    slots.acquire([0], 1)
    with pytest.raises(IllegalMove, match="in use and cannot become free"):
        slots.evict(0)
    slots.release([0])
    with pytest.raises(IllegalMove, match="released more often"):
        slots.release([0])


def test_a_random_walk_makes_only_legal_moves() -> None:
    rng = random.Random(3)
    slots = PoolSlots(4)
    seen: Counter[tuple[int, int]] = Counter()
    for use in range(1, 4000):
        slot = rng.randrange(4)
        old = slots.state[slot]
        move = rng.choice(("load", "landed", "acquire", "release", "evict"))
        try:
            if move == "load":
                slots.load(slot, (rng.randrange(6), 0))
            elif move == "acquire":
                slots.acquire([slot], use)
            elif move == "release" and slots.users[slot]:
                slots.release([slot])
            elif move in ("landed", "evict"):
                getattr(slots, move)(slot)
        except IllegalMove:
            assert slots.state[slot] == old
        if slots.state[slot] != old:
            seen[old, slots.state[slot]] += 1
        check_slots(slots)
    legal = {(FREE, LOADING), (LOADING, READY), (READY, IN_USE), (IN_USE, READY)}
    assert set(seen) == legal | {(LOADING, FREE), (READY, FREE)}
    slots.abort()
    check_slots(slots)
    assert set(slots.state) <= {FREE, READY}


# -- replacement ---------------------------------------------------------------------------------

A, B, C = (0, 0), (0, 1), (0, 2)


def order(rule: object) -> list[tuple[int, int]]:
    return sorted((A, B, C), key=rule.rank)  # type: ignore[attr-defined]


def test_lrfu_gives_up_what_is_used_least_but_forgets_old_fame() -> None:
    rule = Lrfu(half_life=10, n_used=2)
    for now in range(5):
        rule.touched([A, B], now)
    rule.touched([B], 5)
    rule.touched([C], 6)
    assert order(rule) == [C, A, B]
    rule.touched([C], 60)  # five half-lives later one use outweighs six old ones
    assert order(rule) == [A, B, C]


def test_lrfu_counts_decay_by_half_per_half_life() -> None:
    rule = Lrfu(half_life=8)
    for now in (0, 3, 3, 20):
        rule.touched([A], now)
    count = sum(2.0 ** (now / 8) for now in (0, 3, 3, 20))
    assert rule.rank(A) == pytest.approx(np.log2(count))
    rule.touched([A], 10**7)  # no overflow
    assert rule.rank(A) == pytest.approx(10**7 / 8)


def test_lrfu_lets_a_prompt_that_uses_everything_count_as_little_as_a_token() -> None:
    rule = Lrfu(half_life=8, n_used=2)
    rule.touched([A, B], 1)
    rule.touched([(0, e) for e in range(32)], 2)
    assert min(rule.rank(A), rule.rank(B)) > rule.rank(C)
    rule.touched([C], 3)
    assert rule.rank(C) > rule.rank(A)  # recency first: one use now outweighs one before


def test_lrfu_ranks_a_verification_batch_above_older_decodes_of_one_token() -> None:
    rule = Lrfu.for_model(1, n_used=2, n_experts=32)
    for now in range(4):
        rule.touched([A, B], now)
    rule.touched([(0, e) for e in range(2, 28)], 8)  # 16 tokens: many experts, but not all
    assert rule.rank((0, 2)) == 8 / 4
    rule.touched([(1, e) for e in range(32)], 9)  # a prompt
    assert rule.rank((1, 0)) == pytest.approx(9 / 4 - 4)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_lazy_queue_takes_what_sorting_everything_would_take(seed: int) -> None:
    rng = random.Random(seed)
    n = rng.randint(1, 8)
    slots, rule = PoolSlots(n), Lrfu(4.0)
    queue = VictimQueue(slots, rule)
    for now in range(1, 60):
        for slot in [s for s in range(n) if slots.piece[s] is None]:
            slots.load(slot, (0, rng.choice([e for e in range(20) if (0, e) not in slots.where])))
            queue.renew(slot)
            queue.offer(slot)
        touched = rng.sample(sorted(slots.where), rng.randint(0, n))
        rule.touched(touched, now)
        protected = set(rng.sample(sorted(slots.where), rng.randint(0, n)))
        plain = [p for p in slots.where if p not in protected]
        slot = queue.take(protected, ())
        if slot is None:
            assert not plain
        else:
            piece = slots.evict(slot)
            assert rule.rank(piece) == min(rule.rank(p) for p in plain)
        queue.offer_dropped()


# -- spans ---------------------------------------------------------------------------------------


def copy(slot: int, expert: int, after: int | None = None, group: int = 1, pool: int = 0) -> Copy:
    return Copy(pool, slot, (group, expert), 0, "needed", after)


def test_neighbours_become_one_span_that_waits_for_the_last_reader() -> None:
    copies = [copy(3, 10, 5), copy(4, 11, None), copy(5, 12, 9), copy(6, 13, 2)]
    assert coalesce(copies) == [Span(0, 3, 1, 10, 4, 9)]
    assert coalesce([copy(3, 10), copy(4, 11)]) == [Span(0, 3, 1, 10, 2, None)]
    assert coalesce([copy(3, 10), copy(4, 11, 7)]) == [Span(0, 3, 1, 10, 2, 7)]


def test_only_neighbours_in_slot_expert_group_and_pool_are_joined() -> None:
    first = copy(3, 10)
    for other in (copy(5, 11), copy(4, 12), copy(4, 11, group=2), copy(4, 11, pool=1),
                  copy(2, 9)):  # fmt: skip
        assert len(coalesce([first, other])) == 2
    assert coalesce([]) == []


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_spans_copy_the_same_bytes_in_the_same_order(
    pairs: list[tuple[int, int]],
) -> None:
    spans = coalesce([copy(slot, expert) for slot, expert in pairs])
    assert [(s.slot + i, s.expert + i) for s in spans for i in range(s.n)] == pairs


# -- guesses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_tokens", "n_used", "n_experts"), [(1, 8, 256), (5, 2, 8), (40, 3, 16)])
def test_the_expected_union_is_what_random_routers_use(
    n_tokens: int, n_used: int, n_experts: int
) -> None:
    rng = np.random.default_rng(1)
    sizes = [
        len({e for _ in range(n_tokens) for e in rng.choice(n_experts, n_used, replace=False)})
        for _ in range(400)
    ]
    expected = expected_union(n_tokens, n_used, n_experts)
    assert expected == pytest.approx(np.mean(sizes), rel=0.03)


@pytest.mark.parametrize(
    ("n_tokens", "n_slots", "fetch"),
    [
        (512, 256, Fetch.ALL_IN_ORDER),
        (512, 512, Fetch.ALL_IN_ORDER),
        (512, 255, Fetch.CHOSEN),  # they do not fit
        (16, 512, Fetch.CHOSEN),  # about 102 of 256 are used
        (512, 257, Fetch.ALL),  # the rest of the slots take part of the next layer meanwhile
        (512, 511, Fetch.ALL),
    ],
)
def test_large_batches_copy_all_experts_if_they_fit(
    n_tokens: int, n_slots: int, fetch: Fetch
) -> None:
    assert fetch_of(n_tokens, 8, 256, n_slots) is fetch


def test_routing_guesses_what_the_last_batch_used_most() -> None:
    routing = RoutingGuess()
    assert list(routing.predict(3, 4)) == []
    routing.observe(3, np.array([[1, 5], [5, 2], [5, 1]], np.int32))
    assert list(routing.predict(3, 100)) == [5, 1, 2]
    assert list(routing.predict(3, 1)) == [5, 1]  # as many as one token uses
    assert list(routing.predict(4, 1)) == []  # another layer
    routing.observe(3, np.array([[9, 2]], np.int32))
    assert list(routing.predict(3, 100)) == [2, 9, 5, 1]


def test_routing_hears_of_rows_as_of_ids_and_says_what_share_of_tokens_used_an_expert() -> None:
    by_ids, by_rows = RoutingGuess(), RoutingGuess()
    for ids in ([[1, 5], [5, 2], [5, 1]], [[9, 2]]):
        by_ids.observe(3, np.array(ids, np.int32))
        rows = np.bincount(np.ravel(ids), minlength=12)
        by_rows.observe_rows(3, rows, len(ids), 2)
    assert list(by_rows.predict(3, 100)) == list(by_ids.predict(3, 100)) == [2, 9, 5, 1]
    there, found = np.zeros(16, np.bool_), []
    for _ in range(5):
        found.append(by_rows.likeliest(3, there))
        there[found[-1][0]] = True
    assert [expert for expert, _ in found[:4]] == [2, 9, 5, 1]
    assert [score for _, score in found] == pytest.approx([1 + 1 / 6, 1, 1 / 2, 1 / 3, 0])
    assert by_rows.likeliest(4, there)[1] <= 0, "nothing is known of that layer"


def test_a_groups_array_says_where_its_pieces_are_and_which_are_on_their_way() -> None:
    slots = PoolSlots(4)
    slots.load(2, (7, 70))
    assert slots.of_group(7, 100)[70] == 2
    assert slots.loading == {7: {70}}
    check_slots(slots)
    slots.landed(2)
    slots.load(0, (7, 3))
    assert slots.loading == {7: {3}}
    slots.evict(2)
    slots.evict(0)
    assert (slots.of_group(7, 100) == NOWHERE).all()
    assert (slots.of_group(8, 5) == NOWHERE).all()
    assert not slots.loading[7]
    check_slots(slots)


def test_routing_forgets_what_has_not_been_used_for_long() -> None:
    routing = RoutingGuess(decay=0.5)
    routing.observe(0, np.array([[30]], np.int32))
    for _ in range(12):
        routing.observe(0, np.array([[1]], np.int32))
    assert list(routing.predict(0, 1000)) == [1]
    routing.observe(0, np.empty((0, 1), np.int32))
    assert list(routing.predict(0, 1000)) == [1]
