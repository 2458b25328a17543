"""Peers that lie or fall silent: strangers at a worker's ports, workers of a client, and a hub."""

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
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from lab.attack import ATTACK
from lab.attack.outcome import Breach, Outcome
from lab.attack.program import LOOPBACK, bad_lines, environment
from offload.errors import WorkerUnavailable
from offload.remote.address import Address, parse_address
from offload.remote.hello import LayersAsked, ask_for
from offload.remote.probe import COUNT_DEVICES, GREETING, count_devices, greeting_answer
from specoffload.config.resolution import demo_file

_LIMIT_S = 60.0
_ESCAPE = "\x1b]0;owned\x07"
_COMMIT = "0" * 40
_N_STRANGERS = 12
_PATIENCE_S = 2.0  # seconds after which a worker that hangs counts as lost
_RELAYED_DIGITS = (1.0, 5.3)  # decimal logarithms: from a greeting to some hundred tokens
_FAR_END = b'{"end": 1000000000}'
_HEAD = b"HTTP/1.0 200 OK\r\n\r\n"
_REQUESTS = (
    GREETING[:1],
    GREETING,
    GREETING + COUNT_DEVICES[:-1],
    b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    b"GET / HTTP/1.1\r\nOrigin: http://evil.example\r\n\r\n",
    b"POST /layers HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 19\r\n\r\n"
    + _FAR_END,
)
_FILES = ("../../../escaped-Q4_K_M.gguf", "/tmp/escaped-Q4_K_M.gguf", f"{_ESCAPE}-Q4_K_M.gguf")
_COMMITS = ("../../escaped", "/tmp/escaped", f"{_COMMIT}\n", _ESCAPE)


def peers_part(seed: int, numbers: range, folder: Path) -> Outcome:
    """Run the tries with these numbers, the kinds of peers by turns."""
    outcome = Outcome("peers", len(numbers))
    kinds = (_strangers, _hostile_worker, _hostile_hub, _hanging_worker)
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
    log = folder / "worker.log"
    with ExitStack() as opened:
        at = opened.enter_context(_working(log))
        last = list(ask_for(at, LayersAsked(0, 1)))[-1]
        wrong = [] if any("anybody" in note for note in last.notes) else _inner_port(last.port)
        for _ in range(_N_STRANGERS):
            stranger = opened.enter_context(socket.create_connection((at.host, at.port)))
            stranger.sendall(random_.choice(_REQUESTS))
        wrong += _far_layers(at)
        try:
            if (n := count_devices(at)) != 1:
                wrong.append(f"the worker has {n} devices")
        except WorkerUnavailable as e:
            wrong.append(f"strangers held the worker: {e}")
    return [*wrong, *bad_lines(log.read_text())]


def _inner_port(port: int) -> list[str]:
    """Greet ggml's own server, which answers to nobody but the worker."""
    with socket.socket() as stranger:
        stranger.settimeout(0.5)
        try:
            stranger.connect((LOOPBACK, port))
            stranger.sendall(GREETING)
            answer = stranger.recv(100)
        except OSError:
            return []
    return [f"the inner port {port} answered a stranger with {len(answer)} bytes"]


def _far_layers(at: Address) -> list[str]:
    """Ask for layers that the model does not have. The answer is one sentence, and comes soon."""
    request = Request(f"http://{at}/layers", _FAR_END, {"Content-Type": "application/json"})
    begin_s = time.monotonic()
    try:
        with urlopen(request, timeout=_LIMIT_S) as answer:
            status, said = answer.status, answer.read().decode()
    except HTTPError as e:
        status, said = e.code, e.read().decode()
    except OSError as e:
        status, said = 0, str(e)
    took_s = time.monotonic() - begin_s
    is_good = status == 400 and "layers 0 to 999999999 are asked for, and the model has" in said
    wrong = [] if is_good else [f"/layers to 1000000000 got {status}: {said[:200]}"]
    return wrong + [f"/layers to 1000000000 took {took_s:.0f} s"] * (took_s > 10.0)


@contextmanager
def _working(log: Path) -> Iterator[Address]:
    """Run a worker of the embedded target. Raises RuntimeError if it does not listen."""
    command = ["worker", str(demo_file("target.gguf")), "--device", "cpu", "-t", "1"]
    with log.open("w") as out, subprocess.Popen(
        [sys.executable, "-m", "specoffload", *command, "--listen", f"{LOOPBACK}:0"],
        stdout=out, stderr=out, env=environment(),
    ) as process:  # fmt: skip
        try:
            yield _address(log, process)
        finally:
            process.terminate()


def _hanging_worker(random_: random.Random, folder: Path) -> list[str]:
    """Let a worker's answers stop at a random byte. Its client must end soon, with one sentence."""
    left = [int(10 ** random_.uniform(*_RELAYED_DIGITS))]
    log = folder / "worker.log"
    with _working(log) as worker:

        def relay(client: socket.socket) -> None:
            with socket.create_connection((worker.host, worker.port)) as server:
                up = threading.Thread(target=_pass_on, args=(client, server), daemon=True)
                up.start()
                while data := server.recv(1 << 16):
                    passed, left[0] = data[: left[0]], max(0, left[0] - len(data))
                    client.sendall(passed)
                    if not left[0]:
                        up.join()  # until the client leaves
                        return
                client.shutdown(socket.SHUT_WR)

        with _listening(relay) as address:
            wrong = _ends(
                *("run", "hello", "-n", "100000", "--ignore-eos", "-c", "2048", "-t", "1"),
                *("--no-spec", "--rpc", str(address), "--rpc-timeout", f"{_PATIENCE_S:g}"),
            )
    return [*wrong, *bad_lines(log.read_text())]


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


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
