"""Processes that decode with a doorbell are killed or stopped at random moments.

Each ends within seconds, and what follows it writes the same text. The model has more experts than
slots. Without a restart, all decodes ring.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
from running import eventually, http

from lab.synth import write_preset
from specoffload.bench.llama_server import running_server

PROGRAM = [sys.executable, str(Path(__file__).with_name("quick_bell.py"))]
FLAGS = [
    *("--device", "CUDA0", "--hybrid", "on", "-ncmoe", "99", "--vram", "92MiB", "--threads", "1"),
    *("-ub", "64", "--temp", "0", "--no-spec"),
]
ENVIRONMENT = {"SPECOFFLOAD_WITHOUT": "profile,lend", "STANDIN_JITTER": "300"}
PROMPT, N_TOKENS = "def f(x):", 40
ENDS_S, STARTS_S = 20.0, 60.0  # longest times until a process has ended, and another one answers
PTRACE_SEIZE, PTRACE_INTERRUPT, PTRACE_DETACH, ANY_CHILD = 0x4206, 0x4207, 17, 0x40000000
N_KILLS = 10  # of each kind


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    shape: dict[str, Any] = {"n_embd": 256, "n_ff_exp": 256, "n_expert": 64}
    return write_preset("qwen3-30b-a3b", models / "kills.gguf", quant="q4_K", seed=1, **shape)


class Server:
    """A server whose log is `log`."""

    def __init__(self, pid: int, port: int, log: Path) -> None:
        self._pid, self.log, self.url = pid, log, f"http://127.0.0.1:{port}"
        self.events: list[dict[str, Any]] = []  # of the endless answer

    def text(self) -> str:
        body = {"prompt": PROMPT, "n_predict": N_TOKENS, "ignore_eos": True}
        return str(http.post(self.url + "/completion", json=body).json()["content"])

    def layers_rung(self) -> int:
        (found,) = re.findall(r"^\S*layers_rung\S* (\d+)", self._metrics(), re.MULTILINE)
        return int(found)

    def _metrics(self) -> str:
        return http.get(self.url + "/metrics").text

    def is_healthy(self) -> bool:
        return http.get(self.url + "/health").status_code == 200

    def engine(self) -> psutil.Process:
        children = psutil.Process(self._pid).children()
        (found,) = [c for c in children if any("libllama" in m.path for m in c.memory_maps())]
        return found

    def _answer(self, begun: threading.Event) -> None:
        body = {"prompt": "import", "n_predict": -1, "ignore_eos": True, "stream": True}
        with http.stream("POST", self.url + "/completion", json=body) as response:
            for line in response.iter_lines():
                if line.startswith(("data: {", "error: {")):
                    self.events.append(json.loads(line.partition(": ")[2]))
                    if len(self.events) > 8:  # the first decodes of a graph are careful ones
                        begun.set()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer an endless request in the block. Check that it has ended after the block."""
        begun = threading.Event()
        thread = threading.Thread(target=self._answer, args=(begun,), daemon=True)
        thread.start()
        assert begun.wait(STARTS_S)
        yield
        thread.join(ENDS_S)
        assert not thread.is_alive(), "the client still waits"


@contextmanager
def serving(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    log = folder / "log"
    command = [*PROGRAM, "serve", str(model), *FLAGS, "-c", "1024", "-np", "1", "--metrics"]
    with running_server(command, log, STARTS_S) as (process, port):
        yield Server(process.pid, port, log)


def wait_until_gone(pid: int) -> float:
    """Return the seconds until the process has ended."""
    began_s = time.monotonic()
    while psutil.pid_exists(pid) and time.monotonic() - began_s < ENDS_S:
        time.sleep(0.01)
    taken_s = time.monotonic() - began_s
    assert taken_s < ENDS_S, "the process hangs"
    return taken_s


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of all engines that are killed. Each engine rings again."""
    folder = tmp_path_factory.mktemp("killed")
    with pytest.MonkeyPatch.context() as patch, serving(model, folder, patch) as server:
        yield server


@pytest.mark.parametrize("seed", range(N_KILLS))
def test_an_engine_that_is_killed_is_told_and_another_writes_the_same(
    killed: Server, seed: int
) -> None:
    server = killed
    expected = server.text()
    assert server.layers_rung() > 0
    with server.answering():
        time.sleep(Random(seed).uniform(0, 0.5))
        server.engine().kill()
    assert "was killed by SIGKILL" in json.dumps(server.events[-1])
    eventually(server.is_healthy, STARTS_S)
    assert server.text() == expected
    assert server.layers_rung() > 0, "the new engine rings"
    server.events.clear()


def stopped_until_it_ends(pid: int, random: Random) -> float:
    """Stop the decoding thread of a process at random moments until this ends the process.

    If it is stopped between two decodes, nothing waits for it, and it goes on. Returns the seconds
    from the last stop until the end.
    """
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    for _ in range(20):
        time.sleep(random.uniform(0, 0.5))
        if ptrace(PTRACE_SEIZE, pid, None, None):
            pytest.skip(f"threads cannot be stopped here: {os.strerror(ctypes.get_errno())}")
        assert not ptrace(PTRACE_INTERRUPT, pid, None, None)
        assert os.WIFSTOPPED(os.waitpid(pid, ANY_CHILD)[1])
        began_s = time.monotonic()
        while time.monotonic() - began_s < 6.5:  # the watchdog ends it after 4 to 5 s
            if os.waitpid(pid, ANY_CHILD | os.WNOHANG)[0]:  # it has ended
                return time.monotonic() - began_s
            time.sleep(0.01)
        assert not ptrace(PTRACE_DETACH, pid, None, None)
    raise AssertionError("the thread was never stopped within a decode, or the process hangs")


@pytest.mark.parametrize("seed", range(N_KILLS))
def test_a_stopped_thread_ends_its_engine_and_no_later_one_rings(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "STANDIN_JITTER", "1500")  # decodes take most of the time
    with serving(model, tmp_path, monkeypatch) as server:
        expected = server.text()
        assert server.layers_rung() > 0
        with server.answering():
            assert stopped_until_it_ends(server.engine().pid, Random(seed)) < ENDS_S
        assert "the engine process exited with code 1" in json.dumps(server.events[-1])
        eventually(server.is_healthy, STARTS_S)
        assert server.text() == expected
        assert server.layers_rung() == 0
        log = server.log.read_text()
    assert log.count("stopped within a layer, and does not end it within 4 s") == 1
    assert log.count("until this server ends, the host waits in each split layer") == 1
    assert log.count("CUDA0: the host waits for the GPU in each split layer: CUDA0 and") == 1
    assert "Traceback" not in log


@contextmanager
def writing(model: Path, n_tokens: int) -> Iterator[subprocess.Popen[str]]:
    command = [*PROGRAM, "run", str(model), *FLAGS, "-c", "1024", "-no-cnv", "-p", PROMPT]
    command += ["-n", str(n_tokens), "--ignore-eos"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0,
        env={**os.environ, **ENVIRONMENT},
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def written(model: Path) -> str:
    with writing(model, N_TOKENS) as process:
        return process.communicate(timeout=STARTS_S)[0]


@pytest.mark.parametrize("seed", range(N_KILLS))
def test_ctrl_c_ends_a_run_at_once_and_the_next_one_writes_the_same(
    model: Path, written: str, seed: int
) -> None:
    with writing(model, 900) as process:
        assert process.stdout is not None
        process.stdout.read(8)
        time.sleep(Random(seed).uniform(0, 0.5))
        began_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=ENDS_S)
        assert time.monotonic() - began_s < 5
    assert process.returncode == 130
    assert words.strip().splitlines()[-1] == "interrupted"
    with writing(model, N_TOKENS) as process:
        assert process.communicate(timeout=STARTS_S)[0] == written
