"""Tests that need the stand-in for CUDA (tests/cuda_standin); scripts/test-cuda runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from on_gpu import is_standin

from offload.device import DeviceChoice

sys.path.append(str(Path(__file__).parents[2] / "server"))


@pytest.fixture(scope="session", autouse=True)
def standin(gpu: DeviceChoice) -> DeviceChoice:
    """The stand-in's first device; without it these tests skip."""
    if not is_standin(gpu):
        pytest.skip(f"{gpu.name} is not the stand-in for CUDA: scripts/test-cuda")
    return gpu
