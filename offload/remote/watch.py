"""Watches the connections to workers, and ends the process with one sentence if one is lost.

ggml's client waits for ever for a worker that hangs, and aborts if a worker closes the connection.
No exception can pass from ggml to the caller. So this module reads the kernel's state of ggml's own
sockets, which costs nothing in a decode. The server then starts the engine process again
(`server/engine/client.py`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import ParamSpec, TypeVar

from offload.ggml.library import interrupt, log
from offload.remote.address import Address, RemoteOptions
from offload.remote.passage import endpoint_of
from offload.remote.passing import keep_alive
from offload.remote.probe import gone

_logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

# Factor of the patience while a model loads, because the weights of other devices are read between
# two messages to a worker.
LOAD_FACTOR = 6
_LOOK_S = 0.5
_AFTER_CTRL_C_S = 5.0  # most seconds of silence after Ctrl-C, which cannot end ggml's wait
_ESTABLISHED = 1
# Offsets in Linux's tcp_info: state, last_data_sent and last_data_recv (ms ago), bytes_acked and
# bytes_received (64 bits), notsent_bytes.
_STATE, _LAST_SENT, _LAST_RECEIVED, _ACKED, _RECEIVED, _NOT_SENT = 0, 44, 52, 120, 128, 144
_INFO_BYTES = 192
# Least rate of an answer that counts as coming. A worker that drips bytes holds its client, too.
_LEAST_BYTES_PER_S = 1024
_NO_DESCRIPTOR = 1 << 30
# Linux's number of recvfrom, which glibc's recv calls, by machine (asm/unistd.h).
_RECVFROM = {"x86_64": 45, "aarch64": 207, "riscv64": 207}.get(platform.machine())


@dataclass(frozen=True)
class ConnectionState:
    """The kernel's view of one connection. Ages are in seconds."""

    worker: Address
    is_open: bool
    sent_s: float  # age of the last byte that was sent
    received_s: float  # age of the last byte that arrived
    has_unsent: bool  # True: the worker does not read what was sent
    acked_bytes: int = 0  # bytes of questions that the worker's kernel has taken, in all
    received_bytes: int = 0  # bytes of answers that have arrived, in all
    is_awaited: bool | None = None  # True: a thread waits for more of an answer; None: unknown

    def owes(self, busy_s: float | None) -> bool:
        """True if the worker has not wholly answered what it was asked.

        `busy_s`: seconds since the current call of the library began, None between calls. They
        matter only where the kernel does not tell what threads wait for: then a worker owes an
        answer if this call sent something, and nothing has arrived since.
        """
        if self.has_unsent:
            return True
        if self.is_awaited is not None:
            return self.is_awaited
        return busy_s is not None and self.sent_s <= min(busy_s, self.received_s)


@dataclass(frozen=True)
class Owing:
    """Since when an answer is owed without progress, and the bytes that had been moved then."""

    since_s: float
    acked_bytes: int
    received_bytes: int


def owing(before: Owing | None, link: ConnectionState, now_s: float, least_bytes: float) -> Owing:
    """Return since when a worker that owes an answer makes no progress.

    `before`: the last result for this connection, None if nothing was owed then. Progress is a
    further question, which ggml sends after a whole answer, or `least_bytes` of an answer or of a
    question that the worker has begun to read.
    """
    if before is not None:
        n_acked = link.acked_bytes - before.acked_bytes
        n_received = link.received_bytes - before.received_bytes
        is_next = n_acked > 0 and not link.has_unsent
        if not is_next and max(n_acked, n_received) < least_bytes:
            return before
    return Owing(now_s, link.acked_bytes, link.received_bytes)


@contextlib.contextmanager
def watching(options: RemoteOptions) -> Iterator[ConnectionWatch | None]:
    """Watch the workers in the block, which begins with asking them for their devices.

    Yields None if there are no workers.
    """
    if not options.is_used:
        yield None
        return
    with contextlib.closing(ConnectionWatch(options.workers, options.patience_s)) as watch:
        watch.begin(LOAD_FACTOR)
        yield watch


class ConnectionWatch:
    """Watches this process's connections to workers, on a thread of its own. Close it.

    `stop` gets a sentence if a worker is lost, and ends the process. A worker is lost if it closes
    a connection, or if it owes an answer, or the rest of one, for more than `patience_s` seconds.
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
        self._owing: dict[int, Owing] = {}  # connections that owe an answer, by inode
        self._peers = {peer: w for w in self._workers for peer in _ggml_peers_of(w)}
        self._failing = threading.Lock()
        _warn_if_hidden()
        log.explainers.append(self.explain)
        threading.Thread(target=self._run, name="worker watch", daemon=True).start()

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(ValueError):  # a second call
            log.explainers.remove(self.explain)

    def begin(self, factor: int = 1) -> None:
        """Note that a call of the library begins, which lasts until `end`.

        Silence of `factor` times the patience is allowed in it.
        """
        self._factor, self._busy_since = factor, monotonic()

    def end(self) -> None:
        self._factor, self._busy_since = 1, None

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
            lost = [str(link.worker) for _, link in self._links() if not link.is_open]
        return gone(" or ".join(lost or map(str, self._workers)))

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            with self._failing:
                reason = self._reason()
            if reason is not None:
                self._stop(reason)
                return

    def _reason(self) -> str | None:
        since, patience_s, now_s = self._busy_since, self._patience_s * self._factor, monotonic()
        if interrupt.is_ctrl_c():
            patience_s = min(patience_s, _AFTER_CTRL_C_S)
        now_owing: dict[int, Owing] = {}
        for inode, link in self._links():
            if not link.is_open:
                return gone(str(link.worker))
            if not link.owes(None if since is None else now_s - since):
                continue
            least_bytes = _LEAST_BYTES_PER_S * patience_s
            owed = owing(self._owing.get(inode), link, now_s, least_bytes)
            now_owing[inode] = owed
            if now_s - owed.since_s > patience_s:
                return (
                    f"the worker at {link.worker} has not answered for {patience_s:g} s: it hangs "
                    "or its network is down (--rpc-timeout, if it only takes that long)"
                )
        self._owing = now_owing
        return None

    def _links(self) -> Iterator[tuple[int, ConnectionState]]:
        """Yield the connections that ggml has open to the workers, with their inodes."""
        now_known: dict[int, tuple[int, Address]] = {}
        for name in os.listdir("/proc/self/fd"):
            descriptor = int(name)
            with contextlib.suppress(OSError):  # closed meanwhile, or no socket
                if not os.get_inheritable(descriptor):
                    continue  # a socket of Python's, such as that of `ask_for`
                inode = os.fstat(descriptor).st_ino
                connection = socket.socket(fileno=descriptor)
                try:
                    worker = self._worker_of(connection, descriptor, inode)
                    if worker is None:
                        continue
                    if descriptor not in self._known:
                        keep_alive(connection)
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
                finally:
                    connection.detach()  # ggml closes it
                now_known[descriptor] = inode, worker
                yield inode, _link(worker, info, descriptor)
        self._known = now_known

    def _worker_of(self, connection: socket.socket, descriptor: int, inode: int) -> Address | None:
        if connection.type != socket.SOCK_STREAM:
            return None
        try:
            return self._peers.get(connection.getpeername()[:2])
        except OSError:  # the connection was reset, or is a listener
            known = self._known.get(descriptor)
            return known[1] if known is not None and known[0] == inode else None


def _link(worker: Address, info: bytes, descriptor: int) -> ConnectionState:
    def number(kind: str, at: int) -> int:
        is_there = len(info) >= at + struct.calcsize(kind)
        return int(struct.unpack_from(kind, info, at)[0]) if is_there else 0

    return ConnectionState(
        worker,
        is_open=info[_STATE] == _ESTABLISHED,
        sent_s=number("=I", _LAST_SENT) / 1e3,
        received_s=number("=I", _LAST_RECEIVED) / 1e3,
        has_unsent=number("=I", _NOT_SENT) > 0,
        acked_bytes=number("=Q", _ACKED),
        received_bytes=number("=Q", _RECEIVED),
        is_awaited=_is_awaited(descriptor),
    )


def _is_awaited(descriptor: int) -> bool | None:
    """True if a thread of this process waits in recv on this descriptor. None: unknown.

    ggml's thread waits there from the first to the last byte of an answer, and at no other time.
    Needs a kernel that shows what a process's own threads wait for (/proc/PID/task/*/syscall).
    """
    if _RECVFROM is None:
        return None
    waits = f"{_RECVFROM} {descriptor:#x} ".encode()
    try:
        for task in os.listdir("/proc/self/task"):
            # A thread may end meanwhile, which is not the same as a kernel without these files.
            with contextlib.suppress(ProcessLookupError), _opened(task) as file:
                if os.read(file, len(waits)) == waits:
                    return True
    except OSError:
        return None
    return False


@functools.cache
def _warn_if_hidden() -> None:
    """Warn, once in a process, if the kernel does not show what threads wait for."""
    if _is_awaited(_NO_DESCRIPTOR) is None:
        _logger.warning(
            "this system does not show what threads wait for (/proc/PID/task/*/syscall), so a "
            "worker that hangs in the middle of an answer is not noticed"
        )


@contextlib.contextmanager
def _opened(task: str) -> Iterator[int]:
    try:
        file = os.open(f"/proc/self/task/{task}/syscall", os.O_RDONLY)
    except FileNotFoundError:
        if os.path.exists(f"/proc/self/task/{task}"):
            raise
        raise ProcessLookupError from None
    try:
        yield file
    finally:
        os.close(file)


def peers_of(worker: Address) -> list[tuple[str, int]]:
    """Return the socket addresses of a worker, as `getpeername` names them."""
    kinds = socket.AF_INET, socket.SOCK_STREAM
    with contextlib.suppress(OSError):  # `greet` reports unknown names
        infos = socket.getaddrinfo(worker.host, worker.port, *kinds)
        return [(str(peer[0]), int(peer[1])) for *_, peer in infos]
    return []


def _ggml_peers_of(worker: Address) -> list[tuple[str, int]]:
    """Return the socket addresses to which ggml connects for a worker."""
    return peers_of(endpoint_of(worker))
