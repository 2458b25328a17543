"""Serves the chat page at `/`. The page loads only plain files of this package."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_FOLDER = Path(__file__).parent / "static"
# The page loads nothing from other hosts, has no inline code, and may not be framed. Only DOMPurify
# may turn text into HTML.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # browsers ask each time, and get 304 for an unchanged file
}


class _PageFiles(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Serve `/` and the files that it loads from `/page/`. They contain no secret, so they need no
    key."""
    files = _PageFiles(directory=_FOLDER)

    async def index(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.add_api_route(
        "/", index, methods=["GET", "HEAD"], response_model=None, include_in_schema=False
    )
    # 1: a body of no bytes stays empty, as an answer of status 304 must.
    app.mount("/page", GZipMiddleware(files, minimum_size=1))
