"""`specoffload models` lists large models in seconds, in order, and ends at Ctrl-C."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lab.synth.published import published_facts

TITLES = (
    "Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V4-Flash", "GLM-4.6", "DeepSeek-R1", "Kimi-K2",
)  # fmt: skip
MOST_CPU_S = 6.0  # it took 2 s on two idle cores; times of the processor depend little on others


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files with the headers of published models, and without weights."""
    folder = tmp_path_factory.mktemp("published")
    for title in TITLES:
        published_facts(title, folder)
    return folder


def listing(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "specoffload", "models", folder],
        env={**os.environ, "COLUMNS": "400"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def names(lines: list[str]) -> list[str]:
    return [Path(line.strip()).stem for line in lines if not line.startswith(" ")]


def test_six_large_models_are_planned_in_seconds_and_in_order(folder: Path) -> None:
    before_s = cpu_s()
    out, errors = listing(folder).communicate(timeout=120)
    used_s = cpu_s() - before_s
    lines = out.splitlines()
    assert names(lines) == sorted(TITLES), errors
    plans = [line for line in lines if line.startswith(" ")]
    assert len(plans) == len(TITLES)
    assert all("GiB" in plan for plan in plans)
    assert used_s <= MOST_CPU_S


def test_ctrl_c_ends_the_listing_and_keeps_what_was_said(folder: Path) -> None:
    with listing(folder) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        run.send_signal(signal.SIGINT)
        out, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in errors
    found = names([first, *out.splitlines()])
    assert found == sorted(TITLES)[: len(found)]
    assert len(found) < len(TITLES)
