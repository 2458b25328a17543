"""Small HTTP hosts on the loopback address, whose answers tests write byte by byte."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[socket.socket], None]


def sends(*parts: bytes) -> Answer:
    return lambda connection: [connection.sendall(part) for part in parts] and None


def file(body: bytes, *headers: str, status: str = "200 OK") -> Answer:
    head = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return sends("\r\n".join(head).encode(), body)


class Host:
    """A server on the loopback address. Each connection gets the next answer, or the last one."""

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None) -> None:
        self._answers, self._tls = answers, tls
        self.requests: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' * (tls is not None)}://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), self._secured(connection) as connection:
            found = b""
            while b"\r\n\r\n" not in found and (part := connection.recv(4096)):
                found += part
            self.requests.append(found)
            self._answers[min(len(self.requests), len(self._answers)) - 1](connection)

    def _secured(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        try:
            return self._tls.wrap_socket(connection, server_side=True)
        except OSError:
            connection.close()
            raise

    def close(self) -> None:
        self._listener.close()


@contextmanager
def host(*answers: Answer, tls: ssl.SSLContext | None = None) -> Iterator[Host]:
    made = Host(*answers, tls=tls)
    try:
        yield made
    finally:
        made.close()
