"""ggml asks a worker again how many devices it offers, after our own question. A worker may lie."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from program import ENVIRONMENT
from worker import has_rpc

from offload.ggml.rpc import VERSION
from offload.remote.address import Address
from offload.remote.probe import COUNT_DEVICES, GREETING, count_devices, greeting_answer

pytestmark = pytest.mark.skipif(not has_rpc(), reason="libllama is compiled without ggml's RPC")

_MOST_BYTES = 4 << 30  # address space of the client, so that a failing test harms nobody
_CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]),) * 2)
from offload.errors import DeviceUnavailable
from offload.ggml.rpc import add_worker
try:
    add_worker(sys.argv[1], 1)
except DeviceUnavailable as e:
    print(e)
"""


@contextmanager
def liar(*counts: int) -> Iterator[Address]:
    """Serve ggml's greeting. Each connection is told the next one of `counts`."""
    left = list(counts)

    def serve(connection: socket.socket) -> None:
        with connection:
            if connection.recv(len(GREETING), socket.MSG_WAITALL) != GREETING:
                return
            connection.sendall(greeting_answer((*VERSION, 0)))
            while connection.recv(len(COUNT_DEVICES), socket.MSG_WAITALL) == COUNT_DEVICES:
                connection.sendall(struct.pack("<QI", 4, left.pop(0)))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield Address("127.0.0.1", int(listener.getsockname()[1]))
        listener.shutdown(socket.SHUT_RDWR)


def added(worker: Address) -> subprocess.CompletedProcess[str]:
    """Connect to the worker, which has said before that it offers one device."""
    command = [sys.executable, "-c", _CODE, str(worker), str(_MOST_BYTES)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)


def test_another_number_at_the_second_question_is_refused() -> None:
    with liar(1, 3) as worker:
        assert count_devices(worker) == 1
        said = added(worker).stdout
        assert f"the worker at {worker} offered 1 devices, and then 3" in said


def test_devices_that_would_fill_memory_end_the_client_with_a_sentence() -> None:
    with liar(1, 2**32 - 1) as worker:
        assert count_devices(worker) == 1
        done = added(worker)
        assert done.returncode == 1
        assert done.stderr == (
            f"specoffload: the worker at {worker} claims so many devices that they fill memory: "
            "it is no RPC server of ggml, or it is hostile (--rpc)\n"
        )
