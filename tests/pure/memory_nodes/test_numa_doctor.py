"""Each trap of NUMA machines gives a finding and a remedy. A machine without traps gives none."""

from dataclasses import replace
from pathlib import Path

import pytest
from numa_trees import grow, put, topology_of

from numa.doctor import diagnose
from numa.machine import read_setting, read_topology
from numa.threads import plan_threads
from numa.topology import Topology


def codes(topology: Topology, node: int | None = None) -> list[str]:
    plan = plan_threads(topology, node=node)
    return [f.code for f in diagnose(topology, plan, lambda _: 0)]


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        ("two_sockets", []),
        ("one_node", ["one-node"]),
        ("container_without_nodes", ["no-node-files"]),
    ],
)
def test_a_machine_hears_what_concerns_it(tree: str, found: list[str], tmp_path: Path) -> None:
    assert codes(topology_of(tree, tmp_path)) == found


def test_the_kernels_settings_are_read_from_the_tree(tmp_path: Path) -> None:
    root = grow("two_sockets", tmp_path)
    put(root, "proc/sys/vm/zone_reclaim_mode", "1")
    topology = read_topology(root)
    found = diagnose(topology, plan_threads(topology), lambda name: read_setting(name, root))
    assert [f.code for f in found] == ["numa-balancing", "zone-reclaim"]


def test_a_gpu_on_the_far_node_is_named_with_the_node_to_use(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    plan = plan_threads(topology, node=0)
    far = diagnose(topology, plan, lambda _: 0)[0]
    assert far.code == "gpu-far"
    assert far.advice == "use --numa single, which takes the GPU's node"
    assert "0000:c1:00.0 hangs on node 1" in far.sentence


def test_a_gap_in_node_numbers_makes_ggml_blind(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    far = replace(topology.nodes[1], id=2)
    cores = tuple(replace(c, node=2 * c.node) for c in topology.cores)
    gap = replace(topology, nodes=(topology.nodes[0], far), cores=cores, allowed_nodes=(0, 2))
    assert codes(gap, node=0)[0] == "ggml-blind"
