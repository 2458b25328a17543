"""Watches the connections to workers, and ends the process with one sentence if one is lost.

ggml's client waits for ever for a worker that hangs, and aborts if a worker closes the connection.
No exception can pass from ggml to the caller. So this module reads the kernel's state of ggml's own
sockets, which costs nothing in a decode. The server then starts the engine process again
(`server/engine/client.py`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import ParamSpec, TypeVar

from offload.ggml.library import interrupt, log
from offload.remote.address import Address
from offload.remote.probe import gone

P = ParamSpec("P")
R = TypeVar("R")

# Factor of the patience while a model loads, because the weights of other devices are read between
# two messages to a worker.
LOAD_FACTOR = 6
_LOOK_S = 0.5
_AFTER_CTRL_C_S = 5.0  # most seconds of silence after Ctrl-C, which cannot end ggml's wait
_ESTABLISHED = 1
# Offsets in Linux's tcp_info: state, last_data_sent and last_data_recv (ms ago), notsent_bytes.
_STATE, _LAST_SENT, _LAST_RECEIVED, _NOT_SENT = 0, 44, 52, 144
_INFO_BYTES = 192
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


@dataclass(frozen=True)
class Link:
    """The kernel's view of one connection. Ages are in seconds."""

    worker: Address
    is_open: bool
    sent_s: float  # age of the last byte that was sent
    received_s: float  # age of the last byte that arrived
    has_unsent: bool  # True: the worker does not read what was sent


def is_silent(link: Link, busy_s: float, patience_s: float) -> bool:
    """True if the worker has owed an answer, or has read nothing, for `patience_s` seconds.

    `busy_s`: seconds since the current call of the library began. A worker owes an answer if this
    call sent something to it, and nothing has arrived since.
    """
    owes = link.has_unsent or (link.sent_s <= busy_s and link.sent_s <= link.received_s)
    return owes and min(link.sent_s, link.received_s, busy_s) > patience_s


class Watch:
    """Watches this process's connections to workers, on a thread of its own. Close it.

    `stop` gets a sentence if a worker is lost, and ends the process. A worker is lost if it closes
    a connection, or if it owes an answer for more than `patience_s` seconds.
    """

    def __init__(
        self,
        workers: Sequence[Address],
        patience_s: float,
        stop: Callable[[str], None] = log.stop,
    ) -> None:
        self._workers, self._patience_s, self._stop = tuple(workers), patience_s, stop
        self._busy_since: float | None = None
        self._factor = 1
        self._ended = threading.Event()
        self._known: dict[int, tuple[int, Address]] = {}  # (inode, worker) by descriptor
        self._peers = {peer: w for w in self._workers for peer in peers_of(w)}
        self._failing = threading.Lock()
        log.explainers.append(self.explain)
        threading.Thread(target=self._run, name="worker watch", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(ValueError):  # a second call
            log.explainers.remove(self.explain)

    def begin(self, factor: int = 1) -> None:
        """Watch for silence until `end`. Silence of `factor` times the patience is allowed."""
        self._factor, self._busy_since = factor, monotonic()

    def end(self) -> None:
        self._busy_since = None

    def during(self, function: Callable[P, R]) -> Callable[P, R]:
        """Wrap `function` so that silence is watched for while it runs."""

        def watched(*arguments: P.args, **named: P.kwargs) -> R:
            self.begin()
            try:
                return function(*arguments, **named)
            finally:
                self.end()

        return watched

    def explain(self, words: str) -> str | None:
        """Return the sentence for an assertion of ggml, or None if no worker caused it."""
        if "ggml-rpc" not in words:
            return None
        with self._failing:
            lost = [str(link.worker) for link in self._links() if not link.is_open]
        return gone(" or ".join(lost or map(str, self._workers)))

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with self._failing:
                found = self._complaint()
            if found is not None:
                self._stop(found)
                return

    def _complaint(self) -> str | None:
        since, patience_s = self._busy_since, self._patience_s * self._factor
        if interrupt.is_ctrl_c():
            patience_s = min(patience_s, _AFTER_CTRL_C_S)
        for link in self._links():
            if not link.is_open:
                return gone(str(link.worker))
            if since is not None and is_silent(link, monotonic() - since, patience_s):
                return (
                    f"the worker at {link.worker} has not answered for {patience_s:g} s: it hangs "
                    "or its network is down (--rpc-timeout, if it only takes that long)"
                )
        return None

    def _links(self) -> Iterator[Link]:
        """Yield the connections that ggml has open to the workers."""
        now_known: dict[int, tuple[int, Address]] = {}
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            with contextlib.suppress(OSError):  # closed meanwhile, or no socket
                if not os.get_inheritable(descriptor):
                    continue  # a socket of Python's, such as that of `ask_for`
                inode = os.fstat(descriptor).st_ino
                found = socket.socket(fileno=descriptor)
                try:
                    worker = self._worker_of(found, descriptor, inode)
                    if worker is None:
                        continue
                    if descriptor not in self._known:
                        _keep_alive(found)
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                finally:
                    found.detach()  # ggml closes it
                now_known[descriptor] = inode, worker
                yield _link(worker, info)
        self._known = now_known

    def _worker_of(self, found: socket.socket, descriptor: int, inode: int) -> Address | None:
        if found.type != socket.SOCK_STREAM:
            return None
        try:
            return self._peers.get(found.getpeername()[:2])
        except OSError:  # the connection was reset, or is a listener
            known = self._known.get(descriptor)
            return known[1] if known is not None and known[0] == inode else None


def _link(worker: Address, info: bytes) -> Link:
    sent_ms, received_ms, n_not_sent = (
        struct.unpack_from("=I", info, at)[0] if len(info) >= at + 4 else 0
        for at in (_LAST_SENT, _LAST_RECEIVED, _NOT_SENT)
    )
    is_open = info[_STATE] == _ESTABLISHED
    return Link(worker, is_open, sent_ms / 1e3, received_ms / 1e3, n_not_sent > 0)


def peers_of(worker: Address) -> list[tuple[str, int]]:
    """Return the socket addresses of a worker, as `getpeername` names them."""
    kinds = socket.AF_INET, socket.SOCK_STREAM
    with contextlib.suppress(OSError):  # `greet` reports unknown names
        found = socket.getaddrinfo(worker.host, worker.port, *kinds)
        return [(str(peer[0]), int(peer[1])) for *_, peer in found]
    return []


def _keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out within half a minute that an idle worker's machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
