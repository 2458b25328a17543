"""`doctor`, `tune numa` and the NUMA flags as commands: what they print, keep and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import in_process
import pytest
import resolved
from click.testing import Result
from typer.testing import CliRunner

from numa.errors import NumaError
from numa.machine import read_topology
from numa.place import Candidate, Strategy
from numa.topology import Core, MemoryNode, Topology
from specoffload.cli import app
from specoffload.commands.tune import SIZES, config_for
from specoffload.config.speculation import NO_DRAFTS
from specoffload.cpu_load import Load, Watch
from specoffload.kept import MACHINE_FILE
from specoffload.kept_machine import load_tuned

ONE_NODE = not read_topology().is_numa


def command(*words: str, profiles: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SPECOFFLOAD_PROFILE_DIR": str(profiles), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "specoffload", *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )


def two_nodes() -> Topology:
    """An invented machine: two nodes of four cores and 4 GiB each."""
    gib = 1 << 30
    return replace(
        read_topology(),
        nodes=(
            MemoryNode(0, (0, 1, 2, 3), 4 * gib, 4 * gib, (10, 20)),
            MemoryNode(1, (4, 5, 6, 7), 4 * gib, 4 * gib, (20, 10)),
        ),
        cores=tuple(Core((cpu,), cpu // 4) for cpu in range(8)),
        allowed_cpus=tuple(range(8)),
        allowed_nodes=(0, 1),
        gpus=(),
        from_kernel=True,
    )


def test_doctor_names_machine_library_and_findings(tmp_path: Path) -> None:
    done = command("doctor", "--numa", profiles=tmp_path)
    assert done.returncode == 0, done.stderr
    for words in ("processors:", "memory lock limit:", "huge pages:", "self-test passed", "device"):
        assert words in done.stdout
    assert "not tuned yet" in done.stdout
    assert "speeds: none measured yet" in done.stdout
    if ONE_NODE:
        assert "info one-node: one memory node" in done.stdout


def tuned(model: Path, profiles: Path, others: float, monkeypatch: pytest.MonkeyPatch) -> Result:
    """Run `tune numa` while other programs seem to take the share `others` of the processors."""
    monkeypatch.setattr(Watch, "others", lambda _: Load(others, 2))
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(profiles))
    words = ["tune", "numa", str(model), "--time-limit", "5"]
    for _ in range(3):  # tests of other workers may let no time be steady
        with suppress(NumaError):
            return CliRunner().invoke(app, words, catch_exceptions=False)
    pytest.skip("no decode takes a steady time: other programs use the processors")


def test_what_was_measured_on_a_busy_machine_is_said_and_not_kept(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tuned(tiny_dense, tmp_path, 0.43, monkeypatch)
    assert done.exit_code == 0, done.output
    assert "chosen:" in done.stdout
    assert "not kept: other programs took 43% of the 2 processors" in " ".join(done.stdout.split())
    assert load_tuned(tmp_path, read_topology()).result is None


def test_a_folder_that_cannot_be_written_loses_no_finding(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = Path("/proc/specoffload")  # not even root can make a folder there
    done = tuned(tiny_dense, nowhere, 0.0, monkeypatch)
    assert done.exit_code == 0, done.output
    assert "chosen:" in done.stdout
    said = " ".join(done.stdout.split())
    assert said.count("measurements are not kept: ") == 1
    assert "SPECOFFLOAD_PROFILE_DIR names another folder" in said
    assert "later starts use it" not in said


def test_tune_keeps_numbers_that_the_next_start_uses_and_says(
    tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tuned(tiny_dense, tmp_path, 0.0, monkeypatch)
    assert done.exit_code == 0, done.output
    assert "chosen:" in done.stdout
    result = load_tuned(tmp_path, read_topology()).result
    assert result is not None
    assert set(result.trials[0].seconds) == set(SIZES)
    assert all(set(trial.spreads) == set(SIZES) for trial in result.trials if not trial.refusal)
    assert result.settings["threads"].startswith(f"{result.best.n_threads}/")
    assert result.settings["device"]
    stored = json.loads((tmp_path / MACHINE_FILE).read_text())["numa"]
    assert stored["best"]["n_threads"] >= 1
    assert any(tiny_dense.name in reason for reason in stored["reasons"])
    monkeypatch.setenv("SPECOFFLOAD_WITHOUT", "profile")
    started = command("run", str(tiny_dense), "-p", "x", "-n", "1", "-v", profiles=tmp_path)
    assert "measured by `specoffload tune numa`" in started.stderr
    assert "measured by" in command("doctor", profiles=tmp_path).stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("tune", "numa", "--time-limit", "0"), "--time-limit 0"),
        (("run", "-p", "x", "--numa", "mirror"), "--numa mirror: must be one of"),
    ],
)
def test_bad_flags_are_one_sentence_and_exit_2(flags: tuple[str, ...], words: str) -> None:
    done = in_process.command(*flags)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not ONE_NODE, reason="this machine has several memory nodes")
@pytest.mark.parametrize("numa", ["auto", "rows"])
def test_one_node_says_in_one_line_that_no_thread_is_bound(
    numa: str, tiny_dense: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_WITHOUT", "profile")
    words = ("run", str(tiny_dense), "-p", "x", "-n", "1", "-v", "--numa", numa)
    done = command(*words, profiles=tmp_path)
    assert done.stderr.count("one memory node:") == 1, done.stderr
    assert "bound" not in done.stderr


def test_a_candidate_of_several_nodes_becomes_a_plan(tiny_dense: Path) -> None:
    config = resolved.config_of(model=tiny_dense, device="cpu", spec=NO_DRAFTS)
    best = Candidate(Strategy.SINGLE, 2, node=1, huge_pages=False)
    wanted = config_for(config, two_nodes(), best)
    assert wanted.numa is not None
    assert wanted.threads == wanted.numa.decode.n_threads == 2
    assert set(wanted.numa.decode.nodes) == {1}
    assert wanted.numa.candidate == best
