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


def fault_is_due() -> bool:
    """True if the call that was to fail has not come yet."""
    return bool(_library.standin_fault_is_due())
