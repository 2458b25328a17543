"""With random graphs, slots, guesses and timing, each cut reads the pieces that it needs.

The reference is a schedule of depth 0, which copies only the pieces of the current cut.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from weights_machine import Driver, Graph
from wide import examples

from offload.schedule.cache import Lrfu
from offload.schedule.schedule import Schedule
from offload.schedule.slots import CutNeed

N_POOLS = 2
DENSE, WHOLE, EXPERTS = "dense", "whole", "experts"


def random_graph(rng: random.Random, n_experts: int, n_weights: int, guessing: str) -> Graph:
    """Layers of dense, whole and routed needs over weights `pool * 100 + i`."""
    needs: list[CutNeed] = []
    known: set[int] = set()
    groups: dict[int, tuple[int, ...]] = {}
    in_order = rng.random() < 0.6  # True: a whole layer's experts need slots in order
    for _ in range(rng.randint(1, 7)):
        kind = rng.choice((DENSE, WHOLE, EXPERTS))
        cut = len(needs)
        if kind == EXPERTS:
            used = rng.sample(range(n_experts), rng.randint(1, n_experts))
            if rng.random() < 0.5:
                used.sort()
            group = tuple(range(cut, cut + rng.randint(1, 3)))
            groups[cut] = group
            for member in group:
                pool, weight = _weight(rng, n_weights)
                needs.append(CutNeed(member, pool, tuple((weight, e) for e in used)))
            continue
        known.add(cut)
        pool, weight = _weight(rng, n_weights)
        if kind == WHOLE:
            pieces = tuple((weight, e) for e in range(n_experts))
            needs.append(CutNeed(cut, pool, pieces, contiguous=in_order))
        else:
            needs.append(CutNeed(cut, pool, ((weight + 50, 0),)))
    guesses = [
        guess
        for group in groups.values()
        for cut in group
        if (guess := _guess(rng, needs[cut], n_experts, guessing)) is not None
    ]
    promotions = [
        CutNeed(need.cut, need.pool, (rng.choice(need.pieces),))
        for need in rng.sample(needs, rng.randint(0, len(needs)))
        if need.cut in groups
    ]
    return Graph(needs, known, groups, guesses, promotions)


def _weight(rng: random.Random, n_weights: int) -> tuple[int, int]:
    pool = rng.randrange(N_POOLS)
    return pool, 100 * pool + rng.randrange(n_weights)


def _guess(rng: random.Random, need: CutNeed, n_experts: int, guessing: str) -> CutNeed | None:
    weight = need.pieces[0][0]
    unused = [(weight, e) for e in range(n_experts) if (weight, e) not in need.pieces]
    if guessing == "right":
        return need
    if guessing == "wrong":
        return need._replace(pieces=tuple(unused)) if unused else None
    if guessing == "partly":
        right = rng.sample(need.pieces, rng.randint(0, len(need.pieces)))
        wrong = rng.sample(unused, rng.randint(0, len(unused)))
        return need._replace(pieces=tuple(right + wrong))
    return None


def smallest(graphs: list[Graph], pool: int) -> int:
    """Number of slots of the smallest pool in which each cut fits alone."""
    sizes = [len(set(n.pieces)) for g in graphs for n in g.needs if n.pool == pool]
    return max(sizes, default=1)


@settings(max_examples=examples(400), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_experts=st.integers(1, 5),
    n_weights=st.integers(1, 4),
    spare=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    depth=st.sampled_from((0, 1, 2, 3, 5, 1000)),
    guess_limit=st.sampled_from((0, 1, 4, 100)),
    guessing=st.sampled_from(("right", "partly", "wrong", "none")),
    repeat=st.booleans(),
    aborts=st.booleans(),
)
def test_every_cut_reads_the_pieces_it_asked_for(
    seed: int,
    n_experts: int,
    n_weights: int,
    spare: tuple[int, int],
    depth: int,
    guess_limit: int,
    guessing: str,
    repeat: bool,
    aborts: bool,
) -> None:
    rng = random.Random(seed)
    graphs = [random_graph(rng, n_experts, n_weights, guessing) for _ in range(1 if repeat else 3)]
    graphs = graphs * 3 if repeat else graphs
    pools = {a: smallest(graphs, a) + spare[a] for a in range(N_POOLS)}
    schedule = Schedule(pools, Lrfu(4.0), depth, guess_limit)
    driver = Driver(schedule, rng)
    expected: list[tuple[int, tuple[tuple[int, int], ...]]] = []
    for graph in graphs:
        abort_at = rng.randrange(len(graph.needs)) if aborts and rng.random() < 0.5 else None
        driver.run(graph, abort_at)
        expected += [(need.cut, need.pieces) for need in graph.needs[:abort_at]]
    driver.machine.finish()
    assert driver.machine.computed == expected
    counters = schedule.counters
    copied = counters.streamed_experts
    assert counters.hits == driver.hits
    assert counters.misses == driver.misses
    assert counters.prefetched_used + counters.prefetched_wasted <= copied
    resident = sum(schedule.n_slots_by_state()[1:])
    assert copied - counters.evictions >= resident  # failed steps void other pieces
    assert aborts or copied - counters.evictions == resident


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 4))
def test_when_everything_fits_nothing_is_copied_twice(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng, 4, 3, "partly")
    for i, need in enumerate(graph.needs):
        graph.needs[i] = need._replace(contiguous=False)
    graph.guesses.clear()
    pieces = {piece for need in graph.needs for piece in need.pieces}
    schedule = Schedule({0: len(pieces), 1: len(pieces)}, Lrfu(4.0), depth)
    driver = Driver(schedule, rng)
    for _ in range(3):
        driver.run(graph)
    driver.machine.finish()
    assert schedule.counters.streamed_experts == len(pieces)
    assert schedule.counters.evictions == 0
