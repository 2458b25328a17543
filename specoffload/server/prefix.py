"""Paths of requests: below --api-prefix, and with single slashes."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

from specoffload.errors import UsageError
from specoffload.server.api.refusals import problem_response
from specoffload.server.engine.messages import Problem

_SEGMENTS = re.compile(r"(?:/[A-Za-z0-9._~-]+)*")  # of characters that no client encodes
_SLASHES, _RAW = re.compile("//+"), re.compile(b"//+")


def read_prefix(text: str) -> str:
    """Return the path of --api-prefix, which is empty or begins with a slash and ends with none.

    Raises UsageError for other text than a path.
    """
    path = text.removesuffix("/")
    if path and not path.startswith("/"):
        path = f"/{path}"
    if not _SEGMENTS.fullmatch(path):
        raise UsageError(f"--api-prefix {text}: a path looks like /llm")
    return path


class SingleSlashes:
    """ASGI middleware that reads several slashes as one.

    Clients write `/v1//models` if their base address ends with a slash (open-webui #12117).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and "//" in scope["path"]:
            raw = scope.get("raw_path") or scope["path"].encode()
            single = {"path": _SLASHES.sub("/", scope["path"]), "raw_path": _RAW.sub(b"/", raw)}
            scope = {**scope, **single}
        await self._app(scope, receive, send)


class BelowPrefix:
    """ASGI middleware that removes `prefix` from paths, and answers 404 to paths without it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        prefix = self._prefix
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif not scope["path"].startswith(f"{prefix}/"):
            message = f"paths of this server begin with {prefix}/ (--api-prefix)"
            problem = Problem("NotFound", message, 404, "not_found_error")
            await problem_response(problem)(scope, receive, send)
        else:
            raw = scope.get("raw_path") or scope["path"].encode()
            below = {"path": scope["path"][len(prefix) :], "raw_path": raw[len(prefix) :]}
            await self._app({**scope, **below}, receive, send)
