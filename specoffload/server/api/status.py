"""Routes that tell of the server: /health, /v1/models, /props, /metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from offload.errors import NotSupported
from specoffload import __version__
from specoffload.server.api.answer import problem_response
from specoffload.server.api.context import Context
from specoffload.server.api.settings import settings_of
from specoffload.server.api.wire import error_body
from specoffload.server.engine.client import RequestFailed
from specoffload.server.engine.messages import Counters, CountersJob
from specoffload.server.status.metrics import MEDIA_TYPE, Now, metrics_page
from specoffload.server.transport.connection import Waiting
from specoffload.session.generation import ModelCard

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
_ENGINE_PATIENCE_S = 2.0  # it answers between two batches; a long one may take minutes


class Status:
    """See the module. `has_metrics`: /metrics is there."""

    def __init__(self, context: Context, *, has_metrics: bool) -> None:
        self._context = context
        self._has_metrics = has_metrics
        self._counters: dict[str, float] = {}  # as the engine last told them

    def router(self) -> APIRouter:
        router = APIRouter(tags=["status"])
        for path in ("/health", "/v1/health"):
            router.add_api_route(path, self.health, methods=["GET"])
            router.add_api_route(path, self.health, methods=["HEAD"], include_in_schema=False)
        for path in ("/v1/models", "/models"):
            router.add_api_route(path, self.models, methods=["GET"])
        router.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"])
        router.add_api_route("/props", self.props, methods=["GET"])
        router.add_api_route("/metrics", self.metrics, methods=["GET"])
        for path in _NOT_SERVED:
            router.add_api_route(
                path, self.not_served, methods=["GET", "POST"], include_in_schema=False
            )
        return router

    async def health(self) -> Response:
        """200 when requests are taken and the engine is at work on them; else 503 and why not."""
        problem = self._context.engine.unavailable() or self._context.engine.unwell()
        if problem is None:
            return JSONResponse({"status": "ok"})
        loading = self._context.engine.loading
        if loading is None:
            return problem_response(problem)
        told = {"status": "loading model", "step": loading.step, "progress": loading.done}
        body = error_body(problem) | told
        headers = {"Retry-After": str(problem.retry_after_s)}
        return JSONResponse(body, problem.http_status, headers)

    async def models(self) -> dict[str, Any]:
        """The one model, under both its names: OpenAI's list and the older one of llama-server."""
        card = self._context.card()
        return {"object": "list", "data": [self._describe(card)], "models": [_named(card)]}

    async def model(self, name: str) -> dict[str, Any]:
        card = self._context.card()
        if name != card.name:
            raise HTTPException(404, f"no model {name[:80]!r} here: this server has {card.name!r}")
        return self._describe(card)

    async def props(self) -> dict[str, Any]:
        """The server's settings, as llama-server's own page reads them, and ours."""
        card, engine = self._context.card(), self._context.engine
        return {
            "default_generation_settings": {
                "id": 0,
                "n_ctx": card.n_ctx,
                "speculative": engine.totals.n_drafted > 0,
                "is_processing": engine.n_running > 0,
                "params": settings_of(self._context.defaults),
            },
            "total_slots": engine.n_parallel,
            "model_alias": card.name,
            "model_path": card.name,  # the folder is nobody's business
            "modalities": {"vision": False, "audio": False},
            "chat_template": card.chat_template,
            "bos_token": card.bos,
            "eos_token": card.eos,
            "build_info": f"specoffload {__version__}",
            "endpoint_metrics": self._has_metrics,
            "endpoint_slots": True,
            "is_sleeping": False,
            "notes": list(card.notes),
            "requests_processing": engine.n_running,
            "requests_deferred": engine.n_waiting,
            "engine_restarts": engine.n_restarts,
        }

    async def not_served(self, request: Request) -> Response:
        """A 501 that says why llama-server's route is not here, and what to use instead."""
        path = request.url.path
        raise NotSupported(f"{path}: {_NOT_SERVED[path]}")

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text; without --metrics, a 501."""
        if not self._has_metrics:
            raise NotSupported("/metrics is off: start the server with --metrics")
        await self._ask_engine()
        engine = self._context.engine
        connections: Waiting | None = getattr(request.app.state, "connections", None)
        now = Now(
            engine.totals,
            engine.n_running,
            engine.n_waiting,
            engine.n_parallel,
            engine.n_restarts,
            engine.n_refused,
            0 if connections is None else connections.n_closed,
            engine=self._counters,
            delays=engine.delays,
        )
        return Response(metrics_page(now), media_type=MEDIA_TYPE)

    async def _ask_engine(self) -> None:
        """Its counters; those it last told where it has no time, or is being started."""
        try:
            ticket = self._context.engine.submit(CountersJob())
        except RequestFailed:
            return
        try:
            event = await ticket.next(_ENGINE_PATIENCE_S)
        except (RequestFailed, TimeoutError):
            return
        finally:
            ticket.cancel()
        assert isinstance(event, Counters)
        self._counters = dict(event.values)

    def _describe(self, card: ModelCard) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "specoffload",
            "meta": {
                "n_vocab": card.n_vocab,
                "n_ctx": card.n_ctx,
                "n_params": card.n_params,
                "size": card.size_bytes,
                "architecture": card.architecture,
            },
        }


def _named(card: ModelCard) -> dict[str, Any]:
    """As older programs ask a llama-server for it."""
    return {"name": card.name, "model": card.name, "type": "model", "capabilities": ["completion"]}
