"""What deciding costs per cut: times are printed for the log, what is asserted is how they grow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from offload.schedule.cache_rules import make_cache_rule
from offload.schedule.commands import Need
from offload.schedule.schedule import Schedule
from offload.schedule.slots import SlotTable

N_LAYERS = 20


def per_cut_us(schedule: Schedule, graph: Callable[[], list[Need]], n_graphs: int = 12) -> float:
    """need, issue, ready, enter and leave of one cut: the fastest graph, after a first one."""
    best = float("inf")
    for i in range(n_graphs):
        needs = graph()
        schedule.begin(len(needs))
        start_s = time.perf_counter()
        for need in needs:
            schedule.need(need)
            schedule.issue(need.cut)
            schedule.ready(need.cut)
            schedule.enter(need.cut)
            schedule.leave(need.cut)
        if i:
            best = min(best, (time.perf_counter() - start_s) / len(needs))
    return best * 1e6


def dense() -> list[Need]:
    return [Need(cut, 0, ((cut, 0),)) for cut in range(3 * N_LAYERS)]


def every_expert() -> list[Need]:
    return [Need(cut, 0, tuple((cut, e) for e in range(256))) for cut in range(3 * N_LAYERS)]


def routed(seed: int) -> Callable[[], list[Need]]:
    rng = random.Random(seed)

    def graph() -> list[Need]:
        return [
            Need(cut, 0, tuple((cut, e) for e in sorted(rng.sample(range(256), 64))))
            for cut in range(3 * N_LAYERS)
        ]

    return graph


def schedule_of(n_slots: int, rule: str = "lru") -> Schedule:
    return Schedule(SlotTable({0: n_slots}), make_cache_rule(rule), depth=3)


def test_a_cut_costs_no_more_in_a_large_pool(capsys: pytest.CaptureFixture[str]) -> None:
    large = schedule_of(256 * 3 * N_LAYERS)
    per_cut_us(large, every_expert, n_graphs=2)
    costs = {
        "dense, all cached": per_cut_us(schedule_of(100), dense),
        "dense, through a ring of 4": per_cut_us(schedule_of(4), dense),
        "64 experts, all cached": per_cut_us(large, routed(1)),
        "64 experts, 1/8 cached": per_cut_us(schedule_of(2000), routed(1)),
        "64 experts, none cached": per_cut_us(schedule_of(256), routed(1)),
    }
    with capsys.disabled():
        print()
        for case, cost in costs.items():
            print(f"schedule, {case}: {cost:.0f} us per cut")
    assert costs["64 experts, 1/8 cached"] < 4 * costs["64 experts, none cached"]
    assert costs["64 experts, all cached"] < costs["64 experts, none cached"]
