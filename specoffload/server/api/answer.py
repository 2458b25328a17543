"""HTTP responses that follow tickets, which are cancelled when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specoffload.server.anthropic.errors import PATH, anthropic_error
from specoffload.server.api.wire import error_body
from specoffload.server.engine.client import RequestFailed, Ticket
from specoffload.server.engine.messages import Event, Problem


def problem_response(problem: Problem) -> Response:
    """The error as JSON, with the headers that tell clients whether and when to try again."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if problem.retry_after_ms is not None:
        headers["Retry-After-Ms"] = str(problem.retry_after_ms)  # read by OpenAI's clients
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
