"""Routes about the server itself: /health, /v1/models, /props, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from offload.errors import NotSupported
from specoffload import __version__
from specoffload.server.api.models import Models
from specoffload.server.api.refusals import Json
from specoffload.server.api.routes import (
    ModelRoute,
    SubjectRoute,
    WatchingRoute,
    context_of,
    named_context,
)
from specoffload.server.metrics import MEDIA_TYPE, closed_connections, page_of

_NO_RANKS = (
    "this server ranks nothing: start llama-server as a reranker, with a model made for it, or "
    "compare vectors of /v1/embeddings"
)
_NO_ADAPTERS = (
    "adapters are not applied here: merge them into the model file with llama.cpp's "
    "llama-export-lora"
)
_NOT_SERVED = {
    "/rerank": _NO_RANKS,
    "/reranking": _NO_RANKS,
    "/v1/rerank": _NO_RANKS,
    "/v1/reranking": _NO_RANKS,
    "/lora-adapters": _NO_ADAPTERS,
}


def older_form(name: str, *, reads_images: bool = False) -> Json:
    """Return a model as ollama's /api/tags lists it, and llama-server with it.

    What llama-server leaves empty is empty here too.
    """
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion", *["multimodal"] * reads_images],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def status_router(models: Models) -> APIRouter:
    """Return the routes, which tell of one model, or of several if a request names none."""
    router = APIRouter(tags=["status"])
    watching = APIRouter(tags=["status"], route_class=WatchingRoute)
    asking = APIRouter(tags=["status"], route_class=SubjectRoute)
    of_model = APIRouter(tags=["status"], route_class=ModelRoute)

    async def health(request: Request) -> Response:
        """200 if a model takes requests and works on them; otherwise 503 and the reason.

        A server of several models gets 200 while it runs, with the progress of loading ones.
        """
        return models.subject(named_context(request)).health()

    for path in ("/health", "/v1/health"):
        watching.add_api_route(path, health, methods=["GET"])
        watching.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)

    @router.get("/v1/models")
    @router.get("/models")
    @router.get("/api/tags")
    async def all_models(request: Request) -> dict[str, Any]:
        """The models that are served, in OpenAI's list and in llama-server's older one.

        If there are several, `?reload=1` reads the list again first. Without the server's key only
        their names and states are told, and the list is not read again.
        """
        listed = await models.listed(request)
        older = [older_form(m.described["id"], reads_images=m.reads_images) for m in listed]
        return {"object": "list", "data": [m.described for m in listed], "models": older}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of the models that are served."""
        return await models.described(name)

    @asking.get("/props")
    async def props(request: Request) -> dict[str, Any]:
        """The settings as llama-server's page reads them, and others.

        A server of several models tells its own, or with `?model=` those of a model.
        """
        return models.subject(named_context(request)).props()

    @of_model.get("/server_info")
    async def server_info(request: Request) -> dict[str, Any]:
        """The fields of SGLang's route that its router reads to learn a replica's model."""
        context = context_of(request)
        return {
            "served_model_name": context.card.name,
            "context_length": context.card.n_ctx,
            "max_running_requests": context.engine.n_parallel,
            "version": __version__,
        }

    @watching.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text of a model, or of all; 501 without --metrics."""
        if not models.has_metrics:
            raise NotSupported("/metrics is off: start the server with --metrics")
        families = await models.subject(named_context(request)).metrics()
        connections = getattr(request.app.state, "connections", None)
        n_closed = 0 if connections is None else connections.n_closed
        return Response(page_of([*families, closed_connections(n_closed)]), media_type=MEDIA_TYPE)

    async def not_served(request: Request) -> Response:
        """A 501 that says why a route of llama-server is missing, and what to use instead."""
        path = request.url.path
        raise NotSupported(f"{path}: {_NOT_SERVED[path]}")

    for path in _NOT_SERVED:
        router.add_api_route(path, not_served, methods=["GET", "POST"], include_in_schema=False)
    for part in (watching, asking, of_model):
        router.include_router(part)
    return router
