"""A first start's short measurement finds nearly what measuring every batch size finds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from machines import Simulated

from lab.simulation import published_curves, simulate, synthetic_trace
from offload.times.search import (
    TimingRequest,
    budget_s,
    fill,
    left_out,
    next_size,
    noise,
    one_timing,
)
from offload.times.table import CostTable, DecodeTime, Way, entry_of
from specdec.costs.profile import CostProfile
from specdec.policies.throughput import Throughput

WAYS = (Way.IN_PLACE, Way.STREAMED, Way.SPLIT)
KINDS = {
    "code": ("code",),
    "prose": ("prose",),
    "noise": ("noise",),
    "switching": ("code", "prose"),
}


def random_machine(seed: int, noise: float) -> Simulated:
    rng = np.random.default_rng(seed)
    link, cpu, token_s, rest_s = 10 ** rng.uniform((-0.5, -0.6, -3.3, -2.5), (1, 0.8, -1.5, -0.7))
    return Simulated(link, cpu, token_s, rest_s, noise, rng=rng)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_first_start_is_within_a_tenth_of_exhaustive_measurement(noise: float) -> None:
    """`-s` shows the worst T(n) and the worst times of chosen ways, as ratios to the truth."""
    worst = dict.fromkeys(("T(n)", "way of a verification", "way of a prefill"), 1.0)

    def note(what: str, ratio: float) -> None:
        worst[what] = max(worst[what], ratio, 1.0 / ratio if what == "T(n)" else ratio)

    for seed in range(16):
        machine = random_machine(seed, noise)
        one_s = machine.seconds(Way.IN_PLACE, 1)
        table = machine.measured(TimingRequest(WAYS, n_most=512), budget_s(one_s, len(WAYS)))
        longest_s = max(machine.seconds(way, 64) for way in WAYS)
        assert machine.spent_s <= (budget_s(one_s, len(WAYS)) + longest_s) * (1.0 + 4 * noise)
        usual = 1.0 + noise * math.sqrt(2.0 / math.pi)  # mean factor of noise on a decode's time
        for n in range(1, 65):
            truth = min(machine.seconds(way, n) for way in WAYS)
            note("T(n)", table.best(n)[1] / (truth * usual))
            note("way of a verification", machine.seconds(table.best(n)[0], n) / truth)
        min_batch = table.min_batch(512)
        for n in range(65, 513, 8):
            way = Way.STREAMED if min_batch.streams(n, experts=True) else Way.IN_PLACE
            best_s = min(machine.seconds(w, n) for w in WAYS[:2])
            note("way of a prefill", machine.seconds(way, n) / best_s)
    print(f"noise {noise:.0%}:", {what: f"{ratio:.3f}" for what, ratio in worst.items()})
    assert max(worst.values()) <= 1.1


def test_every_way_begins_with_one_token_and_most_is_spent_where_it_decides() -> None:
    machine = Simulated(link=2.0)
    asked: list[tuple[Way, int]] = []
    table, request = CostTable(64, 4), TimingRequest(WAYS, n_most=512)
    samples: dict[tuple[Way, int], list[float]] = {}
    for _ in range(12):
        found = next_size(table, samples, request, 10.0)
        assert found is not None
        asked.append(found)
        seconds = machine.decode_s(*found)
        samples.setdefault(found, []).append(seconds)
        table.add(*found, DecodeTime(seconds, n_timed=1))
    assert asked[:3] == [(way, 1) for way in WAYS]
    assert {Way.STREAMED, Way.SPLIT} <= {way for way, n in asked if n > 1}


def test_nothing_is_timed_that_does_not_fit() -> None:
    table = CostTable(ways={Way.IN_PLACE: {1: DecodeTime(1.0, n_timed=1)}})
    samples = {(Way.IN_PLACE, 1): [1.0]}
    assert next_size(table, samples, TimingRequest((Way.IN_PLACE,)), 0.5) is None
    assert next_size(table, samples, TimingRequest((Way.IN_PLACE,)), 1e3) is not None


def test_a_time_that_contradicts_others_is_taken_again_first() -> None:
    samples = {(Way.IN_PLACE, n): [s] for n, s in {1: 1.0, 2: 30.0, 8: 3.0, 64: 9.0}.items()}
    entries = {n: DecodeTime(s[0], n_timed=1) for (_, n), s in samples.items()}
    table = CostTable(ways={Way.IN_PLACE: entries})
    assert next_size(table, samples, TimingRequest((Way.IN_PLACE,)), 1e3) == (Way.IN_PLACE, 2)


def test_a_thorough_measurement_times_every_size_in_turn() -> None:
    machine = Simulated()
    request = TimingRequest((Way.IN_PLACE,), n_least=3)
    table = machine.measured(request, 1e3)
    assert set(table.measured(Way.IN_PLACE)) == set(request.sizes(Way.IN_PLACE))
    assert min(e.n_timed for e in table.measured(Way.IN_PLACE).values()) >= 3
    request = replace(request, n_repeats=3, since="2026-01-02")
    samples = {(Way.IN_PLACE, n): [1.0] for n in (1, 8, 64)}
    found = next_size(table, samples, request, 1e3)
    assert found is not None
    assert found[1] in (1, 8, 64), "an interrupted measurement goes on with what is missing"


THOROUGH = TimingRequest((Way.IN_PLACE,), n_least=4)


def timed(**times_ms: tuple[float, ...]) -> CostTable:
    """A table with these times in ms of batches of n1=..., n2=... tokens."""
    table = CostTable()
    for name, times in times_ms.items():
        table.add(Way.IN_PLACE, int(name[1:]), entry_of([t / 1e3 for t in times]))
    return table


def test_a_thorough_measurement_of_agreeing_times_is_kept() -> None:
    table = timed(n1=(45.0, 46.0, 45.5, 45.2), n2=(60.0, 61.0, 60.5, 60.1))
    assert noise(table, THOROUGH) == ""
    assert left_out(table, THOROUGH.ways) == []


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (timed(n1=(97.0,), n2=(45.0, 45.5)), "1 token in place was not timed twice"),
        (timed(n2=(45.0, 45.5)), "1 token in place was not timed twice"),
        (timed(n1=(97.0, 97.5), n2=(45.0, 45.5)), "1 token in place took 97.2 ms, which is longer"),
        (
            timed(n1=(40.0, 80.0, 41.0, 79.0), n2=(90.0, 91.0)),
            "4 decodes of 1 token in place differ",
        ),
    ],
)
def test_times_that_may_be_noise_are_named(table: CostTable, why: str) -> None:
    assert why in noise(table, THOROUGH)


def test_a_contradiction_that_stays_through_all_repetitions_is_believed() -> None:
    table = timed(n1=(97.0, 97.5) * 6, n2=(45.0, 45.5) * 6)
    assert noise(table, THOROUGH) == ""


def test_a_size_timed_once_is_left_out_and_spoils_nothing() -> None:
    table = timed(n1=(45.0, 45.5), n2=(60.0, 60.5), n64=(900.0,))
    assert noise(table, THOROUGH) == ""
    assert left_out(table, THOROUGH.ways) == [(Way.IN_PLACE, 64)]


def test_a_thorough_measurement_repeats_a_contradicting_size_until_it_agrees() -> None:
    """Its first six timings of one token are disturbed, which four timings would not show."""
    n_disturbed, clock_s = 6, 0.0

    def time_size(way: Way, n: int) -> list[float]:
        nonlocal n_disturbed, clock_s
        took_s = 0.02 + 0.002 * n
        if n == 1 and n_disturbed:
            n_disturbed, took_s = n_disturbed - 1, 0.09
        clock_s += took_s
        return [took_s]

    table, request = CostTable(), replace(THOROUGH, n_verify=8, n_most=8)
    fill(table, request, time_size, lambda: 100.0 - clock_s, "")
    assert table.measured(Way.IN_PLACE)[1].n_timed > 6


@pytest.mark.parametrize("curve", published_curves())
def test_a_slow_machines_first_start_leaves_the_policy_what_the_whole_curve_would(
    curve: str,
) -> None:
    """One token takes 0.15 s, so that few sizes can be timed."""
    scale = 0.15 / published_curves()[curve].step_s[0]
    steps = tuple(t * scale for t in published_curves()[curve].step_s)
    true, spent_s = CostProfile(steps, 0.0075), 0.0

    def time_size(way: Way, n: int) -> list[float]:
        nonlocal spent_s
        spent_s += true.time(n)
        return [true.time(n)]

    table, budget = CostTable(), budget_s(0.15, 1)
    request = TimingRequest((Way.IN_PLACE,), n_verify=true.n_max)
    fill(table, request, time_size, lambda: budget - spent_s, "")
    assert spent_s <= budget + true.time(true.n_max)
    found = CostProfile(tuple(table.curve(true.n_max)), true.draft_step_s)
    for kind, kinds in KINDS.items():
        text = synthetic_trace(4000, seed=77, kinds=kinds)
        full = simulate(text, true, Throughput(true)).rate
        rate = simulate(text, true, Throughput(found)).rate
        assert rate >= 0.97 * full, f"{kind}: {rate / full:.3f} of the full curve's"


@pytest.mark.parametrize("one_s", [0.001, 0.39, 5.0])
def test_decodes_before_and_of_a_timing_are_cut_to_a_share_of_the_time_left(one_s: float) -> None:
    """24 decodes of 0.39 s would take 9.4 of the 13 seconds that a whole first start has."""
    sizes: list[int] = []

    def decode_s(n: int) -> float:
        sizes.append(n)
        return one_s * n

    for left_s in (13.0, 0.1, -1.0):
        sizes.clear()
        assert one_timing(
            lambda: decode_s(1), decode_s, 1, n_leads=16, left_s=left_s
        ) == pytest.approx(one_s)
        assert one_s * len(sizes) <= max(left_s / 4, 0.4) + 2 * one_s
        assert one_s > 0.01 or len(sizes) == 24, "a fast machine's timing is whole"
    sizes.clear()
    one_timing(lambda: decode_s(8), decode_s, 8, n_leads=2, left_s=1e9, leads_with_one=True)
    assert sizes == [8, 8, 1, 8]
