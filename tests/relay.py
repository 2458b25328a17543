"""A relay between a client and a worker, which counts what crosses the network."""

from __future__ import annotations

import contextlib
import socket
import threading

from offload.remote.address import Address


class Relay:
    """Relays one connection at a time, and counts bytes and answered turns."""

    def __init__(self, to: Address) -> None:
        self.n_bytes, self.n_turns, self._was_up = 0, 0, False
        self._to, self._listener = to, socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._to.host, self._to.port))
                with client, server:
                    back = threading.Thread(target=self._copy, args=(server, client, False))
                    back.start()
                    self._copy(client, server, True)
                    back.join()

    def _copy(self, source: socket.socket, target: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                self.n_bytes += len(data)
                self.n_turns += self._was_up and not up
                self._was_up = up
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
