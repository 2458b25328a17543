"""The kinds of routes that a model answers: they find its context, and read the request's body."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, ClassVar

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specoffload.server.api.body import has_body
from specoffload.server.api.context import ServerContext
from specoffload.server.api.models import Models, RouteNeeds

_CONTEXT = "specoffload.context"  # key in a request's scope


def give_context(scope: Scope, context: ServerContext) -> None:
    """Let a request be answered by the model of `context`."""
    scope[_CONTEXT] = context


def context_of(request: Request) -> ServerContext:
    """Return the context of the model that answers a request."""
    context: ServerContext = request.scope[_CONTEXT]
    return context


def named_context(request: Request) -> ServerContext | None:
    """Return the context of a request's model. None: several are served, and it names none."""
    return request.scope.get(_CONTEXT)


class ModelRoute(APIRoute):
    """A route that the model of a request answers, once it is open."""

    needs: ClassVar = RouteNeeds()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            await super().handle(scope, receive, send)  # refuses the method
            return
        models: Models = scope["app"].state.models
        await models.answer(super().handle, self.needs, scope, receive, send)


class SubjectRoute(ModelRoute):
    """A route about a model, or about all of several."""

    needs = RouteNeeds(named=False)


class WatchingRoute(ModelRoute):
    """A route about a model, or about all of several, that opens none."""

    needs = RouteNeeds(named=False, opened=False)


class BodyRoute(ModelRoute):
    """A route whose body is read by `ServerContext.json_of`, before FastAPI checks it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_read(request: Request) -> Response:
            context = context_of(request)
            with ExitStack() as held:
                read = _ReadRequest(_called_json(request.scope), request.receive)
                if context.card and has_body(request.headers):
                    read.content = await context.json_of(request, held)
                response = await handle(read)
                return _HeldResponse(response, held.pop_all())

        return handle_read if self.body_field is not None else handle


class _HeldResponse(Response):
    """Another response, with which what is held for its request is let go."""

    def __init__(self, response: Response, held: ExitStack) -> None:
        super().__init__()
        self._response, self._held = response, held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._held:
            await self._response(scope, receive, send)


def _called_json(scope: Scope) -> Scope:
    """The scope with application/json as the body's type, because FastAPI reads nothing else."""
    name = b"content-type"
    others = [(key, value) for key, value in scope["headers"] if key != name]
    return {**scope, "headers": [*others, (name, b"application/json")]}


class _ReadRequest(Request):
    """A request whose body is `content`."""

    content: dict[str, Any] | None = None

    async def body(self) -> bytes:
        return b"" if self.content is None else b"{}"  # FastAPI only checks whether there is a body

    async def json(self) -> Any:
        return self.content
