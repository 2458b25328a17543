"""The schedule's cost per cut, in bytecode instructions, which every machine counts alike."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from offload.schedule.cache import Lrfu
from offload.schedule.schedule import Schedule
from offload.schedule.slots import CutNeed

N_LAYERS = 4
N_EXPERTS, N_CHOSEN = 256, 64
ALL_SLOTS = N_EXPERTS * 3 * N_LAYERS

Graph = Callable[[], list[CutNeed]]


def play(schedule: Schedule, needs: list[CutNeed]) -> None:
    """Call need, issue, ready, enter and leave for every cut of a graph."""
    schedule.begin(len(needs))
    for need in needs:
        schedule.need(need)
        schedule.issue(need.cut)
        schedule.ready(need.cut)
        schedule.enter(need.cut)
        schedule.leave(need.cut)


def instructions_per_cut(schedule: Schedule, graph: Graph, n_before: int = 3) -> float:
    """Bytecode instructions per cut of one graph, after `n_before` uncounted graphs."""
    for _ in range(n_before):
        play(schedule, graph())
    needs, n = graph(), 0

    def traced(frame: FrameType, event: str, _: object) -> Any:
        nonlocal n
        frame.f_trace_opcodes = True
        n += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        play(schedule, needs)
    finally:
        sys.settrace(before)
    return n / len(needs)


def routed(seed: int) -> Graph:
    rng = random.Random(seed)

    def graph() -> list[CutNeed]:
        return [
            CutNeed(c, 0, tuple((c, e) for e in sorted(rng.sample(range(N_EXPERTS), N_CHOSEN))))
            for c in range(3 * N_LAYERS)
        ]

    return graph


def schedule_of(n_slots: int) -> Schedule:
    return Schedule({0: n_slots}, Lrfu.for_model(3 * N_LAYERS), depth=3)


def test_a_cut_costs_no_more_in_a_large_pool() -> None:
    small = instructions_per_cut(schedule_of(N_EXPERTS), routed(1))
    large = instructions_per_cut(schedule_of(ALL_SLOTS // 2), routed(1), n_before=30)
    assert large < 1.5 * small, "what is looked through grows with the slots"
