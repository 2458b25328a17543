"""A device's statements about itself."""

from __future__ import annotations

import ctypes as C

from offload.ggml.library import abi
from offload.ggml.library.lib import library


def has_async_and_events(device: int) -> bool:
    """True if copies can run on a second stream, ordered by events."""
    props = abi.ggml_backend_dev_props()
    library().ggml_backend_dev_get_props(device, C.addressof(props))
    return bool(props.caps.async_ and props.caps.events)


def memory_of(device: int) -> tuple[int, int]:
    """Free and total bytes."""
    free, total = C.c_size_t(), C.c_size_t()
    library().ggml_backend_dev_memory(device, C.byref(free), C.byref(total))
    return free.value, total.value
