"""Handles Ctrl-C and SIGTERM: raises an exception only in places where it is not lost.

Ctrl-C raises KeyboardInterrupt, which a conversation catches, and SIGTERM raises SystemExit.
SIGTERM is handled because process 1 of a container ignores signals that have no handler.

Python runs a signal's handler between any two bytecodes of the main thread. Three places drop an
exception that the handler raises:
- a callback before its guard's `try` (ctypes prints the exception and drops it),
- an import (weak reference callbacks release its module locks),
- a finaliser.
In these places the exception is postponed. A callback's guard keeps it, so that C stops soon. A
thread sends the signal again until the main thread can raise the exception.

Before the commands are imported, and after they have returned, nothing is open, so the process
exits at once. It also exits at once if the main thread is in C and does not return to Python in
time, for example while libllama creates a large context.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from offload.ggml.library.callback import Pending, pending_around

EXIT_CODE = 130  # of Ctrl-C; a shell counts 128 + the signal's number
_REMIND_S = 0.02
_MOST_IMPORT_S = 0.3  # most seconds that an import delays Ctrl-C before the process exits
_MOST_IN_C_S = 0.8
_IMPORTS = frozenset({"<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"})


@dataclass(eq=False)
class _Owed:
    """A Ctrl-C whose KeyboardInterrupt was postponed."""

    since_s: float
    kept_in: Pending | None  # holder of the callback in which it arrived; None: not in a callback

    @property
    def is_raised(self) -> bool:
        """True once the code that called into C has taken the exception."""
        return self.kept_in is not None and not isinstance(
            self.kept_in.first, KeyboardInterrupt | SystemExit
        )


class _SignalState:
    leave_at_once = True
    number: int = signal.SIGINT  # signal that came first
    handled: frozenset[int] = frozenset()
    owed: _Owed | None = None
    handled_s = -1.0  # when the handler last ran
    woken: int = -1  # write end of the pipe for signal numbers; its read end is `asleep`
    asleep: int = -1


def install(*numbers: signal.Signals) -> None:
    """Install the handler of these signals. Call it on the main thread."""
    _SignalState.handled = frozenset(numbers)
    if not numbers:
        return
    _SignalState.asleep, _SignalState.woken = os.pipe()
    os.set_blocking(_SignalState.woken, False)
    for number in numbers:
        signal.signal(number, _on_interrupt)
    signal.set_wakeup_fd(_SignalState.woken, warn_on_full_buffer=False)
    sys.unraisablehook = _on_unraisable
    threading.Thread(target=_watch, name="ctrl-c", daemon=True).start()


def _exit_code() -> int:
    return 128 + _SignalState.number


def _exception() -> KeyboardInterrupt | SystemExit:
    """Return what the signal that came first raises."""
    return KeyboardInterrupt() if _SignalState.number == signal.SIGINT else SystemExit(_exit_code())


def commands_begin() -> None:
    """Raise KeyboardInterrupt at Ctrl-C from now on, so that commands close what they opened."""
    _SignalState.leave_at_once = False


def commands_have_ended() -> None:
    """Exit at once at Ctrl-C from now on, since nothing is left to close."""
    _SignalState.owed = None
    _SignalState.leave_at_once = True


def _leave() -> NoReturn:
    os.write(2, b"interrupted\n")
    os._exit(_exit_code())


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    if _SignalState.owed is None:
        _SignalState.number = number
    _SignalState.handled_s = time.monotonic()
    if _SignalState.leave_at_once:
        _leave()
    owed = _SignalState.owed
    pending = pending_around(frame)
    if pending is not None:
        pending.keep(_exception())
        _owe(pending)
    elif _is_importing(frame):
        if owed is not None and time.monotonic() - owed.since_s > _MOST_IMPORT_S:
            _leave()
        _owe(None)
    else:
        _SignalState.owed = None
        if owed is not None and owed.kept_in is not None and not owed.is_raised:
            owed.kept_in.first = None  # dropped, since C returned to code that does not raise it
        raise _exception()


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _IMPORTS:
            return True
        frame = frame.f_back
    return False


def _owe(pending: Pending | None) -> None:
    since_s = _SignalState.owed.since_s if _SignalState.owed is not None else time.monotonic()
    _SignalState.owed = owed = _Owed(since_s, pending)
    # threading.Thread needs locks, which the main thread may hold while the handler runs.
    _thread.start_new_thread(_remind, (owed,))


def _remind(owed: _Owed) -> None:
    time.sleep(_REMIND_S)
    if _SignalState.owed is owed:
        if owed.is_raised:
            _SignalState.owed = None
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, _SignalState.number)


def _on_unraisable(what: sys.UnraisableHookArgs) -> None:
    if isinstance(what.exc_value, KeyboardInterrupt | SystemExit):
        _owe(None)
    else:
        sys.__unraisablehook__(what)


def _is_ours(number: int) -> bool:
    return signal.getsignal(number) is _on_interrupt


def _watch() -> None:
    """Exit if the handler does not run soon after a Ctrl-C, since the main thread is in C."""
    while number := os.read(_SignalState.asleep, 1):
        # A server has its own handlers. It may be over, and ours back, at the end of the sleep.
        if number[0] not in _SignalState.handled or not _is_ours(number[0]):
            continue
        # The handler may have run shortly before this thread woke, so accept earlier runs, too.
        since_s = time.monotonic() - _MOST_IN_C_S / 2
        time.sleep(_MOST_IN_C_S)
        if _is_ours(number[0]) and _SignalState.handled_s < since_s:
            _SignalState.number = number[0]
            _leave()
