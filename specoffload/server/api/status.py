"""Routes about the server itself: /health, /v1/models, /props, /metrics."""

from __future__ import annotations

import contextlib
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.requests import Request
from starlette.responses import Response

from offload.errors import NotSupported
from specoffload import __version__
from specoffload.server.api.answers import Json
from specoffload.server.api.context import ServerContext
from specoffload.server.api.parameters import settings_of
from specoffload.server.api.refusals import Api, error_body, problem_response
from specoffload.server.engine import calls
from specoffload.server.engine.messages import Event, Problem, RequestFailed
from specoffload.server.metrics import MEDIA_TYPE, N_DRAFTED

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
_ENGINE_PATIENCE_S = 2.0  # the engine answers between batches, and a long one takes minutes


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


def status_router(context: ServerContext, *, has_metrics: bool) -> APIRouter:
    engine = context.engine
    router = APIRouter(tags=["status"])
    counters: dict[str, float] = {}  # the engine's last known counters

    async def health() -> Response:
        """200 if requests are taken and the engine works on them; otherwise 503 and the reason."""
        problem = engine.unavailable() or engine.unwell()
        if problem is None:
            return JSONResponse({"status": "ok"})
        loading = engine.loading
        if loading is None:
            return problem_response(problem)
        told = {"status": "loading model", "step": loading.step, "progress": loading.done}
        headers = {"Retry-After": str(problem.retry_after_s)}
        return JSONResponse(error_body(problem, Api.NATIVE) | told, problem.http_status, headers)

    for path in ("/health", "/v1/health"):
        router.add_api_route(path, health, methods=["GET"])
        router.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)

    def described() -> Json:
        card = engine.card
        meta = card and {
            "n_vocab": card.n_vocab,
            "n_ctx": card.n_ctx,
            "n_params": card.n_params,
            "size": card.size_bytes,
            "architecture": card.architecture,
        }
        return {
            "id": context.name,
            "object": "model",
            "created": context.created,
            "owned_by": "specoffload",
            "meta": meta,  # None while the model is loaded the first time, as in llama-server
        }

    @router.get("/v1/models")
    @router.get("/models")
    @router.get("/api/tags")
    async def models() -> dict[str, Any]:
        """The model that is served, in OpenAI's list and in llama-server's older one."""
        name, reads_images = context.name, bool(engine.card and engine.card.reads_images)
        older = older_form(name, reads_images=reads_images)
        return {"object": "list", "data": [described()], "models": [older]}

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model that is served."""
        known = context.name
        if name != known:
            message = f"no model {name[:80]!r} here: this server has {known!r}"
            kind, event = "not_found_error", Event.UNKNOWN_MODEL
            raise RequestFailed(Problem("NotFound", message, 404, kind, event=event))
        return described()

    @router.get("/props")
    async def props() -> dict[str, Any]:
        """The server's settings as llama-server's page reads them, and others."""
        card = context.card
        return {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": card.n_ctx,
                "speculative": engine.metrics.sums[N_DRAFTED] > 0,
                "is_processing": engine.n_running > 0,
                "params": settings_of(context.defaults),
            },
            "total_slots": engine.n_parallel,
            "model_alias": card.name,
            "model_path": card.path,
            "modalities": {"vision": card.reads_images, "audio": False},
            "media_marker": context.media.marker,
            "chat_template": card.chat_template,
            "only_continues": card.only_continues,
            "bos_token": card.bos,
            "eos_token": card.eos,
            "build_info": f"specoffload {__version__}",
            "endpoint_metrics": has_metrics,
            "endpoint_slots": True,
            "is_sleeping": False,
            "notes": list(card.notes),
            "requests_processing": engine.n_running,
            "requests_deferred": engine.n_waiting,
            "engine_restarts": engine.metrics.n_restarts,
        }

    @router.get("/server_info")
    async def server_info() -> dict[str, Any]:
        """The fields of SGLang's route that its router reads to learn a replica's model."""
        return {
            "served_model_name": context.card.name,
            "context_length": context.card.n_ctx,
            "max_running_requests": engine.n_parallel,
            "version": __version__,
        }

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text; 501 without --metrics."""
        if not has_metrics:
            raise NotSupported("/metrics is off: start the server with --metrics")
        with contextlib.suppress(RequestFailed, TimeoutError):  # the engine is loading or busy
            counters.update(await engine.call(calls.counters, timeout_s=_ENGINE_PATIENCE_S))
        connections = getattr(request.app.state, "connections", None)
        page = engine.metrics.page(
            counters,
            n_running=engine.n_running,
            n_waiting=engine.n_waiting,
            n_parallel=engine.n_parallel,
            n_connections_closed=0 if connections is None else connections.n_closed,
            model=engine.model_name,
        )
        return Response(page, media_type=MEDIA_TYPE)

    async def not_served(request: Request) -> Response:
        """A 501 that says why a route of llama-server is missing, and what to use instead."""
        path = request.url.path
        raise NotSupported(f"{path}: {_NOT_SERVED[path]}")

    for path in _NOT_SERVED:
        router.add_api_route(path, not_served, methods=["GET", "POST"], include_in_schema=False)
    return router
