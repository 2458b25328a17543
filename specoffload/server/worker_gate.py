"""The port of a worker: tells its protocols apart, and bounds what strangers can take.

If the worker has a secret, a connection begins with a proof (offload/remote/secret.py). Without a
proof it gets nothing but a sentence. Then comes ggml's greeting or HTTP. A connection that begins
with ggml's greeting is passed on to the process that computes. By HTTP a client asks before it
connects:

    GET /           the worker's file and build, its current client, and its device's memory
    POST /layers    load these layers; answers with lines of JSON while they are being read

The proof, the whole greeting and the first command have one deadline, and a connection takes its
turn only after them. So a connection that sends nothing more never keeps a client waiting.
"""

from __future__ import annotations

import json
import socket
import socketserver
import struct
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from email.message import Message
from http.server import BaseHTTPRequestHandler
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any, TypeVar

from offload.ggml.library import abi
from offload.remote.deadline import DeadlineSocket, with_deadline
from offload.remote.hello import WorkerState, WorkerStatus, read_asked
from offload.remote.passing import keep_alive
from offload.remote.probe import GREETING, greeting_answer
from offload.remote.secret import MAGIC, NEEDED, Secret, reason_of
from specoffload.server.worker import Worker

_Connected = TypeVar("_Connected")

IpNetwork = IPv4Network | IPv6Network

FIRST_BYTES_S = 10.0  # longest time for a whole request, or for a greeting and the first command
_WRITE_S = 10.0  # longest time for a line of an answer
MOST_CONNECTIONS = 64
_MOST_OF_ONE_HOST = 16
_MOST_BODY_BYTES = 1 << 12
_MOST_FIRST_BYTES = 1 << 16  # longest first command; ggml's client begins with small questions
# No client looks at the last number.
_VERSION = (abi.RPC_PROTO_MAJOR_VERSION, abi.RPC_PROTO_MINOR_VERSION, 0)
_COMMAND = struct.Struct("<BQ")  # number of a command, size of its body


class WorkerGate(socketserver.ThreadingTCPServer):
    """Accepts the connections of allowed addresses, a bounded number at once."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(
        self,
        host: str,
        port: int,
        worker: Worker,
        allowed: Sequence[IpNetwork],
        secret: Secret | None = None,
    ) -> None:
        """Listen. Empty `allowed` allows all addresses. Raises OSError for an unusable address.

        With a `secret`, only clients that prove that they know it are served.
        """
        self.worker, self._allowed, self.secret = worker, allowed, secret
        self._counting = threading.Lock()  # of the two mappings
        self._open: dict[socket.socket, str] = {}  # hosts of connections, the oldest first
        self._waiting: dict[socket.socket, str] = {}  # those that have not shown what they want
        super().__init__((host, port), _GateConnection)

    @property
    def is_loopback(self) -> bool:
        return ip_address(str(self.server_address[0])).is_loopback

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, client = super().get_request()
        return with_deadline(connection), client

    def verify_request(self, request: Any, client_address: Any) -> bool:
        client = ip_address(client_address[0])
        is_allowed = not self._allowed or any(client in network for network in self._allowed)
        if not is_allowed:
            self.worker.say(f"{client} was refused: it is not among --allow")
        return is_allowed

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection on a thread.

        If there are too many, one that waits makes room, so that strangers who send nothing keep
        no client out. Without one that waits, the new connection is closed.
        """
        host = client_address[0]
        with self._counting:
            crowded = self._crowded(host)
            closed = request if crowded is not None and not crowded else None
            if crowded:
                closed = closed_first(crowded)
                self._drop(closed)
            if closed is not request:
                self._open[request] = self._waiting[request] = host
        if closed is request:
            self.shutdown_request(request)
            return
        if closed is not None:
            with suppress(OSError):
                closed.shutdown(socket.SHUT_RDWR)  # its thread closes it
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._forget(request)
            raise

    def _crowded(self, host: str) -> dict[socket.socket, str] | None:
        """Return the connections of which one must close before `host` opens another one.

        That is None if there is room, and empty if none of them waits.
        """
        if sum(one == host for one in self._open.values()) >= _MOST_OF_ONE_HOST:
            return {connection: one for connection, one in self._waiting.items() if one == host}
        return dict(self._waiting) if len(self._open) >= MOST_CONNECTIONS else None

    def stays(self, connection: socket.socket) -> bool:
        """Record that a connection has shown what it wants: it makes room for no other one.

        Returns False if it has made room already.
        """
        with self._counting:
            self._waiting.pop(connection, None)
            return connection in self._open

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, connection: socket.socket) -> None:
        with self._counting:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._open.pop(connection, None)
        self._waiting.pop(connection, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop connections that break off; the standard library would print a traceback."""


class _GateConnection(BaseHTTPRequestHandler):
    """One connection, in either protocol."""

    server: WorkerGate
    timeout = FIRST_BYTES_S
    _is_proven = False  # True: both sides have proved that they know the secret

    def handle(self) -> None:
        connection: DeadlineSocket = self.request
        connection.end_in(FIRST_BYTES_S)
        if connection.recv(1, socket.MSG_PEEK) == MAGIC[:1]:
            if reason := reason_of(connection, self.server.secret):
                self.server.worker.say(f"{self._client} was refused: {reason}")
                return
            self._is_proven = True
            if not self.server.stays(connection):
                return
        if connection.recv(1, socket.MSG_PEEK) != GREETING[:1]:
            self.handle_one_request()
            return
        if self._lacks_proof():
            return
        if self.server.worker.refuses(self._client):
            return
        first = _greet(connection)
        if first is None or not self.server.stays(connection):
            return
        connection.end_in(None)
        keep_alive(connection)
        self.server.worker.serve(connection, self._client, first)

    def do_GET(self) -> None:  # noqa: N802  # the standard library's name
        if self._is_refused():
            return
        if self._lacks_proof():
            self._begin(401)
            self._write(asdict(WorkerStatus.hidden()) | {"error": NEEDED})
            return
        self._begin(200 if self.path == "/" else 404)
        if self.path == "/":
            self._write(asdict(self.server.worker.status()))

    def do_POST(self) -> None:  # noqa: N802
        # Only JSON is accepted, because browsers let any page send some other types to any address.
        size = self.headers.get("Content-Length", "0")
        if self._is_refused():
            return
        if self._lacks_proof():
            self._begin(401)
            self._write(asdict(WorkerState(error=NEEDED)))
            return
        if (
            self.path != "/layers"
            or not size.isdecimal()
            or self.headers.get("Content-Type") != "application/json"
        ):
            self._begin(404)
            return
        try:
            body = self.rfile.read(min(int(size), _MOST_BODY_BYTES))
            asked = read_asked(body, self.server.worker.n_layers)
        except ValueError as e:
            self._begin(400)
            self._write(asdict(WorkerState(error=f"/layers: {e}")))
            return
        self._begin(200)
        for state in self.server.worker.load(asked, self._client):
            self._write(asdict(state))

    def _is_refused(self) -> bool:
        """Answer 403 to requests of pages in browsers. Returns True if it did."""
        reason = refusal(self.headers)
        if reason:
            self._begin(403)
            self._write({"error": reason})
        return bool(reason)

    def _lacks_proof(self) -> bool:
        """Return True, and say so, if the client had to prove that it knows the secret."""
        is_lacking = self.server.secret is not None and not self._is_proven
        if is_lacking:
            self.server.worker.say(f"{self._client} was refused: {NEEDED}")
        return is_lacking

    def log_message(self, *_: Any) -> None:
        """Print nothing, where the standard library would print a line for each request."""

    @property
    def _client(self) -> str:
        return f"{self.client_address[0]}:{self.client_address[1]}"

    def _begin(self, status: int) -> None:
        self.server.stays(self.request)
        self.request.end_in(_WRITE_S)
        self.send_response(status)
        self.send_header("Content-Type", "application/x-ndjson")
        self.end_headers()

    def _write(self, values: dict[str, Any]) -> None:
        self.request.end_in(_WRITE_S)
        self.wfile.write(json.dumps(values).encode() + b"\n")
        self.wfile.flush()


def closed_first(waiting: Mapping[_Connected, str]) -> _Connected:
    """Return the connection that makes room: the oldest one of the host that has most.

    `waiting` has the connections' hosts, the oldest first, and is not empty. A client proves itself
    within a few round trips, and strangers cannot fill the gate from many addresses in that time.
    """
    n_of = Counter(waiting.values())
    most = max(n_of.values())
    return next(connection for connection, host in waiting.items() if n_of[host] == most)


def refusal(headers: Message) -> str:
    """Return why a request is refused, or "".

    A page in a browser has an Origin, or is asked for under its own name, which may resolve to this
    machine (DNS rebinding). Clients of ours name the worker's address.
    """
    if headers.get_all("Origin"):
        return "pages in browsers may not use a worker"
    hosts = headers.get_all("Host") or []
    if len(hosts) > 1:
        return "a request has one Host header"
    if hosts and not _is_ours(hosts[0]):
        return "the worker is asked under another name: use its address, localhost or its host name"
    return ""


def _is_ours(host: str) -> bool:
    """True for addresses and for names of this machine, which no page's owner can choose."""
    name = host.strip().lower()
    if not name.startswith("["):
        name = name.partition(":")[0]
    name = name.partition("]")[0].removeprefix("[").removesuffix(".")
    try:
        ip_address(name)
    except ValueError:
        return name in ("localhost", socket.gethostname().lower())
    return True


def _greet(connection: DeadlineSocket) -> bytes | None:
    """Answer ggml's greeting, and return the first command, or None if the peer sends neither.

    The computing process answers the same, but it serves one connection at a time. Raises OSError,
    TimeoutError at the connection's deadline.
    """
    if connection.receive(len(GREETING))[: _COMMAND.size] != GREETING[: _COMMAND.size]:
        return None
    connection.sendall(greeting_answer(_VERSION))
    head = connection.receive(_COMMAND.size)
    if len(head) < _COMMAND.size:
        return None
    _, n_bytes = _COMMAND.unpack(head)
    if n_bytes > _MOST_FIRST_BYTES:
        return None
    body = connection.receive(n_bytes)
    return head + body if len(body) == n_bytes else None
