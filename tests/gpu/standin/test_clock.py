"""The stand-in's virtual clock: what copies and waits take, and steps of the real program."""

from __future__ import annotations

import ctypes as C
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
LINK, VRAM = 1e9, 4e9  # bytes/s
COPY_S = 64 * MIB / LINK
TO_DEVICE, TO_HOST = 1, 2


class Cuda:
    """The runtime's functions, with a clock whose calls and latencies take no time."""

    def __init__(self) -> None:
        self.library = C.CDLL(None)
        self.library.standin_now_s.restype = C.c_double
        self.library.standin_set_rate.argtypes = [C.c_char_p, C.c_double]
        rates = {"link_bytes_per_s": LINK, "vram_bytes_per_s": VRAM, "staging_bytes_per_s": LINK,
                 "host_scale": 0.0}  # fmt: skip
        fixed = ("kernel_s", "copy_s", "launch_call_s", "copy_call_s", "event_call_s",
                 "sync_call_s", "idle_sync_call_s")  # fmt: skip
        for name, value in {**rates, **dict.fromkeys(fixed, 0.0)}.items():
            assert self.library.standin_set_rate(name.encode(), value) == 0
        assert self.library.standin_set_rate(b"no such rate", 1.0) == 1

    def now_s(self) -> float:
        return float(self.library.standin_now_s())

    def call(self, name: str, *arguments: Any) -> None:
        assert getattr(self.library, f"cuda{name}")(*arguments) == 0

    def made(self, name: str, *arguments: Any) -> C.c_void_p:
        """What a function returns through its first argument."""
        found = C.c_void_p()
        self.call(name, C.byref(found), *arguments)
        return found

    def stream(self) -> C.c_void_p:
        return self.made("StreamCreateWithFlags", 1)  # non-blocking

    def copy(self, to: Any, source: Any, kind: int, stream: C.c_void_p) -> None:
        self.call("MemcpyAsync", to, source, C.c_size_t(64 * MIB), kind, stream)


def steps(cuda: Cuda) -> dict[str, float]:
    """Seconds of copies of 64 MiB in various orders, in units of one copy."""
    device = cuda.made("Malloc", C.c_size_t(128 * MIB))
    pinned = cuda.made("HostAlloc", C.c_size_t(128 * MIB), 0)
    pageable = C.create_string_buffer(64 * MIB)
    a, b = cuda.stream(), cuda.stream()
    event = cuda.made("EventCreateWithFlags", 2)
    upper = C.c_void_p((device.value or 0) + 64 * MIB)

    def both(first: int, second: int) -> None:
        for kind, stream in ((first, a), (second, b)):
            to, source = (device, pinned) if kind == TO_DEVICE else (pinned, upper)
            cuda.copy(to, source, kind, stream)

    def waits() -> None:
        cuda.copy(device, pinned, TO_DEVICE, a)
        cuda.call("EventRecord", event, a)
        cuda.call("StreamWaitEvent", b, event, 0)
        cuda.copy(pinned, upper, TO_HOST, b)

    def no_wait() -> None:
        cuda.copy(device, pinned, TO_DEVICE, a)

    def staged() -> None:
        cuda.copy(device, pageable, TO_DEVICE, a)

    ways: dict[str, Callable[[], None]] = {
        "one direction": lambda: both(TO_DEVICE, TO_DEVICE),
        "both directions": lambda: both(TO_DEVICE, TO_HOST),
        "in order": waits, "pageable": staged,
        "memset": lambda: cuda.call("MemsetAsync", device, 0, C.c_size_t(64 * MIB), a),
    }  # fmt: skip
    found = {}
    for name, way in ways.items():
        start_s = cuda.now_s()
        way()
        for stream in (a, b):
            cuda.call("StreamSynchronize", stream)
        found[name] = (cuda.now_s() - start_s) / COPY_S
    start_s = cuda.now_s()
    no_wait()
    found["enqueued only"] = (cuda.now_s() - start_s) / COPY_S
    cuda.call("DeviceSynchronize")
    return found


def test_copies_queue_for_an_engine_of_each_direction(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, __file__], env={**os.environ, "STANDIN_CLOCK": "1"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx({
        "one direction": 2.0, "both directions": 1.0, "in order": 2.0,
        "pageable": 2.0,  # the host stages all bytes, and then the engine copies them
        "memset": LINK / VRAM, "enqueued only": 0.0,
    })  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(steps(Cuda())))
