"""Passes bytes on between two connections, and keeps idle connections watched."""

from __future__ import annotations

import contextlib
import socket
import threading

_PIECE_BYTES = 1 << 20
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that an idle peer's machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def pass_on(client: socket.socket, server: socket.socket, last_s: float) -> bool:
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
