"""HTTP responses that tell of a group of jobs as it goes, in the words of some API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specoffload.server.api.answer import TicketResponse, problem_response
from specoffload.server.api.wire import KEEP_ALIVE
from specoffload.server.engine.client import RequestFailed
from specoffload.server.engine.messages import Event, Problem, Started
from specoffload.server.telling.group import Heard, TicketGroup
from specoffload.server.transport.connection import WRITE_PART
from specoffload.session.generation import Piece

# A refused prompt and a failed prefill should get their HTTP status, so a stream's header waits
# for the first piece; but proxies and clients must not time out in a prefill of minutes.
_HEADER_PATIENCE_S = 10.0
_KEEP_ALIVE_S = 10.0
_NEWS_S = 1.0  # after so long, a part of a prompt that was evaluated is worth a comment

_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the events back
]


class Teller(Protocol):
    """The words of one API for one request. What is returned goes to the client as it is, in the
    order of the calls; empty bytes are nothing. `index` counts the jobs of a request; a piece tells
    of which answer it is."""

    def started(self, index: int, started: Started) -> None:
        """The prompt of an answer was accepted."""
        ...

    def piece(self, index: int, piece: Piece) -> bytes:
        """The events of a piece, and before the first of them those that open the stream. The last
        piece has a finish reason and statistics."""
        ...

    def end(self) -> bytes:
        """The stream's last events."""
        ...

    def failed(self, problem: Problem) -> bytes:
        """The events of a stream that breaks off."""
        ...

    def whole(self) -> bytes:
        """JSON of all that `piece` was given."""
        ...


class Told(TicketResponse):
    """An answer by a teller: in one piece, or as server-sent events."""

    def __init__(self, group: TicketGroup, teller: Teller, *, stream: bool) -> None:
        super().__init__(group.cancel)
        self._group = group
        self._teller = teller
        self._stream = stream
        self._has_header = False
        self._is_writing = False  # what comes now must wait for it
        self._has_spoken = False  # since it was last looked at
        self._wrote_at_s = monotonic()  # the last time that was not at once
        self._write_part: Callable[[bytes], bool] | None = None
        self._unwritten = b""  # what could not be written at once, while the client read slowly

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] == "1.1":
            self._write_part = scope.get("extensions", {}).get(WRITE_PART)
        try:
            if self._stream:
                await self._tell(lambda data: self._write(send, data))
            else:
                await self._collect()
        except RequestFailed as e:
            if not self._has_header:
                await problem_response(e.problem)(scope, receive, send)
                return
            await self._write(send, self._teller.failed(e.problem))
        if self._stream:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        else:
            response = Response(self._teller.whole(), media_type="application/json")
            await response(scope, receive, send)

    async def _collect(self) -> None:
        while (heard := await self._group.next()) is not None:
            self._take(heard.job, heard.event)

    async def _tell(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            try:
                patience_s = _KEEP_ALIVE_S if self._has_header else _HEADER_PATIENCE_S
                self._is_writing = False
                heard = await self._group.next(patience_s)
                self._is_writing = True
            except TimeoutError:
                self._is_writing = True
                if not self._has_spoken:
                    await write(KEEP_ALIVE)
                self._has_spoken = False
                continue
            if heard is None:
                break
            data = self._take(heard.job, heard.event)
            if data:
                await write(data)
                self._group.written(heard.made_at_s)
            elif _is_part_of_prompt(heard.event) and monotonic() - self._wrote_at_s > _NEWS_S:
                await write(KEEP_ALIVE)
        await write(self._teller.end())

    def _write_at_once(self, heard: Heard) -> bool:
        """Write a piece that only adds text, from where it is received: most tokens come here."""
        index, event, made_at_s = heard
        if self._write_part is None or self._is_writing or not isinstance(event, Piece):
            return False
        if not event.text or event.finish_reason is not None:
            return False
        self._has_spoken = True
        self._unwritten += self._teller.piece(index, event)
        if self._unwritten and self._write_part(self._unwritten):
            self._unwritten = b""
            self._group.written(made_at_s)
        return True

    def _take(self, index: int, event: Event) -> bytes:
        if isinstance(event, Started):
            self._teller.started(index, event)
        elif isinstance(event, Piece):
            return self._teller.piece(index, event)
        return b""

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._has_header:
            self._has_header = True
            start = {"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS}
            await send(start)
            # From here on, pieces need not wait for this task to be woken.
            self._group.at_once = self._write_at_once
        data, self._unwritten = self._unwritten + data, b""
        self._wrote_at_s = monotonic()
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _is_part_of_prompt(event: Event) -> bool:
    return isinstance(event, Piece) and event.finish_reason is None and not event.tokens
