"""A server's only model, and what the routes about the server tell of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from fastapi.responses import JSONResponse
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specoffload import __version__
from specoffload.server.api.context import ServerContext
from specoffload.server.api.models import ListedModel, Models, RouteNeeds, Subject, meta_of
from specoffload.server.api.parameters import settings_of
from specoffload.server.api.refusals import Api, Json, error_body, problem_response
from specoffload.server.api.routes import give_context
from specoffload.server.engine import calls
from specoffload.server.engine.messages import Event, Problem, RequestFailed
from specoffload.server.metrics import N_DRAFTED

_ENGINE_PATIENCE_S = 2.0  # the engine answers between batches, and a long one takes minutes


class OneModel(Models):
    """The only model of a server. It answers every request, whatever model the request names."""

    def __init__(self, context: ServerContext, *, has_metrics: bool = False) -> None:
        """`has_metrics` opens /metrics."""
        self.shared = context.shared
        self.has_metrics = has_metrics
        self._context = context

    async def answer(
        self, route: ASGIApp, needs: RouteNeeds, scope: Scope, receive: Receive, send: Send
    ) -> None:
        give_context(scope, self._context)
        await route(scope, receive, send)

    def subject(self, context: ServerContext | None) -> Subject:
        return OneSubject(context or self._context, has_metrics=self.has_metrics)

    async def listed(self, request: Request) -> Sequence[ListedModel]:
        card = self._context.engine.card
        return [ListedModel(self._described(), bool(card and card.reads_images))]

    async def described(self, name: str) -> Json:
        known = self._context.name
        if name != known:
            message = f"no model {name[:80]!r} here: this server has {known!r}"
            kind, event = "not_found_error", Event.UNKNOWN_MODEL
            raise RequestFailed(Problem("NotFound", message, 404, kind, event=event))
        return self._described()

    def _described(self) -> Json:
        return {
            "id": self._context.name,
            "object": "model",
            "created": self._context.created,
            "owned_by": "specoffload",
            "meta": meta_of(self._context.engine.card),
        }


class OneSubject(Subject):
    """What the routes about the server tell of one model."""

    def __init__(self, context: ServerContext, *, has_metrics: bool) -> None:
        self._context, self._engine, self._has_metrics = context, context.engine, has_metrics

    def health(self) -> Response:
        """200 if requests are taken and the engine works on them; otherwise 503 and the reason."""
        problem = self._engine.unavailable() or self._engine.unwell()
        if problem is None:
            return JSONResponse({"status": "ok"})
        loading = self._engine.loading
        if loading is None:
            return problem_response(problem)
        told = {"status": "loading model", "step": loading.step, "progress": loading.done}
        headers = {"Retry-After": str(problem.retry_after_s)}
        return JSONResponse(error_body(problem, Api.NATIVE) | told, problem.http_status, headers)

    def props(self) -> Json:
        """The settings as llama-server's page reads them, and others."""
        context, engine, card = self._context, self._engine, self._context.card
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
            "endpoint_metrics": self._has_metrics,
            "endpoint_slots": True,
            "is_sleeping": False,
            "notes": list(card.notes),
            "requests_processing": engine.n_running,
            "requests_deferred": engine.n_waiting,
            "engine_restarts": engine.metrics.n_restarts,
        }

    async def metrics(self) -> list[Metric]:
        engine = self._engine
        with contextlib.suppress(RequestFailed, TimeoutError):  # the engine is loading or busy
            counters = await engine.call(calls.counters, timeout_s=_ENGINE_PATIENCE_S)
            engine.metrics.of_engine.update(counters)
        return engine.metrics.families(
            n_running=engine.n_running,
            n_waiting=engine.n_waiting,
            n_parallel=engine.n_parallel,
            model=engine.model_name,
        )
