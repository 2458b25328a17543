"""The page at `/`: a chat, served from memory, from this package alone."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

_FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".LICENSE": "text/plain; charset=utf-8",
}
# Nothing from elsewhere, nothing inline, no frame around it; only DOMPurify makes HTML of text.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked again each time, and answered 304 while it is the same
    "Vary": "Accept-Encoding",
}


@dataclass(frozen=True)
class _File:
    content: bytes
    packed: bytes  # gzip
    media_type: str
    tag: str

    @classmethod
    def read(cls, path: Path) -> _File:
        content = path.read_bytes()
        tag = '"' + hashlib.sha256(content).hexdigest()[:16] + '"'
        return cls(content, gzip.compress(content, mtime=0), _TYPES[path.suffix], tag)


def page_router() -> APIRouter:
    """`/` and what it loads from `/page/`. Needs no key: there is no secret in it.

    Only the files that lie in the package now are served, by exact name.
    """
    files = {
        path.relative_to(_FOLDER).as_posix(): _File.read(path)
        for path in _FOLDER.rglob("*")
        if path.suffix in _TYPES
    }

    async def index(request: Request) -> Response:
        return _response(request, files["index.html"])

    async def part(request: Request, name: str) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r}")
        return _response(request, files[name])

    router = APIRouter(include_in_schema=False)
    router.add_api_route("/", index, methods=["GET", "HEAD"], response_model=None)
    router.add_api_route("/page/{name:path}", part, methods=["GET", "HEAD"], response_model=None)
    return router


def _response(request: Request, file: _File) -> Response:
    headers = _HEADERS | {"ETag": file.tag}
    if request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    content = file.content
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers = file.packed, headers | {"Content-Encoding": "gzip"}
    return Response(content, media_type=file.media_type, headers=headers)
