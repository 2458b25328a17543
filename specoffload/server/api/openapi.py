"""/openapi.json: the routes as they are, with the bodies that they check."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import JSONResponse, Response

from specoffload import __version__
from specoffload.server.anthropic.request import CountRequest, MessagesRequest
from specoffload.server.api import wire
from specoffload.server.api.embeddings import EmbeddingsRequest, NativeEmbeddingRequest
from specoffload.server.responses.request import ResponsesRequest

BODIES: dict[str, type[BaseModel]] = {
    "/apply-template": wire.TemplateRequest,
    "/chat/completions": wire.ChatRequest,
    "/embedding": NativeEmbeddingRequest,
    "/embeddings": NativeEmbeddingRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/completion": wire.NativeRequest,
    "/completions": wire.NativeRequest,
    "/detokenize": wire.DetokenizeRequest,
    "/infill": wire.InfillRequest,
    "/slots/{number}": wire.SlotRequest,
    "/tokenize": wire.TokenizeRequest,
    "/v1/chat/completions": wire.ChatRequest,
    "/v1/completions": wire.CompletionRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/responses": ResponsesRequest,
}
_MAY_BE_EMPTY = {"/slots/{number}"}
_REF = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message", "type"],
            "properties": {
                "code": {"type": "integer"},
                "message": {"type": "string"},
                "type": {"type": "string"},
                "n_prompt_tokens": {"type": "integer"},
                "n_ctx": {"type": "integer"},
            },
        }
    },
}
_REFUSALS = {
    "400": "The request cannot be served as it is.",
    "401": "There is no key, or a wrong one.",
    "403": "The page or the host is none that may use the server.",
    "404": "There is no such thing.",
    "405": "The path has other methods.",
    "408": "The request took too long to arrive.",
    "413": "The body is longer than any prompt that fits.",
    "415": "The body is not called application/json.",
    "500": "The engine failed.",
    "501": "This model, or this server with it, cannot do that.",
    "503": "The model is loading, or the queue is full.",
}


def openapi_router(app: FastAPI) -> APIRouter:
    """The route of /openapi.json; the page is made at the first request."""
    made: list[dict[str, Any]] = []

    async def openapi() -> Response:
        """This description."""
        if not made:
            made.append(describe(app))
        return JSONResponse(made[0])

    router = APIRouter(tags=["status"])
    router.add_api_route("/openapi.json", openapi, methods=["GET"])
    return router


def describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document of all routes but the chat page's."""
    document = get_openapi(
        title="specoffload",
        version=__version__,
        description="Errors have llama-server's types. Parameters without effect are named in the "
        "header X-Ignored-Parameters.",
        routes=app.routes,
    )
    kinds = sorted(set(BODIES.values()), key=lambda kind: kind.__name__)
    _, schemas = models_json_schema([(kind, "validation") for kind in kinds], ref_template=_REF)
    components = document.setdefault("components", {})
    components["schemas"] = {**schemas.get("$defs", {}), "Error": _ERROR}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    document["security"] = [{}, {"bearer": []}, {"key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _complete(operation, BODIES.get(path) if method == "post" else None, path)
    return document


def _complete(operation: dict[str, Any], body: type[BaseModel] | None, path: str) -> None:
    """Adds the body and the answers, which the routes' signatures do not tell."""
    if body is not None:
        schema = {"$ref": _REF.format(model=body.__name__)}
        operation["requestBody"] = {
            "required": path not in _MAY_BE_EMPTY,
            "content": {"application/json": {"schema": schema}},
        }
    error = {"application/json": {"schema": {"$ref": _REF.format(model="Error")}}}
    kinds: dict[str, Any] = {"application/json": {"schema": {}}}
    if body is not None and "stream" in body.model_fields:
        kinds["text/event-stream"] = {"schema": {"type": "string"}}
    if path == "/metrics":
        kinds = {"text/plain": {"schema": {"type": "string"}}}
    operation["responses"] = {"200": {"description": "The answer.", "content": kinds}} | {
        status: {"description": words, "content": error} for status, words in _REFUSALS.items()
    }
