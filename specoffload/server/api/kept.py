"""Keeps streams for clients that come back, such as a page that is loaded again.

A client names its stream in the header `X-Stream-Id` of the request that begins it. Then the answer
goes on if the client leaves, and can be read again from its beginning:

    POST ... X-Stream-Id: ID ──> stream ──> its reader
    GET    /v1/streams/ID    ──────┘    └─> another reader, from the first byte
    DELETE /v1/streams/ID    ──> cancels it, since leaving no longer does

A stream without a reader is cancelled, or forgotten if it has ended, after a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specoffload.server.api.body import invalid
from specoffload.server.api.leaving import until_left
from specoffload.server.api.refusals import problem_response
from specoffload.server.engine.messages import Event, RequestFailed, unavailable

STREAM_ID = "x-stream-id"
_ID = re.compile(r"[A-Za-z0-9_-]{22,64}")  # 22 letters of base64 have 128 bits
_MOST_STREAMS = 64
_MOST_BYTES = 64 * 2**20  # a stream that grows larger is cancelled
_RETRY_AFTER_S = 10

log = logging.getLogger("specoffload.server")


class KeptStreams:
    """The streams of one server, by their ids. Used on one event loop."""

    def __init__(self, kept_s: float = 60.0) -> None:
        """`kept_s`: seconds that a stream without a reader is kept."""
        self._kept_s = kept_s
        self._streams: dict[str, _SentMessages] = {}

    def keep(self, stream_id: str, begin: Callable[[], ASGIApp]) -> Response:
        """Return the response that runs the answer of `begin` and keeps what it sends.

        Raises RequestFailed before `begin` is called: 400 for an id that could be guessed, 409 for
        one that is in use, and 503 if too many streams are kept.
        """
        if not _ID.fullmatch(stream_id):
            raise invalid("X-Stream-Id: must be 22 to 64 random letters, digits, - and _")
        if stream_id in self._streams:
            raise invalid("X-Stream-Id: this id is in use: choose another", 409)
        if len(self._streams) >= _MOST_STREAMS and not self._forget_one():
            message = f"{_MOST_STREAMS} streams are kept: try again later, or without X-Stream-Id"
            raise RequestFailed(unavailable(message, _RETRY_AFTER_S, Event.QUEUE_FULL))
        stream = _SentMessages(begin(), self._kept_s, lambda: self._streams.pop(stream_id, None))
        self._streams[stream_id] = stream
        return _Reading(stream)

    def find(self, stream_id: str) -> _SentMessages:
        """Raises RequestFailed (404) if no stream has this id, or has it any more."""
        stream = self._streams.get(stream_id)
        if stream is None:
            raise invalid(
                "no stream has this id: it was cancelled, or had no reader for "
                f"{self._kept_s:.0f} s",
                404,
            )
        return stream

    def _forget_one(self) -> bool:
        """Forget the oldest stream that has ended and has no reader. Returns False if none has."""
        for stream in self._streams.values():
            if stream.has_ended and not stream.n_readers:
                stream.cancel()
                return True
        return False


def streams_router(streams: KeptStreams) -> APIRouter:
    router = APIRouter(tags=["streams"])

    @router.get("/v1/streams/{stream_id}")
    async def read(stream_id: str) -> Response:
        """The stream whose request had this X-Stream-Id, from its first byte."""
        return _Reading(streams.find(stream_id))

    @router.delete("/v1/streams/{stream_id}", status_code=204)
    async def cancel(stream_id: str) -> None:
        """Ends a stream, and its answer."""
        streams.find(stream_id).cancel()

    return router


class _SentMessages:
    """The messages that an answer has sent so far. It runs until its end or `cancel`."""

    def __init__(self, answer: ASGIApp, kept_s: float, forget: Callable[[], object]) -> None:
        self.messages: list[Message] = []
        self.has_ended = False
        self.n_readers = 0
        self.error: BaseException | None = None
        self._answer = answer
        self._kept_s = kept_s
        self._forget = forget
        self._n_bytes = 0
        self._news = asyncio.Event()
        self._gone = asyncio.Event()  # tells the answer that its client has left
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.TimerHandle | None = None

    def begin(self, scope: Scope) -> None:
        """Run the answer to the request `scope`, in a task of its own. Does nothing later."""
        if self._task is None and not self._gone.is_set():
            # Without extensions, because those write to the first reader's socket.
            own = {**scope, "extensions": {}}
            self._task = asyncio.create_task(self._run(own))

    def cancel(self) -> None:
        """End the answer and forget the stream. Readers get what was sent before."""
        self._forget()
        self._gone.set()
        if self._task is None:
            self._finish()

    @contextlib.contextmanager
    def reader(self) -> Iterator[None]:
        """While this is open, the stream is kept."""
        self.n_readers += 1
        if self._end is not None:
            self._end.cancel()
        try:
            yield
        finally:
            self.n_readers -= 1
            if not self.n_readers:
                self._end = asyncio.get_running_loop().call_later(self._kept_s, self.cancel)

    async def wait(self, n_messages: int) -> None:
        """Wait until there are more than `n_messages`, or no more will come."""
        while len(self.messages) <= n_messages and not self.has_ended:
            self._news.clear()
            await self._news.wait()

    async def _run(self, scope: Scope) -> None:
        async def receive() -> Message:
            await self._gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self._answer(scope, receive, self._send)
        except Exception as e:
            self.error = e  # the first reader raises it
        finally:
            self._finish()

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > _MOST_BYTES and not self._gone.is_set():
            log.warning("a stream with X-Stream-Id is cancelled: over %d bytes", _MOST_BYTES)
            self.cancel()
        self._news.set()

    def _finish(self) -> None:
        self.has_ended = True
        self._news.set()


class _Reading(Response):
    """Sends a stream to one reader, from its beginning and until it ends."""

    def __init__(self, stream: _SentMessages) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream.reader():
            self._stream.begin(scope)
            await until_left(receive, self._copy(scope, receive, send))

    async def _copy(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream, at = self._stream, 0
        while True:
            await stream.wait(at)
            if at == len(stream.messages):
                break
            for message in stream.messages[at:]:
                await send(message)
                at += 1
        if stream.error is not None:
            raise stream.error
        if not stream.messages:
            await problem_response(invalid("this stream was cancelled", 409).problem)(
                scope, receive, send
            )
        elif stream.messages[-1].get("more_body"):  # cancelled in its midst
            await send({"type": "http.response.body", "body": b"", "more_body": False})
