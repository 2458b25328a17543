"""A control group's quota of processor time limits the threads, in both versions and nested."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from test_numa_threads import machine as machine_of

from numa.machine import cpu_quota
from specoffload.config import environment
from specoffload.config.environment import Environment, Host
from specoffload.config.options import Options
from specoffload.config.resolution import resolve
from specoffload.kept_machine import Tuned


def machine(root: Path, group: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": group, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2, V1 = "0::/user/job\n", "3:cpu,cpuacct:/user/job\n"


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        (V2, {"user/job/cpu.max": "100000 100000"}, 1.0),
        (V2, {"user/job/cpu.max": "max 100000"}, None),
        (V2, {"user/job/cpu.max": "max 100000", "user/cpu.max": "150000 100000"}, 1.5),
        (V2, {"user/job/cpu.max": "50000 100000", "user/cpu.max": "400000 100000"}, 0.5),
        ("0::/\n", {"cpu.max": "200000 100000"}, 2.0),
        (V2, {"cpu.max": "200000 100000"}, 2.0),  # a container, whose own group is the root
        (V1, {"cpu/user/job/cpu.cfs_quota_us": "-1", "cpu/user/job/cpu.cfs_period_us": "9"}, None),
        (
            V1,
            {
                "cpu/user/job/cpu.cfs_quota_us": "-1",
                "cpu/user/job/cpu.cfs_period_us": "100000",
                "cpu/user/cpu.cfs_quota_us": "300000",
                "cpu/user/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        (V2, {"user/job/cpu.max": "nonsense"}, None),
        ("", {}, None),
    ],
)
def test_the_tightest_limit_holds(
    group: str, files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    places = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    assert cpu_quota(machine(tmp_path, group, places)) == quota


ONE_PROCESSOR = {
    "cpu.max": (V2, {"user/job/cpu.max": "100000 100000"}),
    "cpu.cfs_quota_us": (
        V1,
        {
            "cpu/user/job/cpu.cfs_quota_us": "100000",
            "cpu/user/job/cpu.cfs_period_us": "100000",
        },
    ),
}


def host_in(root: Path, n_nodes: int, monkeypatch: pytest.MonkeyPatch) -> Host:
    """This machine as a start reads it, with four cores and the control groups of `root`."""
    monkeypatch.setattr(environment, "cpu_quota", partial(cpu_quota, root))
    host = environment.read_host(Environment())
    topology = machine_of(n_nodes, 4 // n_nodes, siblings=False)
    return replace(host, topology=topology, tuned=Tuned(None), n_physical=4, n_allowed=4)


@pytest.mark.parametrize("n_nodes", [1, 2])
@pytest.mark.parametrize("version", ONE_PROCESSOR)
def test_a_start_chooses_and_tells_as_many_threads_as_the_quota_keeps_busy(
    version: str, n_nodes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, files = ONE_PROCESSOR[version]
    places = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    host = host_in(machine(tmp_path / "limited", group, places), n_nodes, monkeypatch)
    free = host_in(machine(tmp_path / "free", group, {}), n_nodes, monkeypatch)
    config, unlimited = resolve(Options(), host), resolve(Options(), free)
    assert (config.threads, config.threads_batch) == (1, 1)
    assert unlimited.threads > 1
    words = "1 thread: this process's control group has a quota of 1 processors"
    assert any(reason.startswith(words) for reason in config.reasons)
    assert not any("control group" in reason for reason in unlimited.reasons)
    asked = resolve(Options(threads=2), host)
    assert asked.threads == 2, "a number that is asked for stays, and the line warns"
    assert any(reason.startswith("2 threads: this process's control") for reason in asked.reasons)
