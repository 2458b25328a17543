"""The stand-in poses as several GPUs: memory by device, the current device, copies between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from lab.synth import write_preset


def run(n_devices: int, model: Path, target: Path) -> dict[str, Any]:
    script = Path(__file__).with_name("two_devices_run.py")
    done = subprocess.run(
        [sys.executable, script, model, target],
        env={**os.environ, "STANDIN_DEVICES": str(n_devices), "STANDIN_JITTER": "500"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == found["bad_addresses"] == found["stale_uids"] == 0, done.stderr
    return found


def test_plain_libllama_computes_the_same_on_two_devices(models: Path, tmp_path: Path) -> None:
    model = write_preset("mistral-large", models / "two_devices.gguf", size="tiny", seed=2)
    alone = run(1, model, tmp_path / "1.npy")
    both = run(2, model, tmp_path / "2.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "1.npy"), np.load(tmp_path / "2.npy"))
    assert alone["peer_copies"] == 0
    assert both["peer_copies"] > 0
    assert min(both["taken"]) > 0, "each device holds some of the model"
