"""Bandwidth is measured over real pages by pinned threads; what cannot be is said."""

import os
from pathlib import Path

import pytest
from numa_trees import topology_of

from numa import sys
from numa.errors import PlacementRefused
from numa.machine import read_topology
from numa.measure import read_bandwidth, trial_bytes

MIB = 1 << 20
CPUS = sorted(os.sched_getaffinity(0))[:2]


def test_every_pair_of_this_machine_has_a_bandwidth_above_the_absurd() -> None:
    topology = read_topology()
    node = topology.memory_nodes[0]
    done: list[tuple[int, int]] = []
    pairs = read_bandwidth(
        topology,
        {node: CPUS},
        size_bytes=16 * MIB,
        n_repeats=2,
        progress=lambda a, b: done.append((a, b)),
    )
    assert [(p.reader, p.owner) for p in pairs] == [(node, m) for m in topology.memory_nodes]
    assert pairs[0].bytes_per_s is not None
    assert 1e8 < pairs[0].bytes_per_s < 1e13
    assert done[-1] == (len(pairs), len(pairs))


def test_the_trial_is_larger_than_the_caches_and_smaller_than_free_memory(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    # Two last-level caches of 32 MiB, four times both.
    assert trial_bytes(topology, 0) == 256 * MIB
    small = topology_of("one_node", tmp_path / "one")
    assert trial_bytes(small, 0) <= small.nodes[0].free_bytes // 4


def test_pairs_beyond_the_time_limit_are_listed_with_a_note(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    pairs = read_bandwidth(topology, {0: CPUS[:1], 1: CPUS[:1]}, time_limit_s=0)
    assert len(pairs) == 4
    assert all(p.bytes_per_s is None and "limit of 0 s was reached" in p.note for p in pairs)


def test_a_refusal_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: int) -> int:
        raise PlacementRefused("the kernel refused mmap for 1 bytes (Cannot allocate memory)")

    monkeypatch.setattr(sys, "map_anonymous", refused)
    topology = read_topology()
    pairs = read_bandwidth(topology, {topology.memory_nodes[0]: CPUS}, size_bytes=MIB)
    assert pairs[0].bytes_per_s is None
    assert "Cannot allocate memory" in pairs[0].note


def test_scanning_finds_a_byte_that_should_not_be_there() -> None:
    from numa.memory import PlacedMemory

    with PlacedMemory(MIB) as memory:
        assert sys.scan(memory.address, MIB)
        sys.fill(memory.address + MIB - 1, 0xFF, 1)
        assert not sys.scan(memory.address, MIB)
