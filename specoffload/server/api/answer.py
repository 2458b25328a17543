"""HTTP responses that follow one ticket: whole or streamed, cancelled when the client leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specoffload.server.anthropic.errors import PATH, anthropic_error
from specoffload.server.api.shapes import Shape
from specoffload.server.api.wire import (
    DONE,
    KEEP_ALIVE,
    error_body,
    server_sent,
    server_sent_error,
)
from specoffload.server.engine.client import RequestFailed, Ticket
from specoffload.server.engine.messages import Event, Finished, Problem
from specoffload.server.transport.connection import WRITE_PART
from specoffload.session.generation import Piece

# A refused prompt and a failed prefill should get their HTTP status, so a stream's header waits
# for the first piece; but proxies and clients must not time out in a prefill of minutes.
_HEADER_PATIENCE_S = 10.0
_KEEP_ALIVE_S = 10.0

log = logging.getLogger("specoffload.server")


def problem_response(problem: Problem) -> Response:
    """The error as JSON, with the headers that tell clients whether and when to try again."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if not problem.can_retry:
        headers["X-Should-Retry"] = "false"  # read by OpenAI's clients
    if problem.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _ProblemResponse(problem, headers)


class _ProblemResponse(JSONResponse):
    """OpenAI's shape of an error, or on the paths of Anthropic's API, Anthropic's."""

    def __init__(self, problem: Problem, headers: Mapping[str, str]) -> None:
        super().__init__(error_body(problem), problem.http_status, headers)
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(PATH):
            self.body = self.render(anthropic_error(self._problem))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


class TicketResponse(Response):
    """Runs `produce` until it ends or the client leaves; the ticket is given back either way.

    Starlette cancels only some kinds of response on a disconnect; a request that is queued or in
    prefill must be cancelled too, so this listens itself.
    """

    def __init__(self, give_back: Callable[[], None]) -> None:
        super().__init__()
        self._give_back = give_back

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._produce(scope, receive, send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._give_back()
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _pieces(ticket: Ticket) -> AsyncIterator[Piece]:
    while not isinstance(event := await ticket.next(), Finished):
        if isinstance(event, Piece):
            yield event


class WholeAnswer(TicketResponse):
    """One JSON object when the generation has ended."""

    def __init__(self, ticket: Ticket, shape: Shape) -> None:
        super().__init__(ticket.cancel)
        self._ticket = ticket
        self._shape = shape

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._collect()
        except RequestFailed as e:
            response = problem_response(e.problem)
        await response(scope, receive, send)

    async def _collect(self) -> Response:
        async for piece in _pieces(self._ticket):
            self._shape.add(piece)
        return Response(self._shape.whole(), media_type="application/json")


class StreamedAnswer(TicketResponse):
    """Server-sent events, ended by [DONE]; after the header, an error is an event."""

    def __init__(self, ticket: Ticket, shape: Shape) -> None:
        super().__init__(ticket.cancel)
        self._ticket = ticket
        self._shape = shape
        self._has_header = False
        self._is_writing = False  # what comes now must wait for it
        self._has_spoken = False  # since it was last looked at
        self._write_part: Callable[[bytes], bool] | None = None
        self._unsent = b""  # goes before what is written next

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(data: bytes) -> None:
            await self._write(send, data)
            # From the header on, pieces need not wait for this task to be woken.
            self._ticket.at_once = self._write_at_once

        self._write_part = scope.get("extensions", {}).get(WRITE_PART)
        try:
            async for piece in self._pieces_or_silence(write):
                await self._write_piece(piece, write)
            await write(DONE)
        except RequestFailed as e:
            if not self._has_header:
                await problem_response(e.problem)(scope, receive, send)
                return
            await write(server_sent_error(e.problem))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pieces_or_silence(
        self, write: Callable[[bytes], Awaitable[None]]
    ) -> AsyncIterator[Piece]:
        while True:
            try:
                patience_s = _KEEP_ALIVE_S if self._has_header else _HEADER_PATIENCE_S
                self._is_writing = False
                event = await self._ticket.next(patience_s)
                self._is_writing = True
            except TimeoutError:
                self._is_writing = True
                if not self._has_spoken:
                    await write(KEEP_ALIVE)
                self._has_spoken = False
                continue
            if isinstance(event, Finished):
                return
            if isinstance(event, Piece):
                yield event

    def _write_at_once(self, event: Event) -> bool:
        """Write a piece that only adds text, from where it is received: most tokens come here."""
        if self._write_part is None or not isinstance(event, Piece):
            return False
        if not event.text or event.finish_reason is not None or self._is_writing:
            return False
        data = self._unsent + _events(self._shape.add(event))
        if data:
            self._has_spoken = self._write_part(data)
            self._unsent = b"" if self._has_spoken else data
        return True

    async def _write_piece(self, piece: Piece, write: Callable[[bytes], Awaitable[None]]) -> None:
        if not piece.text and piece.finish_reason is None and not piece.tokens:
            await write(KEEP_ALIVE)  # a part of the prompt was evaluated
            return
        data = _events(self._shape.add(piece))
        if data:
            await write(data)

    async def _write(self, send: Send, data: bytes) -> None:
        if not self._has_header:
            self._has_header = True
            headers = [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),  # nginx would hold the events back
            ]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            data = _events(self._shape.opening()) + data
        data, self._unsent = self._unsent + data, b""
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _events(lines: list[str]) -> bytes:
    return b"".join(map(server_sent, lines))


class SingleAnswer(TicketResponse):
    """One JSON object made of the only event of a job that generates nothing."""

    def __init__(self, ticket: Ticket, body: Callable[[Event], Any]) -> None:
        """`body` words the event as JSON."""
        super().__init__(ticket.cancel)
        self._ticket = ticket
        self._body = body

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            event = await self._ticket.next()
        except RequestFailed as e:
            await problem_response(e.problem)(scope, receive, send)
            return
        await JSONResponse(self._body(event))(scope, receive, send)
