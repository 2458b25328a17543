"""The log of `serve`: lines for the operator, warnings of both processes, and a line per request.

Lines go to standard output, notes and warnings to standard error, and all of them to --log-file.
Log rotation may move the file away. Then each process opens a new file for its next line, and the
API process does so at SIGHUP too.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from offload.notes import NoteKind, kind_of
from specoffload import report
from specoffload.errors import UsageError

_LEVELS = {"D": logging.DEBUG, "I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR}
_REFUSED = "specoffload.refused"  # set in the scope of a request that its connection has answered
_WORDS = "specoffload.words"  # a list in the scope: what the request's line says at its end
_MOST_WORDS = 400  # characters of that


@dataclass(frozen=True)
class LogSettings:
    """Where the log goes besides the terminal, and what stands before its lines.

    `prefix` puts the level's letter (D, I, W, E) before a line, as llama-server does.
    """

    file: Path | None = None
    timestamps: bool = True
    prefix: bool = False

    def marked(self, words: str, letter: str, at_s: float | None = None) -> str:
        """Return `words` after the time (default: now) and the level, as far as they are on."""
        parts = []
        if self.timestamps:
            at = datetime.fromtimestamp(time.time() if at_s is None else at_s)
            parts.append(at.isoformat(timespec="milliseconds"))
        if self.prefix:
            parts.append(letter)
        return " ".join((*parts, words))


class ServerLog:
    """Writes the log of one process. Both processes of a server append to the same file."""

    def __init__(self, settings: LogSettings) -> None:
        """Open the file, to append to it. Raises UsageError if it cannot be written."""
        self._settings = settings
        self._descriptor: int | None = None
        self._is_failing = False
        try:
            self._open()
        except OSError as e:
            raise UsageError(f"--log-file {settings.file}: {e.strerror}") from e

    def _open(self) -> None:
        """Open the file of this name, if there is one to write to. Raises OSError."""
        self._close()
        if self._settings.file is not None:
            # Without O_NONBLOCK, opening a pipe that nobody reads would never return.
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
            self._descriptor = os.open(self._settings.file, flags, 0o644)
            os.set_blocking(self._descriptor, True)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def reopen(self) -> None:
        """Open the file again, and say so in it. Called at SIGHUP."""
        file = self._settings.file
        self._close()
        self.say(
            "SIGHUP: there is no --log-file" if file is None else f"SIGHUP: {file} is open again"
        )

    def say(self, words: str) -> None:
        """Write a line for the operator to standard output and the file.

        Only a terminal gets a long one as several, which are broken between words.
        """
        line = self._settings.marked(words, "W" if kind_of(words) is NoteKind.WARNING else "I")
        report.paragraph(line)
        self.keep(line)

    def note(self, words: str) -> None:
        """Write a note to standard error and the file."""
        line = self._settings.marked(words, "I")
        report.note(line)
        self.keep(line)

    def error(self, error: Exception) -> None:
        """Write the error that ends the server to the file. The caller reports it elsewhere."""
        self.keep(self._settings.marked(str(error), "E"))

    def keep(self, line: str) -> None:
        """Append a line to the file, if there is one. The first failed write in a row is told."""
        if self._settings.file is None:
            return
        data = f"{report.plain(line)}\n".encode(errors="backslashreplace")
        try:
            if self._descriptor is None or self._was_moved(self._descriptor):
                self._open()
            assert self._descriptor is not None
            os.write(self._descriptor, data)  # appended as a whole, between the lines of others
        except OSError as e:
            self._close()
            if not self._is_failing:
                reason = f"{e.strerror}; lines are missing from it until it can be written again"
                words = f"--log-file {self._settings.file}: {reason}"
                report.note(self._settings.marked(words, "W"))
            self._is_failing = True
        else:
            self._is_failing = False

    def _was_moved(self, descriptor: int) -> bool:
        """True if the file's name now belongs to another file, or to none. Raises OSError."""
        assert self._settings.file is not None
        try:
            named = os.stat(self._settings.file)
        except FileNotFoundError:
            return True
        return not os.path.samestat(named, os.fstat(descriptor))

    def follow_warnings(self) -> None:
        """Mark the lines of Python's log too, and keep them in the file.

        What --verbose shows stays so; without it only warnings are shown.
        """
        root = logging.getLogger()
        if not root.handlers:
            handler = report.WordsHandler(sys.stderr)
            handler.setLevel(logging.WARNING)
            root.addHandler(handler)
        shown = root.handlers[0]
        shown.setFormatter(_Marked(self._settings, shown.formatter or logging.Formatter()))
        if self._settings.file is not None:
            kept = _KeepingHandler(self.keep)
            kept.setLevel(shown.level)
            kept.setFormatter(shown.formatter)
            for each in shown.filters:
                kept.addFilter(each)
            root.addHandler(kept)


class _Marked(logging.Formatter):
    """Puts time and level before what another formatter makes."""

    def __init__(self, settings: LogSettings, inner: logging.Formatter) -> None:
        super().__init__()
        self._settings = settings
        self._inner = inner

    def format(self, record: logging.LogRecord) -> str:
        letter = max(
            (level, letter) for letter, level in _LEVELS.items() if level <= max(10, record.levelno)
        )[1]
        return self._settings.marked(self._inner.format(record), letter, record.created)


class _KeepingHandler(logging.Handler):
    def __init__(self, keep: Callable[[str], None]) -> None:
        super().__init__()
        self._keep = keep

    def emit(self, record: logging.LogRecord) -> None:
        self._keep(self.format(record))


class RequestLog:
    """ASGI middleware that says one line for each request: client, method, path, status, seconds.

    Requests of `unsaid` paths have a line only if they are refused (4xx), because monitors send
    them every few seconds.

    The line ends with the words that `add_words` was given: tokens and speeds, or an error.
    The path is the one that was sent, without decoding, because a decoded one may contain line
    feeds. Its query is left out, because clients put secrets there.
    """

    def __init__(
        self, app: ASGIApp, say: Callable[[str], None], unsaid: Container[str] = ()
    ) -> None:
        self._app = app
        self._say = say
        self._unsaid = unsaid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        words: list[str] = []
        scope[_WORDS] = words  # a list, because routes may copy the scope
        status: int | None = None
        is_whole = False

        async def send_noted(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            is_poll = scope["path"] in self._unsaid and not 400 <= (status or 0) < 500
            if _REFUSED not in scope and not is_poll:
                took_s = time.monotonic() - began_s
                said = [] if is_whole else ["cut off, since the client left"]
                reason = " · ".join([*said, *words])
                self._say(request_line(scope, scope.get("client"), status, took_s, reason))


def add_words(scope: Scope, words: str) -> None:
    """Add words to the end of the request's line. They are cut and put in one line."""
    if words and _WORDS in scope:
        scope[_WORDS].append(" ".join(words.split())[:_MOST_WORDS])


def mark_refused(scope: Scope) -> None:
    """Record that the connection answers this request itself, and says its line."""
    scope[_REFUSED] = True


def request_line(
    scope: Scope | None, client: Any, status: int | None, took_s: float, reason: str = ""
) -> str:
    """Return the line of a request. `scope` is None for a request whose header is not complete.

    `client` is the pair of address and port. `reason` says what became of the request.
    """
    host = client[0] if client else "-"
    method, path = "-", "-"
    if scope is not None:
        raw = scope.get("raw_path") or scope["path"].encode()
        method, path = scope["method"], raw.decode("ascii", errors="backslashreplace")
    line = f"{host} {method} {path} {status or '-'} {took_s:.3f} s"
    return f"{line}: {reason}" if reason else line
