"""The schedule's parts, each alone: slots, cache rules, spans and guesses."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_machine import check_slots

from offload.routing.routing import RoutingGuess
from offload.schedule.batch import Fetch, fetch_of
from offload.schedule.cache import Lrfu, VictimQueue
from offload.schedule.slots import (
    FREE,
    IN_USE,
    LOADING,
    READY,
    Copy,
    IllegalMove,
    PoolSlots,
    Span,
    coalesce,
)

# -- slots ---------------------------------------------------------------------------------------


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


def test_lrfu_counts_decay_by_half_per_half_life() -> None:
    rule = Lrfu(half_life=8)
    for now in (0, 3, 3, 20):
        rule.touched([A], now)
    count = sum(2.0 ** (now / 8) for now in (0, 3, 3, 20))
    assert rule.rank(A) == pytest.approx(np.log2(count))
    rule.touched([A], 10**7)  # no overflow
    assert rule.rank(A) == pytest.approx(10**7 / 8)


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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=20))
def test_spans_copy_the_same_bytes_in_the_same_order(
    pairs: list[tuple[int, int]],
) -> None:
    spans = coalesce([copy(slot, expert) for slot, expert in pairs])
    assert [(s.slot + i, s.expert + i) for s in spans for i in range(s.n)] == pairs


# -- guesses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "n_slots", "fetch"),
    [
        (512, 256, Fetch.ALL_IN_ORDER),
        (512, 512, Fetch.ALL_IN_ORDER),
        (512, 255, Fetch.CHOSEN),  # not all experts fit the slots
        (16, 512, Fetch.CHOSEN),  # about 102 of 256 are used
        (512, 257, Fetch.ALL),  # other slots hold a part of the next layer
        (512, 511, Fetch.ALL),
    ],
)
def test_large_batches_copy_all_experts_if_they_fit(
    n_tokens: int, n_slots: int, fetch: Fetch
) -> None:
    assert fetch_of(n_tokens, 8, 256, n_slots) is fetch


def observed(routing: RoutingGuess, layer: int, ids: list[list[int]]) -> None:
    routing.observe(layer, np.bincount(np.ravel(ids)), np.array(ids))


def test_routing_guesses_what_the_last_batch_used_most() -> None:
    routing = RoutingGuess()
    assert list(routing.predict(3, 4)) == []
    observed(routing, 3, [[1, 5], [5, 2], [5, 1]])
    assert list(routing.predict(3, 100)) == [5, 1, 2]
    assert list(routing.predict(3, 1)) == [5, 1]  # as many as one token uses
    assert list(routing.predict(4, 1)) == []  # no uses in this layer yet
    observed(routing, 3, [[9, 2]])
    assert list(routing.predict(3, 100)) == [2, 9, 5, 1]


def test_routing_guesses_what_the_batchs_tokens_chose_last() -> None:
    routing = RoutingGuess()
    routing.expect([70, 80, 90])
    observed(routing, 3, [[1, 5], [5, 2], [7, 1]])
    routing.expect([90])
    observed(routing, 3, [[6, 4]])
    routing.expect([80, 70])
    assert list(routing.predict(3, 2)) == [5, 2, 1]
    routing.expect([90])
    assert sorted(routing.predict(3, 1)) == [4, 6]
    # A batch of another size than was expected does not have these tokens.
    routing.expect([80, 70])
    observed(routing, 3, [[0, 3]])
    assert list(routing.predict(3, 2)) == [5, 2, 1]
    # The last batches stand in for a token that was not seen.
    routing.expect([33, 90])
    guess = list(routing.predict(3, 2))
    assert set(guess[:2]) == {4, 6}
    assert guess[2:4] == [0, 3]
    routing.expect([])
    assert list(routing.predict(3, 2))[:2] == [0, 3]


def test_routing_forgets_what_has_not_been_used_for_long() -> None:
    routing = RoutingGuess(decay=0.5)
    observed(routing, 0, [[30]])
    for _ in range(12):
        observed(routing, 0, [[1]])
    assert list(routing.predict(0, 1000)) == [1]
