"""The speed of the disk, measured with a real file."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from numa_trees import mount

from offload.errors import BadModel
from offload.plan.store_layout import PAGE_BYTES
from offload.store.disk_speed import (
    READ_BYTES,
    Disk,
    HeldDisk,
    disk_of,
    disk_speed,
    seen_rate,
    steady_rate,
)
from offload.store.reading import ReadCounters


def test_bytes_that_were_read_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(2 * READ_BYTES + 100))
    real, counted = os.preadv, [0]

    def preadv(descriptor: int, buffers: list[object], offset: int) -> int:
        n = real(descriptor, buffers, offset)  # type: ignore[arg-type]
        assert offset % PAGE_BYTES == 0
        assert n == READ_BYTES, "no read is cut short by the file's end"
        counted[0] += n
        return n

    monkeypatch.setattr(os, "preadv", preadv)
    assert disk_speed(path, 3, least_s=0.05) > 0
    assert counted[0] >= 3 * READ_BYTES


@pytest.mark.parametrize("burst", [(0.0, 0.4), (0.3, 0.7), (0.6, 1.0)])
def test_a_burst_of_other_reads_does_not_change_a_disks_speed(burst: tuple[float, float]) -> None:
    """Reads take 20 times as long for four tenths of the time, as while a backup runs."""
    reads, now_s = list[tuple[float, int]](), 100.0
    while now_s < 101.0:
        is_slow = burst[0] <= now_s - 100.0 < burst[1]
        now_s += 0.02 if is_slow else 0.001
        reads.append((now_s, READ_BYTES))
    assert steady_rate(reads, 100.0) == pytest.approx(READ_BYTES / 0.001, rel=0.05)


@pytest.mark.parametrize("n", [0, 1, 2, 47, 48, 500])
def test_a_steady_disk_has_its_mean_speed_whatever_the_number_of_reads(n: int) -> None:
    reads = [(100.0 + (i + 1) * 0.01, READ_BYTES) for i in range(n)]
    assert steady_rate(reads, 100.0) == pytest.approx(READ_BYTES / 0.01 * (n > 0), rel=0.04)


SEEN = ReadCounters(direct_bytes=4 << 30, reads=2048, busy_s=2.0, under_way_s=7.0)


@pytest.mark.parametrize(
    ("under_way_s", "depth"), [(1.9, 1), (2.0, 1), (3.0, 2), (7.0, 4), (14.0, 8), (60.0, 16)]
)
def test_serving_sees_the_rate_of_the_mean_number_of_reads(under_way_s: float, depth: int) -> None:
    counters = replace(SEEN, under_way_s=under_way_s)
    assert seen_rate(counters) == (depth, (4 << 30) / 2.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"direct_bytes": 1 << 29},  # few bytes
        {"reads": 8192},  # small reads
        {"cached_bytes": 1 << 28},  # bytes from the page cache
        {"buffered_bytes": 1 << 28},  # perhaps bytes from the page cache
        {"busy_s": 0.0},
    ],
)
def test_what_is_no_speed_of_the_disk_is_not_seen(changes: dict[str, float]) -> None:
    assert seen_rate(replace(SEEN, **changes)) is None  # type: ignore[arg-type]
    assert seen_rate(ReadCounters()) is None


def test_a_file_that_is_too_short_or_missing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"GGUF")
    with pytest.raises(BadModel, match=r"short: is too short"):
        disk_speed(path, 1)
    with pytest.raises(BadModel, match=r"none: cannot be read"):
        disk_speed(tmp_path / "none", 1)


def test_the_disk_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"GGUF")
    disk = disk_of(path)
    assert disk.name
    assert disk.file_system


def test_an_encrypted_rotating_disk_below_a_partition_is_known(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"GGUF")
    root = tmp_path / "root"
    number = mount(root, path, "/dev/mapper/data", "ext4")
    whole = root / "sys/devices/block/dm-0"
    for name, text in (("queue/rotational", "1\n"), ("dm/uuid", "CRYPT-LUKS2-x\n")):
        (whole / name).parent.mkdir(parents=True)
        (whole / name).write_text(text)
    (whole / "part").mkdir()
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block" / number).symlink_to(whole / "part")
    disk = disk_of(path, root)
    assert disk == Disk("/dev/mapper/data", "ext4", is_encrypted=True, is_rotational=True)
    assert len(disk.reasons()) == 2


def test_a_volume_on_an_encrypted_disk_is_encrypted(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"GGUF")
    device = path.stat().st_dev
    number, root = f"{os.major(device)}:{os.minor(device)}", tmp_path / "root"
    volume, below = (root / "sys/devices/block" / name for name in ("dm-1", "dm-0"))
    for folder, uuid in ((volume, "LVM-x"), (below, "CRYPT-LUKS2-x")):
        (folder / "dm").mkdir(parents=True)
        (folder / "dm/uuid").write_text(uuid)
        (folder / "queue").mkdir()
        (folder / "slaves").mkdir()
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block" / number).symlink_to(volume)
    assert not disk_of(path, root).is_encrypted
    (volume / "slaves/dm-0").symlink_to(below)
    assert disk_of(path, root).is_encrypted


def test_what_makes_a_disk_slow_is_said() -> None:
    assert Disk("/dev/nvme0n1p2", "ext4").reasons(6e9) == []
    (remote,) = Disk("server:/models", "nfs4").reasons()
    assert remote.startswith("disk server:/models is remote (nfs4)")  # `serve` says such lines
    (slow,) = Disk("/dev/sda1", "ext4").reasons(0.5e9)
    assert "reads 0.5 GB/s: NVMe disks reach" in slow


def test_a_held_disk_is_no_faster_than_its_rate() -> None:
    clock, slept = [10.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    disk = HeldDisk(100.0, lambda: clock[0], sleep)
    first_s, second_s = disk.begin(50), disk.begin(50)  # the second waits for the first
    disk.wait(first_s)
    assert clock[0] == pytest.approx(10.5)
    disk.wait(second_s)
    assert clock[0] == pytest.approx(11.0)
    third_s = disk.begin(100)
    clock[0] = 20.0  # the real read took longer than the simulated one
    disk.wait(third_s)
    assert slept == pytest.approx([0.5, 0.5])
    assert disk.begin(100) == pytest.approx(21.0), "the disk was idle before"
