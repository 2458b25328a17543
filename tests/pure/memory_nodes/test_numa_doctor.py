"""Each trap of NUMA machines is a finding with what to do; a quiet machine has none."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from numa_trees import grow, put

from numa.doctor import Facts, diagnose, mapped_bytes, read_facts, strategy_shares
from numa.machine import read_topology
from numa.pinning import ThreadPlan, ThreadRequest, plan_threads
from numa.place import NodeRange, NodeRead, Placement, Strategy, place_single
from numa.topology import Topology

GIB = 1 << 30
QUIET = Facts(0, {}, None, None, {})


def machine(
    tree: str, root: Path, request: ThreadRequest | None = None
) -> tuple[Topology, ThreadPlan]:
    topology = read_topology(grow(tree, root))
    return topology, plan_threads(topology, request)


def codes(topology: Topology, facts: Facts, plan: ThreadPlan, needed_bytes: int = 0) -> list[str]:
    return [f.code for f in diagnose(topology, facts, plan, needed_bytes)]


def test_a_quiet_machine_only_hears_where_its_gpu_is(tmp_path: Path) -> None:
    topology, plan = machine("two_sockets", tmp_path)
    assert codes(topology, QUIET, plan) == ["gpu-node"]


def test_one_node_hears_one_line(tmp_path: Path) -> None:
    topology, plan = machine("one_node", tmp_path)
    noisy = replace(QUIET, numa_balancing=1, cache_bytes={0: 20 * GIB})
    found = diagnose(topology, noisy, plan)
    assert [f.sentence for f in found] == [
        "one memory node: page placement changes nothing here and is left alone"
    ]


def test_facts_are_read_from_the_tree(tmp_path: Path) -> None:
    root = grow("two_sockets", tmp_path)
    put(root, "proc/sys/vm/zone_reclaim_mode", "1")
    facts = read_facts(root)
    assert facts.numa_balancing == 1
    assert facts.zone_reclaim == 1
    assert facts.cache_bytes[1] == pytest.approx(0.05 * 256 * GIB, rel=1e-6)
    topology = read_topology(root)
    assert codes(topology, facts, plan_threads(topology))[:2] == ["numa-balancing", "zone-reclaim"]


def test_a_models_stale_page_cache_is_found_in_numa_maps(tmp_path: Path) -> None:
    root = grow("two_sockets", tmp_path)
    put(
        root,
        "proc/self/numa_maps",
        "7f00 default file=/m/model.gguf mapped=262144 N0=262000 N1=144 kernelpagesize_kB=4\n"
        "7f01 default file=/m/other.gguf mapped=10 N1=10 kernelpagesize_kB=4\n"
        "7f02 default anon=5 dirty=5 N1=5 kernelpagesize_kB=4",
    )
    assert mapped_bytes(root, "/m/model.gguf") == {0: 262000 << 12, 1: 144 << 12}
    facts = replace(read_facts(root, "/m/model.gguf"), numa_balancing=0)
    topology = read_topology(root)
    found = diagnose(topology, facts, plan_threads(topology))
    assert found[0].code == "stale-page-cache"
    assert "100% of the model's 1.00 GiB in the page cache lie on node 0" in found[0].sentence


def test_much_page_cache_is_worth_knowing(tmp_path: Path) -> None:
    topology, plan = machine("two_sockets", tmp_path)
    assert "page-cache" in codes(topology, replace(QUIET, cache_bytes={1: 100 * GIB}), plan)


def test_siblings_that_share_a_core_are_counted(tmp_path: Path) -> None:
    topology, plan = machine("two_sockets", tmp_path, ThreadRequest(smt=True, n_spare_cores=0))
    found = diagnose(topology, QUIET, plan)
    assert found[0].code == "smt-oversubscribed"
    assert "16 of 32 threads share a physical core" in found[0].sentence
    assert found[0].advice == "use --threads 16"


def test_lock_and_memory_limits_are_compared_with_the_weights(tmp_path: Path) -> None:
    topology, plan = machine("cpuset_hides_half_v2", tmp_path)
    facts = replace(QUIET, lock_limit_bytes=8 << 20)
    assert "memlock" in codes(topology, facts, plan, 32 * GIB)
    assert "memory-limit" not in codes(topology, facts, plan, 32 * GIB)
    assert codes(topology, facts, plan, 100 * GIB)[0] == "memory-limit"
    assert "memlock" not in codes(topology, facts, plan)


def test_a_gpu_on_the_far_node_is_named_with_the_node_to_use(tmp_path: Path) -> None:
    topology, plan = machine("two_sockets", tmp_path, ThreadRequest(node=0))
    found = [f for f in diagnose(topology, QUIET, plan) if f.code == "gpu-far"]
    assert found[0].advice == "use --numa-node 1"
    assert "0000:c1:00.0 hangs on node 1" in found[0].sentence


def test_a_cpuset_changed_while_running_names_the_lost_processors(tmp_path: Path) -> None:
    topology, plan = machine("two_sockets", tmp_path)
    facts = replace(QUIET, cpuset_cpus=tuple(range(8)))
    found = diagnose(topology, facts, plan)[0]
    assert found.code == "cpuset-changed"
    assert "processors 8-13 of the thread plan" in found.sentence


def test_a_container_without_node_files_is_told(tmp_path: Path) -> None:
    topology, plan = machine("container_without_nodes", tmp_path)
    assert codes(topology, QUIET, plan) == ["no-node-files"]


def test_a_gap_in_node_numbers_makes_ggml_blind(tmp_path: Path) -> None:
    topology, plan = machine("two_sockets", tmp_path)
    far = replace(topology.nodes[1], id=2)
    gap = replace(topology, nodes=(topology.nodes[0], far), allowed_nodes=(0, 2))
    assert "ggml-blind" in codes(gap, QUIET, plan)


def test_strategies_are_tried_and_sampled_on_this_machine() -> None:
    cpu = min(os.sched_getaffinity(0))
    size = 4 << 20
    nowhere = Placement(Strategy.ROWS, size, 4096, (NodeRange(0, size, (77,)),))
    half_here = [NodeRead(0, size // 2, 0), NodeRead(size // 2, size, 77)]
    names: list[str] = []
    shares = strategy_shares(
        [(place_single(size, 0), half_here), (nowhere, half_here)],
        {0: [cpu], 77: [cpu]},
        names.append,
    )
    assert names == ["single", "rows"]
    assert [s.computed_share for s in shares] == [0.5, 0.5]
    if shares[0].local_share is None:
        pytest.skip(f"the kernel does not say where pages lie: {shares[0].notes}")
    # There is no node 77, so its pages came to lie on node 0, where only half are read.
    assert [s.local_share for s in shares] == [0.5, 0.5]
    assert [s.per_node for s in shares] == [{0: 1024}, {0: 1024}]
    assert any("do not lie on their node" in note for note in shares[1].notes)
