"""Sends pickled messages, each after its length, between two processes over a pair of sockets.

multiprocessing's pipe needs threads on both sides, and waking a thread costs as much as all other
work for a token. Here the API process reads and writes on its event loop, and the engine process
between two steps.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any, Generic, TypeVar

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18
_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")


def packed(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits bytes, which arrive in any portions, into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add `data`, and return the messages that are now complete.

        Raises what pickle raises for bytes that are no message.
        """
        self._rest += data
        found: list[Any] = []
        at = 0
        while len(self._rest) >= at + _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(self._rest, at)[0]
            if len(self._rest) < end:
                break
            found.append(pickle.loads(self._rest[at + _LENGTH.size : end]))
            at = end
        del self._rest[:at]
        return found


class Channel(Generic[_Sent, _Received]):
    """One end of a connection. One thread may send, and one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames()
        self.fileno = end.fileno
        self.close = end.close

    def send(self, message: _Sent) -> None:
        """Send a message. Blocks while the other end is slow. Raises OSError if it is gone."""
        self._socket.sendall(packed(message))

    def send_some(self, data: bytearray) -> int:
        """Send packed messages without waiting; returns the number of bytes that were taken. Raises
        OSError when the other end is gone."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def receive(self) -> list[_Received]:
        """Wait for a message; return all that arrived. Raises EOFError at the end, or OSError."""
        while not (found := self._read(0)):
            pass
        return found

    def received(self) -> list[_Received]:
        """Return the messages that have arrived, if any. Raises EOFError at the end, or OSError."""
        try:
            return self._read(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []

    def _read(self, flags: int) -> list[_Received]:
        data = self._socket.recv(_READ_BYTES, flags)
        if not data:
            raise EOFError
        return self._frames.feed(data)


def channels() -> tuple[Channel[Any, Any], Channel[Any, Any]]:
    """Return both ends of a new connection."""
    a, b = socket.socketpair()
    return Channel(a), Channel(b)
