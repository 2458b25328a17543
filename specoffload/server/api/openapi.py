"""/openapi.json: the routes with the bodies that they check, and their errors."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from specoffload import __version__
from specoffload.server.api.requests import RequestModel

_SCHEMAS = "#/components/schemas/"
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
    "401": "The key is missing or wrong.",
    "403": "The page or the host may not use this server.",
    "404": "It does not exist.",
    "405": "The path has other methods.",
    "408": "The request took too long to arrive.",
    "413": "The body is longer than any prompt that fits.",
    "415": "The body is not called application/json.",
    "500": "The engine failed.",
    "501": "This model, or this server with it, cannot do that.",
    "503": "The model is loading, or the queue is full.",
}


def describe(app: FastAPI, bodies: Collection[type[RequestModel]]) -> dict[str, Any]:
    """The OpenAPI document of all routes but the chat page's. `bodies` are those that routes
    refer to."""
    document = get_openapi(
        title="specoffload",
        version=__version__,
        description="Errors have llama-server's types. Parameters without effect are named in the "
        "header X-Ignored-Parameters.",
        routes=app.routes,
    )
    kinds = {kind.__name__: kind for kind in bodies}
    _, schemas = models_json_schema(
        [(kinds[name], "validation") for name in sorted(kinds)], ref_template=_SCHEMAS + "{model}"
    )
    components = document.setdefault("components", {})
    components["schemas"] = {**schemas.get("$defs", {}), "Error": _ERROR}
    components["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    }
    document["security"] = [{}, {"bearer": []}, {"key": []}]
    error = {"application/json": {"schema": {"$ref": _SCHEMAS + "Error"}}}
    refusals = {code: {"description": text, "content": error} for code, text in _REFUSALS.items()}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            content: dict[str, Any] = {"application/json": {"schema": {}}}
            if path == "/metrics":
                content = {"text/plain": {"schema": {"type": "string"}}}
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            name = body.get("schema", {}).get("$ref", "").removeprefix(_SCHEMAS)
            if name in kinds and "stream" in kinds[name].model_fields:
                content["text/event-stream"] = {"schema": {"type": "string"}}
            ok = {"200": {"description": "The answer.", "content": content}}
            operation["responses"] = ok | refusals
    return document
