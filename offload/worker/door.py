"""Closes ggml's listening socket to all programs but the process that listens for clients.

ggml's server binds a TCP port by itself, and serves any program that connects to it. `--allow` does
not protect this port, because only the listening process checks it. So a packet filter on the
socket drops all packets that do not come from one port, which the listening process holds. The
filter is set before the socket listens.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable
from typing import TypeVar

import psutil

from offload.errors import DeviceUnavailable
from offload.ggml.library.listen_hook import before_listening

LOOPBACK = "127.0.0.1"
_START_S = 30.0  # longest wait for ggml's server to listen
_SO_ATTACH_FILTER = 26  # Linux's number for it; Python has no name for it
_CONNECTED = (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_RECV, psutil.CONN_CLOSE_WAIT)
# Instructions of Linux's socket filters (linux/bpf_common.h)
_LOAD_2, _LOAD_4, _JUMP_EQUAL, _RETURN = 0x28, 0x20, 0x15, 0x06
_TCP_SOURCE, _IP_SOURCE = 0, 0xFFF00000 + 12  # SKF_NET_OFF + the offset in IP's header
_DROP, _ACCEPT = (_RETURN, 0, 0, 0), (_RETURN, 0, 0, 0xFFFFFFFF)
SomeAnswer = TypeVar("SomeAnswer")
_ANYBODY = "anybody with an account on this machine can use this worker"


class Door:
    """The socket on which ggml's server will listen. Nobody can connect until `admit` is called.

    Make it on the thread that then starts ggml's server. Another thread calls `wait`.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []  # what this system cannot do, for the user
        self.port = 0  # 0 until `wait` returns
        self._socket: socket.socket | None = None
        self._is_filtered = threading.Event()
        self._late: OSError | None = None  # why packets can only be dropped after listening
        self._has_filter = True
        try:
            before_listening(self._close_early)
        except OSError as e:
            self._late = e

    def wait(self) -> None:
        """Wait until the socket listens. Its packets are dropped from then on.

        Raises DeviceUnavailable if it does not listen in time. On a system that cannot stop the
        server before it listens, also if another program has connected before packets were dropped.
        """
        deadline = time.monotonic() + _START_S
        if self._late is None:
            self._is_filtered.wait(_START_S)
        elif (states := _until(_listening, deadline)) is not None:
            self._drop_all(states)
        ours = self._socket
        if ours is None or not _until(lambda: _is_listening(ours), deadline):
            raise DeviceUnavailable(f"ggml's server does not listen after {_START_S:g} s")
        self.port = ours.getsockname()[1]
        if self._late is not None and self._has_filter:
            self._refuse_earlier_connections()
            self.notes.append(
                f"warning: {_ANYBODY} in the instant before its packet filter is set, because the "
                f"system cannot set it earlier ({self._late.strerror})"
            )

    def admit(self, port: int) -> None:
        """Accept only packets from this port of 127.0.0.1. Port 0: drop all packets.

        Does nothing on a system that has no packet filters, which `notes` then says.
        """
        assert self._socket is not None, "wait was not called"
        if self._has_filter:
            _filter(self._socket, port)

    def close(self) -> None:
        """Release our descriptor of the socket. The filter stays."""
        if self._socket is not None:
            self._socket.close()

    def _close_early(self, fd: int) -> None:
        if self._socket is None:
            self._drop_all(socket.socket(fileno=os.dup(fd)))
            self._is_filtered.set()

    def _drop_all(self, ours: socket.socket) -> None:
        self._socket = ours
        try:
            _filter(ours, 0)
        except OSError as e:
            self._has_filter = False
            self.notes.append(
                f"warning: {_ANYBODY}, because no packet filter can be set ({e.strerror})"
            )

    def _refuse_earlier_connections(self) -> None:
        for there in psutil.net_connections("tcp4"):
            if there.laddr == (LOOPBACK, self.port) and there.status in _CONNECTED:
                raise DeviceUnavailable(
                    f"another program of this machine connected to port {self.port} when ggml's "
                    "server started; start the client again"
                )


def _filter(ours: socket.socket, port: int) -> None:
    """Let the socket get only packets from this port of 127.0.0.1, or none for port 0."""
    from_port = [
        (_LOAD_2, 0, 0, _TCP_SOURCE),
        (_JUMP_EQUAL, 0, 3, port),
        (_LOAD_4, 0, 0, _IP_SOURCE),
        (_JUMP_EQUAL, 0, 1, int.from_bytes(socket.inet_aton(LOOPBACK))),
        _ACCEPT,
        _DROP,
    ]
    program = from_port if port else [_DROP]
    code = array("B", b"".join(struct.pack("HBBI", *step) for step in program))
    filter_ = struct.pack("HL", len(program), code.buffer_info()[0])
    ours.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _until(asked: Callable[[], SomeAnswer], deadline: float) -> SomeAnswer:
    """Ask until the answer is not empty, or until the deadline. Returns the last answer."""
    while not (answer := asked()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return answer


def _is_listening(ours: socket.socket) -> int:
    return ours.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _listening() -> socket.socket | None:
    """Return the IPv4 socket on which this process listens, or None if there is none yet."""
    for there in psutil.net_connections("tcp4"):
        if (there.pid, there.status) == (os.getpid(), psutil.CONN_LISTEN):
            return socket.socket(fileno=os.dup(there.fd))
    return None
