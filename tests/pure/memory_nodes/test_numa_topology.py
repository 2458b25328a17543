"""The topology is read from recorded and constructed sysfs trees, independent of this machine."""

from pathlib import Path

import pytest
from numa_trees import grow, put, topology_of

from numa.errors import BadTopology, NoSuchNode
from numa.machine import MemoryStalls, read_limits, read_topology
from numa.topology import format_list, parse_list

GIB = 1 << 30


def test_one_node_is_not_numa(tmp_path: Path) -> None:
    topology = topology_of("one_node", tmp_path)
    assert [n.id for n in topology.nodes] == [0]
    assert [c.cpus for c in topology.cores] == [(0,), (1,)]
    assert not topology.is_numa
    assert not topology.ggml_is_numa
    assert topology.huge_page_mode == "madvise"


def test_one_node_takes_its_memory_from_the_whole_machine(tmp_path: Path) -> None:
    # In this recorded tree node 0 has 6.1 GiB of the machine's 23.5. The rest was hot-added.
    topology = topology_of("one_node", tmp_path)
    assert topology.nodes[0].memory_bytes == 24684084 << 10


def test_two_sockets_have_cores_with_siblings_distances_and_a_gpu(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    assert len(topology.nodes) == 2
    assert len(topology.cores) == 16
    assert topology.cores[0].cpus == (0, 16)
    assert topology.cores[8].node == 1
    assert (topology.distance(0, 0), topology.distance(0, 1)) == (10, 21)
    assert [(g.address, g.node) for g in topology.gpus] == [
        ("0000:02:00.0", None),
        ("0000:c1:00.0", 1),
    ]
    assert topology.nodes[0].huge_pages[0].page_bytes == 2 << 20
    assert (topology.nodes[0].huge_pages[0].n_total, topology.nodes[0].huge_pages[0].n_free) == (
        512,
        500,
    )
    assert topology.nodes[1].memory_bytes == 256 * GIB
    assert topology.is_numa
    assert topology.ggml_is_numa


def test_nps4_has_eight_nodes_of_four_cores(tmp_path: Path) -> None:
    topology = topology_of("two_sockets_nps4", tmp_path)
    assert [len(n.cpus) for n in topology.nodes] == [4] * 8
    assert topology.distance(0, 3) == 12
    assert topology.distance(0, 4) == 32
    assert topology.memory_nodes == tuple(range(8))


def test_a_node_without_memory_reads_from_the_nearest_that_has_some(tmp_path: Path) -> None:
    topology = topology_of("node_without_memory", tmp_path)
    assert topology.memory_nodes == (0, 2)
    assert topology.memory_node_near(1) == 0
    assert topology.nodes[2].cpus == ()


@pytest.mark.parametrize(
    ("tree", "cpus", "nodes", "limit"),
    [
        ("cpuset_hides_half", (*range(8), *range(16, 24)), (0,), 100 * GIB),
        ("cpuset_hides_half_v2", tuple(range(8, 16)), (0, 1), 64 * GIB),
    ],
)
def test_a_cpuset_hides_half_of_the_machine(
    tree: str, cpus: tuple[int, ...], nodes: tuple[int, ...], limit: int, tmp_path: Path
) -> None:
    topology = topology_of(tree, tmp_path)
    assert read_limits(tmp_path).memory_bytes == limit
    assert topology.allowed_cpus == cpus
    assert topology.allowed_nodes == nodes
    assert len(topology.usable_cores) == 8
    assert topology.is_numa == (len(nodes) > 1)


def test_a_container_without_node_files_is_one_node_and_known_to_be_a_guess(tmp_path: Path) -> None:
    topology = topology_of("container_without_nodes", tmp_path)
    assert len(topology.nodes) == 1
    assert topology.nodes[0].cpus == (0, 1, 2, 3)
    assert not topology.from_kernel
    assert not topology.is_numa
    assert read_limits(tmp_path).memory_bytes == 8 * GIB
    assert [c.cpus for c in topology.cores] == [(0, 2), (1, 3)]


def test_a_system_without_sys_is_one_node_counted_by_psutil(tmp_path: Path) -> None:
    topology = read_topology(tmp_path)
    assert len(topology.nodes) == 1
    assert topology.nodes[0].memory_bytes > 0
    assert len(topology.usable_cores) >= 1


def test_ggml_stops_counting_nodes_at_a_gap(tmp_path: Path) -> None:
    root = grow("two_sockets", tmp_path)
    node = root / "sys/devices/system/node"
    (node / "node1").rename(node / "node2")
    put(root, "sys/devices/system/node/online", "0,2")
    put(root, "proc/self/status", "Mems_allowed_list: 0,2")
    topology = read_topology(root)
    assert topology.is_numa
    assert not topology.ggml_is_numa


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("sys/devices/system/cpu/online", "0-x"),
        ("sys/devices/system/node/node0/distance", "10"),
        ("sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages", "many"),
        ("sys/devices/system/node/node1/cpulist", "8-15"),
    ],
)
def test_a_file_that_says_something_else_is_named(path: str, content: str, tmp_path: Path) -> None:
    root = grow("two_sockets", tmp_path)
    put(root, path, content)
    with pytest.raises(BadTopology, match="/sys/devices/system"):
        read_topology(root)


def test_an_unknown_node_is_refused_with_the_nodes_there_are(tmp_path: Path) -> None:
    topology = topology_of("two_sockets", tmp_path)
    with pytest.raises(NoSuchNode, match=r"node 7 does not exist here \(nodes: 0-1\); nothing"):
        topology.node(7)


def test_lists_of_numbers_are_read_and_written() -> None:
    assert parse_list("0-3,8,10-11", "x") == (0, 1, 2, 3, 8, 10, 11)
    assert format_list((0, 1, 2, 5)) == "0-2,5"
    assert format_list(()) == "none"


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_files_does_not_count_as_kept(tmp_path: Path, version: int) -> None:
    """The kernel can drop pages of files from a control group's memory, whoever read them."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    group = tmp_path / "sys" / "fs" / "cgroup" / ("" if version == 2 else "memory") / "g"
    group.mkdir(parents=True)
    (own / "cgroup").write_text("0::/g\n" if version == 2 else "4:memory:/g\n")
    total = "" if version == 2 else "total_"
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (group / names[0]).write_text(f"{8 * GIB}\n")
    (group / names[1]).write_text(f"{5 * GIB}\n")
    stat = f"{total}inactive_file {GIB}\n{total}active_file {2 * GIB}\n"
    (group / "memory.stat").write_text(stat)
    limits = read_limits(tmp_path)
    assert (limits.memory_bytes, limits.kept_bytes) == (8 * GIB, 2 * GIB)
    (group / names[1]).unlink()
    assert read_limits(tmp_path).kept_bytes == 0


def test_waits_for_memory_are_those_of_the_group_if_it_tells(tmp_path: Path) -> None:
    assert MemoryStalls(tmp_path)() is None
    group, pressure = tmp_path / "sys/fs/cgroup/g", tmp_path / "proc/pressure"
    group.mkdir(parents=True)
    pressure.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("0::/g\n")
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 total=7\n"
    (pressure / "memory").write_text(line.format(2_500_000))
    assert MemoryStalls(tmp_path)() == 2.5
    (group / "memory.max").write_text("1000000")
    assert MemoryStalls(tmp_path)() == 0, "other programs' waits are not the group's"
    (group / "memory.pressure").write_text(line.format(400_000))
    assert MemoryStalls(tmp_path)() == 0.4


@pytest.mark.parametrize("has_pressure", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_a_limited_group_without_a_pressure_file_waits_when_it_meets_its_limit(
    tmp_path: Path, version: int, has_pressure: bool
) -> None:
    """Groups of version 1 have no pressure file, but they count allocations that met the limit."""
    folder = "sys/fs/cgroup/memory/g" if version == 1 else "sys/fs/cgroup/g"
    group, pressure = tmp_path / folder, tmp_path / "proc/pressure"
    group.mkdir(parents=True)
    pressure.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/g\n" if version == 1 else "0::/g\n")
    limit = "memory.limit_in_bytes" if version == 1 else "memory.max"
    (group / limit).write_text("1000000")
    clock_s = 100.0

    def seen(stalled_s: float, n_at_limit: int) -> float | None:
        nonlocal clock_s
        clock_s += 1.0
        if has_pressure:
            (pressure / "memory").write_text(f"some avg10=0 total={round(stalled_s * 1e6)}\n")
        name, text = (
            ("memory.failcnt", "{}") if version == 1 else ("memory.events", "max {}\noom 0")
        )
        (group / name).write_text(text.format(n_at_limit))
        return None if stalls is None else stalls()

    stalls: MemoryStalls | None = None
    seen(5.0, 3)
    stalls = MemoryStalls(tmp_path, now=lambda: clock_s)
    assert seen(5.4, 3) == 0, "others waited"
    waited_s = 0.7 if has_pressure else 1.0
    assert seen(6.1, 9) == pytest.approx(waited_s)
    assert seen(7.6, 9) == pytest.approx(waited_s)


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_group_that_changes_while_it_is_read_is_not_underestimated(
    tmp_path: Path, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files enter the page cache after the use was read, and before its part that is files."""
    folder, total = (
        (tmp_path / "sys/fs/cgroup/memory/g", "total_")
        if version == 1
        else (tmp_path / "sys/fs/cgroup/g", "")
    )
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/g\n" if version == 1 else "0::/g\n")
    limit, used = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    (folder / limit).write_text(f"{8 * GIB}")
    kept, files = 3 * GIB, [GIB]
    real = Path.read_text

    def read_text(self: Path, *args: str, **kwargs: str) -> str:
        if self.name in (used, "memory.stat"):
            text = f"{kept + files[0]}"
            if self.name == "memory.stat":
                text = f"{total}inactive_file {files[0]}\n{total}active_file 0\n"
            files[0] += GIB
            return text
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert read_limits(tmp_path).kept_bytes >= kept


def test_the_group_with_least_room_limits_memory(tmp_path: Path) -> None:
    """Other groups may have used up a parent's larger limit. Above memory.high, programs wait."""
    parent = tmp_path / "sys/fs/cgroup/a"
    group = parent / "b"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/a/b\n")
    for folder, limit, used in ((group, 4, 1), (parent, 16, 14)):
        (folder / "memory.max").write_text(f"{limit * GIB}\n")
        (folder / "memory.current").write_text(f"{used * GIB}\n")
    limits = read_limits(tmp_path)
    assert (limits.memory_bytes, limits.kept_bytes) == (16 * GIB, 14 * GIB)
    (group / "memory.high").write_text(f"{2 * GIB}\n")
    limits = read_limits(tmp_path)
    assert (limits.memory_bytes, limits.kept_bytes) == (2 * GIB, GIB)
