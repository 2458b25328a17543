"""Measures how fast a CUDA stream and the host tell each other something without a synchronisation.

docs/gpu.md prices split layers by such latencies (The price of a split layer). The calls are those
of https://docs.nvidia.com/cuda/archive/13.0.0/cuda-driver-api/group__CUDA__MEMOP.html.
"""

from __future__ import annotations

import ctypes as C
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

N_TIMES = 200
ROW_BYTES = 8192  # one row of Qwen3-30B
_GIVE_UP_S = 5.0
_SETTLE_S = 100e-6  # until the stream is surely at the wait
_TO_DEVICE, _TO_HOST = 1, 2
_NO_TIMING, _NON_BLOCKING = 2, 1


class NoWords(Exception):
    """The device or its driver lacks the calls, or refused one."""


class Words:
    """Two streams of the current CUDA device, an event, two words and a row of pinned memory."""

    def __init__(self, maps: Path = Path("/proc/self/maps")) -> None:
        """Raises NoWords."""
        lines = maps.read_text("utf-8", errors="replace").splitlines()
        paths = {line.split(maxsplit=5)[-1] for line in lines if "libcudart.so" in line}
        if not paths:
            raise NoWords("no CUDA runtime is loaded")
        self._runtime = C.CDLL(min(paths))  # already loaded, so this only finds it
        try:
            driver = C.CDLL("libcuda.so.1")
            self._write, self._wait = (
                getattr(driver, f"cuStream{name}Value32_v2") for name in ("Write", "Wait")
            )
        except (OSError, AttributeError) as e:
            raise NoWords(f"the driver has no stream memory operations: {e}") from e
        for call in (self._write, self._wait):
            call.argtypes = [C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint]
        self._freed: list[tuple[str, C.c_void_p]] = []
        self._first, self._second = (
            self._made("StreamCreateWithFlags", "StreamDestroy", C.c_uint(_NON_BLOCKING))
            for _ in range(2)
        )
        self._event = self._made("EventCreateWithFlags", "EventDestroy", C.c_uint(_NO_TIMING))
        self._device = self._made("Malloc", "Free", C.c_size_t(ROW_BYTES))
        self._row = self._made("HostAlloc", "FreeHost", C.c_size_t(ROW_BYTES), C.c_uint(0))
        words = self._made("HostAlloc", "FreeHost", C.c_size_t(128), C.c_uint(0))
        assert words.value is not None
        self._asked_at, self._answered_at = words.value, words.value + 64  # a cache line each
        self._asked = C.c_uint32.from_address(self._asked_at)
        self._answered = C.c_uint32.from_address(self._answered_at)
        self._asked.value = self._answered.value = self._n = 0

    def close(self) -> None:
        """Free everything. A stream that waits would block this, so it is woken first."""
        self._asked.value = self._n
        self._runtime.cudaDeviceSynchronize()
        while self._freed:
            name, made = self._freed.pop()
            getattr(self._runtime, f"cuda{name}")(made)

    def _made(self, name: str, free: str, *arguments: Any) -> C.c_void_p:
        found = C.c_void_p()
        self._call(name, C.byref(found), *arguments)
        self._freed.append((free, found))
        return found

    def _call(self, name: str, *arguments: Any) -> None:
        error = getattr(self._runtime, f"cuda{name}")(*arguments)
        if error:
            raise NoWords(f"cuda{name} failed with error {error}")

    def _write_on(self, stream: C.c_void_p) -> None:
        if error := self._write(stream, self._answered_at, self._n, 0):
            raise NoWords(f"cuStreamWriteValue32 failed with error {error}")

    def _wait_on(self, stream: C.c_void_p) -> None:
        if error := self._wait(stream, self._asked_at, self._n, 0):
            raise NoWords(f"cuStreamWaitValue32 failed with error {error}")

    def _await_answer(self) -> None:
        until_s = time.monotonic() + _GIVE_UP_S
        while self._answered.value != self._n:
            if self._answered.value != self._n and time.monotonic() > until_s:
                raise NoWords(f"no answer of the stream within {_GIVE_UP_S:.0f} s")

    def _round_trip_s(self, between: Callable[[], C.c_void_p]) -> float:
        """Seconds from the host's word to the stream's answer. `between` enqueues what lies between
        them, and returns the stream that answers."""
        self._n += 1
        self._wait_on(self._first)
        self._write_on(between())
        time.sleep(_SETTLE_S)
        start_s = time.perf_counter()
        self._asked.value = self._n
        self._await_answer()
        return time.perf_counter() - start_s

    def _enqueue_s(self) -> float:
        """The host's seconds for one call."""
        self._n += 1
        start_s = time.perf_counter()
        self._write_on(self._first)
        taken_s = time.perf_counter() - start_s
        self._await_answer()
        return taken_s

    def rows(self) -> list[dict[str, Any]]:
        """Median times of each step. Raises NoWords."""

        def nothing() -> C.c_void_p:
            return self._first

        def event() -> C.c_void_p:
            self._call("EventRecord", self._event, self._first)
            self._call("StreamWaitEvent", self._second, self._event, C.c_uint(0))
            return self._second

        def copied(to: C.c_void_p, source: C.c_void_p, kind: int) -> C.c_void_p:
            self._call("MemcpyAsync", to, source, C.c_size_t(ROW_BYTES), C.c_int(kind), self._first)
            return self._first

        ways: dict[str, Callable[[], float]] = {
            "enqueue a write of a word": self._enqueue_s,
            "a word to a waiting stream, and its word back": lambda: self._round_trip_s(nothing),
            "the same, across an event to a second stream": lambda: self._round_trip_s(event),
            f"the same, with a copy of {ROW_BYTES} bytes to the device": lambda: self._round_trip_s(
                lambda: copied(self._device, self._row, _TO_DEVICE)
            ),
            f"the same, with a copy of {ROW_BYTES} bytes to the host": lambda: self._round_trip_s(
                lambda: copied(self._row, self._device, _TO_HOST)
            ),
        }
        found = []
        for step, measured_s in ways.items():
            measured_s()
            taken_s = statistics.median(measured_s() for _ in range(N_TIMES))
            found.append({"step": step, "taken_s": taken_s})
        return found


def measure_words() -> list[dict[str, Any]]:
    """The rows of the current CUDA device. Raises NoWords."""
    words = Words()
    try:
        return words.rows()
    finally:
        words.close()
