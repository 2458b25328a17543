"""Measures how fast large direct reads of a file are, with several reads under way at once."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from pathlib import Path

from offload.errors import BadModel
from offload.store.layout import PAGE_BYTES
from offload.store.reading import OpenFile

DEPTHS = (1, 2, 4, 8, 16)  # numbers of reads under way
READ_BYTES = 2 << 20  # bytes of one read, as of an expert's matrix
_LEAST_S = 0.25


def disk_speed(path: Path, depth: int, least_s: float = _LEAST_S) -> float:
    """Return the bytes/s of reads at random places of a file, `depth` at once.

    Reads bypass the page cache if the file system allows it. Raises BadModel if the file cannot be
    read or is shorter than a read.
    """
    file = OpenFile(path)
    size_bytes = path.stat().st_size
    if size_bytes < READ_BYTES:
        file.close()
        raise BadModel(f"{path}: is too short to measure the disk with")
    last_page = (size_bytes - READ_BYTES) // PAGE_BYTES
    descriptor = file.direct if file.is_direct else file.buffered
    read_bytes = [0] * depth
    errors: list[OSError] = []
    end_s = time.perf_counter() + least_s

    def read(number: int) -> None:
        memory, chance = mmap.mmap(-1, READ_BYTES), random.Random(number + depth)
        try:
            while time.perf_counter() < end_s:
                at = PAGE_BYTES * chance.randint(0, last_page)
                read_bytes[number] += os.preadv(descriptor, [memory], at)
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
    took_s = time.perf_counter() - start_s
    file.close()
    if errors:
        raise BadModel(f"{path}: cannot be read ({errors[0]})") from errors[0]
    return sum(read_bytes) / took_s
