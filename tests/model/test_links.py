"""Links are measured for each device, alone and all at once, and kept for later starts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from offload.device import DeviceChoice, choose_device
from offload.stream.link_speed import _COPY_BYTES, _MOST_AT_ONCE, _LinkProbe, link_speeds
from specoffload import kept_machine
from specoffload.kept import MACHINE_FILE
from specoffload.kept_machine import link_lines, links_of

RATES = (200e6, 50e6)  # bytes/s of two simulated links, far below memory's


def two() -> list[DeviceChoice]:
    return [choose_device(f"sim:bw={rate / 1e6:.0f}MB/s") for rate in RATES]


def test_each_link_is_measured_alone_and_with_the_other() -> None:
    speeds = link_speeds(two(), least_s=0.1)
    for of_one in (speeds.alone, speeds.together):
        for measured, rate in zip(of_one, RATES, strict=True):
            assert 0.5 * rate < measured <= rate * 1.01
    (only,) = link_speeds(two()[1:], least_s=0.1).together
    assert 0.5 * RATES[1] < only <= RATES[1] * 1.01


def test_a_burst_of_other_programs_does_not_change_a_links_speed() -> None:
    """Copies take 20 times as long in 8 of about 30 stretches of a measurement."""
    rate, n_stretches, time_s = 10e9, -1, 0.0

    def now() -> float:
        nonlocal n_stretches, time_s
        n_stretches += 1
        if n_stretches:
            n_copies = min(_MOST_AT_ONCE, 1 << (n_stretches - 1))
            slowness = 20 if 10 <= n_stretches < 18 else 1
            time_s += slowness * n_copies * _COPY_BYTES / rate
        return time_s

    with ExitStack() as closing:
        probe = _LinkProbe(choose_device("sim"), closing)
        least_s = (22 + 8 * 20) * _MOST_AT_ONCE * _COPY_BYTES / rate
        assert probe.run(least_s, now) == pytest.approx(rate, rel=0.01)
    assert 25 < n_stretches < 40


def test_links_are_kept_by_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = links_of(two(), tmp_path, keep=False)
    assert not (tmp_path / MACHINE_FILE).exists()
    first = links_of(two(), tmp_path, keep=True)
    assert len(json.loads((tmp_path / MACHINE_FILE).read_text())["links"]) == 1
    monkeypatch.setattr(kept_machine, "link_speeds", None)  # not measured again
    assert links_of(two(), tmp_path, keep=True) == first
    with pytest.raises(TypeError):  # other devices are measured
        links_of(two()[::-1], tmp_path, keep=True)
    monkeypatch.setattr(kept_machine, "today", lambda: "2999-01-01")
    assert links_of(two(), tmp_path, keep=False) == first, "a plan measures only what is missing"
    with pytest.raises(TypeError):  # a start measures old speeds again
        links_of(two(), tmp_path, keep=True)


def test_a_line_says_both_rates(tmp_path: Path) -> None:
    kept = links_of(two(), None, keep=False)
    kept.alone, kept.together = [25e9, 12.5e9], [13e9, 12.4e9]
    lines = link_lines(two(), kept)
    assert "25.0 GB/s from RAM, 13.0 GB/s while the other copies, too" in lines[0]
    assert kept.date in lines[1]
