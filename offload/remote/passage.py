"""Loopback ports of this process, through which ggml's client reaches workers with a secret.

ggml's client cannot prove anything: it connects and speaks its own protocol. So it gets a port of
this process in place of the worker's. Each connection to this port gets a connection to the worker.
On it both sides prove that they know the secret. Then the bytes are passed on.

The port serves this process alone, because others could use the worker through it.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import time

import psutil

from offload.errors import WorkerUnavailable
from offload.ggml import rpc
from offload.ggml.backend import Device
from offload.remote.address import Address
from offload.remote.deadline import connect
from offload.remote.passing import keep_alive, pass_on
from offload.remote.probe import CONNECT_S, count_devices
from offload.remote.secret import Secret

_logger = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_LAST_S = 60.0  # longest wait for a worker to end its connection after ggml has
_AFTER_ACCEPT_S = 0.2  # pause after a connection could not be accepted, for lack of descriptors


class Passage:
    """A loopback port for ggml's connections to one worker. It exists as long as this process."""

    def __init__(self, worker: Address) -> None:
        self._worker = worker
        self._listener = socket.create_server((_LOOPBACK, 0))
        self.endpoint = Address(_LOOPBACK, self._listener.getsockname()[1])
        threading.Thread(target=self._run, name="passage", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                client, peer = self._listener.accept()
            except OSError:
                time.sleep(_AFTER_ACCEPT_S)
                continue
            threading.Thread(
                target=self._serve, args=(client, peer), name="passage", daemon=True
            ).start()

    def _serve(self, client: socket.socket, peer: tuple[str, int]) -> None:
        with client:
            if not _is_ours(peer, client.getsockname()):
                _logger.warning("another program tried to use the worker at %s", self._worker)
                return
            try:
                server = connect(self._worker, CONNECT_S)
            except (OSError, WorkerUnavailable) as e:
                _logger.warning("the worker at %s is lost: %s", self._worker, e)
                return
            with server:
                server.end_in(None)
                keep_alive(server)
                pass_on(client, server, _LAST_S)


def _is_ours(peer: tuple[str, int], here: tuple[str, int]) -> bool:
    """True if the connection from `peer` to `here` was made by this process."""
    return any(
        (it.laddr, it.raddr) == (peer, here) for it in psutil.Process().net_connections("tcp4")
    )


@functools.cache
def _passage_of(worker: Address, secret: Secret | None) -> Passage:  # equal addresses, two secrets
    return Passage(worker)


def endpoint_of(worker: Address) -> Address:
    """Return the address to which ggml's client connects: the worker's, or a passage to it."""
    if worker.secret is None:
        return worker
    return _passage_of(worker, worker.secret).endpoint


def devices_of(worker: Address) -> list[Device]:
    """Let ggml connect to a worker, and return the worker's devices. Raises WorkerUnavailable."""
    return rpc.add_worker(str(endpoint_of(worker)), count_devices(worker), shown=str(worker))
