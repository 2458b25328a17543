"""Another user of the GPU in this process: makes a torch draft's CUDA calls on its own thread.

torch without CUDA cannot run its kernels here. Its other calls go to the same CUDA runtime as
ggml's: memory, copies and events on non-blocking streams, captures and launches.
"""

from __future__ import annotations

import ctypes as C
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_runtime = C.CDLL(None)  # the preloaded stand-in

GLOBAL, THREAD_LOCAL, RELAXED = range(3)  # capture modes
_NON_BLOCKING = 1
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3
_N_BYTES = 1 << 16
_CAPTURE_S = 0.002  # time for the other threads while a capture is open


class CudaError(Exception):
    """A refused call; `code` is its cudaError_t."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: error {code}")
        self.code = code


def call(name: str, *arguments: object) -> None:
    """Call the CUDA runtime. Raises CudaError if it refuses."""
    code = getattr(_runtime, name)(*arguments)
    if code:
        raise CudaError(name, code)


def made(name: str, *arguments: object) -> C.c_void_p:
    """Make a call. Returns the handle or address that it writes through its first argument."""
    handle = C.c_void_p()
    call(name, C.byref(handle), *arguments)
    return handle


def new_stream(*, blocking: bool = False) -> C.c_void_p:
    return made("cudaStreamCreateWithFlags", C.c_uint(0 if blocking else _NON_BLOCKING))


def copy(to: C.c_void_p, source: C.c_void_p, kind: int, stream: C.c_void_p | None) -> None:
    call("cudaMemcpyAsync", to, source, C.c_size_t(_N_BYTES), kind, stream)


class Neighbour:
    """Allocates, copies, captures and launches in a loop, and checks the copied bytes."""

    def __init__(self, mode: int) -> None:
        """`mode` is the capture mode: GLOBAL, THREAD_LOCAL or RELAXED."""
        self.n_rounds = 0
        self.error: Exception | None = None
        self._mode = mode
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            streams = new_stream(), new_stream()
            events = [made("cudaEventCreateWithFlags", C.c_uint(2)) for _ in range(3)]
            host = made("cudaHostAlloc", C.c_size_t(_N_BYTES), C.c_uint(0))
            while not self._stopped.is_set():
                self._round(streams, events, host)
                self.n_rounds += 1
            call("cudaFreeHost", host)
            for event in events:
                call("cudaEventDestroy", event)
            for stream in streams:
                call("cudaStreamDestroy", stream)
        except Exception as error:
            self.error = error

    def _round(
        self, streams: tuple[C.c_void_p, ...], events: list[C.c_void_p], host: C.c_void_p
    ) -> None:
        """Capture and launch a graph that copies `source` to `middle`, and `middle` to `target`.

        The two copies are on different streams.
        """
        main, side = streams
        fork, join, done = events
        source, middle, target = (made("cudaMalloc", C.c_size_t(_N_BYTES)) for _ in range(3))
        value = 1 + self.n_rounds % 200
        C.memset(host, value, _N_BYTES)
        copy(source, host, _HOST_TO_DEVICE, main)
        call("cudaEventRecord", done, main)
        call("cudaEventSynchronize", done)
        call("cudaStreamBeginCapture", main, self._mode)
        copy(middle, source, _DEVICE_TO_DEVICE, main)
        call("cudaEventRecord", fork, main)
        call("cudaStreamWaitEvent", side, fork, 0)
        copy(target, middle, _DEVICE_TO_DEVICE, side)
        call("cudaEventRecord", join, side)
        call("cudaStreamWaitEvent", main, join, 0)
        time.sleep(_CAPTURE_S)
        graph = made_by_capture(main)
        instance = made("cudaGraphInstantiate", graph, C.c_ulonglong(0))
        call("cudaGraphDestroy", graph)
        call("cudaGraphLaunch", instance, main)
        C.memset(host, 0, _N_BYTES)
        copy(host, target, _DEVICE_TO_HOST, main)
        call("cudaStreamSynchronize", main)
        assert C.string_at(host, _N_BYTES) == bytes([value]) * _N_BYTES, "other bytes came back"
        call("cudaGraphExecDestroy", instance)
        for address in (source, middle, target):
            call("cudaFree", address)


def made_by_capture(stream: C.c_void_p) -> C.c_void_p:
    graph = C.c_void_p()
    call("cudaStreamEndCapture", stream, C.byref(graph))
    return graph


@contextmanager
def beside(mode: int) -> Iterator[Neighbour]:
    """Run a neighbour until the block ends, then raise its error if it had one."""
    neighbour = Neighbour(mode)
    neighbour.start()
    try:
        yield neighbour
    finally:
        neighbour.stop()
    if neighbour.error:
        raise neighbour.error
