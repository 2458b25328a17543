"""Lets Ctrl-C end a decode, without a Python call per graph node.

Python cannot run its signal handlers while C computes, so KeyboardInterrupt would wait for the end
of the decode. ggml calls an abort callback after each node; a Python callback costs a microsecond
per node. Instead, CPython's C-level handler writes the signal's number to the wake-up file
descriptor. Our descriptor is a memory file, mapped at a fixed address. The abort callback is libc's
`strlen` of that memory, which is zero until a signal comes.

Only the main thread can set the descriptor; decodes on other threads run to their end. A signal
whose handler returns, such as a changed window size, aborts the decode as well, and the decode is
redone.

Backends without an abort callback compute each submitted graph to its end. So code that submits
parts of a graph calls `requested` before each part.

A server's engine process ignores signals. There another thread ends a decode with `stop`, by the
same byte, for example because the client of a long prompt has left. Such a decode is not redone.

`signal` is used without its Python wrappers: they look up each handler in an enum, which raises an
exception and takes more than 10 us per decode.
"""

from __future__ import annotations

import _signal as c_signal  # type: ignore[import-not-found]
import ctypes as C
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

from offload.errors import NotWritten
from offload.ggml.library.callback import Pending

_PAGE = mmap.PAGESIZE
_HEEDS_AT = 2048  # offset of the byte that is 1 during decodes that signals may abort


class _InterruptFlag:
    def __init__(self) -> None:
        try:
            self.fd = os.memfd_create("specoffload-interrupt")
            os.ftruncate(self.fd, _PAGE)
        except OSError as e:  # RLIMIT_FSIZE limits files in memory, too
            raise NotWritten(
                f"a file of {_PAGE} bytes in memory cannot be made ({e.strerror}): raise the "
                "shell's limits (ulimit -f, ulimit -n)"
            ) from e
        os.set_blocking(self.fd, False)  # required of a wake-up descriptor
        self.memory = mmap.mmap(self.fd, _PAGE)
        self.address = C.addressof(C.c_char.from_buffer(self.memory))
        self.strlen = C.cast(C.CDLL(None).strlen, C.c_void_p).value

    def clear(self) -> None:
        if self.memory[0]:
            self.memory[:64] = bytes(64)
        os.lseek(self.fd, 0, os.SEEK_SET)


_flag: _InterruptFlag | None = None
_heeded = False  # True during a decode that a signal or `stop` may abort
_may_stop = False  # True in a process that ignores signals, and whose decodes `stop` may end
_stopped = False  # True from `stop` until `go_on`


def requested() -> bool:
    """True if a signal came during the current decode and may abort it. Takes 0.1 us."""
    return _heeded and _flag is not None and _flag.memory[0] != 0


def allow_stops() -> None:
    """Let `stop` end decodes of the main thread. Call it before contexts are made.

    For processes that ignore SIGINT, which then ends no decode.
    """
    global _may_stop
    _may_stop = True


def may_stop() -> bool:
    """True after `allow_stops`."""
    return _may_stop


def stop() -> None:
    """Abort the decode that runs, and all later ones until `go_on`. Any thread may call it."""
    global _stopped
    _stopped = True
    if _flag is not None:
        _flag.memory[0] = 1


def go_on() -> None:
    """End what `stop` began."""
    global _stopped
    _stopped = False
    if _flag is not None:
        _flag.memory[0] = 0


def is_stopped() -> bool:
    """True if `stop` was called after the last `go_on`."""
    return _stopped


def is_ctrl_c() -> bool:
    """True if Ctrl-C came during the current decode, whether or not it may abort the decode."""
    return _flag is not None and c_signal.SIGINT in _flag.memory[:64]


def watched_byte() -> int:
    """Return the address of a byte that a signal sets, or 0 if no signal may abort the decode."""
    return _flag.address if _heeded and _flag is not None else 0


def aborting_bytes() -> tuple[int, int]:
    """Return the addresses of two bytes, or 0 and 0. If neither byte is 0, `requested` is True.

    Native code reads these bytes. The addresses are 0 until `watch` is called, then constant.
    """
    return (0, 0) if _flag is None else (_flag.address, _flag.address + _HEEDS_AT)


def watch(lib: Any, context: int) -> None:
    """Let signals abort the decodes of `context` (on backends that compute on the CPU)."""
    global _flag
    if _flag is None:
        _flag = _InterruptFlag()
    lib.llama_set_abort_callback(context, _flag.strlen, _flag.address)


@contextmanager
def deferred(pending: Pending) -> Iterator[None]:
    """Keep SIGINT's handler from raising in a block that calls C.

    The handler may run at the entry of a callback, before the guard's `try`, and its exception
    would be lost in C. It may also run between two calls that must both be made. So the exception
    is kept in `pending`. Does nothing outside the main thread, or if SIGINT has no Python handler.
    """
    handler = c_signal.getsignal(c_signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def keep(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except BaseException as e:
            pending.keep(e)

    c_signal.signal(c_signal.SIGINT, keep)
    try:
        yield
    finally:
        c_signal.signal(c_signal.SIGINT, handler)


def during_decode(pending: Pending, *, can_abort: bool) -> AbstractContextManager[None]:
    """Return a context in which signals set the abort flag, and SIGINT's handler is `deferred`.

    If `can_abort` is False, `requested` stays False. Contexts given to `watch` still see the flag.
    After `allow_stops`, only `stop` sets the flag, whatever `can_abort` is.
    """
    if _may_stop and _flag is not None:
        is_main = threading.current_thread() is threading.main_thread()
        return _stoppable(_flag) if is_main else _NOTHING
    handled = callable(c_signal.getsignal(c_signal.SIGINT))  # else nothing sets the flag
    if _flag is None or not handled or threading.current_thread() is not threading.main_thread():
        return _NOTHING
    return _routed(pending, _flag, can_abort)


_NOTHING = nullcontext()


@contextmanager
def _stoppable(flag: _InterruptFlag) -> Iterator[None]:
    global _heeded
    flag.memory[0] = 0
    _heeded = True
    flag.memory[_HEEDS_AT] = True
    if _stopped:  # after the byte was cleared, because `stop` may come at any time
        flag.memory[0] = 1
    try:
        yield
    finally:
        _heeded = False
        flag.memory[_HEEDS_AT] = False
        flag.memory[0] = 0


@contextmanager
def _routed(pending: Pending, flag: _InterruptFlag, can_abort: bool) -> Iterator[None]:
    global _heeded
    flag.clear()
    with deferred(pending):
        previous = c_signal.set_wakeup_fd(flag.fd, warn_on_full_buffer=False)
        _heeded = can_abort
        flag.memory[_HEEDS_AT] = can_abort
        try:
            yield
        finally:
            _heeded = False
            flag.memory[_HEEDS_AT] = False
            c_signal.set_wakeup_fd(previous)
    flag.clear()
