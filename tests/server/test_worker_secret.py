"""A client and a worker prove to each other that they know a secret, over real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from our_worker import SIM, RunningWorker, working
from remote_engine import logits, options
from running import eventually
from worker import has_rpc
from worker import working as stock_working

from offload.engine import open_engine
from offload.errors import DeviceUnavailable, WorkerUnavailable
from offload.ggml.rpc import add_worker
from offload.remote.address import Address, RemoteOptions
from offload.remote.deadline import DeadlineSocket, connect
from offload.remote.hello import (
    LayersAsked,
    WorkerFacts,
    WorkerStatus,
    ask_for,
    look_for,
    status_of,
)
from offload.remote.passage import endpoint_of
from offload.remote.probe import COUNT_DEVICES, GREETING, count_devices, greet, greeting_answer
from offload.remote.secret import MAGIC, Secret
from specoffload.config.rpc_secret import read_secret
from specoffload.errors import UsageError
from specoffload.server import worker_gate
from specoffload.server.worker_gate import WorkerGate

SECRET, OTHER = Secret.of("correct horse battery staple"), Secret.of("a" * 32)
_SOON_S = 60.0
_FIRST_BYTES = len(MAGIC) + 32
needs_rpc = pytest.mark.skipif(not has_rpc(), reason="libllama is compiled without ggml's RPC")


class _StillWorker:
    """Records which connections take their turn. Stands for the worker."""

    n_layers = 4

    def __init__(self) -> None:
        self.served: list[bytes] = []
        self.said: list[str] = []
        self.say = self.said.append

    def refuses(self, client: str) -> bool:
        return False

    def serve(self, connection: socket.socket, client: str, first: bytes) -> None:
        self.served.append(first)
        connection.recv(1)  # until the client closes


class _Guarded:
    """A gate with or without a secret, before a worker that only records."""

    def __init__(self, gate: WorkerGate, worker: _StillWorker) -> None:
        self.worker, self.said = worker, worker.said
        host, port = gate.server_address[:2]
        self.address = Address(str(host), int(port))

    def with_secret(self, secret: Secret | None) -> Address:
        return replace(self.address, secret=secret)

    def stranger(self) -> socket.socket:
        return socket.create_connection((self.address.host, self.address.port), timeout=_SOON_S)


@contextmanager
def guarded(secret: Secret | None = SECRET) -> Iterator[_Guarded]:
    worker = _StillWorker()
    with WorkerGate("127.0.0.1", 0, worker, (), secret) as gate:  # type: ignore[arg-type]
        threading.Thread(target=gate.serve_forever, args=(0.02,), daemon=True).start()
        yield _Guarded(gate, worker)
        gate.shutdown()


def exactly(connection: socket.socket, n_bytes: int) -> bytes:
    found = b""
    while len(found) < n_bytes and (piece := connection.recv(n_bytes - len(found))):
        found += piece
    return found


def is_served(gate: _Guarded) -> bool:
    before = len(gate.worker.served)
    with closing(connect(gate.with_secret(SECRET), _SOON_S)) as client:
        client.sendall(GREETING)
        assert len(exactly(client, len(greeting_answer((0, 0, 0))))) > 0
        client.sendall(COUNT_DEVICES)
        eventually(lambda: len(gate.worker.served) > before, _SOON_S)
    return gate.worker.served[-1] == COUNT_DEVICES


def test_both_sides_prove_the_secret_and_the_client_is_served() -> None:
    with guarded() as gate:
        assert is_served(gate)
        greet(gate.with_secret(SECRET))
        assert gate.said == []


@pytest.mark.parametrize(
    ("has", "knows", "said", "logged"),
    [
        (SECRET, OTHER, "has another secret: give both the same", "it has another secret than"),
        (
            None,
            SECRET,
            "has no secret, so it cannot prove that it is yours",
            "this worker has none",
        ),
    ],
)
def test_two_secrets_that_differ_are_one_sentence_on_each_side(
    has: Secret | None, knows: Secret, said: str, logged: str
) -> None:
    with guarded(has) as gate:
        for ask in (status_of, greet, count_devices, look_for):
            with pytest.raises(WorkerUnavailable, match=said) as told:
                ask(gate.with_secret(knows))  # type: ignore[operator]
            assert str(gate.address) in str(told.value)
        eventually(lambda: len(gate.said) == 4, _SOON_S)
        assert all("was refused: " in line and logged in line for line in gate.said)
        assert gate.worker.served == []


def test_a_client_of_llama_cpp_gets_nothing_and_the_log_says_why() -> None:
    with guarded() as gate, gate.stranger() as stock:
        stock.sendall(GREETING + COUNT_DEVICES)
        with suppress(ConnectionError):
            assert stock.recv(100) == b""
        eventually(lambda: len(gate.said) == 1, _SOON_S)
        assert "llama.cpp cannot" in gate.said[0]
        assert gate.worker.served == []
        with pytest.raises(WorkerUnavailable, match="wants a secret"):
            greet(gate.address)


def test_a_client_without_the_secret_gets_one_sentence_and_no_facts() -> None:
    with guarded() as gate:
        answer = httpx.get(f"http://{gate.address}/")
        assert answer.status_code == 401
        hidden = {name: value for name, value in answer.json().items() if value}
        assert hidden.keys() == {"version", "library", "needs_secret", "error"}
        with pytest.raises(WorkerUnavailable, match="has a secret: --rpc-secret-file FILE, or"):
            status_of(gate.address)
        with pytest.raises(DeviceUnavailable, match="did not prove that it knows it"):
            list(ask_for(gate.address, LayersAsked(0, 1)))
        # An older client knows nothing of secrets, and compares versions.
        status = WorkerStatus.hidden()
        mine = WorkerFacts(status.version.split()[0], status.library, "f.gguf", "hash")
        told = mine.difference(status, gate.address)
        assert "with a secret (--rpc-secret-file), and this machine" in told


def test_a_recorded_proof_is_worth_nothing_later() -> None:
    with guarded() as gate:
        sent, got = _recorded(gate)
        assert len(sent) == _FIRST_BYTES + 32
        with gate.stranger() as replayed:
            replayed.sendall(sent)
            answer = exactly(replayed, 200)
        assert answer[:1] == got[:1]
        assert answer[1:33] != got[1:33]  # another nonce of the worker's
        assert answer[33:] == b"\x03"  # no proof of the worker's
        eventually(lambda: len(gate.said) == 1, _SOON_S)
        assert "it has another secret" in gate.said[0]


def test_a_worker_s_own_proof_is_no_proof_of_a_client() -> None:
    """A stranger sends back what the worker sent to a client."""
    with guarded() as gate, gate.stranger() as stranger:
        _, got = _recorded(gate)
        stranger.sendall(MAGIC + got[1:33])  # the worker's own earlier nonce
        exactly(stranger, 33)
        stranger.sendall(got[34:])  # its own earlier proof
        assert exactly(stranger, 100) == b"\x03"


def _recorded(gate: _Guarded) -> tuple[bytes, bytes]:
    """Return what a client with the secret sends, and what it gets."""
    sent, got = bytearray(), bytearray()

    class Recorder:
        def __init__(self, inner: socket.socket) -> None:
            self._inner = inner

        def sendall(self, data: bytes, /) -> None:
            sent.extend(data)
            self._inner.sendall(data)

        def receive(self, n_bytes: int) -> bytes:
            found = exactly(self._inner, n_bytes)
            got.extend(found)
            return found

    with gate.stranger() as inner:
        SECRET.prove(Recorder(inner), "")
    return bytes(sent), bytes(got)


@pytest.mark.parametrize(
    "sent", [MAGIC[:1], MAGIC + bytes(31), MAGIC + bytes(32), MAGIC + bytes(32 + 31)]
)
def test_half_a_proof_ends_at_the_deadline_and_holds_nobody(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits_s: list[float | None] = []
    end_in = DeadlineSocket.end_in

    def noted(self: DeadlineSocket, seconds: float | None) -> None:
        end_in(self, seconds)
        limits_s.append(seconds)

    with guarded() as gate:
        monkeypatch.setattr(worker_gate, "FIRST_BYTES_S", 1.0)
        monkeypatch.setattr(DeadlineSocket, "end_in", noted)
        with gate.stranger() as silent:
            silent.sendall(sent)
            eventually(lambda: limits_s == [1.0], _SOON_S)
            monkeypatch.setattr(worker_gate, "FIRST_BYTES_S", _SOON_S)
            assert is_served(gate)
            while silent.recv(100):
                pass
        assert len(gate.worker.served) == 1


def test_a_dripped_proof_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_gate, "FIRST_BYTES_S", 0.5)
    n_sent = 0
    with guarded() as gate, gate.stranger() as slow, suppress(OSError):
        slow.settimeout(0.1)
        for byte in MAGIC + bytes(32):
            slow.sendall(bytes([byte]))
            n_sent += 1
            with suppress(TimeoutError):
                if not slow.recv(1):
                    break
    assert n_sent < _FIRST_BYTES, "each byte renewed the deadline"


# -- workers that lie


@contextmanager
def answering(answer: Callable[[socket.socket], None]) -> Iterator[Address]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1], SECRET)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize("kind", ["claims", "mirrors", "zeros"])
def test_an_impostor_gets_no_byte_of_the_client_s_data(kind: str) -> None:
    after: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        start = exactly(connection, _FIRST_BYTES)
        nonce = start[-32:] if kind == "mirrors" else bytes(32)
        connection.sendall(b"\x01" + nonce)
        proof = exactly(connection, 32)
        connection.sendall(b"\x01" + {"mirrors": proof, "zeros": bytes(32)}.get(kind, b"x" * 32))
        after.append(connection.recv(100))

    with answering(answer) as address:
        with pytest.raises(WorkerUnavailable, match="did not prove that it knows the secret"):
            status_of(address)
        eventually(lambda: after == [b""], _SOON_S)


@needs_rpc
def test_a_stock_worker_proves_nothing() -> None:
    with stock_working() as stock:
        with pytest.raises(WorkerUnavailable, match="proves no secret: .*rpc-server"):
            count_devices(replace(stock.address, secret=SECRET))
        greet(stock.address)  # it serves others as before


def test_an_older_worker_proves_nothing() -> None:
    """It takes the client's first line for bad HTTP, and answers at once."""

    def answer(connection: socket.socket) -> None:
        line = b""
        while not line.endswith(b"\n"):
            line += connection.recv(1)
        connection.sendall(b"HTTP/1.0 400 Bad request\r\n\r\n")

    with (
        answering(answer) as address,
        pytest.raises(WorkerUnavailable, match="an older specoffload"),
    ):
        status_of(address)


# -- the file


def test_a_secret_is_read_without_the_blanks_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  correct horse battery staple\n\n", encoding="utf-8")
    file.chmod(0o600)
    assert read_secret(file, "") == (SECRET, "")
    assert read_secret(None, "correct horse battery staple") == (SECRET, "")
    assert read_secret(None, "") == (None, "")
    file.chmod(0o644)
    secret, warning = read_secret(file, "something else that is long enough")
    assert secret == SECRET
    assert warning == f"warning: other users may read {file}, which has a secret: chmod 600 {file}"
    assert "horse" not in repr(Address("a", 1, secret))


@pytest.mark.parametrize("text", ["", "short", " " * 40, "x" * 1025, "x" * 10_000])
def test_a_secret_that_is_no_good_is_one_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="a secret has 16 to 1024 characters, and this has"):
        read_secret(file, "")
    if text:
        with pytest.raises(UsageError, match="SPECOFFLOAD_RPC_SECRET: a secret has 16 to 1024"):
            read_secret(None, text)
    file.write_bytes(b"\xff" * 40)
    with pytest.raises(UsageError, match=f"--rpc-secret-file {file}: cannot be read as UTF-8"):
        read_secret(file, "")


# -- the programs


@pytest.fixture(scope="module")
def secret_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text(SECRET.key.decode(), encoding="utf-8")
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def worker(tiny_moe: Path, secret_file: Path) -> Iterator[RunningWorker]:
    with working(tiny_moe, "--device", SIM, "--rpc-secret-file", str(secret_file)) as running:
        yield running


@needs_rpc
def test_a_worker_with_a_secret_computes_the_same_logits(
    worker: RunningWorker, tiny_moe: Path
) -> None:
    with open_engine(tiny_moe, options("sim")) as engine:
        expected = logits(engine)
    for _ in range(2):  # the second engine of this process has the same passage
        remote = RemoteOptions((replace(worker.address, secret=SECRET),))
        with open_engine(tiny_moe, options("sim", remote)) as engine:
            assert engine.opened.remote is not None
            assert str(worker.address) in engine.opened.remote.words  # not the passage's port
            np.testing.assert_array_equal(logits(engine), expected)
    with pytest.raises(WorkerUnavailable, match="has a secret"):
        open_engine(tiny_moe, options("sim", RemoteOptions((worker.address,))))
    status = status_of(replace(worker.address, secret=SECRET))
    assert status is not None
    assert status.counters["graphs"] > 0


@needs_rpc
def test_a_passage_serves_its_own_process_alone(worker: RunningWorker) -> None:
    known = replace(worker.address, secret=SECRET)
    assert list(ask_for(known, LayersAsked(0, 1)))[-1].is_ready
    passage = endpoint_of(known)
    code = (
        "import socket, sys\n"
        f"with socket.create_connection(('127.0.0.1', {passage.port}), 20) as s:\n"
        f"    s.sendall({GREETING!r})\n"
        "    try: print(len(s.recv(100)))\n"
        "    except ConnectionError: print(0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr
    assert len(add_worker(str(passage), count_devices(known))) == 1  # this process


@needs_rpc
@pytest.mark.parametrize("by", ["file", "variable"])
def test_a_program_uses_a_worker_with_a_secret(
    by: str, worker: RunningWorker, tiny_moe: Path, secret_file: Path
) -> None:
    environment = {**os.environ, "SPECOFFLOAD_WITHOUT": "profile"}
    flags: tuple[str, ...] = ("--rpc-secret-file", str(secret_file))
    if by == "variable":
        flags, environment["SPECOFFLOAD_RPC_SECRET"] = (), SECRET.key.decode()
    command = [sys.executable, "-m", "specoffload", "run", str(tiny_moe), "-p", "Once", "-n", "4",
               "-no-cnv", "--no-spec", "-t", "1", "-c", "256", "--temp", "0"]  # fmt: skip
    at = ("--rpc", str(worker.address))
    plain = subprocess.run(command, capture_output=True, text=True, env=environment)
    done = subprocess.run([*command, *at, *flags], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, plain.stdout), done.stderr
    assert SECRET.key.decode() not in worker.text + done.stderr
    environment.pop("SPECOFFLOAD_RPC_SECRET", None)
    refused = subprocess.run([*command, *at], capture_output=True, text=True, env=environment)
    assert refused.returncode == 2
    assert f"the worker at {worker.address} has a secret: --rpc-secret-file" in refused.stderr


def test_a_worker_with_a_secret_may_listen_for_other_machines(
    tiny_moe: Path, secret_file: Path
) -> None:
    flags = ("--device", "cpu", "--listen", "0.0.0.0:0", "--rpc-secret-file", str(secret_file))
    with working(tiny_moe, *flags, "--insecure") as running:
        assert running.says("every machine that reaches it that knows the secret can use this")
        assert running.says("--insecure is ignored: there is a secret")
        with pytest.raises(WorkerUnavailable, match="has a secret"):
            status_of(running.address)
