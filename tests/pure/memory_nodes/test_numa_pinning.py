"""Threads go to physical cores first, node by node, and are read back after binding."""

import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_trees import topology_of

from numa.bind import bind_team, check_team, new_thread_ids, pinned, thread_ids
from numa.errors import NoSuchNode, PlacementRefused
from numa.pinning import Team, ThreadRequest, plan_threads
from numa.topology import Core, Node, Topology


def machine(n_nodes: int, cores_per_node: int, *, siblings: bool) -> Topology:
    n_cores = n_nodes * cores_per_node
    cores = tuple(
        Core((i, i + n_cores) if siblings else (i,), i // cores_per_node, i // cores_per_node)
        for i in range(n_cores)
    )
    cpus = tuple(sorted(c for core in cores for c in core.cpus))
    nodes = tuple(
        Node(n, tuple(c for k in cores if k.node == n for c in k.cpus), 1 << 38, 1 << 38,
             tuple(10 if m == n else 21 for m in range(n_nodes)))
        for n in range(n_nodes)
    )  # fmt: skip
    ids = tuple(range(n_nodes))
    return Topology(nodes, cores, (), (), cpus, ids, None, "madvise", True)


def test_physical_cores_come_node_by_node_and_two_stay_free_near_the_gpu(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path))
    assert plan.spare_cpus == (14, 15, 30, 31)
    assert plan.decode.cpus == tuple(range(14))
    assert plan.decode.nodes == (0,) * 8 + (1,) * 6
    assert plan.decode.mask_keeps_order(openmp=True)
    assert any("left for the API process" in r for r in plan.reasons)


def test_the_draft_stays_on_the_node_of_the_gpu(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path))
    assert set(plan.draft.nodes) == {1}


def test_hardware_siblings_come_last_within_their_node(tmp_path: Path) -> None:
    request = ThreadRequest(smt=True, n_spare_cores=0)
    plan = plan_threads(topology_of("two_sockets", tmp_path), request)
    assert plan.decode.cpus == (*range(8), *range(16, 24), *range(8, 16), *range(24, 32))


def test_more_threads_than_cores_run_one_per_core_and_say_so(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path), ThreadRequest(n_decode=200))
    assert plan.decode.n_threads == 14
    assert any(
        r == "decode: 200 threads asked for but 14 cores are free for them, so 14 threads run,"
        " one each"
        for r in plan.reasons
    )


def test_fewer_threads_are_spread_evenly_over_the_nodes(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path), ThreadRequest(n_decode=6, n_batch=12))
    assert plan.decode.threads_per_node() == {0: 3, 1: 3}
    assert plan.decode.cpus == (0, 1, 2, 8, 9, 10)
    assert plan.batch.threads_per_node() == {0: 6, 1: 6}


def test_alternate_order_is_llama_cpp_distribute(tmp_path: Path) -> None:
    request = ThreadRequest(n_decode=8, order="alternate")
    plan = plan_threads(topology_of("two_sockets", tmp_path), request)
    assert plan.decode.nodes == (0, 1) * 4
    assert not plan.decode.mask_keeps_order(openmp=True)


def test_a_cpuset_that_hides_half_is_named_and_obeyed(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("cpuset_hides_half_v2", tmp_path))
    assert set(plan.decode.cpus) <= set(range(8, 16))
    assert "the cpuset leaves 8 of 16 cores to this process" in plan.reasons


def test_threads_of_a_node_without_memory_read_the_nearest_that_has_some(tmp_path: Path) -> None:
    plan = plan_threads(
        topology_of("node_without_memory", tmp_path), ThreadRequest(n_spare_cores=0)
    )
    assert plan.decode.cpus == tuple(range(8))
    assert plan.decode.nodes == (0,) * 8
    assert "node 1 has no memory: its threads read node 0" in plan.reasons


def test_one_node_says_in_one_line_that_placement_does_nothing(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("one_node", tmp_path))
    lines = [r for r in plan.reasons if "one memory node" in r]
    assert lines == ["one memory node: page placement changes nothing here and is left alone"]
    assert plan.decode.n_threads == 2


def test_an_unknown_node_or_one_without_processors_is_refused(tmp_path: Path) -> None:
    topology = topology_of("node_without_memory", tmp_path)
    with pytest.raises(NoSuchNode, match="node 9 does not exist here"):
        plan_threads(topology, ThreadRequest(node=9))
    with pytest.raises(NoSuchNode, match="node 2 has no processor"):
        plan_threads(topology, ThreadRequest(node=2))
    with pytest.raises(NoSuchNode, match="n_decode is 0"):
        plan_threads(topology, ThreadRequest(n_decode=0))


def test_all_threads_can_be_kept_on_one_node(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets_nps4", tmp_path), ThreadRequest(node=3))
    assert set(plan.decode.nodes) == {3}


def test_the_strict_mask_hands_out_processors_in_ascending_order() -> None:
    even_odd = Team("decode", (0, 2, 1, 3), (0, 0, 1, 1))
    assert even_odd.cpus_under_strict_mask(openmp=True) == (0, 1, 2, 3)
    assert not even_odd.mask_keeps_order(openmp=True)
    # Without OpenMP ggml gives thread 0, the caller, the last bit.
    assert Team("d", (3, 0, 1, 2), (0,) * 4).mask_keeps_order(openmp=False)
    assert [i for i, bit in enumerate(even_odd.cpumask()) if bit] == [0, 1, 2, 3]


def test_a_processor_beyond_ggmls_mask_is_refused() -> None:
    with pytest.raises(NoSuchNode, match="processor 600 is beyond ggml's mask of 512 bits"):
        Team("decode", (0, 600), (0, 0)).cpumask()


@given(
    st.integers(1, 8),
    st.integers(1, 12),
    st.booleans(),
    st.integers(1, 200),
    st.sampled_from(["by_node", "alternate"]),
)
def test_every_plan_uses_each_processor_once_and_nodes_evenly(
    n_nodes: int, cores_per_node: int, smt: bool, n_decode: int, order: str
) -> None:
    topology = machine(n_nodes, cores_per_node, siblings=True)
    request = ThreadRequest(n_decode=n_decode, smt=smt, order=order)  # type: ignore[arg-type]
    plan = plan_threads(topology, request)
    team = plan.decode
    assert len(set(team.cpus)) == team.n_threads
    assert not set(team.cpus) & set(plan.spare_cpus)
    assert all(topology.node_of_cpu(c) == n for c, n in zip(team.cpus, team.nodes, strict=True))
    if order == "by_node":
        assert list(team.nodes) == sorted(team.nodes)
    counts = team.threads_per_node().values()
    if n_decode * 2 < len(topology.cores):
        assert max(counts) - min(counts) <= 2


class Sleepers:
    """Threads that wait until told, with their ids."""

    def __init__(self, n_threads: int) -> None:
        self.stop = threading.Event()
        before = thread_ids()
        self.threads = [threading.Thread(target=self.stop.wait) for _ in range(n_threads)]
        for thread in self.threads:
            thread.start()
        self.tids = new_thread_ids(before)

    def __enter__(self) -> "Sleepers":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def some_cpu() -> int:
    return min(os.sched_getaffinity(0))


def test_bound_threads_are_read_back_in_the_order_they_started() -> None:
    with Sleepers(2) as sleepers:
        assert sleepers.tids == tuple(t.native_id for t in sleepers.threads)
        report = bind_team(Team("decode", (some_cpu(),) * 2, (0, 0)), sleepers.tids)
        assert report.is_right
        assert [t.actual for t in report.threads] == [(some_cpu(),)] * 2


def test_a_refused_processor_is_a_sentence_and_the_thread_stays_where_it_was() -> None:
    with Sleepers(1) as sleepers:
        report = bind_team(Team("decode", (100_000 % 1023,), (0,)), sleepers.tids)
        assert not report.is_right
        assert "the kernel refused processor" in report.notes[0]
        assert "runs where it ran before" in report.notes[0]


def test_a_binding_lost_while_running_is_found_by_checking_again() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process may use one processor only: there is nothing to change to")
    first, second = sorted(os.sched_getaffinity(0))[:2]
    team = Team("decode", (first,), (0,))
    with Sleepers(1) as sleepers:
        assert bind_team(team, sleepers.tids).is_right
        os.sched_setaffinity(sleepers.tids[0], {second})  # what a change of the cpuset does
        report = check_team(team, sleepers.tids)
        assert "did the cpuset change?" in report.notes[0]


def test_a_thread_that_has_ended_is_a_note() -> None:
    beyond_every_id = 1 << 23
    report = check_team(Team("decode", (0,), (0,)), [beyond_every_id])
    assert "has ended" in report.notes[0]


def test_a_team_of_another_size_than_the_plan_is_a_note() -> None:
    with Sleepers(1) as sleepers:
        report = bind_team(Team("batch", (some_cpu(),) * 3, (0,) * 3), sleepers.tids)
        assert report.notes[0].startswith("batch: the plan has 3 threads and 1 were found")


def test_pinned_restores_and_refuses() -> None:
    before = os.sched_getaffinity(0)
    with pinned([some_cpu()]):
        assert os.sched_getaffinity(0) == {some_cpu()}
    assert os.sched_getaffinity(0) == before
    with pytest.raises(PlacementRefused, match="refused processor 1000"), pinned([1000]):
        pass
