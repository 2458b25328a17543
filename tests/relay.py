"""A relay between a client and a worker, which counts what crosses the network."""

from __future__ import annotations

import contextlib
import socket
import threading

from offload.remote.address import Address


class Relay:
    """Relays one connection at a time, and counts bytes and answered turns."""

    def __init__(self, to: Address) -> None:
        self._flows, self._drip_s = threading.Event(), 0.0
        self._flows.set()
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

    def stop_in_mid_answer(self, drip_s: float = 0.0) -> None:
        """Pass 4 bytes of the next answer on, and the others when `go_on` is called.

        `drip_s`: pass another byte on each time after this many seconds, 0 none.
        """
        self._drip_s = drip_s
        self._flows.clear()

    def go_on(self) -> None:
        self._flows.set()

    def _pass_slowly(self, data: bytes, target: socket.socket) -> bytes:
        """Pass bytes on until `go_on` is called. Returns the rest."""
        target.sendall(data[:4])
        data = data[4:]
        while not self._flows.wait(self._drip_s or None) and data:
            target.sendall(data[:1])
            data = data[1:]
        return data

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
                if not up and not self._flows.is_set():
                    data = self._pass_slowly(data, target)
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
