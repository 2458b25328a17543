"""The speed of a disk is measured by several starts, kept with the machine, and told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from busy_programs import busy_programs
from numa_trees import mount

from offload.errors import BadModel
from offload.store.disk_speed import DEPTHS, Disk
from offload.store.reading import ReadCounters
from offload.times.repeated import RepeatedRate
from specoffload import kept_machine
from specoffload.kept import KeptFile
from specoffload.kept_machine import lines_of_disks, load_disk, measure_disk
from specoffload.kept_values import KeptDisk


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return busy_programs(monkeypatch)


@pytest.mark.usefixtures("load")
def test_a_disk_is_measured_until_values_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    for n in (2, 3, 3, 3):
        assert measure_disk(folder, model) == first
        assert measured == n * [*DEPTHS]
    known = load_disk(folder, model)
    assert known is not None
    assert known.bytes_per_s == 6e9
    assert measure_disk(None, model) == first, "without a folder it is measured again"
    assert len(measured) == 4 * len(DEPTHS)


@pytest.mark.usefixtures("load")
def test_an_old_speed_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, measured = tmp_path / "m.gguf", list[int]()
    model.write_bytes(b"GGUF")

    def speed(path: Path, depth: int) -> float:
        measured.append(depth)
        return 1e9

    monkeypatch.setattr(kept_machine, "disk_speed", speed)
    days = ["2026-01-01"] * 3 + ["2026-01-30", "2026-01-31"]
    for day, n_measured in zip(days, (1, 2, 3, 3, 4), strict=True):
        monkeypatch.setattr(kept_machine, "today", lambda day=day: day)
        measure_disk(tmp_path, model)
        assert len(measured) == n_measured * len(DEPTHS)
    known = load_disk(tmp_path, model)
    assert known is not None
    assert known.date == "2026-01-31"


RATE = 2e9


def rates_by_start(
    rates: Sequence[float], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """The rate that a plan reads after each start. Each start measures the next of `rates`."""
    model = folder / "m.gguf"
    model.write_bytes(b"GGUF")
    used = []
    for rate in rates:
        monkeypatch.setattr(kept_machine, "disk_speed", lambda *_, rate=rate: rate)
        measure_disk(folder, model)
        known = load_disk(folder, model)
        used.append(0.0 if known is None else known.bytes_per_s)
    return used


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("nth", range(3))
def test_a_disturbed_measurement_heals(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = [RATE] * 4
    rates[nth] = RATE / 20
    used = rates_by_start(rates, tmp_path, monkeypatch)
    assert used[max(nth, 1) :] == [RATE] * (4 - max(nth, 1))
    for path in tmp_path.iterdir():
        path.unlink()
    rates[nth] = RATE * 20  # a lucky one, as from the page cache
    assert rates_by_start(rates, tmp_path, monkeypatch)[2:] == [RATE] * 2


@pytest.mark.usefixtures("load")
def test_a_measurement_out_of_bounds_costs_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rates_by_start([RATE, 1.0, RATE], tmp_path, monkeypatch) == [RATE] * 3
    KeptFile(tmp_path).path.unlink()
    assert rates_by_start([1.0], tmp_path, monkeypatch) == [0.0]


def test_a_measurement_beside_other_programs_is_replaced(
    load: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load.add("a compiler")
    assert rates_by_start([RATE * 2] * 2, tmp_path, monkeypatch) == [RATE * 2] * 2
    load.clear()
    assert rates_by_start([RATE], tmp_path, monkeypatch) == [RATE]
    load.add("a compiler")
    assert rates_by_start([RATE / 20] * 5, tmp_path, monkeypatch) == [RATE] * 5


def starts_by_day(days: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether a start of each of these days measures the disk."""
    model, measured = folder / "m.gguf", list[int]()
    model.write_bytes(b"GGUF")

    def speed(path: Path, depth: int) -> float:
        measured.append(depth)
        return RATE

    monkeypatch.setattr(kept_machine, "disk_speed", speed)
    did = []
    for day in days:
        n = len(measured)
        monkeypatch.setattr(kept_machine, "today", lambda day=day: day)
        measure_disk(folder, model)
        did.append(len(measured) > n)
    return did


@pytest.mark.parametrize("n_quiet", [0, 1])
def test_starts_on_a_busy_machine_come_to_an_end(
    n_quiet: int, load: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert starts_by_day(["2026-01-01"] * n_quiet, tmp_path, monkeypatch) == [True] * n_quiet
    load.add("a compiler")
    first = starts_by_day(["2026-01-01"] * 10, tmp_path, monkeypatch)
    assert first == [True] * (5 - n_quiet) + [False] * (5 + n_quiet)
    days = ["2026-01-02"] * 3 + ["2026-01-03"] * 2
    assert starts_by_day(days, tmp_path, monkeypatch) == [True, False, False, True, False]


@pytest.mark.usefixtures("load")
def test_a_measurement_keeps_what_another_process_kept_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts measure at once, and a session ends meanwhile."""
    rates_by_start([RATE], tmp_path, monkeypatch)
    model, others = tmp_path / "m.gguf", ["a start"]

    def speed(path: Path, depth: int) -> float:
        if others:
            others.clear()
            rates_by_start([RATE * 1.02], tmp_path, monkeypatch)
            kept_machine.keep_seen_disk(tmp_path, model, seen(RATE))
        return RATE * 1.04

    monkeypatch.setattr(kept_machine, "disk_speed", speed)
    measure_disk(tmp_path, model)
    known = load_disk(tmp_path, model)
    assert known is not None
    assert known.rates[1].values[:2] == (RATE, RATE * 1.02)
    assert known.rates[1].n == 3
    assert len(known.rates[1].seen) == 1


def test_an_encrypted_disk_is_not_doubted_for_its_decryption(
    load: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load.add("kcryptd")
    disk = Disk("/dev/mapper/home", "ext4", is_encrypted=True)
    monkeypatch.setattr(kept_machine, "disk_of", lambda _: disk)
    rates_by_start([RATE], tmp_path, monkeypatch)
    known = load_disk(tmp_path, tmp_path / "m.gguf")
    assert known is not None
    assert not any(rate.is_doubted for rate in known.rates.values())


@pytest.mark.usefixtures("load")
def test_a_speed_of_an_earlier_version_is_one_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rates_by_start([RATE], tmp_path, monkeypatch)
    path = KeptFile(tmp_path).path
    data = json.loads(path.read_text())
    for disk in data["disks"].values():
        disk["rates"] = {str(depth): RATE / 20 for depth in DEPTHS}
    path.write_text(json.dumps(data))
    known = load_disk(tmp_path, tmp_path / "m.gguf")
    assert known is not None
    assert known.bytes_per_s == RATE / 20
    assert rates_by_start([RATE], tmp_path, monkeypatch) == [RATE]
    assert caplog.records == []


def seen(rate: float, n_under_way: int = 4) -> ReadCounters:
    """Counters of a session whose reads brought 4 GiB at this rate."""
    busy_s = (4 << 30) / rate
    return ReadCounters(4 << 30, reads=2048, busy_s=busy_s, under_way_s=n_under_way * busy_s)


@pytest.mark.usefixtures("load")
def test_serving_corrects_the_speed_of_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was replaced, or a backup ran during each measurement."""
    check_corrected(RATE / 20, RATE, tmp_path, monkeypatch)


@pytest.mark.usefixtures("load")
def test_serving_corrects_a_speed_that_is_too_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan reads the highest speed, and sessions see one number of reads."""
    check_corrected(RATE, RATE / 2, tmp_path, monkeypatch)


def check_corrected(
    before: float, after: float, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sessions that contradict three starts make one more start measure, which counts."""
    rates_by_start([before] * 3, folder, monkeypatch)
    model = folder / "m.gguf"
    for n in range(3):
        assert rates_by_start([after], folder, monkeypatch) == [before], f"after {n} sessions"
        kept_machine.keep_seen_disk(folder, model, seen(after))
    kept_machine.keep_seen_disk(folder, model, seen(1e13))  # no disk is so fast
    kept_machine.keep_seen_disk(folder, model, ReadCounters())
    known = load_disk(folder, model)
    assert known is not None
    assert known.bytes_per_s == before, "sessions alone change nothing"
    assert rates_by_start([after], folder, monkeypatch) == [after]


@pytest.mark.usefixtures("load")
@pytest.mark.parametrize("factor", [0.85, 1.2])
def test_sessions_that_nearly_agree_with_a_disks_speed_confirm_it(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_by_start([RATE] * 3, tmp_path, monkeypatch)
    for _ in range(3):
        kept_machine.keep_seen_disk(tmp_path, tmp_path / "m.gguf", seen(factor * RATE))
    known = load_disk(tmp_path, tmp_path / "m.gguf")
    assert known is not None
    assert known.is_settled


def test_what_serving_sees_of_a_disk_that_was_not_measured_is_not_kept(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    model.write_bytes(b"GGUF")
    kept_machine.keep_seen_disk(tmp_path, model, seen(RATE))
    assert load_disk(tmp_path, model) is None


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
    slow = KeptDisk(
        {1: RepeatedRate((0.4e9,)), 8: RepeatedRate((0.9e9,))}, "2026-01-02", ["sda reads 0.9 GB/s"]
    )
    lines = lines_of_disks({"sda": slow}, models, root)
    assert lines[0].startswith("disk sda: GB/s by number of reads at once: 0.4 with 1, 0.9 with 8")
    assert "do not wear it out" in lines[0]
    assert lines[1:] == ["sda reads 0.9 GB/s", warning]
    known = KeptDisk({8: RepeatedRate((1e9,))}, "2026-01-02", ["kept"])
    assert lines_of_disks({"server:/models": known}, models, root)[1:] == ["kept"]
