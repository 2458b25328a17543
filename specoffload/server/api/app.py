"""Builds the HTTP application: middleware, routes, error handlers and OpenAPI document."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import BaseRoute

from specoffload import __version__
from specoffload.errors import KNOWN
from specoffload.server.access import AccessRules, Gate, origin_pattern
from specoffload.server.api.anthropic import anthropic_router
from specoffload.server.api.body import fault
from specoffload.server.api.brief import embeddings_router, slots_router, text_router
from specoffload.server.api.kept import streams_router
from specoffload.server.api.models import Models
from specoffload.server.api.native import native_router
from specoffload.server.api.openai import openai_router
from specoffload.server.api.refusals import problem_response
from specoffload.server.api.responses import responses_router
from specoffload.server.api.status import status_router
from specoffload.server.api.stored import stored_router
from specoffload.server.decoding import Decoding
from specoffload.server.engine.messages import Problem, RequestFailed, problem_of
from specoffload.server.page import add_page

log = logging.getLogger("specoffload.server")

_TYPES = {404: "not_found_error", 500: "server_error"}


class _Fault(BaseModel):
    code: int
    message: str
    type: str
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class _Error(BaseModel):
    """The body of all errors but those of Anthropic's API, for /openapi.json."""

    error: _Fault


_REFUSED: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": _Error, "description": "The request cannot be served as it is."},
    "5XX": {"model": _Error, "description": "The engine failed, is loading or cannot do that."},
}


def create_app(
    models: Models, *, access: AccessRules | None = None, has_page: bool = True
) -> FastAPI:
    """Return the application, which has the same routes for one model and for several.

    The caller starts and closes the engines of `models`. `has_page` puts the chat page at `/`.
    """
    app = _bare_app()
    _guard(app, access or AccessRules())
    app.state.models = models
    for router in (
        status_router(models),
        *models.own_routers(),
        streams_router(models.shared.streams),
        stored_router(models.shared.stored),
        *(text_router(), openai_router(), native_router(), anthropic_router(), responses_router()),
        *(embeddings_router(), slots_router()),
    ):
        app.include_router(router)
    if has_page:
        add_page(app)
    return app


def _bare_app() -> FastAPI:
    """Return an application without routes, whose errors have llama-server's form."""
    # No /docs, because its page loads scripts from another host. No redirects, because they would
    # go to the name in the client's Host header.
    app = FastAPI(docs_url=None, redoc_url=None, redirect_slashes=False, responses=_REFUSED)
    app.openapi = functools.cache(lambda: _describe(app.routes))  # type: ignore[method-assign]
    _add_error_handlers(app)
    return app


def _guard(app: FastAPI, access: AccessRules) -> None:
    """Let the application refuse requests by `access`, and decode the bodies of others."""
    app.add_middleware(Decoding)
    app.add_middleware(Gate, rules=access)
    if access.origins:  # the middleware that is added last sees a request first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_origin_regex=origin_pattern(access.origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )


def _add_error_handlers(app: FastAPI) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestFailed)
        return problem_response(error.problem)

    async def known(request: Request, error: Exception) -> Response:
        return problem_response(problem_of(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = _TYPES.get(status, "invalid_request_error")
        response = problem_response(Problem("HTTPException", message, status, kind))
        response.headers.update(error.headers or {})
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = [{**told, "loc": told["loc"][1:]} for told in error.errors()]
        return problem_response(fault(faults, error.body).problem)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(
            status_code=400
        )  # never read, because the client left while sending its body

    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(problem_of(error))

    app.add_exception_handler(RequestFailed, failed)
    for kind in KNOWN:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unforeseen)


def _describe(routes: Sequence[BaseRoute]) -> dict[str, Any]:
    """Return the OpenAPI document of all routes but the chat page's."""
    document = get_openapi(
        title="specoffload",
        version=__version__,
        description="Errors have llama-server's types. Parameters without effect are named in the "
        "header X-Ignored-Parameters.",
        routes=routes,
    )
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    document["security"] = [{}, {"bearer": []}, {"key": []}]
    return document
