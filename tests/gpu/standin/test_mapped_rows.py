"""Kernels that read and write pinned memory share the link with copies, in virtual time."""

from __future__ import annotations

import ctypes as C
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
LINK = 1e9  # bytes/s
UNIT_S = 64 * MIB / LINK  # seconds of 64 MiB over the link
FIRST = 0.1  # of a kernel's first access, in these units
FIRST_S, COPY_S = 1.5e-6, 2e-6  # of a kernel's first access and of a copy, as a start measures them
TO_DEVICE, TO_HOST = 1, 2
GPU_CHECK = str(Path(__file__).parents[3] / "scripts" / "gpu_check")


class Link:
    """A device's link, two streams, and a clock on which only the link takes time."""

    def __init__(self) -> None:
        self.library, self.driver = C.CDLL(None), C.CDLL("libcuda.so.1")
        self.library.standin_now_s.restype = C.c_double
        self.library.standin_set_rate.argtypes = [C.c_char_p, C.c_double]
        none = ("kernel_s", "copy_s", "launch_call_s", "graph_call_s", "graph_node_call_s",
                "copy_call_s", "event_call_s", "sync_call_s", "idle_sync_call_s",
                "host_scale")  # fmt: skip
        for name in none:
            self.rate(name, 0.0)
        self.rate("link_bytes_per_s", LINK)
        self.rate("vram_bytes_per_s", 1e18)
        self.rate("mapped_s", FIRST * UNIT_S)
        self.device = self._made("Malloc", C.c_size_t(192 * MIB))
        self.pinned = self._made("HostAlloc", C.c_size_t(192 * MIB), 0)
        self.streams = [self._made("StreamCreateWithFlags", 1) for _ in range(2)]

    def rate(self, name: str, value: float) -> None:
        assert self.library.standin_set_rate(name.encode(), value) == 0

    def _made(self, name: str, *arguments: Any) -> int:
        made = C.c_void_p()
        assert getattr(self.library, f"cuda{name}")(C.byref(made), *arguments) == 0
        return made.value or 0

    def copy(self, mib: int, kind: int = TO_DEVICE) -> None:
        """Copy on the first stream, and wait until the copy has its place in virtual time."""
        to, source = self.device, self.pinned
        if kind == TO_HOST:
            to, source = source, to
        pointers = C.c_void_p(to), C.c_void_p(source), C.c_size_t(mib * MIB)
        assert self.library.cudaMemcpyAsync(*pointers, kind, C.c_void_p(self.streams[0])) == 0
        while self.driver.cuStreamQuery(C.c_void_p(self.streams[0])):
            time.sleep(1e-3)

    def move(self, mib: int, kind: int = TO_DEVICE) -> None:
        """Let a kernel on the second stream read pinned memory, or write it."""
        to, source = self.device + 64 * MIB, self.pinned + 64 * MIB
        if kind == TO_HOST:
            to, source = source, to
        self.library.standin_move(
            C.c_void_p(self.streams[1]), C.c_void_p(to), C.c_void_p(source), C.c_size_t(mib * MIB)
        )

    def units(self, nth: int, start_s: float) -> float:
        """The virtual time at which a stream has done its work, from `start_s` on."""
        assert self.library.cudaStreamSynchronize(C.c_void_p(self.streams[nth])) == 0
        return (self.now_s() - start_s) / UNIT_S

    def now_s(self) -> float:
        return float(self.library.standin_now_s())


def steps() -> dict[str, float]:
    """When kernels and copies of 64 MiB end, in units of a copy alone."""
    link, ends = Link(), {}

    def kernel_ends(name: str, *copies: tuple[int, int], kind: int = TO_DEVICE) -> float:
        start_s = link.now_s()
        for mib, direction in copies:
            link.copy(mib, direction)
        link.move(64, kind)
        ends[name] = link.units(1, start_s)
        return start_s

    kernel_ends("read alone")
    kernel_ends("write alone", kind=TO_HOST)
    link.units(0, 0.0)
    kernel_ends("read beside a write of copies", (64, TO_HOST))
    link.units(0, 0.0)
    start_s = kernel_ends("read beside a copy", (64, TO_DEVICE))
    link.copy(64)
    ends["copy after both"] = link.units(0, start_s)
    kernel_ends("read beside half a copy", (32, TO_DEVICE))
    link.units(0, 0.0)
    kernel_ends("write beside a copy", (64, TO_HOST), kind=TO_HOST)
    link.copy(64, TO_HOST)
    link.units(0, 0.0)
    link.rate("mapped_beside", 0.25)
    kernel_ends("read that a copy starves", (64, TO_DEVICE), (64, TO_DEVICE), (64, TO_DEVICE))
    link.copy(64)
    link.units(0, 0.0)
    link.rate("mapped_share", 0.25)
    kernel_ends("slow read")
    return ends


def link_and_gpu() -> tuple[Link, Any]:
    """The clock's link with the times of this file, and the device, both in virtual time."""
    from lab.virtual_gpu import use_virtual_time
    from offload.device import devices

    link = Link()
    link.rate("mapped_s", FIRST_S)
    link.rate("copy_s", COPY_S)
    use_virtual_time()
    return link, next(device for device in devices() if device.on_gpu)


def measured() -> dict[str, Any]:
    """Return a start's measurements and decisions, first with fast kernels and then with slow ones.

    Fast kernels fill the link.
    """
    from offload.stream.read_speed import measure_reads
    from offload.times.mapped_reads import reads_pay

    link, gpu = link_and_gpu()
    fast = measure_reads(gpu)
    link.rate("mapped_share", 0.5)
    slow = measure_reads(gpu)
    return {
        "fast": asdict(fast), "slow": asdict(slow), "pay": [reads_pay(fast), reads_pay(slow)],
    }  # fmt: skip


def table() -> dict[str, Any]:
    """Return the measurements of scripts/gpu-check, with rows of up to 4 MB."""
    from mapped import measure_mapped

    _, gpu = link_and_gpu()
    return measure_mapped(gpu, 4 * MIB)


def child(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, name],
        env={**os.environ, "STANDIN_CLOCK": "1",
             "PYTHONPATH": os.pathsep.join([*sys.path, GPU_CHECK])},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_kernel_shares_the_link_with_copies_of_its_direction() -> None:
    assert child("steps") == pytest.approx({
        "read alone": FIRST + 1.0,
        "write alone": FIRST + 1.0,
        "read beside a write of copies": FIRST + 1.0,
        # 0.9 of the copy are left, which half of the link moves in the time of as much of the read.
        "read beside a copy": FIRST + 1.0 + 0.9,
        "copy after both": 3.0,  # the link has moved three times 64 MiB
        "read beside half a copy": FIRST + 1.0 + 0.4,
        "write beside a copy": FIRST + 1.0 + 0.9,
        # The copies have three quarters of the link, and 2.9 of them are left.
        "read that a copy starves": FIRST + 1.0 + 2.9,
        "slow read": FIRST + 4.0,
    })  # fmt: skip


def test_a_start_measures_the_cards_reads_and_decides_by_them() -> None:
    found = child("measured")
    fast, slow = found["fast"], found["slow"]
    for reads in (fast, slow):
        assert reads["first_s"] == pytest.approx(FIRST_S, rel=0.2)
        assert reads["copy_bytes_per_s"] == pytest.approx(LINK, rel=0.02)
        # Whether the copies beside a read come first is up to the streams' threads.
        assert 0.4 * reads["bytes_per_s"] < reads["beside_bytes_per_s"] <= 1.02 * LINK
    assert fast["bytes_per_s"] == pytest.approx(LINK, rel=0.02)
    assert slow["bytes_per_s"] == pytest.approx(0.5 * LINK, rel=0.02)
    assert found["pay"] == [True, False]


def test_gpu_check_shows_kernels_and_copies_of_both_directions() -> None:
    found = child("table")
    rows = {(row["direction"], row["moved_bytes"]): row for row in found["rows"]}
    assert {size for _, size in rows} == {4096 << (2 * n) for n in range(6)}
    for direction in ("to the device", "to the host"):
        for size in (64 << 10, 4 * MIB):
            row, link_s = rows[direction, size], size / LINK
            # Kernels that read have the rows' places in pinned memory, too.
            places_s = size / 1024 / LINK if direction == "to the device" else 0.0
            alone_s = FIRST_S + link_s + places_s
            assert row["kernel_s"] == pytest.approx(alone_s, rel=0.01), row
            assert row["copy_s"] == pytest.approx(COPY_S + link_s, rel=0.01), row
            assert 0.99 * alone_s <= row["beside_s"] <= 2.01 * alone_s, row
    assert found["start"]["kernels_read"]


if __name__ == "__main__":
    print(json.dumps({"steps": steps, "measured": measured, "table": table}[sys.argv[1]]()))
