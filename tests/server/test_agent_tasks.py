"""`bench --agent` starts a real server for each way of decoding, and plays its tasks there.

The embedded pair knows no tools, so a grammar forces valid calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from resolved import config_of, line_of

from offload.errors import DeviceFailed
from specoffload import cli, report
from specoffload.commands import bench_agent
from specoffload.commands.bench_serving import serving

# Two short tasks, the second of which takes several answers of this model.
TASKS = tuple(task for task in bench_agent.TASKS if task.name in ("all lights", "brackets"))

FIXED = ("--spec-policy", "fixed", "--spec-draft-n-max", "4")


@pytest.fixture
def two_tasks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Play two of the tasks, and print only data. No server may be left."""
    monkeypatch.setattr(bench_agent, "TASKS", TASKS)
    report.only_data(True)
    yield
    report.only_data(False)
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not [command for command in commands if "bench_serving" in command]


@pytest.mark.usefixtures("two_tasks")
def test_forced_calls_are_the_same_with_a_draft(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--tool-choice", "required", "-n", "120", "--spec-type", "draft")
    cli.bench(line_of("--agent", "-t", "1", "-c", "2048", *words, *FIXED, command="bench"))
    found = json.loads(capsys.readouterr().out)
    assert found["passes"]
    plain, drafted = found["agent"]
    assert (plain["name"], drafted["name"]) == ("no drafts", "draft")
    assert plain["n_drafted"] == 0 < plain["n_valid"]
    assert drafted["n_drafted"] >= drafted["n_accepted"] > 0
    assert drafted["n_same"] == len(TASKS)
    assert (drafted["n_valid"], drafted["n_calls"]) == (plain["n_valid"], plain["n_calls"])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    model = tmp_path / "damaged.gguf"
    model.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(DeviceFailed, match=r"the server ended with status 2 .*damaged\.gguf"), \
            serving(config_of(model=model)):  # fmt: skip
        pass


def test_equal_requests_to_responses_are_answered_alike(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With a draft, n-grams of the answers before, and a cached prompt."""
    words = ("--spec-type", "ngram-cache,draft", "-t", "1", "-c", "2048", *FIXED)
    report.only_data(True)
    try:
        with serving(config_of(line_of(*words, command="bench").options)) as url:
            asked = ("--texts", url, "--responses", "20", "-n", "24", "--runs", "seq,seq")
            cli.bench(line_of(*asked, command="bench"))
    finally:
        report.only_data(False)
    (found,) = json.loads(capsys.readouterr().out)["responses"]
    assert (found["n"], found["n_equal"]) == (20, 20)
    (text,) = found["texts"]
    assert text["n_characters"] > 24
