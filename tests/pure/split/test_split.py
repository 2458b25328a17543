"""The split of a layer's experts between CPU and device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offload.split.division import (
    HIT,
    HOST,
    STREAMED,
    Split,
    SplitCosts,
    _stages,
    expected,
    seconds_at,
    split_pairs,
)

Ids = NDArray[np.int32]
Resident = NDArray[np.bool_]
_US = 1e-6
seconds = st.integers(0, 400).map(lambda n: n * _US)
steps = st.lists(st.integers(1, 50).map(lambda n: n * _US), min_size=1, max_size=5)
slowdowns = st.sampled_from([1.0, 1.5, 3.0])


def shares(parts: list[int]) -> tuple[float, ...]:
    return tuple(part / sum(parts) for part in parts)


kinds = st.lists(st.integers(1, 9), min_size=1, max_size=4).map(shares)


@st.composite
def regular_costs(draw: st.DrawFn) -> SplitCosts:
    """Costs as machines have them: more rows take longer, the CPU's share of it growing."""
    per_row = draw(steps)
    host_s = np.array([0.0, *itertools.accumulate(per_row)])
    speedups = np.cumsum([0, 1, *(draw(st.integers(0, 3)) for _ in per_row[1:])])
    device_s = np.array([0.0, *(h / s for h, s in zip(host_s[1:], speedups[1:], strict=True))])
    return SplitCosts(
        host_s,
        device_s,
        draw(seconds),
        draw(seconds),
        draw(seconds),
        draw(slowdowns),
        draw(slowdowns),
        draw(kinds),
    )


@st.composite
def any_costs(draw: st.DrawFn) -> SplitCosts:
    """Costs as nobody would expect them."""
    n = draw(st.integers(2, 6))
    return SplitCosts(
        np.array([0.0, *(draw(seconds) for _ in range(n - 1))]),
        np.array([0.0, *(draw(seconds) for _ in range(n - 1))]),
        draw(seconds),
        draw(seconds),
        draw(seconds),
        draw(slowdowns),
        draw(slowdowns),
        draw(kinds),
    )


@st.composite
def batches(draw: st.DrawFn, most_experts: int = 8, most_tokens: int = 6) -> tuple[Ids, Resident]:
    """The experts of some tokens, and which of all have a slot."""
    n_experts = draw(st.integers(1, most_experts))
    n_used = draw(st.integers(1, n_experts))
    chosen = st.permutations(range(n_experts)).map(lambda order: order[:n_used])
    ids = draw(st.lists(chosen, min_size=1, max_size=most_tokens))
    resident = draw(st.lists(st.booleans(), min_size=n_experts, max_size=n_experts))
    return np.array(ids, np.int32), np.array(resident)


def priced(ids: Ids, costs: SplitCosts, kind: NDArray[np.uint8]) -> tuple[float, float]:
    """The model in plain words: seconds of the CPU, and of the device, expert by expert."""
    work_s = compute_s = link_s = 0.0
    rows = {int(e): int((ids == e).sum()) for e in np.unique(ids)}
    for expert, n in rows.items():
        if kind[expert] == HOST:
            work_s += float(seconds_at(costs.host_s, np.array([n]))[0])
        else:
            compute_s += float(seconds_at(costs.device_s, np.array([n]))[0])
            link_s += costs.copy_s if kind[expert] == STREAMED else 0.0
    sides = {int(kind[expert]) for expert in rows}
    cpu_s = device_s = 0.0
    if HOST in sides:
        work_s += costs.host_fixed_s
        slow = costs.host_slowdown
        # At 1 / slow of its speed until the link rests, or it has ended.
        cpu_s = work_s * slow if work_s * slow <= link_s else link_s + work_s - link_s / slow
    if sides != {HOST}:
        copied = 0.0
        for share in costs.kinds:  # a product behind the one before and the copies of its kind
            copied += share
            arrived_s = copied * link_s
            if arrived_s > cpu_s:  # the CPU has ended, and the link goes on at its own speed
                arrived_s = cpu_s + (arrived_s - cpu_s) / costs.link_slowdown
            device_s = max(device_s, arrived_s) + share * compute_s
        device_s += costs.device_fixed_s
    return cpu_s, device_s


def later_s(split: Split) -> float:
    return max(split.cpu_s, split.device_s)


def best_of_all_s(ids: Ids, resident: Resident, costs: SplitCosts) -> float:
    used = np.unique(ids)
    misses = used[~resident[used]]
    kind = np.zeros(len(resident), np.uint8)
    found = np.inf
    for sides in itertools.product((HOST, STREAMED), repeat=len(misses)):
        kind[misses] = sides
        found = min(found, max(priced(ids, costs, kind)))
    return found


@given(batches(), any_costs())
def test_a_split_is_what_it_says_and_costs_what_the_model_says(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    split = split_pairs(ids, resident, costs)
    used = np.unique(ids)
    assert split.kind.dtype == np.uint8
    assert set(split.kind[used[resident[used]]]) <= {HIT}
    assert set(split.kind[used[~resident[used]]]) <= {STREAMED, HOST}
    assert (split.cpu_s, split.device_s) == pytest.approx(priced(ids, costs, split.kind), abs=1e-12)


@given(batches(), any_costs(), st.randoms(use_true_random=False))
def test_any_split_of_somebody_else_costs_what_the_model_says(
    batch: tuple[Ids, Resident], costs: SplitCosts, random: Random
) -> None:
    ids, resident = batch
    kind = np.array([random.choice((HOST, HIT if r else STREAMED)) for r in resident], np.uint8)
    split = expected(ids, kind, costs)
    assert split.kind is kind
    assert (split.cpu_s, split.device_s) == pytest.approx(priced(ids, costs, kind), abs=1e-12)


@given(batches(64, 16), any_costs())
def test_it_is_never_behind_the_cpu_alone_nor_the_device_alone(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    found_s = later_s(split_pairs(ids, resident, costs))
    all_host = np.where(resident, HIT, HOST).astype(np.uint8)  # the device has hits anyway
    all_device = np.where(resident, HIT, STREAMED).astype(np.uint8)
    assert found_s <= max(priced(ids, costs, all_host)) + 1e-12
    assert found_s <= max(priced(ids, costs, all_device)) + 1e-12


@given(batches(), regular_costs())
def test_no_split_at_all_is_better_by_more_than_the_bound(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    best_s = best_of_all_s(ids, resident, costs)
    found_s = later_s(split_pairs(ids, resident, costs))
    assert best_s - 1e-12 <= found_s <= best_s + excess_s(ids, resident, costs) + 1e-12


@given(batches(most_tokens=1), any_costs())
def test_for_one_token_it_is_the_best_of_all(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    found_s = later_s(split_pairs(ids, resident, costs))
    assert found_s == pytest.approx(best_of_all_s(ids, resident, costs), abs=1e-12)


@given(batches(32, 8), any_costs(), st.sampled_from(["host_s", "device_s", "copy_s"]))
def test_a_faster_part_never_makes_a_step_longer(
    batch: tuple[Ids, Resident], costs: SplitCosts, part: str
) -> None:
    ids, resident = batch
    faster = replace(costs, **{part: getattr(costs, part) * 0.5})
    before_s = later_s(split_pairs(ids, resident, costs))
    assert later_s(split_pairs(ids, resident, faster)) <= before_s + 1e-12


@given(batches(32, 1), any_costs(), st.integers(0, 31))
def test_one_expert_more_in_a_slot_makes_a_tokens_step_longer_by_its_products_at_most(
    batch: tuple[Ids, Resident], costs: SplitCosts, at: int
) -> None:
    ids, resident = batch
    more = resident.copy()
    more[at % len(more)] = True
    before_s = later_s(split_pairs(ids, resident, costs))
    products_s = costs.device_fixed_s + costs.device_s[1]
    assert later_s(split_pairs(ids, more, costs)) <= before_s + products_s + 1e-12


@given(batches(32, 8), regular_costs())
def test_the_link_gets_the_misses_of_most_rows(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    split = split_pairs(ids, resident, costs)
    rows = np.bincount(ids.ravel(), minlength=len(resident))
    misses = (rows > 0) & ~resident
    streamed, left = (rows[misses & (split.kind == kind)] for kind in (STREAMED, HOST))
    assert streamed.min(initial=99) >= left.max(initial=0)


def test_beyond_what_was_measured_costs_follow_their_last_step() -> None:
    measured = np.array([0.0, 2.0, 5.0])
    assert seconds_at(measured, np.array([1, 2, 3, 10])).tolist() == [2.0, 5.0, 8.0, 29.0]


def test_products_wait_for_their_own_kind_of_weight_and_no_other() -> None:
    """Two copies of 30 s and products of 6 s for all three experts; the CPU would take 100 s."""
    costs = SplitCosts(np.array([0.0, 100.0]), np.array([0.0, 2.0]), 0.0, 0.0, 15.0)
    ids = np.arange(3, dtype=np.int32)[None]
    resident = np.arange(3) < 1

    def device_s(*kinds: float) -> float:
        split = split_pairs(ids, resident, replace(costs, kinds=kinds))
        assert split.kind.tolist() == [HIT, STREAMED, STREAMED]
        return split.device_s

    assert device_s(1.0) == pytest.approx(36.0), "all copies, then the product"
    assert device_s(0.5, 0.5) == pytest.approx(33.0), "half a product behind the last copy"
    assert device_s(0.25, 0.25, 0.5) == pytest.approx(33.0)
    assert device_s(0.4, 0.4, 0.2) == pytest.approx(31.2)
    slow_device = replace(costs, device_s=np.array([0.0, 30.0]), kinds=(0.25, 0.75))
    assert split_pairs(ids, resident, slow_device).device_s == pytest.approx(97.5), "7.5 of copies"


def test_either_side_is_slow_only_while_the_other_is_busy() -> None:
    """Four experts; one is copied in 10 s beside the CPU, in 5 s alone."""
    costs = SplitCosts(np.array([0.0, 2.0]), np.zeros(2), 0.0, 0.0, 10.0, 1.5, 2.0)
    ids = np.arange(4, dtype=np.int32)[None]
    nothing, all_but_one = np.zeros(4, np.bool_), np.arange(4) > 0
    split = split_pairs(ids, nothing, costs)
    assert (split.kind.tolist(), split.cpu_s) == ([HOST] * 4, 8.0), "at its own speed"
    split = split_pairs(ids, nothing, replace(costs, copy_s=4.0))
    assert split.kind.tolist() == [STREAMED, STREAMED, HOST, HOST]
    assert split.cpu_s == pytest.approx(6.0), "4 s of work beside copies to the end"
    assert split.device_s == pytest.approx(7.0), "6 of 8 s of copies beside it, the rest in one"
    longer = replace(costs, copy_s=2.0, host_s=np.array([0.0, 5.0]), link_slowdown=1.0)
    split = split_pairs(ids, nothing, longer)
    assert split.kind.tolist() == [STREAMED, STREAMED, STREAMED, HOST]
    assert split.cpu_s == pytest.approx(7.0), "6 s beside copies, in which it does 4 of 5, and 1"
    alone = split_pairs(ids, all_but_one, replace(costs, host_s=np.array([0.0, 20.0])))
    assert alone.kind.tolist() == [STREAMED, HIT, HIT, HIT]
    assert (alone.cpu_s, alone.device_s) == (0.0, 5.0)


def test_a_slow_link_leaves_every_miss_to_the_cpu_and_a_fast_one_shares_them() -> None:
    costs = SplitCosts(np.array([0.0, 10.0]), np.array([0.0, 1.0]), 0.0, 0.0, 100.0)
    ids = np.arange(8, dtype=np.int32)[None]
    resident = np.arange(8) < 3
    assert split_pairs(ids, resident, costs).kind.tolist() == [HIT] * 3 + [HOST] * 5
    fast = split_pairs(ids, resident, replace(costs, copy_s=12.5))
    assert fast.kind.tolist() == [HIT] * 3 + [STREAMED] * 2 + [HOST] * 3
    assert (fast.cpu_s, fast.device_s) == (30.0, 30.0)


@given(batches(32, 8), any_costs())
def test_the_link_is_idle_but_for_what_is_streamed(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    split = split_pairs(ids, resident, costs)
    rows = np.bincount(ids.ravel(), minlength=len(resident))
    link_s = costs.copy_s * int(((rows > 0) & (split.kind == STREAMED)).sum())
    assert split.idle_s == pytest.approx(max(0.0, later_s(split) - link_s), abs=1e-12)
    known = split_pairs(ids, resident, costs, rows)
    assert known.kind.tolist() == split.kind.tolist(), "its own count is the same"


def excess_s(ids: NDArray[np.int32], resident: NDArray[np.bool_], costs: SplitCosts) -> float:
    """Seconds at most between the split and the best of all splits of the misses.

    It holds where `host_s` and the quotient `host_s / device_s` do not fall as rows grow. Then
    exchanging any two misses towards the cut's order with the CPU's work as it is lowers nobody's
    time: the device computes no more, and the link copies no more. So the best division of experts
    into fractions has at most one miss divided. Rounding it to one side adds no more to either than
    it takes alone: a slowdown of the CPU is in its part, and a longer wait for copies beside a CPU
    that works longer is at most what that adds.
    """
    rows = np.bincount(ids.ravel(), minlength=len(resident))
    misses = rows[~resident & (rows > 0)]
    if not len(misses):
        return 0.0
    host_s, device_s = (
        float(seconds_at(seconds, misses).max()) for seconds in (costs.host_s, costs.device_s)
    )
    stages = _stages(costs.kinds, all_of_them=True)
    on_device_s = max(link * costs.copy_s + products * device_s for link, products in stages)
    return min(host_s * costs.host_slowdown, on_device_s)
