"""A worker's port: strangers get a deadline and a bounded number of threads."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from our_worker import SIM, RunningWorker, working
from running import eventually
from worker import has_rpc

from offload.errors import WorkerUnavailable
from offload.remote import hello
from offload.remote.address import Address
from offload.remote.hello import LayersAsked, WorkerState, ask_for, status_of
from offload.remote.probe import COUNT_DEVICES, GREETING, count_devices, greet, greeting_answer
from specoffload.server import worker_gate
from specoffload.server.worker_gate import WorkerGate, _is_ours, closed_first

needs_rpc = pytest.mark.skipif(not has_rpc(), reason="libllama is compiled without ggml's RPC")


class _StillWorker:
    """Records which connections take their turn. Stands for the worker."""

    n_layers = 4

    def __init__(self) -> None:
        self.served: list[tuple[str, bytes]] = []
        self.said: list[str] = []
        self.say = self.said.append

    def refuses(self, client: str) -> bool:
        return False

    def serve(self, connection: socket.socket, client: str, first: bytes) -> None:
        self.served.append((client, first))
        connection.recv(1)  # until the client closes


@contextmanager
def gate(worker: object) -> Iterator[WorkerGate]:
    with WorkerGate("127.0.0.1", 0, worker, ()) as made:  # type: ignore[arg-type]
        threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True).start()
        yield made
        made.shutdown()


def connected(made: WorkerGate) -> socket.socket:
    return socket.create_connection(made.server_address[:2], timeout=10)  # type: ignore[arg-type]


def drip(connection: socket.socket, data: bytes, each_s: float) -> float:
    """Send a byte at a time until the peer closes. Returns the seconds that it took."""
    begin_s = time.monotonic()
    connection.settimeout(each_s)
    for byte in data:
        try:
            connection.sendall(bytes([byte]))
            if connection.recv(1 << 10) == b"":
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - begin_s


@pytest.mark.parametrize(
    "sent",
    [
        GREETING[:1],
        GREETING[:-1],
        GREETING,
        GREETING + COUNT_DEVICES[:-1],
        GREETING + b"\x00" + (12).to_bytes(8, "little") + bytes(11),  # a command without its end
        GREETING + b"\x06" + (1 << 40).to_bytes(8, "little"),
        b"G",
        b"GET / HTTP/1.1\r\n",
    ],
)
def test_a_connection_without_a_first_command_ends_before_its_turn(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_gate, "FIRST_BYTES_S", 0.3)
    worker = _StillWorker()
    with gate(worker) as made, connected(made) as silent:
        silent.sendall(sent)
        while silent.recv(100):
            pass
    assert worker.served == []


@pytest.mark.parametrize("sent", [GREETING + COUNT_DEVICES, b"GET / HTTP/1.1\r\nX: " + b"y" * 60])
def test_a_deadline_is_for_all_bytes_together(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_gate, "FIRST_BYTES_S", 0.5)
    worker = _StillWorker()
    with gate(worker) as made, connected(made) as slow:
        took_s = drip(slow, sent, 0.1)
    assert took_s < 0.1 * len(sent) / 2, "each byte renewed the deadline"
    assert worker.served == []


def test_a_client_is_greeted_and_takes_its_turn_with_its_first_command() -> None:
    worker = _StillWorker()
    with gate(worker) as made, connected(made) as client:
        client.sendall(GREETING)
        answer = client.recv(100)
        assert answer == greeting_answer(worker_gate._VERSION)
        assert worker.served == []
        client.sendall(COUNT_DEVICES)
        eventually(lambda: [first for _, first in worker.served] == [COUNT_DEVICES], 10)
        time.sleep(0.1)
        assert client.fileno() >= 0


def test_the_number_of_threads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest connection that waits makes room for a new one."""
    monkeypatch.setattr(worker_gate, "MOST_CONNECTIONS", 3)
    before = threading.active_count()
    with gate(_StillWorker()) as made, ExitStack() as opened:
        silent = [opened.enter_context(connected(made)) for _ in range(3)]
        for one in silent:
            one.sendall(GREETING[:1])
        eventually(lambda: len(made._open) == 3, 10)
        with connected(made) as fourth:
            assert silent[0].recv(1) == b""
            fourth.sendall(GREETING)
            assert fourth.recv(1)
            eventually(lambda: threading.active_count() <= before + 1 + 3, 10)
            assert len(made._open) == 3
        opened.close()
        eventually(lambda: not made._open and not made._waiting, 10)


def test_connections_that_were_served_make_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_gate, "MOST_CONNECTIONS", 2)
    worker, done = _StillWorker(), threading.Event()
    monkeypatch.setattr(worker, "serve", lambda *_: done.wait(20), raising=False)
    with gate(worker) as made, ExitStack() as opened:
        clients = [opened.enter_context(connected(made)) for _ in range(2)]
        for one in clients:
            one.sendall(GREETING + COUNT_DEVICES)
        eventually(lambda: len(made._open) == 2 and not made._waiting, 10)
        with connected(made) as third:
            assert third.recv(1) == b""
        done.set()


@settings(max_examples=200, deadline=None)
@given(hosts=st.lists(st.sampled_from("abcdef"), min_size=1, max_size=64))
def test_the_host_with_most_silent_connections_makes_room(hosts: list[str]) -> None:
    at = closed_first(dict(enumerate(hosts)))
    assert hosts.count(hosts[at]) == max(map(hosts.count, hosts))
    assert hosts[at] not in hosts[:at]


def test_strangers_from_many_addresses_keep_no_client_out() -> None:
    """They hold more connections than there may be, and open a new one for each that is closed."""
    n_served = 0
    with gate(_StillWorker()) as made, ExitStack() as opened:
        port = made.server_address[1]
        for turn in range(200):
            host = f"127.0.1.{turn % 6}"
            with suppress(OSError):
                stranger = socket.create_connection(("127.0.0.1", port), 5, (host, 0))
                opened.enter_context(stranger)
            if turn % 10 == 9:
                with connected(made) as client:
                    client.sendall(GREETING)
                    n_served += client.recv(100) == greeting_answer(worker_gate._VERSION)
        assert len(made._open) <= worker_gate.MOST_CONNECTIONS
    assert n_served == 20


@pytest.fixture(scope="module")
def worker(tiny_moe: Path) -> Iterator[RunningWorker]:
    with working(tiny_moe, "--device", SIM) as running:
        yield running


@needs_rpc
def test_a_silent_greeting_does_not_hold_a_worker(worker: RunningWorker) -> None:
    with socket.create_connection((worker.address.host, worker.address.port)) as silent:
        silent.sendall(GREETING)
        assert len(silent.recv(100)) == len(greeting_answer((0, 0, 0)))
        for _ in range(2):
            assert worker.status()["serving"] is None
            assert [s for s in ask_for(worker.address, LayersAsked(0, 1))][-1].is_ready
            assert count_devices(worker.address) == 1


@needs_rpc
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example:50052"},
        {"Host": "localhost.evil.example"},
    ],
)
def test_pages_in_browsers_get_nothing(headers: dict[str, str], worker: RunningWorker) -> None:
    url = f"http://{worker.address}"
    body = json.dumps({"first": 0, "end": 2})
    asked = httpx.post(
        f"{url}/layers", content=body, headers={"Content-Type": "application/json", **headers}
    )
    for answer in (httpx.get(url, headers=headers), asked):
        assert answer.status_code == 403
        assert set(answer.json()) == {"error"}


def test_names_that_a_page_cannot_choose() -> None:
    for host in ("127.0.0.1:5", "10.0.0.2", "[::1]:5", "localhost:5", socket.gethostname()):
        assert _is_ours(host), host
    for host in ("evil.example", "localhost.evil.example:5", "", "1.2.3.4.evil", "[evil]"):
        assert not _is_ours(host), host


@needs_rpc
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"first": 0, "end": 1_000_000_000}, "layers 0 to 999999999 are asked for, and the model"),
        ({"first": 0, "end": 1, "reserve_bytes": 1 << 200}, "cannot be reserved"),
    ],
)
def test_layers_that_a_model_does_not_have_are_refused(
    asked: dict[str, int], said: str, worker: RunningWorker
) -> None:
    answer = httpx.post(f"http://{worker.address}/layers", json=asked, headers={})
    assert answer.status_code == 400
    assert said in answer.json()["error"]


@needs_rpc
def test_a_status_does_not_wait_for_the_computing_process(tiny_moe: Path) -> None:
    """The process neither counts nor admits a client while it hangs or computes."""
    with working(tiny_moe, "--device", SIM) as running:
        port = list(ask_for(running.address, LayersAsked(0, 1)))[-1].port
        known = running.status()
        assert known["counters"]["graphs"] == 0  # type: ignore[index]
        (computing,) = (
            child for child in psutil.Process(running.process.pid).children(recursive=True)
            if port in (line.laddr.port for line in child.net_connections())
        )  # fmt: skip
        computing.suspend()
        try:
            with socket.create_connection((running.address.host, running.address.port)) as client:
                client.sendall(GREETING + COUNT_DEVICES)
                mine = f"127.0.0.1:{client.getsockname()[1]}"
                eventually(lambda: running.status()["serving"] == mine, 10)
                begin_s = time.monotonic()
                assert [running.status() for _ in range(3)] == [known | {"serving": mine}] * 3
                assert time.monotonic() - begin_s < 10, "it waited for the process to admit"
        finally:
            computing.resume()


# -- hostile workers


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Address]:
    """A server that calls `answer` with each connection, on a thread."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                answer(connection)

        def listen() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield Address(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize("n_devices", [65, (1 << 32) - 1])
def test_a_worker_with_too_many_devices_is_refused(n_devices: int) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(greeting_answer((7, 0, 0)))
        connection.recv(100)
        connection.sendall((4).to_bytes(8, "little") + n_devices.to_bytes(4, "little"))

    with (
        answering(answer) as address,
        pytest.raises(WorkerUnavailable, match=f"claims {n_devices} devices, and a worker has at"),
    ):
        count_devices(address)


def test_a_dripped_greeting_ends_at_its_deadline() -> None:
    def answer(connection: socket.socket) -> None:
        for byte in greeting_answer((7, 0, 0)):
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    begin_s = time.monotonic()
    with (
        answering(answer) as address,
        pytest.raises(WorkerUnavailable, match=r"does not answer within 0.4 s"),
    ):
        greet(address, answer_s=0.4)
    assert time.monotonic() - begin_s < 2.5


HEAD = b"HTTP/1.0 200 OK\r\n\r\n"


def test_a_dripped_status_ends_at_its_deadline() -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        for byte in HEAD + b" " * 1000:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    begin_s = time.monotonic()
    with (
        answering(answer) as address,
        pytest.raises(WorkerUnavailable, match=r"does not answer within 0.4 s"),
    ):
        status_of(address, 0.4)
    assert time.monotonic() - begin_s < 5


def test_an_endless_status_is_no_status() -> None:
    n_sent = 0

    def answer(connection: socket.socket) -> None:
        nonlocal n_sent
        connection.recv(1000)
        connection.sendall(HEAD)
        while n_sent < 64 << 20:
            n_sent += connection.send(b" " * (1 << 16))

    with answering(answer) as address:
        assert status_of(address, 20.0) is None
        assert n_sent < 32 << 20


def test_an_endless_line_while_loading_ends() -> None:
    n_sent = 0

    def answer(connection: socket.socket) -> None:
        nonlocal n_sent
        connection.recv(1000)
        connection.sendall(HEAD + b'{"doing": "')
        while n_sent < 64 << 20:
            n_sent += connection.send(b"x" * (1 << 16))

    with answering(answer) as address, pytest.raises(WorkerUnavailable, match="went away while"):
        list(ask_for(address, LayersAsked(0, 1)))
    assert n_sent < 32 << 20


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (0.0, r"has made no progress in loading layers 0 to 0 for 0.3 s \(its step"),
        (1e-6, "has not loaded layers 0 to 0 within 1 s"),
    ],
)
def test_a_worker_that_only_says_that_it_loads_ends_the_start(
    step: float, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hello, "_STALLED_S", 0.3)
    monkeypatch.setattr(hello, "_LEAST_READ_BYTES_PER_S", 100.0)

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(HEAD)
        for i in range(10_000):
            state = {"doing": "reading weights", "done": 0.5 + i * step}
            connection.sendall(json.dumps(state).encode() + b"\n")
            time.sleep(0.02)

    with answering(answer) as address, pytest.raises(WorkerUnavailable, match=words):
        list(ask_for(address, LayersAsked(0, 1), n_bytes=100))


def test_a_worker_that_falls_silent_while_loading_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hello, "_ANSWER_S", 0.5)

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(HEAD + b'{"doing": "reading')
        while connection.recv(1000):  # until the client leaves
            pass

    words = "has been silent for 0.5 s while it was loading layers 0 to 0"
    with answering(answer) as address, pytest.raises(WorkerUnavailable, match=words):
        list(ask_for(address, LayersAsked(0, 1)))


def test_a_slow_worker_that_makes_progress_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps together may take longer than the limit for one without progress."""
    monkeypatch.setattr(hello, "_STALLED_S", 1.0)

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(HEAD)
        for done in (0.0, 0.5, 0.9, 0.0, 0.5, 0.9):
            connection.sendall(json.dumps({"doing": "reading", "done": done}).encode() + b"\n")
            time.sleep(0.3)
        connection.sendall(json.dumps({"is_ready": True}).encode() + b"\n")

    with answering(answer) as address:
        states = list(ask_for(address, LayersAsked(0, 1), n_bytes=1 << 30))
    assert len(states) == 7
    assert states[-1].is_ready


def test_a_workers_words_are_shown_without_what_terminals_obey() -> None:
    escape = "\x1b]0;owned\x07\x9b2J"

    def answer(connection: socket.socket) -> None:
        connection.recv(1000)
        for state in (
            {"doing": f"reading{escape}", "done": 7e300},
            {"notes": [escape], "is_ready": True},
        ):
            connection.sendall((HEAD if "doing" in state else b"") + json.dumps(state).encode())
            connection.sendall(b"\n")

    with answering(answer) as address:
        first, last = ask_for(address, LayersAsked(0, 1))
    assert first == WorkerState(doing="reading\ufffd]0;owned\ufffd\ufffd2J")
    assert last.notes == ("\ufffd]0;owned\ufffd\ufffd2J",)

    def refuse(connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(HEAD + json.dumps({"error": escape * 1000}).encode() + b"\n")

    with answering(refuse) as address, pytest.raises(Exception, match="owned") as found:
        list(ask_for(address, LayersAsked(0, 1)))
    assert "\x1b" not in str(found.value)
    assert len(str(found.value)) < 500
