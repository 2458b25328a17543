"""Listens for the clients of a worker, and lets one at a time use ggml's RPC server.

The port speaks two protocols. A connection that begins with ggml's greeting is passed on to the
process that computes (`offload/worker/serving.py`). Any other connection is HTTP, by which a client
asks before it connects:

    GET /           the worker's file and build, its current client, and its device's memory
    POST /layers    load these layers; answers with lines of JSON while they are being read

This process never loads the native library, so a failed assertion there does not end it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from ipaddress import IPv4Network, IPv6Network, ip_address
from multiprocessing.process import BaseProcess
from typing import Any

from offload.remote.hello import (
    GREETING,
    HEARTBEAT_S,
    Admit,
    Count,
    LayersAsked,
    WorkerFacts,
    WorkerState,
    WorkerStatus,
    read_asked,
)
from offload.worker.door import LOOPBACK
from offload.worker.serving import Answer, WorkerOptions, serve_layers
from specoffload.server.engine.child import start_shielded

Network = IPv4Network | IPv6Network

_FIRST_BYTE_S = 10.0  # longest wait for a client's first bytes
_TURN_S = 3.0  # longest wait for the previous connection of the same machine to end
LAST_S = 60.0  # longest wait for the computation of a client that has left
_COUNT_S = 1.0  # longest wait for the counters of the computing process
_ADMIT_S = 20.0  # longest wait until the computing process admits a connection
_PIECE_BYTES = 1 << 20
_MOST_BODY_BYTES = 1 << 12
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Computing:
    """Runs the process that holds layers and computes them. `close` ends the process."""

    def __init__(self, options: WorkerOptions, on_state: Callable[[WorkerState], None]) -> None:
        """Start the process. `on_state` is called with its states, on a thread of its own."""
        self.asked: LayersAsked | None = None
        self.state = WorkerState(doing="opening the device")
        self.device = WorkerState()  # the first state, which names the device; empty until then
        self.is_spent = False  # True: the next client needs another process
        self._on_state = on_state
        self._asking = threading.Lock()
        self._answer: Answer | None = None  # answer to the last question, None until it comes
        self._changed = threading.Condition()
        self._is_closed = False
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=serve_layers, args=(theirs, options), name="worker", daemon=True
        )
        start_shielded(self._process)
        theirs.close()
        self._reader = threading.Thread(target=self._read, name="worker reader", daemon=True)
        self._reader.start()

    def load(self, asked: LayersAsked) -> None:
        """Let the process load these layers. Call it once."""
        self.asked = asked
        self._line.send(asked)

    def states(self) -> Iterator[WorkerState]:
        """Yield states until the process is ready or has failed, at least one per HEARTBEAT_S."""
        while True:
            with self._changed:
                state = self.state
            yield state
            if state.is_ready or state.error:
                return
            with self._changed:
                if self.state is state:
                    self._changed.wait(HEARTBEAT_S)

    def wait_for_device(self) -> WorkerState:
        """Return the first state of the process, or the state with the error that ended it."""
        with self._changed:
            self._changed.wait_for(lambda: self.device.device or self.state.error)
            return self.state if self.state.error else self.device

    def counters(self) -> dict[str, float]:
        """Return the counters of streaming by name, or {} if no layers are ready."""
        found = self._ask(Count(), dict, _COUNT_S)
        return found if isinstance(found, dict) else {}

    def _ask(self, question: Admit | Count, kind: type, wait_s: float) -> Answer | None:
        """Return the answer of this kind, or None if there is none within `wait_s` seconds."""
        with self._asking, self._changed:
            if not self.state.is_ready:
                return None
            self._answer = None
            try:
                self._line.send(question)
            except OSError:  # the process has just ended
                return None
            is_there = self._changed.wait_for(
                lambda: isinstance(self._answer, kind) or self.state.error, wait_s
            )
            return self._answer if is_there and not self.state.error else None

    def close(self) -> None:
        """End the process. No state is reported from now on."""
        with self._changed:
            self._is_closed = True
        self._end()

    def _end(self) -> None:
        """End the process, and wait until its end has been reported."""
        self._process.kill()
        self._reader.join()  # joins the process; a second thread that does gets no exit code

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Yield a connection to ggml's server, which admits no other one. Raises OSError."""
        with socket.socket() as server:
            server.bind((LOOPBACK, 0))
            try:
                self._admit(server.getsockname()[1])
                server.connect((LOOPBACK, self.state.port))
                yield server
            finally:
                with contextlib.suppress(ConnectionAbortedError):
                    self.is_spent = self._admit(0).is_spent

    def _admit(self, port: int) -> Admit:
        """Let ggml's server admit only this port. Raises ConnectionAbortedError if it fails.

        Then the process is ended, because its server might admit a port that others can get.
        """
        answer = self._ask(Admit(port), Admit, _ADMIT_S)
        if isinstance(answer, Admit):
            return answer
        self.is_spent = True
        self._end()
        raise ConnectionAbortedError(errno.ECONNABORTED, "the worker does not answer")

    def _read(self) -> None:
        try:
            while True:
                self._set(self._line.recv())
        except (EOFError, OSError):
            self._process.join()
        if not self.state.error:
            code = self._process.exitcode
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._set(WorkerState(error=f"the computing process ended ({how})"))

    def _set(self, answer: Answer) -> None:
        with self._changed:
            if isinstance(answer, WorkerState):
                self.state = answer
                if answer.device:
                    self.device = answer
            else:
                self._answer = answer
            is_reported = isinstance(answer, WorkerState) and not self._is_closed
            self._changed.notify_all()
        if is_reported:
            self._on_state(self.state)


class Worker:
    """Serves one client at a time. Each connection calls it on a thread of its own."""

    def __init__(
        self,
        options: WorkerOptions,
        facts: WorkerFacts,
        say: Callable[[str], None],
        progress: Callable[[str, float], None],
    ) -> None:
        """`say` gets lines for the user, and `progress` a step of loading and its fraction."""
        self._options, self._facts, self.say, self._progress = options, facts, say, progress
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._client: str | None = None  # address of the client that is served
        self._loader: str | None = None  # address of the client whose layers are being loaded
        self._is_closed = False
        self._sockets: list[socket.socket] = []  # both ends of the connection that is passed on
        self._is_open = False
        self._computing = Computing(options, self._on_state)

    def open_device(self) -> WorkerState:
        """Wait for the device. Returns a state with the device, or with the error if it failed."""
        state = self._computing.wait_for_device()
        self._is_open = not state.error
        return state

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # a connection's thread may be about to start another process
            self._computing.close()

    def status(self) -> WorkerStatus:
        """Return the answer for a client that asks before it connects."""
        device, asked = self._computing.device, self._computing.asked
        return WorkerStatus(
            **asdict(self._facts),
            device=device.device,
            free_bytes=device.free_bytes,
            total_bytes=device.total_bytes,
            serving=self._client,
            layers=None if asked is None else (asked.first, asked.end),
            counters=self._computing.counters(),
        )

    def load(self, asked: LayersAsked, client: str) -> Iterator[WorkerState]:
        """Load layers for a client, unless they are loaded. Yields states, the last one ready.

        If another client is served or loads other layers, or if loading fails, the last state has
        the error. Clients that want the same layers wait together.
        """
        with self._lock:
            if not self._waits_for_turn(client, asked):
                yield WorkerState(error=self._busy(), is_busy=True)
                return
            computing = self._holding(asked, client)
            self._loader = self._loader or client
            is_first = self._loader == client
        try:
            yield from computing.states()
        finally:
            if is_first:
                with self._lock:
                    self._loader = None
                    self._free.notify_all()

    def _holding(self, asked: LayersAsked, client: str) -> Computing:
        """Return a process that holds these layers or is loading them.

        A process that has failed, is spent or has other layers is replaced. Raises OSError if the
        worker is closed.
        """
        if self._is_closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the worker ends")
        computing = self._computing
        if computing.asked not in (None, asked) or computing.state.error or computing.is_spent:
            computing.close()
            computing = self._computing = Computing(self._options, self._on_state)
        if computing.asked is None:
            self.say(f"{client}: loading {asked.words}")
            computing.load(asked)
        return computing

    def serve(self, connection: socket.socket, client: str) -> None:
        """Pass a connection on to ggml's server until one of the two ends it."""
        with self._lock:
            if not self._waits_for_turn(client):
                if host_of(client) != host_of(self._client or ""):  # retries are not reported
                    self.say(f"{client} was refused: {self._busy()}")
                return
            self._client = client
        try:
            # A stock client asks for no layers, because it sends the weights itself.
            with self._lock:
                computing = self._holding(self._computing.asked or LayersAsked(), client)
            for state in computing.states():
                if state.error:
                    return
            with computing.connection() as server:
                self._sockets = [connection, server]
                if not pass_on(connection, server):
                    self.say(
                        f"error: a computation for {client} has not ended {LAST_S:g} s after it "
                        "left; the next client gets a new computing process"
                    )
                    computing.close()
        except OSError as e:
            self.say(f"{client}: the connection ended ({e.strerror or e})")
        finally:
            with self._lock:
                self._client, self._sockets = None, []
                self._free.notify_all()

    def _waits_for_turn(self, client: str, asked: LayersAsked | None = None) -> bool:
        """Return True if no other client needs the computing process, which may load `asked`.

        Waits for the other client for _TURN_S seconds if it is on the same machine.
        """
        other = self._in_the_way(asked)
        if other is None or host_of(client) != host_of(other):
            return other is None
        return self._free.wait_for(lambda: self._in_the_way(asked) is None, _TURN_S)

    def _in_the_way(self, asked: LayersAsked | None) -> str | None:
        """Return the client that is served or loads other layers than `asked`, or None.

        If `asked` is None, no layers are to be loaded.
        """
        if self._client is None and asked not in (None, self._computing.asked):
            return self._loader
        return self._client

    def _busy(self) -> str:
        does = f"serves {self._client} already"
        if self._client is None and self._computing.asked is not None:
            does = f"is loading {self._computing.asked.words} for {self._loader}"
        return f"this worker {does}, and it serves one client at a time"

    def _on_state(self, state: WorkerState) -> None:
        """Report a state to the user.

        If the process has failed, the client's connection is closed, so that the client asks again.
        """
        if state.doing:
            self._progress(state.doing, state.done)
        if state.is_ready:
            self.say(f"ready: {'; '.join(state.notes) or 'no layers yet'}")
        if not state.error or not self._is_open:
            return
        self.say(f"error: {state.error}")
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class Gate(socketserver.ThreadingTCPServer):
    """Accepts the connections of allowed addresses."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int, worker: Worker, allowed: Sequence[Network]) -> None:
        """Listen. Empty `allowed` allows all addresses. Raises OSError for an unusable address."""
        self.worker, self._allowed = worker, allowed
        super().__init__((host, port), _Connection)

    @property
    def is_loopback(self) -> bool:
        return ip_address(str(self.server_address[0])).is_loopback

    def verify_request(self, request: Any, client_address: Any) -> bool:
        client = ip_address(client_address[0])
        is_allowed = not self._allowed or any(client in network for network in self._allowed)
        if not is_allowed:
            self.worker.say(f"{client} was refused: it is not among --allow")
        return is_allowed

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop connections that break off; the standard library would print a traceback."""


class _Connection(BaseHTTPRequestHandler):
    """One connection, in either protocol."""

    server: Gate
    timeout = _FIRST_BYTE_S

    def handle(self) -> None:
        connection: socket.socket = self.request
        if connection.recv(1, socket.MSG_PEEK) != GREETING:
            self.handle_one_request()
            return
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self.server.worker.serve(connection, self._client)

    def do_GET(self) -> None:  # noqa: N802  # the standard library's name
        self._begin(200 if self.path == "/" else 404)
        if self.path == "/":
            self._write(asdict(self.server.worker.status()))

    def do_POST(self) -> None:  # noqa: N802
        # Only JSON is accepted, because browsers let any page send some other types to any address.
        size = self.headers.get("Content-Length", "0")
        if (
            self.path != "/layers"
            or not size.isdecimal()
            or self.headers.get("Content-Type") != "application/json"
        ):
            self._begin(404)
            return
        try:
            asked = read_asked(self.rfile.read(min(int(size), _MOST_BODY_BYTES)))
        except ValueError as e:
            self._begin(400)
            self._write(asdict(WorkerState(error=f"/layers: {e}")))
            return
        self._begin(200)
        for state in self.server.worker.load(asked, self._client):
            self._write(asdict(state))

    def log_message(self, *_: Any) -> None:
        """Print nothing, where the standard library would print a line for each request."""

    @property
    def _client(self) -> str:
        return f"{self.client_address[0]}:{self.client_address[1]}"

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()

    def _write(self, values: dict[str, Any]) -> None:
        self.wfile.write(json.dumps(values).encode() + b"\n")
        self.wfile.flush()


def host_of(client: str) -> str:
    return client.rpartition(":")[0]


def pass_on(client: socket.socket, server: socket.socket, last_s: float = LAST_S) -> bool:
    """Copy both directions until one side ends.

    Returns False if the server has not ended the connection `last_s` seconds after the client has.
    """
    for end in (client, server):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def answer() -> None:
        _copy(server, client)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)  # ends the other direction, too

    back = threading.Thread(target=answer, daemon=True)
    back.start()
    _copy(client, server)
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_WR)
    back.join(last_s)
    return not back.is_alive()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Copy until `source` ends. Drops the bytes when `target` is closed."""
    memory, is_there = memoryview(bytearray(_PIECE_BYTES)), True
    with contextlib.suppress(OSError):
        while n := source.recv_into(memory):
            try:
                if is_there:
                    target.sendall(memory[:n])
            except OSError:
                is_there = False
