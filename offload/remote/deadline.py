"""Sockets with one deadline for all that is read and written, not one for each packet.

A peer that sends a byte now and then would renew a timeout of `socket` for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from time import monotonic
from typing import Any

from offload.remote.address import Address

_PIECE_BYTES = 1 << 16


class DeadlineSocket(socket.socket):
    """A socket whose calls raise TimeoutError after a common deadline. None: they wait for ever."""

    _ends_s: float | None = None

    def end_in(self, seconds: float | None) -> None:
        """Let all calls together take this long from now on, or for ever."""
        self._ends_s = None if seconds is None else monotonic() + seconds
        self.settimeout(seconds)

    def _wait(self) -> None:
        if self._ends_s is not None:
            left_s = self._ends_s - monotonic()
            if left_s <= 0:
                raise TimeoutError("timed out")
            self.settimeout(left_s)

    # Python's buffered files read with `recv_into` and write with `send` or `sendall`.

    def recv_into(self, *arguments: Any) -> int:
        self._wait()
        return super().recv_into(*arguments)

    def recv(self, *arguments: Any) -> bytes:
        self._wait()
        return super().recv(*arguments)

    def send(self, *arguments: Any) -> int:
        self._wait()
        return super().send(*arguments)

    def sendall(self, *arguments: Any) -> None:
        self._wait()
        super().sendall(*arguments)

    def receive(self, n_bytes: int) -> bytes:
        """Return the next `n_bytes` bytes, or fewer if the peer ends the connection."""
        received = b""
        while len(received) < n_bytes and (
            piece := self.recv(min(_PIECE_BYTES, n_bytes - len(received)))
        ):
            received += piece
        return received


def with_deadline(connection: socket.socket) -> DeadlineSocket:
    """Return the connection as a DeadlineSocket. `connection` must not be used any more."""
    timeout_s = connection.gettimeout()
    made = DeadlineSocket(fileno=connection.detach())
    made.settimeout(timeout_s)
    return made


def connect(worker: Address, seconds: float) -> DeadlineSocket:
    """Connect to a worker, and let the connection take `seconds` in all.

    If the address has a secret, both sides prove that they know it. Raises OSError, and
    WorkerUnavailable if one of them cannot prove it.
    """
    begin_s = monotonic()
    made = with_deadline(socket.create_connection((worker.host, worker.port), timeout=seconds))
    try:
        made.end_in(max(0.0, seconds - (monotonic() - begin_s)))
        if worker.secret is not None:
            worker.secret.prove(made, str(worker))
    except BaseException:
        made.close()
        raise
    return made


class BoundedHttp:
    """One HTTP request to a worker, whose answer is bounded in time and in length.

    Close it. All methods raise OSError (TimeoutError after the deadline) or HTTPException, and
    connecting also raises WorkerUnavailable.
    """

    def __init__(self, worker: Address, seconds: float) -> None:
        """Connect. `seconds` is the limit for connecting and, without `end_in`, for all."""
        self._socket = connect(worker, seconds)
        self.end_in = self._socket.end_in
        self._http = HTTPConnection(worker.host, worker.port)
        self._http.sock = self._socket
        self._answer: HTTPResponse | None = None
        # A worker accepts its address, but no name that a page's owner may have chosen.
        host, port = self._socket.getpeername()[:2]
        self._host = f"{host}:{port}"

    def request(self, method: str, path: str, body: str | None = None) -> int:
        """Send a request, and return the status of the answer."""
        headers = {"Host": self._host, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        self._http.request(method, path, body, headers)
        self._answer = self._http.getresponse()
        return self._answer.status

    def read(self, most_bytes: int) -> bytes:
        """Return the rest of the answer. Raises HTTPException if it is longer than that."""
        return self._bounded(lambda answer: answer.read(most_bytes + 1), most_bytes)

    def readline(self, most_bytes: int) -> bytes:
        """Return a line, b"" at the end. Raises HTTPException if it is longer than that."""
        return self._bounded(lambda answer: answer.readline(most_bytes + 1), most_bytes)

    def _bounded(self, read: Callable[[HTTPResponse], bytes], most_bytes: int) -> bytes:
        assert self._answer is not None
        body = read(self._answer)
        if len(body) > most_bytes:
            raise HTTPException(f"an answer of more than {most_bytes} bytes")
        return body

    def close(self) -> None:
        with suppress(OSError):
            self._http.close()
        if self._answer is not None:
            self._answer.close()
        self._socket.close()
