"""scripts/lab/run pictures: each picture is drawn from runs, here of small models."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is an extra")
    matplotlib.use("Agg")
    from lab import pictures

    pictures.SHAPE = {**pictures.SHAPE, "n_embd": 256, "n_ff_exp": 256}
    return pictures


def test_the_three_runs_of_a_picture_differ_as_they_should(
    pictures: ModuleType, tmp_path: Path
) -> None:
    runs = pictures.run(tmp_path, n_tokens=4, slots=0.4)
    assert runs.resident.copied_bytes == 0
    assert min(runs.serial.copied_bytes, runs.scheduled.copied_bytes) > 0
    for step in (runs.serial, runs.scheduled):
        assert {"copy", "compute"} <= {event.lane for event in step.events}
        assert all(-1e-3 <= event.start_s <= step.seconds for event in step.events)
    reasons = [
        {event.args["reason"] for event in step.events if event.lane == "copy"}
        for step in (runs.serial, runs.scheduled)
    ]
    assert reasons[0] == {"needed"}
    assert reasons[1] & {"ahead", "predicted"}
    assert all(found <= set(pictures.WORDS) for found in reasons)


def test_the_pictures_are_drawn(pictures: ModuleType, tmp_path: Path) -> None:
    pictures.draw_overlap(tmp_path, tmp_path / "overlap.png")
    pictures.draw_costs(tmp_path, tmp_path / "costs.png", sizes=(4, 1))
    for name in ("overlap", "costs"):
        drawn = (tmp_path / f"{name}.png").read_bytes()
        assert drawn.startswith(b"\x89PNG")
        assert 5_000 < len(drawn) < 100_000
