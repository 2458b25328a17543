"""A worker that dies, hangs or is missing ends a request with a sentence, but not the server."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import our_worker
import pytest
from program import ENVIRONMENT, Program, serving
from relay import Relay
from running import eventually, http
from worker import Worker, free_port, has_rpc, working

from offload.ggml.rpc import VERSION
from offload.remote.probe import COUNT_DEVICES
from specoffload.config.resolution import demo_file

pytestmark = pytest.mark.skipif(
    not has_rpc(), reason="the library is compiled without ggml's RPC: scripts/setup"
)
LIMIT_S = 30.0  # longest time until a lost worker ends a request
TEXT = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with working() as worker:
        yield worker


@pytest.fixture(scope="module")
def program(worker: Worker) -> Iterator[Program]:
    with serving("--rpc", str(worker.address), "--rpc-timeout", "3", "--no-spec") as program:
        yield program


def health(program: Program) -> str:
    answer = http.get(program.url + "/health")
    return "ok" if answer.status_code == 200 else str(answer.json()["error"]["message"])


def is_served(program: Program) -> bool:
    short = {**TEXT, "max_tokens": 4}
    return http.post(program.url + "/v1/completions", json=short).status_code == 200


class Streamed:
    """A streamed request on a thread. `error` is the sentence that ended it."""

    def __init__(self, program: Program) -> None:
        self.has_begun = threading.Event()
        self.error: str | None = None
        self._url = program.url + "/v1/completions"
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self.has_begun.wait(20)

    def _read(self) -> None:
        body = {**TEXT, "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                self.has_begun.set()
                if line.startswith("data: {") and "error" in (event := json.loads(line[6:])):
                    self.error = event["error"]["message"]

    def wait(self) -> str:
        """Return the sentence, after at most LIMIT_S seconds."""
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        assert self.error is not None
        return self.error


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_lost_worker_costs_one_request(program: Program, worker: Worker, fault: str) -> None:
    assert is_served(program)
    answer = Streamed(program)
    if fault == "dies":
        worker.kill()
    else:
        worker.hang()
    name = f"the worker at {worker.address}"
    assert answer.wait().startswith(
        f"{name} is gone" if fault == "dies" else f"{name} has not answered for 3 s"
    )
    eventually(lambda: name in health(program))
    assert "the engine starts again as soon as it answers" in health(program)
    assert not is_served(program)
    if fault == "dies":
        worker.start()
    else:
        worker.resume()
    eventually(lambda: health(program) == "ok", 30)
    assert is_served(program)


def test_a_worker_that_dies_between_requests_costs_none(program: Program, worker: Worker) -> None:
    assert is_served(program)
    worker.kill()
    eventually(lambda: f"the worker at {worker.address}" in health(program), 5)
    worker.start()
    eventually(lambda: health(program) == "ok", 30)
    assert is_served(program)


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_a_lost_worker_of_ours_costs_one_request(fault: str) -> None:
    """`specoffload worker` has a process that listens and one that computes; both are lost."""
    model, port = demo_file("target.gguf"), free_port()
    listen = ("--listen", f"127.0.0.1:{port}", "--device", "sim")
    name = f"the worker at 127.0.0.1:{port}"
    with ExitStack() as first:
        own = first.enter_context(our_worker.working(model, *listen))
        with serving("--rpc", str(own.address), "--rpc-timeout", "3", "--no-spec") as program:
            assert is_served(program)
            answer = Streamed(program)
            own.process.send_signal(signal.SIGKILL if fault == "dies" else signal.SIGSTOP)
            assert answer.wait().startswith(name)
            eventually(lambda: name in health(program))
            if fault == "dies":
                first.close()
                first.enter_context(our_worker.working(model, *listen))
            else:
                own.process.send_signal(signal.SIGCONT)
            eventually(lambda: health(program) == "ok", 60)
            assert is_served(program)


@pytest.mark.parametrize("drip_s", [0.0, 0.5])
def test_a_worker_that_hangs_in_the_middle_of_an_answer_is_lost(drip_s: float) -> None:
    """The kernel has seen an answer arrive, but ggml still waits for the rest of it."""
    with (
        working() as own,
        Relay(own.address) as relay,
        serving("--rpc", str(relay.address), "--rpc-timeout", "3", "--no-spec") as program,
    ):
        assert is_served(program)
        answer = Streamed(program)
        name = f"the worker at {relay.address}"
        relay.stop_in_mid_answer(drip_s)
        try:
            assert answer.wait().startswith(f"{name} has not answered for 3 s")
            eventually(lambda: name in health(program))
        finally:
            relay.go_on()
        eventually(lambda: health(program) == "ok", 30)
        assert is_served(program)


def test_ctrl_c_ends_run_while_its_worker_hangs_in_the_middle_of_an_answer() -> None:
    with working() as own, Relay(own.address) as relay:
        process = command(
            *("run", "Once", "-n", "100000", "-c", "100000", "--ignore-eos"),
            *("--rpc-timeout", "600", "--rpc", str(relay.address)),
        )
        assert process.stdout is not None
        assert process.stdout.read(20)
        relay.stop_in_mid_answer()
        try:
            time.sleep(1.0)  # the decode now waits for the worker
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
            relay.go_on()
    assert "has not answered for 5 s" in errors
    assert "Traceback" not in errors


def command(*words: str) -> subprocess.Popen[str]:
    whole = [sys.executable, "-m", "specoffload", *words, "-t", "1", "--no-spec"]
    out = subprocess.PIPE
    return subprocess.Popen(whole, stdout=out, stderr=out, text=True, env=ENVIRONMENT)


@pytest.mark.parametrize("name", ["serve", "run"])
def test_a_worker_that_is_missing_at_the_start_is_one_sentence(name: str) -> None:
    port, began = free_port(), time.monotonic()
    extra = ("--port", "0") if name == "serve" else ("hello",)
    process = command(name, *extra, "--rpc", f"127.0.0.1:{port}")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"the worker at 127.0.0.1:{port} cannot be reached within 3 s" in errors
    assert "Traceback" not in errors
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize(("n_answers", "code"), [(0, 2), (1, 1)])
@pytest.mark.parametrize("name", ["serve", "run"])
def test_a_worker_that_dies_during_the_start_is_one_sentence(
    name: str, n_answers: int, code: int
) -> None:
    """The worker closes when our client counts its devices, or later when ggml's client does."""
    answers = [struct.pack("<QI", 4, 1)] * n_answers

    def greet_and_close() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.recv(33)
                    connection.sendall(struct.pack("<Q4B24x", 28, *VERSION, 0, 0))
                    if connection.recv(9) == COUNT_DEVICES and answers:
                        connection.sendall(answers.pop())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet_and_close, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        extra = ("--port", "0") if name == "serve" else ("hello",)
        process = command(name, *extra, "--rpc", address)
        out, errors = process.communicate(timeout=60)
        listener.shutdown(socket.SHUT_RDWR)
    assert process.returncode == code
    assert f"the worker at {address} is gone: it closed the connection" in errors + out
    assert "Traceback" not in errors


def test_ctrl_c_ends_run_while_its_worker_hangs() -> None:
    with working() as own:
        process = command(
            *(
                "run",
                "Once",
                "-n",
                "100000",
                "-c",
                "100000",
                "--ignore-eos",
                "--rpc-timeout",
                "600",
            ),
            *("--rpc", str(own.address)),
        )
        assert process.stdout is not None
        assert process.stdout.read(20)
        own.hang()
        time.sleep(1.0)  # the decode now waits for the worker
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=LIMIT_S)
    assert "has not answered for 5 s" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("fault", ["dies", "hangs"])
def test_run_ends_with_one_sentence_if_its_worker_is_lost(fault: str) -> None:
    with working() as own:
        process = command(
            *("run", "Once", "-n", "100000", "-c", "100000", "--ignore-eos", "--rpc-timeout", "3"),
            *("--rpc", str(own.address)),
        )
        assert process.stdout is not None
        assert process.stdout.read(20)
        if fault == "dies":
            own.kill()
        else:
            own.hang()
        _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert last.startswith(f"specoffload: the worker at {own.address} ")
    assert "Traceback" not in errors


@pytest.mark.parametrize("name", ["serve", "run", "plan"])
def test_a_missing_worker_beside_other_devices_is_one_sentence(name: str) -> None:
    """The worker would not be used, but the user has asked for it."""
    address = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "specoffload", name, "--device", "cpu", "--rpc", address]
    extra = {"serve": ["--port", "0"], "run": ["hello", "-n", "1"], "plan": []}[name]
    done = subprocess.run([*words, *extra], capture_output=True, text=True, env=ENVIRONMENT)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2
    assert f"the worker at {address} cannot be reached within 3 s" in said
    assert "Traceback" not in said
