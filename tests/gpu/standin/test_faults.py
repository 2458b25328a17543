"""Memory that runs out at each allocation in turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("call", ["malloc", "host_alloc", "host_register", "instantiate", "cublas"])
def test_memory_that_runs_out_ends_a_request_or_the_program_in_one_sentence(call: str) -> None:
    script = Path(__file__).with_name("fault_runs.py")
    done = subprocess.run(
        [sys.executable, script, call], capture_output=True, text=True, timeout=280
    )
    print(done.stdout)
    assert done.returncode == 0, done.stderr
