"""The checks that every request passes before a route sees it."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specoffload.server.access.browsers import refusal
from specoffload.server.access.clients import client_name, note_client
from specoffload.server.access.keys import held_key
from specoffload.server.api.answer import problem_response
from specoffload.server.body.reading import has_body, ignored_header
from specoffload.server.engine.messages import Problem

PUBLIC = frozenset({"/health", "/v1/health", "/"})
PUBLIC_BELOW = "/page/"  # the page asks for the key itself


@dataclass(frozen=True)
class Access:
    """`keys`: one of them is needed, where there are any. `origins`: pages in browsers that may use
    the server besides its own. `on_loopback`: only this machine can reach it."""

    keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    on_loopback: bool = True


class Gate:
    """ASGI: 403 for pages of other origins, 401 without a key, 415 for what is not JSON."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            problem = self._problem(scope)
            if problem is not None:
                await problem_response(problem)(scope, receive, send)
                return
        await self._app(scope, receive, _naming_ignored(scope, send))

    def _problem(self, scope: Scope) -> Problem | None:
        headers, access = Headers(scope=scope), self._access
        why = refusal(
            headers.getlist("host"),
            headers.getlist("origin"),
            scheme=scope["scheme"],
            on_loopback=access.on_loopback,
            origins=access.origins,
        )
        if why is not None:
            return Problem("Forbidden", why, 403, "permission_error", can_retry=False)
        is_public = scope["path"] in PUBLIC or scope["path"].startswith(PUBLIC_BELOW)
        key = held_key(access.keys, headers.get("authorization"), headers.get("x-api-key"))
        if not is_public and access.keys and key is None:
            message = "Invalid API Key: send `Authorization: Bearer KEY`"
            return Problem("Unauthorized", message, 401, "authentication_error")
        address = scope["client"][0] if scope.get("client") else None
        note_client(scope, client_name(key if len(access.keys) > 1 else None, address))
        return _media_problem(headers)


def _naming_ignored(scope: Scope, send: Send) -> Send:
    """`send` with the header that names parameters without effect."""

    async def named(message: Message) -> None:
        if message["type"] == "http.response.start" and (added := ignored_header(scope)):
            message = {**message, "headers": [*message.get("headers", []), *added]}
        await send(message)

    return named


def _media_problem(headers: Headers) -> Problem | None:
    """JSON is demanded by name: any page may send other types to other origins unasked."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    if not has_body(headers) or media == "application/json":
        return None
    said = f"Content-Type is {media}" if media else "Content-Type is missing"
    message = f"{said}: send application/json"
    return Problem("UnsupportedMediaType", message, 415, "invalid_request_error", can_retry=False)
