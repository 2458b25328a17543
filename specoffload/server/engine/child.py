"""Starts and ends the engine process, and exchanges messages with it on the event loop."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import signal
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess

from offload.stream.bell_use import BELLS
from specoffload.server.engine.messages import FromEngine, ToEngine
from specoffload.server.engine.process import (
    IGNORED_SIGNALS,
    Channel,
    Factory,
    channels,
    engine_main,
    packed,
)

_EXIT_AFTER_EOF_S = 10.0

log = logging.getLogger("specoffload.server")


def start_shielded(process: BaseProcess) -> None:
    """Start a process that ignores IGNORED_SIGNALS and then unblocks them. Raises OSError.

    The signals are blocked during the spawn. Otherwise Ctrl-C at that moment prints a traceback.
    """
    resource_tracker.ensure_running()  # before blocking, because it would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """Owns one engine process and the channel to it. Callbacks run on the event loop's thread;
    `on_exit` is the last one."""

    def __init__(
        self,
        factory: Factory,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[int | None], None],
    ) -> None:
        """Start the process and return at once. Raises OSError if it cannot be started."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        self._channel: Channel[ToEngine, FromEngine]
        self._channel, theirs = channels()
        self._unsent = bytearray()  # packed messages
        self._is_writing = False  # True while the loop waits until the socket takes more
        self._has_ended = False
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(
            target=engine_main, args=(theirs, factory, BELLS.why_not), name="engine", daemon=True
        )
        try:
            start_shielded(self._process)
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()  # otherwise the reader would never see the end of file
        # Exit functions run in reverse order, so this one runs before multiprocessing's own. That
        # one sends SIGTERM, which the child ignores, and then waits for the child.
        atexit.register(self.kill)
        self._loop.add_reader(self._channel.fileno(), self._read)

    def send(self, message: ToEngine) -> None:
        """Send at once, or as soon as the socket takes it. A message to a dead process is lost."""
        if self._has_ended:
            return
        self._unsent += packed(message)
        if not self._is_writing:
            self._write()

    def kill(self) -> None:
        with contextlib.suppress(ValueError):  # the process has ended and is closed
            self._process.kill()

    def _read(self) -> None:
        try:
            messages = self._channel.received()
        except (EOFError, OSError):
            self._end()  # perhaps after half a message, if the process was killed
            return
        except Exception:
            log.exception("a message of the engine process cannot be read; ending the process")
            self._process.kill()
            self._end()
            return
        for message in messages:
            self._on_message(message)

    def _write(self) -> None:
        try:
            n_taken = self._channel.send_some(self._unsent)
        except OSError:
            n_taken = len(self._unsent)  # the reader sees the end after the messages that remain
        del self._unsent[:n_taken]
        if self._is_writing == bool(self._unsent):
            return
        self._is_writing = bool(self._unsent)
        if self._is_writing:
            self._loop.add_writer(self._channel.fileno(), self._write)
        else:
            self._loop.remove_writer(self._channel.fileno())

    def _end(self) -> None:
        self._has_ended = True
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        threading.Thread(target=self._bury, name="engine burial", daemon=True).start()

    def _bury(self) -> None:
        """Wait for the process, on a thread because this blocks."""
        self._process.join(_EXIT_AFTER_EOF_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        exit_code = self._process.exitcode
        self._process.close()
        atexit.unregister(self.kill)
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is ending
            self._loop.call_soon_threadsafe(self._on_exit, exit_code)
