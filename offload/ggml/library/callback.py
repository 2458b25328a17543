"""Turns Python functions into C callbacks. No callback is made in another way.

ctypes prints and drops an exception that leaves a callback, Ctrl-C included. C then reads an
uninitialised result: an arbitrary int, a bool that is true, or a junk pointer. So each callback
goes through `guard`, which keeps the first exception and returns a declared failure value to C.
A caller of C functions calls `Pending.raise_first()` when they have returned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Pending:
    """Keeps the first exception raised in callbacks until it is re-raised or forgotten."""

    def __init__(self) -> None:
        self.first: BaseException | None = None

    def keep(self, exception: BaseException) -> None:
        if self.first is None:
            self.first = exception

    def raise_first(self) -> None:
        """Re-raise the kept exception, if any, with its own traceback, and forget it."""
        first, self.first = self.first, None
        if first is not None:
            raise first

    def forget(self) -> None:
        """Forget the kept exception, but raise it if it is KeyboardInterrupt."""
        if isinstance(self.first, KeyboardInterrupt):
            self.raise_first()
        self.first = None


_calls = [0]


def calls_into_python() -> int:
    """Return how often C has called back into Python so far."""
    return _calls[0]


def guard(
    prototype: Any, pending: Pending, on_error: Any, function: Callable[..., Any]
) -> tuple[Any, int]:
    """Wrap `function` for C. Returns the thunk, which the caller must keep alive, and its address.

    C receives `on_error` if `function` raises, so choose the value that makes C stop.
    """

    def call(*arguments: Any) -> Any:
        _calls[0] += 1
        try:
            return function(*arguments)
        except BaseException as e:  # also KeyboardInterrupt, since no exception may pass through C
            pending.keep(e)
            return on_error

    thunk = prototype(call)
    return thunk, ctypes.cast(thunk, ctypes.c_void_p).value or 0


_GUARDED = {code for code in guard.__code__.co_consts if isinstance(code, CodeType)}


def pending_around(frame: FrameType | None) -> Pending | None:
    """Return the pending-exception holder of the callback that `frame` belongs to, or None.

    Signal handlers need it, because they may run at a callback's entry, before the guard's `try`.
    """
    while frame is not None:
        if frame.f_code in _GUARDED:
            pending: Pending = frame.f_locals["pending"]
            return pending
        frame = frame.f_back
    return None
