"""A decode enters Python files for several devices or for the disk only if its model needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from test_devices import options
from test_disk import PRESETS, least_ram
from test_disk import options as disk_options

import offload
from lab.options import Streaming
from lab.synth import write_preset
from offload.engine import Engine, open_engine

_ROOT = Path(offload.__file__).parent
DEVICES = {"plan/devices.py", "plan/ranges.py", "plan/search.py",
           "stream/link_speed.py"}  # fmt: skip
DISK = {"schedule/from_disk.py", *(f"store/{path.name}" for path in (_ROOT / "store").glob("*.py"))}


def entered(engine: Engine, n_tokens: int) -> set[str]:
    """Return the files of offload that this thread enters while it decodes tokens."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(_ROOT):
            found.add(path.relative_to(_ROOT).as_posix())

    engine.sequences.extend(0, list(range(n_tokens)), 1)  # prepares the graph
    sys.setprofile(note)
    try:
        engine.sequences.extend(0, list(range(n_tokens)), 1)
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return write_preset(PRESETS["qwen3moe"], models / "way.gguf", size="tiny", seed=6)


@pytest.mark.parametrize("mode", ["resident", "streamed", "split"])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_a_model_in_memory_on_one_device(model: Path, mode: str, device: str) -> None:
    with open_engine(model, options(device, mode)) as engine:
        for n_tokens in (1, 64):
            way = entered(engine, n_tokens)
            assert "sequences/sequences.py" in way
            assert not way & (DEVICES | DISK)
            assert not any(file.startswith(("remote/", "worker/")) for file in way)


def test_the_disk_is_seen_if_experts_are_there(model: Path) -> None:
    least = least_ram(model, "sim", Streaming())
    with open_engine(model, disk_options("sim", least, Streaming())) as engine:
        assert "store/expert_memory.py" in entered(engine, 1)
