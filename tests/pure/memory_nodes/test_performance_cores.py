"""Cores that are slower than others are told from false trees of /sys, and get no threads."""

from dataclasses import replace
from pathlib import Path

import pytest
from numa_trees import put

from numa.machine import read_topology
from numa.place import Candidate, Strategy
from numa.threads import Processors, plan_threads, processors_for
from numa.topology import Topology
from numa.tune import fingerprint, strategies
from specoffload.commands.doctor import machine_lines
from specoffload.config.environment import Environment, Host
from specoffload.config.numa_choice import Threads, choose_threads
from specoffload.config.options import Options
from specoffload.kept_machine import Tuned

CPU = "sys/devices/system/cpu"


def machine(root: Path, cores: list[tuple[int, ...]]) -> Path:
    """A machine of one node whose cores have these hardware threads."""
    cpus = sorted(cpu for core in cores for cpu in core)
    put(root, f"{CPU}/online", f"0-{len(cpus) - 1}")
    put(root, "proc/meminfo", "MemTotal: 65536000 kB\nMemAvailable: 60000000 kB")
    put(root, "proc/self/status", f"Cpus_allowed_list:\t0-{len(cpus) - 1}")
    for core in cores:
        for cpu in core:
            siblings = ",".join(map(str, core))
            put(root, f"{CPU}/cpu{cpu}/topology/thread_siblings_list", siblings)
    return root


def intel(root: Path, n_fast: int = 8, n_slow: int = 16) -> Path:
    """A Core i9-14900K: 8 performance cores with two threads each, and 16 efficiency cores."""
    fast = [(2 * i, 2 * i + 1) for i in range(n_fast)]
    slow = [(2 * n_fast + i,) for i in range(n_slow)]
    machine(root, fast + slow)
    put(root, "sys/devices/cpu_core/cpus", f"0-{2 * n_fast - 1}")
    put(root, "sys/devices/cpu_atom/cpus", f"{2 * n_fast}-{2 * n_fast + n_slow - 1}")
    return root


def with_speeds(root: Path, name: str, speeds: list[int]) -> Topology:
    machine(root, [(cpu,) for cpu in range(len(speeds))])
    for cpu, speed in enumerate(speeds):
        put(root, f"{CPU}/cpu{cpu}/{name}", str(speed))
    return read_topology(root)


def chosen(topology: Topology, quota: float | None = None, **given: object) -> tuple[Threads, str]:
    n = len(topology.usable_cores)
    host = Host(Environment(), topology, Tuned(None), n, len(topology.allowed_cpus), quota)
    reasons: list[str] = []
    threads = choose_threads(replace(Options(), **given), host, reasons)  # type: ignore[arg-type]
    return threads, "\n".join(reasons)


def test_intels_hybrids_get_a_thread_per_performance_core(tmp_path: Path) -> None:
    topology = read_topology(intel(tmp_path))
    assert [core.is_fast for core in topology.cores] == [True] * 8 + [False] * 16
    threads, said = chosen(topology)
    on = Processors((0, 2, 4, 6, 8, 10, 12, 14))
    assert threads == Threads(8, 8, None, on, on)
    assert (
        "threads run on the 8 performance cores (processors 0,2,4,6,8,10,12,14): 16 others" in said
    )
    assert "(threads 24 uses all, numa none leaves it to the kernel)" in said
    (line, *_) = machine_lines(topology)
    assert "24 cores, 24 usable by this process (0-31), 8 of them performance cores (0-15)" in line


def test_low_power_cores_are_slow_too(tmp_path: Path) -> None:
    intel(tmp_path, 2, 4)
    put(tmp_path, "sys/devices/cpu_atom/cpus", "4-5")
    put(tmp_path, "sys/devices/cpu_lowpower/cpus", "6-7")
    assert len(read_topology(tmp_path).performance_cores) == 2


@pytest.mark.parametrize(
    ("name", "speeds", "n_fast"),
    [
        ("cpu_capacity", [1024, 860, 860, 860, 320, 320, 320, 320], 4),  # Arm, three kinds
        ("cpu_capacity", [406] * 4 + [1024] * 4, 4),  # RK3588
        ("cpufreq/cpuinfo_max_freq", [5_157_000] * 4 + [3_301_000] * 8, 4),  # Zen 5 and 5c
        ("cpufreq/cpuinfo_max_freq", [5_700_000, 5_750_000, 5_250_000, 5_250_000], 0),  # 7950X3D
        ("cpufreq/cpuinfo_max_freq", [3_000_000] * 4, 0),
        ("cpu_capacity", [1024] * 4, 0),
    ],
)
def test_the_kernel_tells_speeds_in_two_ways(
    tmp_path: Path, name: str, speeds: list[int], n_fast: int
) -> None:
    topology = with_speeds(tmp_path, name, speeds)
    assert len(topology.performance_cores) == n_fast
    threads, _ = chosen(topology)
    assert threads.n_decode == (n_fast or len(speeds))
    assert [speeds[cpu] for cpu in threads.decode_on.cpus] == sorted(speeds, reverse=True)[:n_fast]


def test_a_speed_that_only_some_processors_have_tells_nothing(tmp_path: Path) -> None:
    with_speeds(tmp_path, "cpu_capacity", [1024, 300, 300])
    (tmp_path / CPU / "cpu2" / "cpu_capacity").unlink()
    assert read_topology(tmp_path).performance_cores == ()


def test_a_cpuset_decides_which_cores_count(tmp_path: Path) -> None:
    intel(tmp_path)
    put(tmp_path, "proc/self/status", "Cpus_allowed_list:\t16-31")
    only_slow = read_topology(tmp_path)
    assert only_slow.performance_cores == ()
    assert chosen(only_slow)[0] == Threads(16, 16)
    put(tmp_path, "proc/self/status", "Cpus_allowed_list:\t1,2,3,20")
    threads, _ = chosen(read_topology(tmp_path))
    on = Processors((1, 2))
    assert threads == Threads(2, 2, None, on, on)


@pytest.mark.parametrize(
    ("given", "n_decode", "n_batch", "is_bound"),
    [
        ({"threads": 6}, 6, 6, True),
        ({"threads": 24}, 24, 24, False),
        ({"threads": 8, "threads_batch": 24}, 8, 24, False),
        ({"numa": "none"}, 8, 8, False),
    ],
)
def test_flags_decide_before_the_kinds_of_cores_do(
    tmp_path: Path, given: dict[str, object], n_decode: int, n_batch: int, is_bound: bool
) -> None:
    threads, said = chosen(read_topology(intel(tmp_path)), **given)
    assert (threads.n_decode, threads.n_batch, bool(threads.decode_on.cpus)) == (
        n_decode,
        n_batch,
        is_bound,
    )
    assert "16 others are much slower" in said


def test_a_quota_below_the_performance_cores_holds(tmp_path: Path) -> None:
    threads, said = chosen(read_topology(intel(tmp_path)), quota=4.0)
    assert threads.n_decode == 4
    assert len(threads.decode_on.cpus) == 8, "any four of the performance cores"
    assert "quota of 4 processors" in said


def test_tuning_tries_all_cores_too_and_knows_the_machine_again(tmp_path: Path) -> None:
    topology = read_topology(intel(tmp_path))
    tried = strategies(topology, plan_threads(topology, n_spare_cores=0), 1 << 30)
    assert tried == [Candidate(Strategy.SINGLE, 8), Candidate(Strategy.SINGLE, 24)]
    assert processors_for(topology, 24) == ()
    assert fingerprint(topology) == "node0:24c,62g 8 fast"
    alike = replace(topology, cores=tuple(replace(core, is_fast=True) for core in topology.cores))
    assert fingerprint(alike) == "node0:24c,62g"
