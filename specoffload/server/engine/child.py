"""One run of the engine process, as the API process's event loop sees it."""

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
from typing import TypeVar

from specoffload.server.engine.channel import Channel, channels, packed
from specoffload.server.engine.engine_process import IGNORED_SIGNALS, Factory, engine_main
from specoffload.server.engine.messages import FromEngine, ToEngine

_EXIT_AFTER_EOF_S = 10.0
_T = TypeVar("_T")

log = logging.getLogger("specoffload.server")


def start_shielded(process: BaseProcess) -> None:
    """Start a process that ignores IGNORED_SIGNALS itself, and unblocks them then. Raises OSError.

    They stay blocked across the spawn; otherwise Ctrl-C in that window shows its traceback.
    """
    resource_tracker.ensure_running()  # before, since it unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """Owns the process and the channel to it.

    Everything but the burial runs on the event loop's thread, the callbacks too; `on_exit` is the
    last of them.
    """

    def __init__(
        self,
        factory: Factory,
        on_message: Callable[[FromEngine], None],
        on_exit: Callable[[int | None], None],
    ) -> None:
        """Starts the process and returns at once. Raises OSError when it cannot be started."""
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._on_exit = on_exit
        context = multiprocessing.get_context("spawn")
        self._channel: Channel[ToEngine, FromEngine]
        self._channel, theirs = channels()
        self._unsent = bytearray()  # messages, packed
        self._is_writing = False  # the loop says when the socket takes more of them
        self._has_ended = False
        self._process = context.Process(
            target=engine_main, args=(theirs, factory), name="engine", daemon=True
        )
        try:
            start_shielded(self._process)
        except BaseException:
            self._channel.close()
            raise
        finally:
            theirs.close()  # else the reader would never see end of file
        # Should this program end on an unforeseen path: multiprocessing's own exit function sends
        # SIGTERM, which the child ignores, and waits for it. Exit functions run last in, first out.
        atexit.register(self.kill)
        self._loop.add_reader(self._channel.fileno(), self._read)

    def send(self, message: ToEngine) -> None:
        """Send a message at once, or as soon as the socket takes it; one sent to a dead process is
        lost, and `on_exit` tells of its end."""
        if self._has_ended:
            return
        self._unsent += packed(message)
        if not self._is_writing:
            self._write()

    def kill(self) -> None:
        with contextlib.suppress(ValueError):  # closed: it is dead
            self._process.kill()

    def _read(self) -> None:
        """The channel has something, be it the end."""
        try:
            messages = self._channel.received()
        except (EOFError, OSError):
            self._end()  # a process killed while writing leaves half a message behind
            return
        except Exception:
            log.exception("a message of the engine process cannot be read; ending the process")
            self._process.kill()
            self._end()
            return
        for message in messages:
            self._on_message(message)

    def _end(self) -> None:
        self._has_ended = True
        self._loop.remove_reader(self._channel.fileno())
        self._loop.remove_writer(self._channel.fileno())
        self._channel.close()
        threading.Thread(target=self._bury, name="engine burial", daemon=True).start()

    def _bury(self) -> None:
        """Waiting for the process blocks."""
        self._process.join(_EXIT_AFTER_EOF_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        exit_code = self._process.exitcode
        self._process.close()
        atexit.unregister(self.kill)
        self._tell(self._on_exit, exit_code)

    def _write(self) -> None:
        try:
            n_taken = self._channel.send_some(self._unsent)
        except OSError:
            n_taken = len(self._unsent)  # the reader learns of the end, and still reads
        del self._unsent[:n_taken]
        if self._is_writing == bool(self._unsent):
            return
        self._is_writing = bool(self._unsent)
        if self._is_writing:
            self._loop.add_writer(self._channel.fileno(), self._write)
        else:
            self._loop.remove_writer(self._channel.fileno())

    def _tell(self, callback: Callable[[_T], None], value: _T) -> None:
        # The loop may be closed already when the program is ending; nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(callback, value)
