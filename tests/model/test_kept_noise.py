"""One disturbed measurement of a machine costs a plan nothing once two more starts have measured.

A time that is too long costs nothing from the next start on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lab.synth import plan_preset, write_header_only
from offload.model import TensorEntry
from offload.plan.repacking import LayoutTimes, Repacking, choose_layouts
from offload.plan.workload import PlannedWork
from offload.stream.link_speed import LinkSpeeds
from specoffload import kept_machine
from specoffload.cli import app
from specoffload.cpu_load import Load

SLOW, FAST = 1 / 20, 20.0  # factors on a rate
N_STARTS = 3
LINKS = LinkSpeeds((25e9, 24e9), (14e9, 13e9))
DISK = 4e9
LAYOUTS = LayoutTimes(312e-6, 244e-6, 102e-6, 213e-6)  # of which prompts prefer the file's layout
WEIGHTS = [TensorEntry("blk.0.attn_q.weight", "q4_K", (4096, 4096), 0, 64 << 20)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("header") / "qwen.gguf"
    return write_header_only(plan_preset("qwen3-30b-a3b", size="full"), path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of kept files, on a machine without other programs."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setattr(Load, "is_busy", False)
    return tmp_path


def planned_tps(model: Path, *more: str) -> float:
    """The predicted tokens per second of decodes."""
    result = CliRunner().invoke(app, ["plan", str(model), *more, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    expected: dict[str, Any] = json.loads(result.stdout)["expected"]
    return float(expected["decode_tps"])


def by_links(model: Path, factors: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The speed planned for two devices at each start, whose links measure `factors` × `LINKS`."""
    speeds = []
    for factor in factors:
        rates = tuple(tuple(factor * rate for rate in of) for of in (LINKS.alone, LINKS.together))
        monkeypatch.setattr(kept_machine, "link_speeds", lambda _, rates=rates: LinkSpeeds(*rates))
        speeds.append(
            planned_tps(model, "--device", "sim:vram=5GiB,sim:vram=4GiB", "--ram", "64GiB")
        )
    return speeds


def by_disk(model: Path, factors: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The speed planned after each start, at which the disk measures `factors` × `DISK`."""
    speeds, folder = [], Path(model.parent / "kept")
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(folder))
    for factor in factors:
        monkeypatch.setattr(kept_machine, "disk_speed", lambda *_, rate=factor * DISK: rate)
        kept_machine.measure_disk(folder, model)
        speeds.append(planned_tps(model, "--device", "sim:vram=5GiB", "--ram", "6GiB"))
    (folder / "machine.json").unlink()
    return speeds


def check(speeds: list[float], clean: float, factor: float, nth: int) -> None:
    """Compare planned speeds with that of a quiet machine."""
    ends = 1 if factor < 1 else 2  # start from which the disturbed measurement is outvoted
    for at, speed in enumerate(speeds):
        if at >= ends:
            assert speed == clean
        elif at == nth == 0:
            assert abs(speed / clean - 1.0) > 0.05, "otherwise this test compares nothing"


@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("factor", [SLOW, FAST])
def test_a_disturbed_measurement_of_links_costs_a_plan_nothing(
    factor: float, nth: int, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean,) = by_links(model, [1.0], monkeypatch)
    (folder / "machine.json").unlink()
    factors = [factor if start == nth else 1.0 for start in range(N_STARTS)]
    check(by_links(model, factors, monkeypatch), clean, factor, nth)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("factor", [SLOW, FAST])
def test_a_disturbed_measurement_of_the_disk_costs_a_plan_nothing(
    factor: float, nth: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean,) = by_disk(model, [1.0], monkeypatch)
    factors = [factor if start == nth else 1.0 for start in range(N_STARTS)]
    check(by_disk(model, factors, monkeypatch), clean, factor, nth)


@pytest.mark.parametrize("nth", [0, 1, 2])
@pytest.mark.parametrize("name", ["plain_one_s", "plain_prompt_s"])
def test_a_disturbed_measurement_of_layouts_costs_a_prompt_nothing(
    name: str, nth: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = list[Repacking]()
    for start in range(N_STARTS):
        slow = replace(LAYOUTS, **{name: 20 * getattr(LAYOUTS, name)})
        times = slow if start == nth else LAYOUTS
        monkeypatch.setattr(kept_machine, "layout_times", lambda _, times=times: times)
        measured = partial(kept_machine.layouts_of, folder)
        choices.append(choose_layouts(WEIGHTS, measured, PlannedWork(4096, 512)))
    assert not any(choice.is_on for choice in choices[1:])
    assert choices[0].is_on == (nth == 0)
