"""The split of a layer's experts between CPU and device."""

from __future__ import annotations

import ctypes as C
import itertools
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offload.ggml.player import Layer, Player, PlayerHost, native
from offload.schedule.division import (
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
from offload.stream.entries import CostEntry

native()  # compiled before the tests, whose time is limited
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
    """Draws realistic costs: more rows take longer, and the CPU's time grows at least as fast as
    the device's."""
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
    """Draws arbitrary costs, also implausible ones."""
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
    """Draws the experts of each token, and a mask of the experts that have a slot."""
    n_experts = draw(st.integers(1, most_experts))
    n_used = draw(st.integers(1, n_experts))
    chosen = st.permutations(range(n_experts)).map(lambda order: order[:n_used])
    ids = draw(st.lists(chosen, min_size=1, max_size=most_tokens))
    resident = draw(st.lists(st.booleans(), min_size=n_experts, max_size=n_experts))
    return np.array(ids, np.int32), np.array(resident)


def priced(ids: Ids, costs: SplitCosts, kind: NDArray[np.uint8]) -> tuple[float, float]:
    """Seconds of (CPU, device) by the cost model, computed in a simple way, expert by expert."""
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
        # The CPU runs at 1 / slow of its speed until it or the link has finished.
        cpu_s = work_s * slow if work_s * slow <= link_s else link_s + work_s - link_s / slow
    if sides != {HOST}:
        copied = 0.0
        for (
            share
        ) in costs.kinds:  # each product waits for the previous one and for copies of its kind
            copied += share
            arrived_s = copied * link_s
            if arrived_s > cpu_s:  # the link has its own speed once the CPU has finished
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


def test_beyond_what_was_measured_costs_follow_their_last_step() -> None:
    measured = np.array([0.0, 2.0, 5.0])
    assert seconds_at(measured, np.array([1, 2, 3, 10])).tolist() == [2.0, 5.0, 8.0, 29.0]


def test_a_slow_link_leaves_every_miss_to_the_cpu_and_a_fast_one_shares_them() -> None:
    costs = SplitCosts(np.array([0.0, 10.0]), np.array([0.0, 1.0]), 0.0, 0.0, 100.0)
    ids = np.arange(8, dtype=np.int32)[None]
    resident = np.arange(8) < 3
    assert split_pairs(ids, resident, costs).kind.tolist() == [HIT] * 3 + [HOST] * 5
    fast = split_pairs(ids, resident, replace(costs, copy_s=12.5))
    assert fast.kind.tolist() == [HIT] * 3 + [STREAMED] * 2 + [HOST] * 3
    assert (fast.cpu_s, fast.device_s) == (30.0, 30.0)


def excess_s(ids: NDArray[np.int32], resident: NDArray[np.bool_], costs: SplitCosts) -> float:
    """Upper bound on the seconds by which our split exceeds the best of all splits of the
    misses.

    The bound holds if neither `host_s` nor the quotient `host_s / device_s` falls as rows grow.
    Then any two misses can be exchanged towards the cut's order while the CPU's work stays the
    same. The device computes no more, and the link copies no more. So the best division of
    experts into fractions divides at most one miss. Rounding that miss to one side adds at most
    its own time to either side. This includes a slowdown of the CPU. If the CPU works longer,
    waits for copies grow by at most the time added to the CPU.
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


def played(
    ids: Ids, resident: Resident, costs: SplitCosts
) -> tuple[NDArray[np.uint8], float, float]:
    """Return the kinds, the step's and the link's idle seconds, as the player decides them."""
    n_experts, (n_tokens, n_used) = len(resident), ids.shape
    entry = CostEntry(costs, n_experts)
    ids = np.ascontiguousarray(ids)
    slot_of = np.where(resident, 0, -1).astype(np.int32)
    state = np.full(n_experts, 2, np.int32)  # ready
    rows, used, order = (np.zeros(n_experts, np.int32) for _ in range(3))
    there, kinds = np.zeros(n_experts, np.uint8), np.zeros(n_experts, np.uint8)
    host = PlayerHost()  # only split layers have one
    layer = Layer(
        host=C.addressof(host),
        n_experts=n_experts, n_used=n_used, n_tokens=n_tokens, n_slots=n_experts,
        n_own_slots=n_experts,
        slot_of=slot_of.ctypes.data, state=state.ctypes.data,
    )  # fmt: skip
    player = Player(
        layers=C.addressof(layer), n_layers=1, ids=ids.ctypes.data, rows=rows.ctypes.data,
        resident=there.ctypes.data, kinds=kinds.ctypes.data, used=used.ctypes.data,
        order=order.ctypes.data,
    )  # fmt: skip
    entry.give(player)
    native().divide(C.addressof(player), 0)
    return kinds, player.counts.step_s, player.counts.idle_s


@given(batches(most_experts=12, most_tokens=9), st.one_of(any_costs(), regular_costs()))
def test_the_player_divides_layers_as_python_does(
    batch: tuple[Ids, Resident], costs: SplitCosts
) -> None:
    ids, resident = batch
    found = split_pairs(ids, resident, costs)
    kinds, step_s, idle_s = played(ids, resident, costs)
    used = np.unique(ids)
    assert kinds[used].tolist() == found.kind[used].tolist()
    assert (step_s, idle_s) == (later_s(found), found.idle_s), "not only nearly equal"
