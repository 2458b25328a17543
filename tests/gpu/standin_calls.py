"""Counters of the CUDA stand-in (tests/cuda_standin), and a switch to make its calls fail."""

from __future__ import annotations

import ctypes as C
import json

_library = C.CDLL(None)  # with the stand-in preloaded its functions are found here


def is_loaded() -> bool:
    return hasattr(_library, "standin_counters")


def counters() -> dict[str, int]:
    """All counters since the last reset, by name."""
    n_bytes = _library.standin_counters(None, C.c_size_t(0)) + 1024
    text = C.create_string_buffer(n_bytes)
    _library.standin_counters(text, C.c_size_t(n_bytes))
    found: dict[str, int] = json.loads(text.value)
    return found


def reset() -> None:
    _library.standin_reset()


def fail(call: str, nth: int) -> None:
    """Let the `nth` call of a kind from now on fail.

    Kinds: malloc, host_alloc, host_register, instantiate, cublas.
    """
    _library.standin_fail(call.encode(), C.c_long(nth))


def record_copies(*, is_on: bool) -> None:
    """Start a new record of the copies between host and devices, or end it."""
    _library.standin_record_copies(int(is_on))


def copies() -> list[dict[str, int]]:
    """The recorded copies, in the order in which they were enqueued.

    Each has `device`, `to_device`, `stream` (an address), `bytes` and `is_pinned`.
    """
    n_bytes = _library.standin_copies(None, C.c_size_t(0)) + 1
    text = C.create_string_buffer(n_bytes)
    _library.standin_copies(text, C.c_size_t(n_bytes))
    found: list[dict[str, int]] = json.loads(text.value)
    return found


def fault_is_due() -> bool:
    """True if the call that was to fail has not come yet."""
    return bool(_library.standin_fault_is_due())
