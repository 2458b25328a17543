"""Learning while serving: changed rates are found at a bounded cost, and bad times corrected."""

from __future__ import annotations

import pytest
from machines import N_EXPERTS, N_USED, Simulated

from offload.costs.learner import Learner
from offload.costs.table import CostTable, Entry, Way

WAYS = (Way.IN_PLACE, Way.STREAMED, Way.SPLIT)


def table_of(machine: Simulated, ways: tuple[Way, ...] = WAYS) -> CostTable:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    entries = {w: {n: Entry(machine.seconds(w, n), n_timed=4) for n in sizes} for w in ways}
    return CostTable(N_EXPERTS, N_USED, entries)


def serve(
    learner: Learner, machine: Simulated, n_tokens: int, n_decodes: int
) -> tuple[float, float]:
    """Seconds of these decodes, and of as many in the best way."""
    took_s = 0.0
    for _ in range(n_decodes):
        seconds = machine.decode_s(learner.way(n_tokens), n_tokens)
        learner.took(n_tokens, seconds)
        took_s += seconds
    best_s = min(machine.seconds(way, n_tokens) for way in WAYS)
    return took_s, best_s * n_decodes


@pytest.mark.parametrize("n_tokens", [1, 4, 16])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"link": 0.2}, {"link": 6.0}),
        ({"link": 6.0}, {"link": 0.2}),
        ({"cpu": 0.4, "token_s": 0.02}, {"cpu": 4.0, "token_s": 0.001}),
        ({"cpu": 4.0, "token_s": 0.001, "link": 4.0}, {"cpu": 0.4, "token_s": 0.02, "link": 4.0}),
    ],
)
def test_after_the_rates_change_the_best_way_is_found_within_300_decodes(
    before: dict[str, float], after: dict[str, float], n_tokens: int
) -> None:
    machine = Simulated(**before)
    said: list[str] = []
    learner = Learner(table_of(machine), 64, lambda n: WAYS, say=said.append)
    serve(learner, machine, n_tokens, 100)
    for name, value in after.items():
        setattr(machine, name, value)
    serve(learner, machine, n_tokens, 300)
    best_s = min(machine.seconds(way, n_tokens) for way in WAYS)
    settled = learner.way(n_tokens)
    assert machine.seconds(settled, n_tokens) <= 1.1 * best_s
    assert len(said) == learner.n_changes <= 3
    took_s, least_s = serve(learner, machine, n_tokens, 1000)
    assert took_s <= 1.1 * least_s


@pytest.mark.parametrize("n_tokens", [1, 8])
@pytest.mark.parametrize("link", [0.1, 1.0, 10.0])
def test_looking_for_a_better_way_costs_at_most_a_fiftieth(n_tokens: int, link: float) -> None:
    machine = Simulated(link=link, noise=0.0)
    learner = Learner(table_of(machine), 64, lambda n: WAYS)
    took_s, _ = serve(learner, machine, n_tokens, 300)
    usual_s = 300 * machine.seconds(learner.way(n_tokens), n_tokens)
    assert took_s <= 1.02 * usual_s
    took_s, _ = serve(learner, machine, n_tokens, 3000)
    assert took_s <= 1.012 * 3000 * machine.seconds(learner.way(n_tokens), n_tokens)


def test_times_follow_a_machine_that_becomes_slower() -> None:
    machine = Simulated(noise=0.0)
    learner = Learner(table_of(machine, (Way.IN_PLACE,)), 64, lambda n: (Way.IN_PLACE,))
    machine.rest_s *= 2.0
    machine.cpu, machine.token_s = machine.cpu / 2, machine.token_s * 2
    for n in (1, 2, 4, 1, 2, 4) * 40:
        learner.took(n, machine.seconds(Way.IN_PLACE, n))
    for n in (1, 2, 4):
        assert learner.times[n - 1] == pytest.approx(machine.seconds(Way.IN_PLACE, n), rel=0.03)
    assert learner.times[63] == pytest.approx(machine.seconds(Way.IN_PLACE, 64), rel=0.1)
    kept = learner.table("2026-03-04").measured(Way.IN_PLACE)
    assert kept[1].date == "2026-03-04"
    assert kept[1].n_timed > 80
    assert kept[64].n_timed == 4


def test_a_size_in_doubt_is_planned_with_and_its_decode_decides() -> None:
    seconds = {n: 1.0 + 0.1 * n for n in range(1, 17)}
    wrong = seconds | {3: 40.0, 4: 40.0}
    entries = {n: Entry(s, n_timed=2) for n, s in wrong.items()}
    learner = Learner(CostTable(ways={Way.IN_PLACE: entries}), 16, lambda n: (Way.IN_PLACE,))
    assert set(learner.tried) == {3, 4}
    assert learner.planned[2] == pytest.approx(seconds[2])
    learner.took(3, seconds[3])
    assert learner.times[2] == pytest.approx(seconds[3])
    assert 3 not in learner.tried
    learner.took(4, 40.0)  # uneven kernels
    assert learner.times[3] == 40.0
    assert learner.n_retries == 2


def test_what_a_busy_machine_taught_does_not_replace_times_that_agree() -> None:
    seconds = {n: 1.0 + 0.1 * n for n in range(1, 17)}
    entries = {n: Entry(s, n_timed=2) for n, s in seconds.items()}
    learner = Learner(CostTable(ways={Way.IN_PLACE: entries}), 16, lambda n: (Way.IN_PLACE,))
    for _ in range(400):
        learner.took(3, 40 * seconds[3])
        learner.took(1, seconds[1])
        learner.took(8, seconds[8])
    kept = learner.table("2026-03-04").measured(Way.IN_PLACE)
    assert kept[3].seconds == seconds[3]


def test_units_of_one_token_become_seconds_with_the_first_decode() -> None:
    entries = {n: Entry(0.5 + 0.5 * n, n_timed=1) for n in range(1, 9)}
    learner = Learner(
        CostTable(ways={Way.FIXED: entries}), 8, lambda n: (Way.FIXED,), draft_step_s=0.1,
        relative=True,
    )  # fmt: skip
    learner.took(1, 0.02)
    assert learner.times[3] == pytest.approx(0.05)
    assert learner.draft_step_s == pytest.approx(0.002)
    learner.observe(4, 0.05, 0.01, 2, 0.008)
    assert 0.002 < learner.draft_step_s < 0.004
    learner.reach(12)
    assert len(learner.times) == 12
