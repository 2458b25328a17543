"""How fast bytes get from host memory into the device's."""

from __future__ import annotations

import time
from typing import Any

from offload.device import DeviceChoice
from offload.ggml import tensor
from offload.ggml.arena import DeviceMemory
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.memory import AnonymousMemory, HostRange
from offload.ggml.pinning import Pinner

_REPETITIONS = 7


def measure_link(choice: DeviceChoice, size_bytes: int) -> dict[str, Any]:
    """Best of a few copies of `size_bytes`, from memory that is pinned and memory that is not.

    Where pinning is refused both are of memory that is not, and `why_not_pinned` says why.
    """
    lib = library()
    backend = lib.ggml_backend_dev_init(choice.address, None)
    buft = lib.ggml_backend_dev_buffer_type(choice.address)
    target = DeviceMemory(buft, size_bytes, "the link's measurement")
    host, pinner = AnonymousMemory(), Pinner(choice.address)
    memory = host.allocate(size_bytes)
    view = _bytes_tensor(target, size_bytes)
    try:
        pageable = _best(backend, view, memory)
        pinned = pinner.pin(memory)
        fastest = _best(backend, view, memory) if pinned.ok else pageable
    finally:
        pinner.unpin(memory)
        host.free(memory)
        target.close()
        lib.ggml_backend_free(backend)
    return {
        "size_bytes": size_bytes,
        "pinned_bytes_per_s": fastest,
        "pageable_bytes_per_s": pageable,
        "why_not_pinned": "" if pinned.ok else pinned.reason,
    }


def _bytes_tensor(memory: DeviceMemory, size_bytes: int) -> Any:
    """All of the memory as a row of f32 (type 0)."""
    made = abi.ggml_tensor()
    made.type, made.buffer, made.data = 0, memory.buffer, memory.base
    for i, (n, stride) in enumerate(((size_bytes // 4, 4), *((1, size_bytes),) * 3)):
        made.ne[i], made.nb[i] = n, stride
    return made


def _best(backend: int, view: Any, memory: HostRange) -> float:
    lib, times, size_bytes = library(), [], memory.size_bytes
    for _ in range(_REPETITIONS):
        start = time.perf_counter()
        lib.ggml_backend_tensor_set_async(
            backend, tensor.address_of(view), memory.address, 0, size_bytes
        )
        lib.ggml_backend_synchronize(backend)
        times.append(time.perf_counter() - start)
    return size_bytes / min(times)
