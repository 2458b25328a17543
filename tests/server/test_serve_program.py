"""`specoffload serve` as a program: address line, signals, exit codes, no process left behind."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import eventually, http

PROGRAM = Path(__file__).with_name("serve_fake.py")


@contextmanager
def _program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a process group of its own, as a shell would start it."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words[:2] == ["listening", "on"]
    eventually(lambda: http.get(words[2] + "/health").status_code == 200)
    return words[2]


def _children(process: subprocess.Popen[Any]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("spawn_main" in " ".join(child.cmdline()) for child in children)
    return children


def _all_gone(children: list[psutil.Process]) -> None:
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert len(gone) == len(children)


@pytest.mark.parametrize(
    ("sent", "to_group", "exit_code"),
    [
        (signal.SIGTERM, True, 0),  # a service manager signals every process of the service
        (signal.SIGINT, True, 130),  # Ctrl-C at a terminal goes to the whole group
    ],
)
def test_a_signal_ends_a_busy_server_and_its_engine(
    tmp_path: Path, sent: signal.Signals, to_group: bool, exit_code: int
) -> None:
    log = tmp_path / "log"
    with _program("0", str(log), "0.3") as process:
        body = {"prompt": "[forever]", "stream": True}
        with http.stream("POST", _url(process) + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            children = _children(process)
            (os.killpg if to_group else os.kill)(process.pid, sent)
            rest = [line for line in lines if line]
        assert "the server is shutting down" in rest[-1]
        output, errors = process.communicate(timeout=15)
        assert process.returncode == exit_code
        assert errors == ""
        assert "restarting" not in output
        _all_gone(children)


def test_a_second_ctrl_c_does_not_wait_for_the_grace_time(tmp_path: Path) -> None:
    with _program("0", str(tmp_path / "log"), "1000") as process:
        body = {"prompt": "[forever]", "stream": True}
        url = _url(process)
        with http.stream("POST", url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            children = _children(process)
            os.killpg(process.pid, signal.SIGINT)
            # Two signals at once may arrive as one, so the second waits for the first one's effect.
            eventually(lambda: http.get(url + "/health").status_code == 503)
            os.killpg(process.pid, signal.SIGINT)
            rest = [line for line in lines if line]
        assert "the server is shutting down" in rest[-1]
        process.communicate(timeout=15)
        assert process.returncode == 130
        _all_gone(children)


def test_a_stopping_server_answers_503_and_lets_the_running_answer_end(tmp_path: Path) -> None:
    with _program("0", str(tmp_path / "log"), "1000") as process:
        url = _url(process)
        body = {"prompt": "[slow]" + "a" * 90, "stream": True}
        with http.stream("POST", url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.terminate()
            eventually(lambda: http.get(url + "/health").status_code == 503)
            refused = http.post(url + "/v1/completions", json={"prompt": "a"})
            rest = [line for line in lines if line]
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "5"
        assert refused.json()["error"]["message"] == "the server is shutting down"
        assert rest[-1] == "data: [DONE]"
        output, _ = process.communicate(timeout=15)
        assert process.returncode == 0
    said = [line for line in output.splitlines() if line.startswith("stopping: ")]
    assert re.fullmatch(r"stopping: waiting for #0 \(\d+ tokens\), 1000 s left", said[0])
    assert len(said) == len(set(said))  # a line a second


def test_sighup_opens_the_log_again_and_loses_no_line(tmp_path: Path) -> None:
    file, moved = tmp_path / "server.log", tmp_path / "server.log.1"
    with _program("0", str(tmp_path / "log"), "1", str(file)) as process:
        url = _url(process)
        http.get(url + "/first")
        eventually(lambda: "/first" in file.read_text())
        file.rename(moved)
        os.killpg(process.pid, signal.SIGHUP)
        eventually(lambda: file.exists() and "SIGHUP" in file.read_text())
        http.get(url + "/second")
        eventually(lambda: "/second" in file.read_text())
        process.terminate()
        process.communicate(timeout=15)
        assert process.returncode == 0
    assert "/first" in moved.read_text()
    assert "/second" not in moved.read_text()
    assert file.read_text().startswith(f"SIGHUP: {file} is open again\n")


@contextmanager
def _at_a_terminal(
    folder: Path, on_hang_up: signal.Handlers
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program at a terminal of its own, and the terminal's other end. Its log is `server.log`.

    It starts with `on_hang_up` as its action for SIGHUP.
    """
    ours, theirs = pty.openpty()

    def begin() -> None:
        signal.signal(signal.SIGHUP, on_hang_up)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    with subprocess.Popen(
        [sys.executable, str(PROGRAM), "0", str(folder / "log"), "1", str(folder / "server.log")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=begin,
    ) as process:
        os.close(theirs)
        file = folder / "server.log"
        try:
            eventually(lambda: file.exists() and "model loaded" in file.read_text())
            yield process, ours
        finally:
            process.kill()


def test_a_closed_terminal_stops_the_server_with_a_line(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    with _at_a_terminal(tmp_path, signal.SIG_DFL) as (process, terminal):
        children = _children(process)
        url = file.read_text().split()[2]
        body = {"prompt": "[forever]", "stream": True}
        with http.stream("POST", url + "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            os.close(terminal)
            rest = [line for line in lines if line]
        assert "the server is shutting down" in rest[-1]
        assert process.wait(timeout=15) == 129
        _all_gone(children)
    text = file.read_text()
    assert "the terminal is closed: stopping\nstopping: waiting for #0 (" in text
    assert "Traceback" not in text


def test_a_server_of_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    file = tmp_path / "server.log"
    with _at_a_terminal(tmp_path, signal.SIG_IGN) as (process, terminal):
        os.close(terminal)
        eventually(lambda: f"SIGHUP: {file} is open again" in file.read_text())
        url = file.read_text().split()[2]
        assert http.get(url + "/nothing").status_code == 404
        eventually(lambda: "/nothing" in file.read_text())
        process.terminate()
        assert process.wait(timeout=15) == 0


def test_a_killed_api_process_leaves_no_engine(tmp_path: Path) -> None:
    with _program("0", str(tmp_path / "log"), "0.3") as process:
        _url(process)
        children = _children(process)
        process.kill()
        _all_gone(children)


def test_a_port_in_use_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with _program(str(port), str(tmp_path / "log"), "0.3") as process:
            output, errors = process.communicate(timeout=15)
    assert process.returncode == 2
    assert output == ""
    assert errors == (f"port {port} on 127.0.0.1 is already in use: choose another with --port\n")


@pytest.mark.parametrize(
    ("how", "exit_code", "sentence"),
    [
        ("bad-model", 2, "fake.gguf is not a GGUF file: it begins with 'text'\n"),
        ("crash", 1, "the engine process was killed by SIGABRT while loading the model\n"),
    ],
)
def test_a_model_that_does_not_load_ends_the_program(
    tmp_path: Path, how: str, exit_code: int, sentence: str
) -> None:
    with _program("0", str(tmp_path / "log"), "0.3", how) as process:
        _, errors = process.communicate(timeout=15)
    assert process.returncode == exit_code
    assert errors.endswith(sentence)
    assert "Traceback" not in errors
