"""Lets a request wait for its model. A stream gets its header and signs of life meanwhile."""

from __future__ import annotations

import asyncio
import math
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specoffload.server.api.answers import STREAM_HEADERS
from specoffload.server.api.body import HeldBodies
from specoffload.server.api.leaving import has_left
from specoffload.server.api.life_signs import SIGN_S
from specoffload.server.api.refusals import problem_response
from specoffload.server.api.routes import give_context
from specoffload.server.engine.messages import RequestFailed, problem_of
from specoffload.server.router.early import EarlyStream
from specoffload.server.router.model import PoolModel, Wish

_HEADER_PATIENCE_S = SIGN_S  # a stream's header is sent after this time, so that proxies wait
_NEWS_S = 1.0  # seconds between comments about loading


class WaitingRequest:
    """A request that waits for its model, and is then answered by its route.

    A stream gets its header, signs of life, and comments with the progress while it waits long. It
    then has status 200, so a later refusal is an event.
    """

    def __init__(
        self,
        route: ASGIApp,
        wish: Wish,
        bodies: HeldBodies,
        body: bytes,
        early: EarlyStream | None,
    ) -> None:
        """`early` has the first events of a stream, None for other answers."""
        self._route, self._wish, self._bodies = route, wish, bodies
        self._body, self._early = body, early
        self._has_header = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._wish.end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.ensure_future(has_left(receive))
        try:
            with self._bodies.hold(len(self._body)):  # the route counts it then
                if not await self._wait(left, send):
                    return
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        try:
            self._wish.granted.result()
        except RequestFailed as e:
            await problem_response(e.problem)(scope, receive, self._sender(send))
            return
        served = self._wish.model.served
        assert served is not None  # a wish is granted by a model with an engine
        give_context(scope, served.context)
        body, self._body = self._body, b""
        replayed = _replayed(body, receive)
        del body
        sender = self._sender(send)
        try:
            await self._route(scope, replayed, sender)
        except Exception as e:
            if self._has_header:  # the stream is open, so that only an event can say it
                await problem_response(problem_of(e))(scope, receive, sender)
            raise

    async def _wait(self, left: asyncio.Future[None], send: Send) -> bool:
        """Wait until the model takes the request, or refuses it. False if the client left."""
        granted, began_s = self._wish.granted, time.monotonic()
        told_at_s = -math.inf  # time of the last event
        while not granted.done():
            waited_s = time.monotonic() - began_s
            patience_s: float | None = (
                _NEWS_S if self._has_header else _HEADER_PATIENCE_S - waited_s
            )
            await asyncio.wait(
                {granted, left},
                timeout=None if self._early is None else patience_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if granted.done():
                break
            if left.done():
                return False
            assert self._early is not None  # else only the two events above end the wait
            if not self._has_header:
                self._has_header = True
                start = {"type": "http.response.start", "status": 200}
                await send({**start, "headers": STREAM_HEADERS.raw})
            told = f": {_waiting_words(self._wish.model)}\n\n".encode()
            if time.monotonic() - told_at_s >= SIGN_S:
                told_at_s = time.monotonic()
                told += self._early.sign()
            await send({"type": "http.response.body", "body": told, "more_body": True})
        return True

    def _sender(self, send: Send) -> Send:
        """Return `send`, or one for a stream whose header was sent while it waited."""
        early = self._early
        if not self._has_header or early is None:
            return send
        is_error = False
        body = b""

        async def send_rest(message: Message) -> None:
            nonlocal is_error, body
            if message["type"] == "http.response.start":
                is_error = message["status"] != 200
                return
            if not is_error:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                await send({**message, "body": early.failed(body)})

        return send_rest


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, which was read before, and then what follows."""
    left = [body]  # given away once, so that it is in memory once

    async def receive_again() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return receive_again


def _waiting_words(model: PoolModel) -> str:
    loading = model.loading
    if loading is None:
        return f"{model.name} is {model.status}"
    return f"loading {model.name}: {loading.step} {loading.done:.0%}"
