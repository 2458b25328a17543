"""A server's memory does not grow with the number of requests that it has answered."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
from program import Program, serving

_N_PARTS = 4  # the first part of the requests after the warm-up is compared with the last one
_BODY_BYTES = 50_000  # of a field that has no effect, so that a body that is kept is noticed
_MOST_BYTES_A_REQUEST = 2_000
_NOISE_BYTES = 2 << 20  # memory that allocators take at once, and return late


def memory_bytes(server: psutil.Process) -> int:
    """Memory that only the server and its processes use."""
    processes = [server, *server.children(recursive=True)]
    return sum(process.memory_full_info().uss for process in processes)


def ask(client: httpx.Client, i: int) -> None:
    """One request: texts, chats, streams that are left early, bad ones, and short routes."""
    words = f"request {i}: " + "def area(x):\n    return x\n" * 8
    fields = {"max_tokens": 4, "user": f"{i} " * (_BODY_BYTES // len(f"{i} "))}
    completion = {"prompt": words, **fields}
    chat = {"messages": [{"role": "user", "content": words}], **fields}
    kind = i % 6
    if kind == 0:
        assert client.post("/v1/completions", json=completion).status_code == 200
    elif kind == 1:
        assert client.post("/v1/chat/completions", json=chat).status_code == 200
    elif kind == 2:
        body = chat | {"stream": True, "max_tokens": 50}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            next(answer.iter_lines())  # the client leaves
    elif kind == 3:
        assert client.post("/v1/completions", json={"prompt": words, "n_predict": "x"}).is_error
    elif kind == 4:
        assert client.post("/tokenize", json={"content": words}).status_code == 200
    else:
        assert client.get("/health").status_code == 200
        assert client.get("/slots").status_code in (200, 501)


def grown_bytes(program: Program, n_warm_up: int, n_requests: int) -> list[int]:
    """The growth since the warm-up, after each part of `n_requests` further requests."""
    server, found = psutil.Process(program.process.pid), list[int]()
    assert program.process.stdout is not None
    # A log that nobody reads would fill its pipe, and the server would wait for ever.
    threading.Thread(target=program.process.stdout.read, daemon=True).start()
    with httpx.Client(base_url=program.url, timeout=60) as client:
        for i in range(n_warm_up):
            ask(client, i)
        before_bytes = memory_bytes(server)
        for i in range(n_warm_up, n_warm_up + n_requests):
            ask(client, i)
            if (i + 1 - n_warm_up) % (n_requests // _N_PARTS) == 0:
                found.append(memory_bytes(server) - before_bytes)
    assert len(found) == _N_PARTS
    print(f"after each {n_requests // _N_PARTS} requests: {[n >> 10 for n in found]} KiB more")
    return found


@contextmanager
def fake_server(folder: Path) -> Iterator[Program]:
    command = [sys.executable, str(Path(__file__).with_name("serve_fake.py"))]
    command += ["0", str(folder / "log"), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Program(process)
        finally:
            process.terminate()
            process.wait(30)


def is_flat(grown: list[int], n_requests: int) -> bool:
    n_compared = n_requests - n_requests // _N_PARTS
    return grown[-1] - grown[0] <= _NOISE_BYTES + _MOST_BYTES_A_REQUEST * n_compared


def test_a_servers_memory_does_not_grow_with_requests(tmp_path: Path) -> None:
    with fake_server(tmp_path) as program:
        assert is_flat(grown_bytes(program, 100, 200), 200)


def test_a_servers_memory_does_not_grow_with_thousands_of_requests(tmp_path: Path) -> None:
    with fake_server(tmp_path) as program:
        assert is_flat(grown_bytes(program, 600, 4000), 4000)


def test_an_engines_memory_does_not_grow_with_requests() -> None:
    """No prompt is kept, because kept prompts take memory up to --cache-ram."""
    with serving("--device", "sim", "--min-batch", "3", "--cache-ram", "0") as program:
        assert is_flat(grown_bytes(program, 200, 800), 800)
