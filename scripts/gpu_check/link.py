"""How fast bytes get from host memory into the device's."""

from __future__ import annotations

import time
from typing import Any

from offload.device import DeviceChoice
from offload.ggml.backend import Stream
from offload.ggml.memory import AnonymousMemory
from offload.ggml.pinning import Pinner
from offload.ggml.tensor import Tensor, host_bytes, new_tensor

_REPETITIONS = 7


def measure_link(choice: DeviceChoice, size_bytes: int) -> dict[str, Any]:
    """Best of a few copies of `size_bytes`, from memory that is pinned and memory that is not.

    Where pinning is refused both are of memory that is not, and `why_not_pinned` says why.
    """
    stream = choice.device.open()
    buffer = choice.device.allocate(size_bytes, "the link's measurement")
    host, pinner = AnonymousMemory(), Pinner(choice.device)
    memory = host.allocate(size_bytes)
    target = new_tensor("i8", (size_bytes, 1, 1, 1), (buffer, 0))
    source = host_bytes(memory)
    try:
        pageable = _best(stream, target, source, size_bytes)
        pinned = pinner.pin(memory)
        fastest = _best(stream, target, source, size_bytes) if pinned.ok else pageable
    finally:
        pinner.unpin(memory)
        host.free(memory)
        buffer.close()
        stream.close()
    return {
        "size_bytes": size_bytes,
        "pinned_bytes_per_s": fastest,
        "pageable_bytes_per_s": pageable,
        "why_not_pinned": "" if pinned.ok else pinned.reason,
    }


def _best(stream: Stream, target: Tensor, source: Tensor, size_bytes: int) -> float:
    times = []
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        stream.copy(target, 0, source, 0, size_bytes)
        stream.synchronize()
        times.append(time.perf_counter() - start)
    return size_bytes / min(times)
