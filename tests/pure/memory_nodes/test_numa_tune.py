"""The search finds the best measured placement within its time limit, and keeps all times."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from numa_trees import topology_of

from numa.errors import NumaError, PlacementRefused
from numa.place import Candidate, Strategy
from numa.threads import plan_threads
from numa.tune import (
    TuneResult,
    fingerprint,
    search,
    strategies,
    variations,
)

GIB = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(tree: str, root: Path, times: Mapping[Strategy, float], limit_s: float = 1e9) -> TuneResult:
    """Search with simulated times. A trial takes 10 s, and each thread above 10 slows decoding."""
    topology = topology_of(tree, root)
    clock = Clock()

    def measure(candidate: Candidate) -> Mapping[int, Sequence[float]]:
        clock.now += 10
        t1 = times[candidate.strategy] * (1 + 0.1 * max(candidate.n_threads - 10, 0))
        return {1: [t1], 8: [2 * t1]}

    return search(
        topology, plan_threads(topology), 100 * GIB, measure, time_limit_s=limit_s, clock=clock
    )


ROWS_WIN = {
    Strategy.ROWS: 0.1,
    Strategy.INTERLEAVE: 0.13,
    Strategy.SINGLE: 0.2,
    Strategy.DISTRIBUTE: 0.12,
}


def test_two_sockets_try_every_strategy_then_threads_and_pages_of_the_winner(
    tmp_path: Path,
) -> None:
    result = run("two_sockets", tmp_path, ROWS_WIN)
    assert result.best == Candidate(Strategy.ROWS, 10)
    tried = [(t.candidate.strategy, t.candidate.n_threads) for t in result.trials]
    assert tried == [
        (Strategy.ROWS, 14),
        (Strategy.INTERLEAVE, 14),
        (Strategy.SINGLE, 8),
        (Strategy.SINGLE, 6),
        (Strategy.DISTRIBUTE, 14),
        (Strategy.ROWS, 10),
        (Strategy.ROWS, 7),
        (Strategy.ROWS, 14),
    ]
    assert result.reasons[0] == "chosen: rows, 10 threads, huge pages: T(1) 100.0 ms, T(8) 200.0 ms"
    assert any(
        "interleave, 14 threads" in r and "1.82 times the chosen" in r for r in result.reasons
    )


def test_single_wins_where_the_link_between_nodes_is_slow(tmp_path: Path) -> None:
    result = run("two_sockets", tmp_path, {**ROWS_WIN, Strategy.SINGLE: 0.05})
    assert result.best.strategy is Strategy.SINGLE
    assert result.best.node == 0


def test_differences_within_the_noise_keep_the_first(tmp_path: Path) -> None:
    result = run("two_sockets_nps4", tmp_path, dict.fromkeys(ROWS_WIN, 0.1))
    assert result.best.strategy is Strategy.ROWS


def test_the_time_limit_leaves_candidates_out_and_names_them(tmp_path: Path) -> None:
    result = run("two_sockets", tmp_path, ROWS_WIN, limit_s=25)
    assert len(result.trials) == 2
    assert result.best.strategy is Strategy.ROWS
    assert result.reasons[-1].startswith("not tried within the time limit: single on node 0")


def test_one_node_only_varies_threads(tmp_path: Path) -> None:
    topology = topology_of("one_node", tmp_path)
    assert strategies(topology, plan_threads(topology), GIB) == [Candidate(Strategy.SINGLE, 2)]
    result = run("one_node", tmp_path, ROWS_WIN)
    assert "one memory node" in result.reasons[0]
    assert [t.candidate.n_threads for t in result.trials] == [2, 1]
    assert all(t.candidate.huge_pages for t in result.trials)


def test_single_is_left_out_where_the_weights_do_not_fit_one_node(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    names = [c.strategy for c in strategies(topology, plan_threads(topology), 300 * GIB)]
    assert names == [Strategy.ROWS, Strategy.INTERLEAVE, Strategy.DISTRIBUTE]


def test_variations_never_have_more_threads_nor_fewer_than_one() -> None:
    assert [c.n_threads for c in variations(Candidate(Strategy.ROWS, 64))] == [48, 32, 64]
    assert [c.n_threads for c in variations(Candidate(Strategy.ROWS, 2))] == [1, 2]
    assert [c.n_threads for c in variations(Candidate(Strategy.ROWS, 1))] == [1]
    assert variations(Candidate(Strategy.ROWS, 1), with_pages=False) == []


def test_a_refused_candidate_is_reported_and_passed_over(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)

    def measure(candidate: Candidate) -> Mapping[int, Sequence[float]]:
        if candidate.strategy is Strategy.ROWS:
            raise PlacementRefused("node 1 is full")
        return {1: [0.1]} if candidate.strategy is Strategy.INTERLEAVE else {}

    result = search(topology, plan_threads(topology), GIB, measure, clock=Clock())
    assert result.best.strategy is Strategy.INTERLEAVE
    assert any("not possible, node 1 is full" in r for r in result.reasons)
    assert any("measured nothing" in r for r in result.reasons)


def test_nothing_measurable_is_an_error(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    with pytest.raises(NumaError, match="no candidate could be measured; the first: measured"):
        search(topology, plan_threads(topology), GIB, lambda _: {1: [0.0]}, clock=Clock())


def test_progress_is_told_before_each_trial(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    seen: list[tuple[int, int]] = []
    search(
        topology,
        plan_threads(topology),
        GIB,
        lambda _: {1: [0.1]},
        clock=Clock(),
        progress=lambda done, total, _: seen.append((done, total)),
    )
    assert seen == [(i, 8) for i in range(8)]


def test_a_result_knows_its_machine(tmp_path: Path) -> None:
    result = run("two_sockets", tmp_path, ROWS_WIN)
    topology = topology_of("two_sockets", tmp_path)
    assert result.is_for(topology)
    assert not result.is_for(topology_of("cpuset_hides_half", tmp_path / "other"))
    assert fingerprint(topology) == "node0:8c,256g node1:8c,256g"
