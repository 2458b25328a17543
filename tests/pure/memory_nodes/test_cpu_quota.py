"""A control group's quota of processor time limits the threads, in both versions and nested."""

from __future__ import annotations

from pathlib import Path

import pytest

from numa.machine import cpu_quota


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
