"""The speed of a disk is measured once, kept with the machine, and told."""

from __future__ import annotations

from pathlib import Path

import pytest
from numa_trees import mount

from offload.errors import BadModel
from offload.store.disk_speed import DEPTHS
from specoffload import kept_machine
from specoffload.kept import KeptDisk
from specoffload.kept_machine import lines_of_disks, load_disk, measure_disk


def test_a_disk_is_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder, measured = tmp_path / "m.gguf", tmp_path / "profiles", list[int]()
    model.write_bytes(b"GGUF")

    def speed(path: Path, depth: int) -> float:
        measured.append(depth)
        return 1e9 * min(depth, 6)

    monkeypatch.setattr(kept_machine, "disk_speed", speed)
    assert load_disk(folder, model) is None
    first = measure_disk(folder, model)
    assert measured == list(DEPTHS)
    assert "1.0 with 1, 2.0 with 2, 4.0 with 4, 6.0 with 8, 6.0 with 16" in first[0]
    assert measure_disk(folder, model) == first
    assert measured == list(DEPTHS)
    known = load_disk(folder, model)
    assert known is not None
    assert known.bytes_per_s == 6e9
    assert measure_disk(None, model) == first, "without a folder it is measured again"
    assert len(measured) == 2 * len(DEPTHS)


def test_an_old_speed_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured = tmp_path / "m.gguf", list[int]()
    model.write_bytes(b"GGUF")

    def speed(path: Path, depth: int) -> float:
        measured.append(depth)
        return 1e9

    monkeypatch.setattr(kept_machine, "disk_speed", speed)
    for day, n_measured in (("2026-01-01", 1), ("2026-01-30", 1), ("2026-01-31", 2)):
        monkeypatch.setattr(kept_machine, "today", lambda day=day: day)
        measure_disk(tmp_path, model)
        assert len(measured) == n_measured * len(DEPTHS)
    known = load_disk(tmp_path, model)
    assert known is not None
    assert known.date == "2026-01-31"


def test_a_file_that_cannot_be_measured_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")

    def speed(path: Path, depth: int) -> float:
        raise BadModel(f"{path}: is too short to measure the disk with")

    monkeypatch.setattr(kept_machine, "disk_speed", speed)
    assert measure_disk(tmp_path, model) == [
        f"the disk is not measured: {model}: is too short to measure the disk with"
    ]
    assert load_disk(tmp_path, model) is None


def test_the_doctor_warns_of_the_disk_of_models_before_it_is_measured(tmp_path: Path) -> None:
    root = tmp_path / "root"
    mount(root, tmp_path, "server:/models", "nfs4")
    models = tmp_path / "not/there/yet"
    (warning,) = lines_of_disks({}, models, root)
    assert "server:/models is remote (nfs4)" in warning
    slow = KeptDisk({1: 0.4e9, 8: 0.9e9}, "2026-01-02", ["sda reads 0.9 GB/s"])
    lines = lines_of_disks({"sda": slow}, models, root)
    assert lines[0].startswith("disk sda: GB/s by number of reads at once: 0.4 with 1, 0.9 with 8")
    assert "do not wear it out" in lines[0]
    assert lines[1:] == ["sda reads 0.9 GB/s", warning]
    known = KeptDisk({8: 1e9}, "2026-01-02", ["kept"])
    assert lines_of_disks({"server:/models": known}, models, root)[1:] == ["kept"]
