"""The GPU tests fail if CUDA's waits are left out, so they do detect a wrong order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GPU_TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("left_out", ["waits", "event_syncs", "stream_syncs"])
def test_leaving_out_waits_fails_tests(left_out: str, tmp_path: Path) -> None:
    """STANDIN_JITTER delays work, so that without the waits some data is read too early."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys"]
    command += [str(GPU_TESTS / "test_gpu_equality.py")]
    command += ["-k", "half or least_slots or pinned_ring"]
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    env |= {"STANDIN_JITTER": "2000", "STANDIN_IGNORE": left_out}
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    # A number that is read too early may also end the program: an expert's id is out of range.
    found = done.stdout + done.stderr
    assert " failed" in found or "GGML_ASSERT" in found, found
