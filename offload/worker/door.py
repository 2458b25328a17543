"""Closes ggml's listening socket to all programs but the process that listens for clients.

ggml's server binds a TCP port by itself, and serves any program that connects to it. `--allow` does
not protect this port, because only the listening process checks it. So a packet filter on the
socket drops all packets that do not come from one port, which the listening process holds.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from array import array

import psutil

from offload.errors import DeviceUnavailable

LOOPBACK = "127.0.0.1"
_START_S = 30.0  # longest wait for ggml's server to listen
_SO_ATTACH_FILTER = 26  # Linux's number for it; Python has no name for it
_CONNECTED = (psutil.CONN_ESTABLISHED, psutil.CONN_SYN_RECV, psutil.CONN_CLOSE_WAIT)
# Instructions of Linux's socket filters (linux/bpf_common.h)
_LOAD_2, _LOAD_4, _JUMP_EQUAL, _RETURN = 0x28, 0x20, 0x15, 0x06
_TCP_SOURCE, _IP_SOURCE = 0, 0xFFF00000 + 12  # SKF_NET_OFF + the offset in IP's header


class Door:
    """The listening socket of this process. Nobody can connect until `admit` is called."""

    def __init__(self) -> None:
        """Wait until this process listens on an IPv4 address, then drop all packets to the socket.

        Raises DeviceUnavailable if the process does not listen in time, or if another program has
        connected before packets were dropped.
        """
        self._socket = _listening()
        self.port: int = self._socket.getsockname()[1]
        self.admit(0)
        for there in psutil.net_connections("tcp4"):
            if there.laddr == (LOOPBACK, self.port) and there.status in _CONNECTED:
                raise DeviceUnavailable(
                    f"another program of this machine connected to port {self.port} when ggml's "
                    "server started; start the client again"
                )

    def admit(self, port: int) -> None:
        """Accept only packets from this port of 127.0.0.1. Port 0: drop all packets."""
        drop = (_RETURN, 0, 0, 0)
        accept = (_RETURN, 0, 0, 0xFFFFFFFF)
        program = [
            (_LOAD_2, 0, 0, _TCP_SOURCE),
            (_JUMP_EQUAL, 0, 3, port),
            (_LOAD_4, 0, 0, _IP_SOURCE),
            (_JUMP_EQUAL, 0, 1, int.from_bytes(socket.inet_aton(LOOPBACK))),
            accept if port else drop,
            drop,
        ]
        code = array("B", b"".join(struct.pack("HBBI", *step) for step in program))
        filter_ = struct.pack("HL", len(program), code.buffer_info()[0])
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _listening() -> socket.socket:
    """Wait until this process listens on an IPv4 address, and return that socket."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        for there in psutil.net_connections("tcp4"):
            if (there.pid, there.status) == (os.getpid(), psutil.CONN_LISTEN):
                return socket.socket(fileno=os.dup(there.fd))
    raise DeviceUnavailable(f"ggml's server does not listen after {_START_S:g} s")
