"""Peers that lie: strangers at a worker's port, hostile workers of a client, and a hostile hub."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from lab.attack import ATTACK
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import LOOPBACK, bad_lines, environment
from offload.errors import WorkerUnavailable
from offload.remote.address import Address, parse_address
from offload.remote.probe import COUNT_DEVICES, GREETING, count_devices, greeting_answer
from specoffload.config.resolution import demo_file

_LIMIT_S = 60.0
_ESCAPE = "\x1b]0;owned\x07"
_COMMIT = "0" * 40
_N_STRANGERS = 12
_HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
_REQUESTS = (
    GREETING[:1],
    GREETING,
    GREETING + COUNT_DEVICES[:-1],
    b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nOrigin: http://evil.example\r\n\r\n",
    b"POST /layers HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 19\r\n\r\n"
    b'{"end": 1000000000}',
)
_FILES = ("../../../escaped-Q4_K_M.gguf", "/tmp/escaped-Q4_K_M.gguf", f"{_ESCAPE}-Q4_K_M.gguf")
_COMMITS = ("../../escaped", "/tmp/escaped", f"{_COMMIT}\n", _ESCAPE)


def peers_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Run the tries with these numbers: strangers, hostile workers and hubs by turns."""
    outcome = Outcome("peers", len(numbers))
    kinds = (_strangers, _hostile_worker, _hostile_hub)
    for number in numbers:
        kind = kinds[number % len(kinds)]
        place = folder / str(number) / "below"
        place.mkdir(parents=True)
        wrong = kind(random.Random(f"{seed} {number}"), place)
        outcome.tally[kind.__name__.strip("_").replace("_", " ")] += 1
        command = f"{ATTACK} --part peers --seed {seed} --only {number}"
        outcome.breaches += [Breach(what, command) for what in wrong]
    return outcome


def _strangers(random_: random.Random, folder: Path) -> list[str]:
    """Connect as strangers who fall silent. The worker's client must be served meanwhile."""
    command = ["worker", str(demo_file("target.gguf")), "--device", "cpu", "-t", "1"]
    log = folder / "worker.log"
    with log.open("w") as out, subprocess.Popen(
        [sys.executable, "-m", "specoffload", *command, "--listen", f"{LOOPBACK}:0"],
        stdout=out, stderr=out, env=environment(),
    ) as process, ExitStack() as opened:  # fmt: skip
        opened.callback(process.terminate)
        at = _address(log, process)
        for _ in range(_N_STRANGERS):
            stranger = opened.enter_context(socket.create_connection((at.host, at.port)))
            stranger.sendall(random_.choice(_REQUESTS))
        wrong = []
        try:
            if (n := count_devices(at)) != 1:
                wrong.append(f"the worker has {n} devices")
        except WorkerUnavailable as e:
            wrong.append(f"strangers held the worker: {e}")
    return [*wrong, *bad_lines(log.read_text())]


def _address(log: Path, process: subprocess.Popen[bytes]) -> Address:
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("worker listening on "):
                return parse_address(line.rpartition(" ")[2])
        time.sleep(0.1)
    raise RuntimeError(f"the worker does not listen: {log.read_text()}")


def _hostile_worker(random_: random.Random, folder: Path) -> list[str]:
    """Let a client start with a worker that lies. It must end soon, with one sentence."""
    status = {"version": _ESCAPE, "library": _ESCAPE, "file": "f", "hash": "h"}
    greeted = greeting_answer((7, 0, 0))
    count = (4).to_bytes(8, "little") + random_.randrange(65, 1 << 32).to_bytes(4, "little")
    http = random_.choice(
        (b"", _HEAD + b" " * (8 << 20), _HEAD + json.dumps(status).encode() + b"\n")
    )
    drips = random_.random() < 0.3

    def answer(connection: socket.socket) -> None:
        if connection.recv(1000)[:1] != GREETING[:1]:
            connection.sendall(http)
            return
        for byte in greeted if drips else b"":
            connection.sendall(bytes([byte]))
            time.sleep(1.0)
        connection.sendall(b"" if drips else greeted)
        connection.recv(100)
        connection.sendall(count)

    with _listening(answer) as address:
        return _ends("run", "hello", "-n", "1", "--device", "RPC0", "--rpc", str(address))


@contextmanager
def _listening(answer: Callable[[socket.socket], None]) -> Iterator[Address]:
    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            answer(connection)

    def listen() -> None:
        with suppress(OSError):
            while True:
                connection = listener.accept()[0]
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server((LOOPBACK, 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield Address(LOOPBACK, listener.getsockname()[1])
        listener.shutdown(socket.SHUT_RDWR)


def _hostile_hub(random_: random.Random, folder: Path) -> list[str]:
    """Fetch from a hub that names files and commits outside of its cache."""
    file, commit = random_.choice(_FILES), random_.choice((_COMMIT, *_COMMITS))
    content, home = demo_file("target.gguf").read_bytes(), folder / "hf"

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802
            listed = {"id": "a/b", "sha": commit, "siblings": [{"rfilename": file}]}
            is_api = self.path.startswith("/api/")
            body = json.dumps(listed).encode() if is_api else content
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", "".join(c for c in commit if c.isprintable()))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((LOOPBACK, 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    words = random_.choice((("plan",), ("run", "hello", "-n", "1")))
    variables = {"HF_ENDPOINT": f"http://{LOOPBACK}:{server.server_port}", "HF_HOME": str(home)}
    try:
        wrong = _ends(*words, "-hf", "a/b", "--device", "cpu", **variables)
    finally:
        server.shutdown()
        server.server_close()
    outside = [p for p in folder.parent.rglob("*") if p.is_file() and home not in p.parents]
    return [*wrong, *(f"{path} was written" for path in outside)]


def _ends(*words: str, **variables: str) -> list[str]:
    """Run the program, which must refuse in one sentence. Returns what is wrong."""
    command = [sys.executable, "-m", "specoffload", *words]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=_LIMIT_S, env={**environment(), **variables}
        )
    except subprocess.TimeoutExpired:
        return [f"no end within {_LIMIT_S:g} s: {' '.join(words)}"]
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    wrong = bad_lines(said)
    if done.returncode not in (1, 2):
        wrong.append(f"exit status {done.returncode}: {' '.join(words)}: {said[-200:]}")
    return [*wrong, *["an escape sequence reached the terminal"] * ("\x1b" in said)]
