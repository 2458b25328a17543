"""Finds the disk that a file is on, and measures how fast large direct reads are.

Reads are measured with one, several and many under way at once.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import median

from offload.errors import BadModel
from offload.plan.store_layout import PAGE_BYTES
from offload.store.reading import OpenFile, ReadCounters

_REMOTE = ("nfs", "cifs", "smb", "fuse.sshfs", "9p", "ceph", "glusterfs", "lustre", "virtiofs")
_SLOW_BYTES_PER_S = 1.5e9  # less than NVMe disks reach
DEPTHS = (1, 2, 4, 8, 16)  # numbers of reads under way
READ_BYTES = 2 << 20  # bytes of one read, as of an expert's matrix
_LEAST_S = 0.25
# What serving must have read for a speed of the disk.
_LEAST_SEEN_BYTES = 1 << 30
_LEAST_READ_BYTES = READ_BYTES // 2  # mean size of a read
_LEAST_DIRECT_SHARE = 0.99  # of the bytes, which did not come from the page cache
# Stretches of a measurement. Each must have enough reads that one more or less matters little.
_LEAST_STRETCHES, _MOST_STRETCHES, _READS_OF_STRETCH = 3, 15, 16


class HeldDisk:
    """Simulates a slow disk: delays the ends of reads so that they are no faster than a rate."""

    def __init__(
        self,
        bytes_per_s: float,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_s, self._now, self._sleep = bytes_per_s, now, sleep
        self._free_s = 0.0  # clock time at which all reads so far have ended

    def begin(self, size_bytes: int) -> float:
        """Return the clock time at which a read that begins now ends. Call it under a lock."""
        began_s = max(self._free_s, self._now())
        self._free_s = began_s + size_bytes / self._bytes_per_s
        return self._free_s

    def wait(self, end_s: float) -> None:
        """Sleep until a read ends."""
        left_s = end_s - self._now()
        if left_s > 0:
            self._sleep(left_s)


@dataclass(frozen=True)
class Disk:
    """The disk under a file system."""

    name: str  # the kernel's name of the device, or the file system's source
    file_system: str
    is_encrypted: bool = False
    is_rotational: bool = False

    @property
    def is_remote(self) -> bool:
        return self.file_system.startswith(_REMOTE)

    def reasons(self, bytes_per_s: float | None = None) -> list[str]:
        """Return sentences on what makes reads from this disk slow."""
        reasons, disk = [], f"disk {self.name}"
        if self.is_remote:
            reasons.append(f"{disk} is remote ({self.file_system}): a local disk is faster")
        if self.is_encrypted:
            reasons.append(f"{disk} is encrypted: the CPU decrypts all that is read")
        if self.is_rotational:
            reasons.append(f"{disk} is a rotating disk: an SSD is 10 to 50 times as fast")
        elif bytes_per_s is not None and bytes_per_s < _SLOW_BYTES_PER_S:
            rate = f"{bytes_per_s / 1e9:.1f} GB/s"
            reasons.append(f"{disk} reads {rate}: NVMe disks reach 3 to 14 GB/s")
        return reasons


def disk_of(path: Path, root: Path = Path("/")) -> Disk:
    """Return the disk that a file is on, as far as the kernel tells."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    name, file_system = number, ""
    with suppress(OSError):
        for line in (root / "proc/self/mountinfo").read_text(errors="replace").splitlines():
            before, _, after = line.partition(" - ")
            if before.split()[2:3] == [number] and len(after.split()) > 1:
                file_system, name = after.split()[:2]
    folder = (root / "sys/dev/block" / number).resolve()
    if not (folder / "queue").exists():  # a partition lies below its disk
        folder = folder.parent
    return Disk(
        name,
        file_system,
        is_encrypted=_is_encrypted(folder),
        is_rotational=_text(folder / "queue/rotational") == "1" and not name.startswith("/dev/vd"),
    )


def _is_encrypted(folder: Path) -> bool:
    """True if a block device, or a device below it, is encrypted. `folder`: its /sys folder."""
    if _text(folder / "dm/uuid").startswith("CRYPT-"):
        return True
    return any(_is_encrypted(below.resolve()) for below in (folder / "slaves").glob("*"))


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def disk_speed(path: Path, depth: int, least_s: float = _LEAST_S) -> float:
    """Return the bytes/s of reads at random places of a file, `depth` at once.

    This is the median of several stretches (`steady_rate`), since the result is kept for later
    starts. Reads bypass the page cache if the file system allows it. Raises BadModel if the file
    cannot be read or is shorter than a read.
    """
    file = OpenFile(path)
    size_bytes = path.stat().st_size
    if size_bytes < READ_BYTES:
        file.close()
        raise BadModel(f"{path}: is too short to measure the disk with")
    last_page = (size_bytes - READ_BYTES) // PAGE_BYTES
    descriptor = file.direct if file.is_direct else file.buffered
    reads: list[tuple[float, int]] = []  # when each read ended, and its bytes
    errors: list[OSError] = []
    end_s = time.perf_counter() + least_s

    def read(number: int) -> None:
        memory, chance = mmap.mmap(-1, READ_BYTES), random.Random(number + depth)
        try:
            while time.perf_counter() < end_s:
                at = PAGE_BYTES * chance.randint(0, last_page)
                n_bytes = os.preadv(descriptor, [memory], at)
                reads.append((time.perf_counter(), n_bytes))
        except OSError as e:
            errors.append(e)
        finally:
            memory.close()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(depth)]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    if errors:
        raise BadModel(f"{path}: cannot be read ({errors[0]})") from errors[0]
    return steady_rate(reads, start_s)


def steady_rate(reads: Sequence[tuple[float, int]], start_s: float) -> float:
    """Return the bytes/s of reads, each given by the second of its end and its bytes. Pure.

    With enough reads it is the median rate of equal stretches of time, so a disturbance of less
    than half of them does not change it.
    """
    ends_s = max((end_s for end_s, _ in reads), default=start_s)
    took_s = max(ends_s - start_s, 1e-9)
    n_stretches = min(_MOST_STRETCHES, len(reads) // _READS_OF_STRETCH)
    if n_stretches < _LEAST_STRETCHES:
        return sum(n_bytes for _, n_bytes in reads) / took_s
    stretch_bytes = [0] * n_stretches
    for end_s, n_bytes in reads:
        at = int((end_s - start_s) / took_s * n_stretches)
        stretch_bytes[min(at, n_stretches - 1)] += n_bytes
    return median(stretch_bytes) * n_stretches / took_s


def seen_rate(counters: ReadCounters) -> tuple[int, float] | None:
    """Return the disk's speed as serving saw it: the number of reads under way, and bytes/s. Pure.

    Bytes are divided by the seconds in which at least one read was under way, so waiting for
    computation does not count. The rate belongs to the mean number of reads under way in these
    seconds, of which the nearest of `DEPTHS` is returned. It is too low, because this
    number varies, and more reads at once gain less than fewer reads at once lose: a little if it
    varies little, and much if reads come in bursts.

    None if this is no speed of the disk: few bytes, small reads, or bytes from the page cache.
    """
    read_bytes = counters.read_bytes
    if (
        read_bytes < _LEAST_SEEN_BYTES
        or read_bytes < _LEAST_READ_BYTES * counters.reads
        or counters.direct_bytes < _LEAST_DIRECT_SHARE * read_bytes
        or counters.busy_s <= 0.0
    ):
        return None
    n_under_way = max(1.0, counters.under_way_s / counters.busy_s)
    depth = min(DEPTHS, key=lambda depth: abs(log2(n_under_way / depth)))
    return depth, read_bytes / counters.busy_s
