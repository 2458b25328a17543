"""Standard output and error that never make the server wait for their reader.

A pipe or terminal whose reader has stopped takes no more bytes, and a write would wait. Here lines
then wait in memory, where a thread writes them as soon as they are read again. If too many wait,
later lines are dropped, and a line tells how many. A reader that has left gets nothing more.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import socket
import stat
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

_MOST_WAITING_BYTES = 1 << 20  # of lines that nobody reads
_PIECE_BYTES = 4096  # PIPE_BUF of Linux: smaller writes to a pipe are whole or not done
_PAUSE_S = 0.05  # after a write that took nothing, though the system said that it would
_LAST_WAIT_S = 0.5  # at the end of the process, for lines that wait

Send = Callable[[bytes], int]
"""Writes some bytes without waiting. Raises BlockingIOError if there is no room."""


class UnwaitedWriter:
    """Writes to a descriptor from any thread, without waiting."""

    def __init__(self, descriptor: int, most_bytes: int = _MOST_WAITING_BYTES) -> None:
        """`most_bytes` of lines wait at most."""
        self._descriptor, self._most_bytes = descriptor, most_bytes
        self._closing = contextlib.ExitStack()
        self._send = _sender(descriptor, self._closing)  # None: only waiting writes are possible
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._n_waiting_bytes = 0
        self._thread: threading.Thread | None = None  # writes what waits
        self._is_gone = False  # True: nobody will read
        self.n_dropped = 0  # lines since the last line about them

    def write(self, data: bytes) -> None:
        """Write lines, now or later."""
        with self._lock:
            if self._is_gone:
                return
            if self._thread is None and self._send is not None:
                data = data[self._sent(data) :]
                if not data or self._is_gone:
                    return
            elif self.n_dropped or self._n_waiting_bytes + len(data) > self._most_bytes:
                self.n_dropped += max(1, data.count(b"\n"))
                return
            self._wait(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
                self._thread.start()

    def settle(self, patience_s: float) -> None:
        """Wait until nothing waits, or until `patience_s` has passed."""
        end_s = time.monotonic() + patience_s
        while self._thread is not None and time.monotonic() < end_s:
            time.sleep(0.005)

    def close(self, patience_s: float = 0.0) -> None:
        """Write what waits, for at most `patience_s`, and nothing more."""
        self.settle(patience_s)
        with self._lock:
            self._is_gone = True
            if self._thread is None:  # otherwise it is using them
                self._closing.close()

    def _wait(self, data: bytes) -> None:
        self._waiting.append(data)
        self._n_waiting_bytes += len(data)

    def _sent(self, data: bytes) -> int:
        """Write as much as there is room for. Returns the number of bytes."""
        assert self._send is not None
        done = 0
        try:
            while done < len(data):
                done += self._send(data[done : done + _PIECE_BYTES])
        except BlockingIOError:
            pass
        except OSError:
            self._is_gone = True
        return done

    def _write_all(self) -> None:
        """Write what waits, until nothing does."""
        while True:
            data = self._waiting[0]
            n_sent = self._sent_later(data)
            with self._lock:
                self._waiting.popleft()
                self._n_waiting_bytes -= n_sent
                if n_sent < len(data):
                    self._waiting.appendleft(data[n_sent:])
                if self._is_gone:
                    self._waiting.clear()
                elif not self._waiting and self.n_dropped:
                    words = f"{self.n_dropped} lines dropped, because nobody read this output\n"
                    self.n_dropped = 0
                    self._wait(words.encode())
                if not self._waiting:
                    self._thread = None
                    if self._is_gone:
                        self._closing.close()
                    return

    def _sent_later(self, data: bytes) -> int:
        """Wait until there is room, and write. Returns the number of bytes."""
        if self._send is None:
            try:
                return os.write(self._descriptor, data[:_PIECE_BYTES])
            except OSError:
                self._is_gone = True
                return 0
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        poll.poll()
        n_sent = self._sent(data)
        if not n_sent:
            time.sleep(_PAUSE_S)
        return n_sent


def _sender(descriptor: int, closing: contextlib.ExitStack) -> Send | None:
    """Return a function that writes without waiting, None if there is no way to.

    What it uses is closed by `closing`. The descriptor's own mode stays as it is, because other
    processes share it.
    """
    try:
        if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            same = closing.enter_context(socket.socket(fileno=os.dup(descriptor)))
            return lambda data: same.send(data, socket.MSG_DONTWAIT)
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        opened = os.open(f"/proc/self/fd/{descriptor}", flags)
        closing.callback(os.close, opened)
    except OSError:
        return None
    return lambda data: os.write(opened, data)


class UnwaitedStream(io.TextIOBase):
    """A text stream in the place of sys.stdout or sys.stderr."""

    def __init__(self, shown: io.TextIOBase, writer: UnwaitedWriter) -> None:
        """`shown` is the stream that it takes the place of."""
        self._shown, self._writer = shown, writer

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._shown.encoding or "utf-8"

    def write(self, text: str) -> int:
        self._writer.write(text.encode(self.encoding, "backslashreplace"))
        return len(text)

    def isatty(self) -> bool:
        return self._shown.isatty()

    def fileno(self) -> int:
        return self._shown.fileno()


def never_wait_for_output() -> None:
    """Make standard output and error streams that never wait, if they are pipes or terminals.

    Log handlers that write to them do so through the new ones.
    """
    writers: dict[tuple[int, int], UnwaitedWriter] = {}  # one for both, if they are the same
    for name in ("stdout", "stderr"):
        shown = getattr(sys, name)
        if shown is None or isinstance(shown, UnwaitedStream):
            continue
        try:
            descriptor = shown.fileno()
            about = os.fstat(descriptor)
        except (OSError, ValueError):
            continue  # there is no file behind it
        is_pipe = stat.S_ISFIFO(about.st_mode) or stat.S_ISSOCK(about.st_mode)
        if not is_pipe and not os.isatty(descriptor):
            continue  # files always take more, or fail
        shown.flush()
        key = (about.st_dev, about.st_ino)
        if key not in writers:
            writers[key] = UnwaitedWriter(descriptor)
        stream = UnwaitedStream(shown, writers[key])
        setattr(sys, name, stream)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is shown:
                with contextlib.suppress(ValueError):
                    handler.setStream(stream)
    for writer in writers.values():
        atexit.register(writer.settle, _LAST_WAIT_S)
