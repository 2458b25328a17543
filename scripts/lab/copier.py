"""Measures how fast weights that are not pinned reach a GPU's copy engine, without a GPU.

    scripts/lab/run copier                  experts of 0.9, 3.5 and 16 MB; 1, 2 and 4 threads
    ... --sizes-mb 0.9,3.5 --fillers 1,2,4,6 --gb 1

Copies go through the ring of pinned memory (`BounceCopier`) to a device whose copies take no time,
so the rate is that of the threads which fill the ring. Ordinary memory stands in for pinned memory.
Experts are taken from `--gb` of memory in a random order. `memmove` is the rate of plain copies of
the same experts by one thread. One thread fills the ring as in earlier versions.
Prints GB/s, the median of `--rounds`. PCIe 4 x16 carries about 25 GB/s.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from typing import Any

from offload.backends import CUDA
from offload.ggml.memory import AnonymousMemory, HostRange, copy_bytes
from offload.ggml.tensor import Tensor, host_bytes
from offload.plan.host import BOUNCE_BYTES
from offload.stream.copying import PART_BYTES, BounceCopier, Transfer


class FreeEvent:
    """An event that has always passed."""

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class FreeStream:
    """A stream whose copies take no time."""

    def __init__(self, device: FreeDevice) -> None:
        self.device = device

    def copy(self, *_: object) -> None: ...

    def record(self, event: FreeEvent) -> None: ...

    def wait(self, event: FreeEvent) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class FreeDevice:
    backend = CUDA

    def open(self) -> FreeStream:
        return FreeStream(self)

    def event(self) -> FreeEvent:
        return FreeEvent()


class Ring:
    """Ordinary memory in place of pinned memory."""

    def __init__(self) -> None:
        self._memory = AnonymousMemory()
        self.host_range = self._memory.allocate(BOUNCE_BYTES)
        self.host_range.array()[:] = 1

    def close(self) -> None:
        self._memory.free(self.host_range)


def memmove_rate(source: HostRange, starts: list[int], size_bytes: int) -> float:
    """Bytes/s of plain copies by one thread into memory as large as the ring."""
    ring = Ring()
    n_parts = max(1, BOUNCE_BYTES // size_bytes)
    began_s = time.perf_counter()
    for i, start in enumerate(starts):
        to = ring.host_range.address + i % n_parts * size_bytes
        copy_bytes(to, source.address + start, min(size_bytes, BOUNCE_BYTES))
    rate = len(starts) * size_bytes / (time.perf_counter() - began_s)
    ring.close()
    return rate


def copier_rate(source: Tensor, starts: list[int], size_bytes: int, fillers: int) -> float:
    """Bytes/s of the copier, from the first copy to the last part of the ring handed over."""
    stream: Any = FreeDevice().open()
    ring: Any = Ring()
    target: Any = None
    copier = BounceCopier(stream, ring, fillers=fillers)
    copier.begin()
    began_s = time.perf_counter()
    for start in starts:
        copier.copy([Transfer(target, 0, source, start, size_bytes)], None)
        ticket = copier.mark()
    copier.finish(ticket)
    rate = len(starts) * size_bytes / (time.perf_counter() - began_s)
    assert copier.bounced_bytes == len(starts) * size_bytes
    copier.close()
    return rate


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes-mb", default="0.9,3.5,16")
    parser.add_argument("--fillers", default="1,2,4")
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    fillers = [int(n) for n in args.fillers.split(",")]
    memory = AnonymousMemory().allocate(int(args.gb * 1e9))
    memory.array()[:] = 1  # every page is there
    source = host_bytes(memory)
    n_cpus = len(os.sched_getaffinity(0))
    print(f"{n_cpus} CPUs, ring of {BOUNCE_BYTES >> 20} MiB in parts of {PART_BYTES >> 20} MiB\n")
    print("| expert | memmove | " + " | ".join(f"{n} threads" for n in fillers) + " |")
    print("|---|" + "---|" * (1 + len(fillers)))
    for size in (int(float(mb) * 1e6) for mb in args.sizes_mb.split(",")):
        starts = list(range(0, memory.size_bytes - size, size))
        random.Random(1).shuffle(starts)
        found: dict[int, list[float]] = {n: [] for n in (0, *fillers)}
        for _ in range(args.rounds):
            for n in found:
                found[n].append(
                    copier_rate(source, starts, size, n)
                    if n
                    else memmove_rate(memory, starts, size)
                )
        row = " | ".join(f"{statistics.median(rates) / 1e9:.1f}" for rates in found.values())
        print(f"| {size / 1e6:.1f} MB | {row} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
