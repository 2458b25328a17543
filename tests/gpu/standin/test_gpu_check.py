"""scripts/gpu-check from end to end with the real ggml-cuda, before a GPU is there to run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_whole_call_passes_with_small_models(tmp_path: Path) -> None:
    done = subprocess.run(
        [ROOT / "scripts/gpu-check", "--small", "--out", tmp_path],
        env={**os.environ, "VENV": sys.prefix}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    report = json.loads((tmp_path / "gpu-check.json").read_text("utf-8"))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert report["device"].startswith("CUDA")
    assert report["ok"]
    statuses = {name: part["status"] for name, part in report["parts"].items()}
    passed = {name for name, status in statuses.items() if status == "passed"}
    assert passed >= {"imports", "link", "equality", "decode", "split", "prefill"}, statuses
    assert report["link"]["why_not_pinned"] == ""
    assert all(row["kl_worst"] == 0.0 for row in report["equality"])
    ways = ("streamed", "split")
    assert all(row["n_repairs"] > 0 for row in report["equality"] if row["way"] in ways)
    assert all(row["layers_rung"] > 0 for row in report["equality"] if row["way"] == "doorbell")
    # The stand-in's card tells these values. Plain llama.cpp has a process of its own.
    assert all(row["card_power_watts"] == 60.0 for row in report["decode"])
    assert all(row["card_limit_watts"] == 200.0 for row in report["decode"])
    assert all(row["core_clock_hz"] == 1410e6 for row in report["decode"])
    streamed = [row for row in report["decode"] if row.get("streamed_bytes")]
    assert streamed
    assert all(row["copying_share"] > 0.0 for row in streamed)
    turns = [row for row in report["decode"] if "waiting_s" in row]
    assert turns
    assert all(row["layers_rung"] > 0 for row in turns)
    assert all(row["same"] for row in report["decode"] if "same" in row)
    moved = report["link"]["mapped"]["rows"]
    assert [row["moved_bytes"] for row in moved] == 2 * [
        4096,
        16384,
        65536,
        262144,
        1 << 20,
        4 << 20,
    ]
    assert {row["direction"] for row in moved} == {"to the device", "to the host"}
    assert report["link"]["mapped"]["start"]["kernels_read"] in {True, False}
    assert len(report["link"]["words"]) == 5, report["link"].get("why_no_words")
    assert all(row["taken_s"] > 0.0 for row in report["link"]["words"])
