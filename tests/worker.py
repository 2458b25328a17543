"""A stock worker: ggml's own RPC server with the CPU device, as a child process."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from offload.errors import WorkerUnavailable
from offload.ggml.library.lib import library
from offload.remote.address import Address
from offload.remote.probe import greet

_CODE = """
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: end with the test
from offload.ggml.rpc import serve_devices
from offload.ggml.threads import cpu_device
serve_devices(sys.argv[1], [cpu_device()], 1)
"""


def has_rpc() -> bool:
    """True if the installed library is compiled with ggml's RPC."""
    return bool(library().ggml_backend_reg_by_name(b"RPC"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Worker:
    """A worker process at `address`, which can be stopped and started again."""

    def __init__(self, port: int | None = None) -> None:
        self.address = Address("127.0.0.1", port or free_port())
        self.start()

    def start(self) -> None:
        """Start the process, and wait until it answers."""
        command = [sys.executable, "-c", _CODE, str(self.address)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for _ in range(100):
            try:
                greet(self.address, connect_s=1.0)
                return
            except WorkerUnavailable:
                assert self._process.poll() is None, "the worker has ended"
                signal.sigtimedwait([], 0.1)
        raise AssertionError("the worker does not answer")

    def hang(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def working() -> Iterator[Worker]:
    worker = Worker()
    try:
        yield worker
    finally:
        worker.kill()
