"""Links are measured for each device, alone and all at once, and kept for later starts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from busy_programs import busy_programs
from resolved import config_of

from offload.device import DeviceChoice, choose_device
from offload.stream import link_speed
from offload.stream.link_speed import (
    _COPY_BYTES,
    _MOST_AT_ONCE,
    LinkSpeeds,
    _LinkProbe,
    link_speeds,
    seen_link_rates,
)
from offload.times.repeated import RepeatedRate
from specoffload import kept_machine
from specoffload.config.options import Toggle
from specoffload.kept import MACHINE_FILE, KeptFile
from specoffload.kept_machine import keep_seen_links, link_lines, links_of
from specoffload.kept_values import KeptLinks
from specoffload.session.session import Session
from specoffload.speculation.costs import SessionCosts

RATES = (200e6, 50e6)  # bytes/s of two simulated links, far below memory's


def two() -> list[DeviceChoice]:
    return [choose_device(f"sim:bw={rate / 1e6:.0f}MB/s") for rate in RATES]


def test_each_link_is_measured_alone_and_with_the_other() -> None:
    speeds = link_speeds(two(), least_s=0.1)
    # Other programs may take most of the time of a measurement, and never make a link faster.
    for of_one in (speeds.alone, speeds.together):
        for measured, rate in zip(of_one, RATES, strict=True):
            assert 0.1 * rate < measured <= rate * 1.01
    (only,) = link_speeds(two()[1:], least_s=0.1).together
    assert 0.1 * RATES[1] < only <= RATES[1] * 1.01


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


SPEEDS = LinkSpeeds((30e9, 25e9), (21e9, 12e9))


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    return busy_programs(monkeypatch)


@pytest.fixture
def coming(others: set[str], monkeypatch: pytest.MonkeyPatch) -> list[LinkSpeeds]:
    """The next measurements. Each start takes the first one."""
    speeds: list[LinkSpeeds] = []
    monkeypatch.setattr(kept_machine, "link_speeds", lambda _: speeds.pop(0))
    return speeds


def by_start(n: int, folder: Path) -> list[tuple[float, ...]]:
    """The rates that the plan of each start reads."""
    return [links_of(two(), folder, keep=True).rates for _ in range(n)]


def test_links_are_kept_by_device(
    coming: list[LinkSpeeds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coming += [SPEEDS] * 4
    assert links_of(two(), tmp_path, keep=False).rates == SPEEDS.together
    assert not (tmp_path / MACHINE_FILE).exists()
    assert by_start(4, tmp_path) == [SPEEDS.together] * 4
    assert coming == [], "three starts measure"
    assert len(json.loads((tmp_path / MACHINE_FILE).read_text())["links"]) == 1
    with pytest.raises(IndexError):  # other devices are measured
        links_of(two()[::-1], tmp_path, keep=True)
    monkeypatch.setattr(kept_machine, "today", lambda: "2999-01-01")
    assert links_of(two(), tmp_path, keep=False).rates == SPEEDS.together, "a look measures not"
    with pytest.raises(IndexError):  # a start measures old speeds again
        links_of(two(), tmp_path, keep=True)


def test_real_links_of_a_start_are_kept(tmp_path: Path) -> None:
    first = links_of(two(), tmp_path, keep=True)
    assert links_of(two(), tmp_path, keep=False) == first


@pytest.mark.parametrize("nth", range(3))
@pytest.mark.parametrize("factor", [1 / 20, 20.0])
def test_a_disturbed_measurement_of_links_heals(
    factor: float, nth: int, coming: list[LinkSpeeds], tmp_path: Path
) -> None:
    """Rates that are too low heal with the next start, too high ones with the third at the latest.

    No link is faster together with others than alone, so too high rates of one kind do less harm.
    """
    for kind in ("alone", "together"):
        disturbed = tuple(factor * rate for rate in getattr(SPEEDS, kind))
        coming[:] = [SPEEDS] * 5
        coming[nth] = replace(SPEEDS, **{kind: disturbed})
        used = by_start(5, tmp_path)
        healed = 2 if factor > 1 else max(nth, 1)
        assert used[healed:] == [SPEEDS.together] * (5 - healed)
        assert max(map(max, used)) <= max(SPEEDS.alone)
        (tmp_path / MACHINE_FILE).unlink()


def test_links_out_of_bounds_or_beside_other_programs_do_not_count(
    others: set[str], coming: list[LinkSpeeds], tmp_path: Path
) -> None:
    slow, absurd = LinkSpeeds((1e9, 1e9), (1e9, 1e9)), replace(SPEEDS, together=(1e3, 12e9))
    coming += [slow, SPEEDS, absurd, slow]
    others.add("a compiler")
    assert by_start(1, tmp_path) == [slow.together]
    others.clear()
    assert by_start(2, tmp_path) == [SPEEDS.together] * 2
    others.add("a compiler")
    assert by_start(1, tmp_path) == [SPEEDS.together]


def test_speeds_of_an_earlier_version_are_one_measurement(
    coming: list[LinkSpeeds], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    coming += [SPEEDS] * 2
    by_start(1, tmp_path)
    path = tmp_path / MACHINE_FILE
    data = json.loads(path.read_text())
    for links in data["links"].values():
        links |= {"alone": [3e9, 3e9], "together": [1e9, 2e9]}
    path.write_text(json.dumps(data))
    assert links_of(two(), tmp_path, keep=False).rates == (1e9, 2e9)
    assert by_start(1, tmp_path) == [SPEEDS.together]
    assert caplog.records == []


def test_serving_corrects_what_is_faster_than_links_alone(
    coming: list[LinkSpeeds], tmp_path: Path
) -> None:
    """A card moved to a slower place: no link is faster together with others than alone."""
    slow = LinkSpeeds((1e9, 25e9), (1e9, 12e9))
    coming += [SPEEDS] * 3 + [slow]
    by_start(3, tmp_path)
    first, _ = two()
    for rate in (1e9, 1e9, 1e14, 1e9):
        assert by_start(1, tmp_path) == [SPEEDS.together], "two sessions change nothing"
        keep_seen_links(tmp_path, two(), {first.name: rate})
    assert links_of(two(), tmp_path, keep=False).rates == SPEEDS.together, "nor do three"
    assert by_start(1, tmp_path) == [(1e9, SPEEDS.together[1])], "but a start measures"
    assert coming == []
    keep_seen_links(tmp_path, two()[::-1], {first.name: rate})
    assert len(json.loads((tmp_path / MACHINE_FILE).read_text())["links"]) == 1


def test_serving_sees_links_alone_by_the_experts_of_equal_layers() -> None:
    copies_s = {"CUDA0": 1e-3, "CUDA1": 2e-3}
    assert seen_link_rates(copies_s, [20_000_000] * 3) == {"CUDA0": 2e10, "CUDA1": 1e10}
    assert seen_link_rates(copies_s, [20_000_000, 24_000_000]) == {}, "which one was timed?"
    assert seen_link_rates(copies_s, [1 << 20] * 3) == {}, "calls take as long as bytes"
    assert seen_link_rates(copies_s, []) == seen_link_rates({}, [20_000_000]) == {}


def test_a_session_adds_what_it_saw_of_links(
    tiny_moe: Path, coming: list[LinkSpeeds], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setattr(link_speed, "_LEAST_EXPERT_BYTES", 1)  # the model's are small
    coming += [SPEEDS] * 3
    config = config_of(
        model=tiny_moe, device="sim:bw=1GB/s,sim:bw=2GB/s", threads=1, ctx_size=256,
        spec_given={"--spec-type": "none"}, hybrid=Toggle.OFF,
    )  # fmt: skip
    with Session(config) as session:
        choices = [choice for choice, _ in session.target.start.choices]
        expert_bytes = session.target.facts.one_expert_bytes
        assert len(coming) == 2, "the start measured the links"
        monkeypatch.setattr(SessionCosts, "copies_s", {choices[0].name: 1e-3})
    (links,) = KeptFile(tmp_path).load()[0].links.values()
    assert [rate.values for rate in links.alone] == [(30e9,), (25e9,)]
    assert [rate.seen for rate in links.alone] == [(1e3 * expert_bytes,), ()]
    assert [rate.seen for rate in links.together] == [(), ()]


def test_a_line_says_both_rates() -> None:
    alone, together = (
        [RepeatedRate((rate,)) for rate in rates] for rates in ((25e9, 12.5e9), (13e9, 12.4e9))
    )
    kept = KeptLinks(alone, together, "2026-01-02")
    lines = link_lines(two(), kept)
    assert "25.0 GB/s from RAM, 13.0 GB/s while the other copies, too" in lines[0]
    assert "2026-01-02" in lines[1]
