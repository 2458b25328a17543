"""Threads go to physical cores, node by node."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_trees import topology_of

from numa.errors import NoSuchNode, PlacementRefused
from numa.sys import running_on
from numa.threads import Team, cpumask, plan_threads
from numa.topology import Core, MemoryNode, Topology


def machine(n_nodes: int, cores_per_node: int, *, siblings: bool) -> Topology:
    n_cores = n_nodes * cores_per_node
    cores = tuple(
        Core((i, i + n_cores) if siblings else (i,), i // cores_per_node) for i in range(n_cores)
    )
    cpus = tuple(sorted(c for core in cores for c in core.cpus))
    nodes = tuple(
        MemoryNode(n, tuple(c for k in cores if k.node == n for c in k.cpus), 1 << 38, 1 << 38,
             tuple(10 if m == n else 21 for m in range(n_nodes)))
        for n in range(n_nodes)
    )  # fmt: skip
    ids = tuple(range(n_nodes))
    return Topology(nodes, cores, (), cpus, ids)


def test_physical_cores_come_node_by_node_and_two_stay_free_near_the_gpu(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path))
    assert not {14, 15, 30, 31} & set(plan.decode.cpus + plan.batch.cpus)
    assert plan.decode.cpus == tuple(range(14))
    assert plan.decode.nodes == (0,) * 8 + (1,) * 6
    assert plan.decode.in_mask_order(openmp=True) == plan.decode
    assert any("left for the API process" in r for r in plan.reasons)


def test_the_draft_stays_on_the_node_of_the_gpu(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path))
    assert set(plan.draft.nodes) == {1}


def test_more_threads_than_cores_run_one_per_core_and_say_so(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path), 200)
    assert plan.decode.n_threads == 14
    assert any(
        r == "decode: 200 threads asked for but 14 cores are free for them, so 14 threads run,"
        " one each"
        for r in plan.reasons
    )


def test_fewer_threads_are_spread_evenly_over_the_nodes(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path), 6, 12)
    assert plan.decode.cpus == (0, 1, 2, 8, 9, 10)
    assert plan.batch.nodes == (0,) * 6 + (1,) * 6


def test_alternate_order_is_llama_cpp_distribute(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets", tmp_path), 8, alternate=True)
    assert plan.decode.nodes == (0, 1) * 4


def test_a_cpuset_that_hides_half_is_named_and_obeyed(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("cpuset_hides_half_v2", tmp_path))
    assert set(plan.decode.cpus) <= set(range(8, 16))
    assert "the cpuset leaves 8 of 16 cores to this process" in plan.reasons


def test_threads_of_a_node_without_memory_read_the_nearest_that_has_some(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("node_without_memory", tmp_path), n_spare_cores=0)
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
        plan_threads(topology, node=9)
    with pytest.raises(NoSuchNode, match="node 2 has no processor"):
        plan_threads(topology, node=2)
    with pytest.raises(NoSuchNode, match="n_decode is 0"):
        plan_threads(topology, 0)


def test_all_threads_can_be_kept_on_one_node(tmp_path: Path) -> None:
    plan = plan_threads(topology_of("two_sockets_nps4", tmp_path), node=3)
    assert set(plan.decode.nodes) == {3}


def test_the_strict_mask_hands_out_processors_in_ascending_order() -> None:
    even_odd = Team("decode", (0, 2, 1, 3), (0, 0, 1, 1))
    ordered = even_odd.in_mask_order(openmp=True)
    assert (ordered.cpus, ordered.nodes) == ((0, 1, 2, 3), (0, 1, 0, 1))
    # Without OpenMP ggml gives thread 0, the caller, the last bit.
    assert even_odd.in_mask_order(openmp=False).cpus == (3, 0, 1, 2)
    assert [i for i, bit in enumerate(cpumask(even_odd.cpus)) if bit] == [0, 1, 2, 3]


def test_a_processor_beyond_ggmls_mask_is_refused() -> None:
    with pytest.raises(NoSuchNode, match="processor 600 is beyond ggml's mask of 512 bits"):
        cpumask((0, 600))


@given(st.integers(1, 8), st.integers(1, 12), st.integers(1, 200), st.booleans())
def test_every_plan_uses_each_processor_once_and_nodes_evenly(
    n_nodes: int, cores_per_node: int, n_decode: int, alternate: bool
) -> None:
    topology = machine(n_nodes, cores_per_node, siblings=True)
    plan = plan_threads(topology, n_decode, alternate=alternate)
    team = plan.decode
    assert len(set(team.cpus)) == team.n_threads
    node_of = {cpu: core.node for core in topology.cores for cpu in core.cpus}
    assert [node_of[cpu] for cpu in team.cpus] == list(team.nodes)
    if not alternate:
        assert list(team.nodes) == sorted(team.nodes)
    counts = [len(cpus) for cpus in team.cpus_per_node().values()]
    if n_decode * 2 < len(topology.cores):
        assert max(counts) - min(counts) <= 2


def test_a_thread_runs_where_it_is_put_for_a_while_and_refusals_are_said() -> None:
    before = os.sched_getaffinity(0)
    cpu = min(before)
    with running_on([cpu]):
        assert os.sched_getaffinity(0) == {cpu}
    assert os.sched_getaffinity(0) == before
    with pytest.raises(PlacementRefused, match="refused processor 1000"), running_on([1000]):
        pass
