"""Processes that the server starts: engines, renderers, planners, and the one of a worker.

They ignore the signals of the terminal and of a service manager, which go to the whole group. The
server decides when each of them ends, and none outlives it.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any, Protocol

IGNORED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_STARTING = threading.Lock()  # processes start one after another, because signals are blocked then


class _Closable(Protocol):
    def close(self) -> None: ...


class Spawned:
    """A process of its own. Any thread may kill it, and one thread waits for its end."""

    def __init__(
        self, name: str, main: Callable[..., object], theirs: _Closable, *arguments: object
    ) -> None:
        """Start `main(theirs, *arguments)`, and close this process's copy of `theirs`.

        `theirs` is the process's end of a pipe or channel. `main` and all arguments are pickled.
        Raises OSError if no process can be started.
        """
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=_run, args=(main, theirs, *arguments), name=name, daemon=True
        )
        try:
            with _STARTING:
                self._start()
        finally:
            theirs.close()  # otherwise a reader would never see the end of file
        # Exit functions run in reverse order, so this one runs before multiprocessing's own. That
        # one sends SIGTERM, which the process ignores, and then waits for it.
        atexit.register(self.kill)
        self.pid: int = self._process.pid or 0
        self._exit_code: int | None = None

    def _start(self) -> None:
        """Start with the signals blocked. Otherwise Ctrl-C at that moment prints a traceback."""
        resource_tracker.ensure_running()  # before blocking, because it would unblock the signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def kill(self) -> None:
        """End the process at once. Does not wait for its end, and may be called after it."""
        with contextlib.suppress(ValueError):  # it has ended and is closed
            self._process.kill()

    def join(self, timeout_s: float | None = None) -> int | None:
        """Wait for the end. Returns the exit code, or None if the process still runs.

        The code of a process that a signal ended is the negative number of the signal.
        """
        if self._exit_code is None:
            self._process.join(timeout_s)
            self._exit_code = self._process.exitcode
            if self._exit_code is not None:
                atexit.unregister(self.kill)
                self._process.close()
        return self._exit_code


def _run(main: Callable[..., object], theirs: object, *arguments: object) -> None:
    for sig in IGNORED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    main(theirs, *arguments)


def answer_of(name: str, main: Callable[..., object], *arguments: object) -> Any:
    """Return what `main(pipe, *arguments)` sends in a process of its own. Blocks until it ended.

    Raises EOFError if it ends without an answer, OSError if it cannot be started.
    """
    ours, theirs = multiprocessing.get_context("spawn").Pipe(duplex=False)
    with contextlib.closing(ours):
        process = Spawned(name, main, theirs, *arguments)
        try:
            return ours.recv()
        finally:
            process.join()
