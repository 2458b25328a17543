"""Starts and ends the engine process, and exchanges messages with it on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from offload.stream.bell_use import BELLS
from specoffload.server.engine.messages import FromEngine, ToEngine
from specoffload.server.engine.process import Channel, Factory, channels, engine_main, packed
from specoffload.server.spawned import Spawned

_EXIT_AFTER_EOF_S = 10.0

log = logging.getLogger("specoffload.server")


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
        try:
            self._process = Spawned("engine", engine_main, theirs, factory, BELLS.why_not)
        except BaseException:
            self._channel.close()
            raise
        self._loop.add_reader(self._channel.fileno(), self._read)

    def send(self, message: ToEngine) -> None:
        """Send at once, or as soon as the socket takes it. A message to a dead process is lost."""
        if self._has_ended:
            return
        self._unsent += packed(message)
        if not self._is_writing:
            self._write()

    def kill(self) -> None:
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
        exit_code = self._process.join(_EXIT_AFTER_EOF_S)
        if exit_code is None:
            self._process.kill()
            exit_code = self._process.join()
        with contextlib.suppress(RuntimeError):  # the loop is closed: the program is ending
            self._loop.call_soon_threadsafe(self._on_exit, exit_code)
