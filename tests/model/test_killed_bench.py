"""A command that starts a server or libllama leaves neither when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from specoffload.bench.child import ending_with_us
from specoffload.config.resolution import demo_file

PATIENCE_S = 120
BENCH = ("-m", str(demo_file("target.gguf")), "--device", "cpu", "-t", "1", "-c", "512")


def eventually(holds: Callable[[], object]) -> None:
    end_s = monotonic() + PATIENCE_S
    while not holds():
        assert monotonic() < end_s, "it did not happen"
        sleep(0.05)


def below(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_there(name: str, processes: list[psutil.Process]) -> bool:
    for process in processes:
        try:
            if any(name in word for word in process.cmdline()):
                return True
        except psutil.Error:
            continue
    return False


# The server has an engine process of its own.
AGENT = ("--agent", "--spec-type", "ngram-simple"), "specoffload.commands.bench_serving", 2
LLAMA = ("-p", "256", "-r", "50"), "offload.ggml.library.untouched", 1


@pytest.mark.parametrize(
    ("words", "name", "n_least", "end"),
    [
        (*AGENT, signal.SIGKILL),
        (*AGENT, signal.SIGHUP),
        (*LLAMA, signal.SIGKILL),
    ],
)
def test_a_killed_bench_leaves_no_process(
    words: tuple[str, ...], name: str, n_least: int, end: signal.Signals, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "specoffload", "bench", *BENCH, *words]
    environment = {**os.environ, "SPECOFFLOAD_PROFILE_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    quiet = subprocess.DEVNULL
    # These tests may run under nohup, whose programs ignore SIGHUP.
    hears = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(
        command, stdout=quiet, stderr=quiet, env=environment, preexec_fn=hears
    ) as bench:
        it = psutil.Process(bench.pid)
        eventually(lambda: len(below(it)) >= n_least and is_there(name, below(it)))
        children = below(it)
        bench.send_signal(end)
        assert bench.wait(PATIENCE_S) in (-end, 128 + end)
    _, left = psutil.wait_procs(children, PATIENCE_S)
    assert left == []


def test_a_child_whose_parent_has_ended_does_not_begin(tmp_path: Path) -> None:
    """The parent may end before the child can watch it."""
    command = ending_with_us(["touch", str(tmp_path / "begun")])
    command[command.index(str(os.getpid()))] = "1234567890"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "has ended" in done.stderr
    assert not (tmp_path / "begun").exists()
    assert subprocess.run(ending_with_us(["touch", str(tmp_path / "begun")])).returncode == 0
    assert (tmp_path / "begun").exists()


def test_a_program_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    done = subprocess.run(ending_with_us([str(tmp_path / "no")]), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path / 'no'}: No such file or directory\n"
