"""Several models behind one server: finds a request's model, and lets the request wait for it.

States and errors are those of llama-server's router (tools/server/server-models.cpp in llama.cpp).
A POST names its model in the body, a GET in the query.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import parse_qs

from fastapi import APIRouter
from fastapi.responses import JSONResponse
from prometheus_client.metrics_core import Metric
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specoffload import __version__
from specoffload.generation.generation import ModelCard
from specoffload.server.access import ANOTHER_SITE, NEEDS_KEY, has_key, may_change
from specoffload.server.api.body import invalid, read_json
from specoffload.server.api.context import ServerContext
from specoffload.server.api.kept import STREAM_ID
from specoffload.server.api.models import ListedModel, Models, RouteNeeds, Subject, meta_of
from specoffload.server.api.one_model import OneSubject
from specoffload.server.api.refusals import Json
from specoffload.server.api.routes import give_context
from specoffload.server.api.shared import SharedParts
from specoffload.server.engine.messages import Event, RequestFailed, unavailable
from specoffload.server.log import add_words
from specoffload.server.router.changes import (
    ModelEvents,
    changes_router,
    chunks_of,
    name_in,
    not_found,
)
from specoffload.server.router.early import EarlyStream
from specoffload.server.router.listing import Listing
from specoffload.server.router.model import Entry, PoolModel
from specoffload.server.router.pool import ModelPool
from specoffload.server.router.scrape import joined
from specoffload.server.router.waiting import WaitingRequest

_HOW_TO_LIST = "GET /v1/models lists the models, and with ?reload=1 it reads the list again first"
_ON = ("true", "1")  # values of a query that switch something on


class SeveralModels(Models):
    """The models of a pool, which are opened as requests ask for them."""

    def __init__(
        self,
        pool: ModelPool,
        *,
        entries: Callable[[], Sequence[Entry]],
        on_list: Callable[[Sequence[Entry]], None] = lambda entries: None,
        shared: SharedParts,
        has_metrics: bool = False,
        autoload: bool = True,
    ) -> None:
        """`entries` reads the list of models again, for `on_list` too.

        `shared` has the parts of the models' contexts. `has_metrics` opens /metrics. Without
        `autoload`, requests for models that are not loaded are refused.
        """
        self.shared = shared
        self._pool = pool
        self._listing = Listing(pool, entries, on_list)
        self._events = ModelEvents(pool)
        self.has_metrics = has_metrics
        self._autoload = autoload
        self._created = int(time.time())  # Unix seconds

    def own_routers(self) -> Sequence[APIRouter]:
        return (changes_router(self._pool, self._listing, self._events, self.shared.bodies),)

    # ---- the list

    async def listed(self, request: Request) -> Sequence[ListedModel]:
        if request.query_params.get("reload") in _ON:
            _check_may_change(request)
            await self._listing.read_again()
            self._events.tell({"model": "*", "event": "models_reload"})
        is_known = has_key(request.scope)
        return [
            ListedModel(self._described(model, is_known=is_known), _reads_images(model))
            for model in self._pool.models.values()
        ]

    async def described(self, name: str) -> Json:
        model = await self._listing.find(name)
        if model is None:
            raise not_found()
        return self._described(model, is_known=True)

    def _described(self, model: PoolModel, *, is_known: bool) -> Json:
        """Describe a model, to somebody without a key by its names and its state alone."""
        entry = model.entry
        status: Json = {"value": model.status}
        if model.has_failed:
            status["failed"] = True
        if model.status == "loading":
            status["progress"] = _progress(model)
        told: Json = {
            "id": model.name,
            "aliases": list(entry.aliases),
            "object": "model",
            "owned_by": "specoffload",
            "created": self._created,
            "status": status,
        }
        if not is_known:
            return told
        status["args"] = list(entry.words)
        if entry.preset:
            status["preset"] = entry.preset
        if model.has_failed:
            status |= {"exit_code": model.exit_code, "message": str(model.failure)}
        told |= {
            "tags": list(entry.tags),
            "architecture": {
                "input_modalities": ["text", *["image"] * _reads_images(model)],
                "output_modalities": ["text"],
            },
            "source": entry.source,
            "can_remove": False,
        }
        if (card := _card(model)) is not None:
            told["meta"] = meta_of(card)
        return told

    # ---- requests for a model

    def subject(self, context: ServerContext | None) -> Subject:
        if context is None:
            return _AllModels(self._pool, autoload=self._autoload)
        return OneSubject(context, has_metrics=self.has_metrics)

    async def answer(
        self, route: ASGIApp, needs: RouteNeeds, scope: Scope, receive: Receive, send: Send
    ) -> None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        if not needs.named and "model" not in query:
            await route(scope, receive, send)
            return
        has_body = scope["method"] not in ("GET", "HEAD", "DELETE", "OPTIONS")
        body, fields = b"", {}
        if has_body:
            async with self.shared.bodies.read(chunks_of(receive)) as data:
                body, fields = bytes(data), read_json(data) if data else {}
        model = await self._named(name_in(fields) or query.get("model", [""])[0])
        self._check_opens(model, needs, query, may_open=has_body or may_change(scope))
        add_words(scope, model.name)
        # A question about an open model is no use of it: whoever watches it lets it sleep.
        if not needs.opened or (not has_body and model.is_ready):
            give_context(scope, _context_of(model))
            await route(scope, receive, send)
            return
        wish = self._pool.ask(model)
        is_stream = fields.get("stream") is True
        early = EarlyStream(scope, fields, model.name) if is_stream else None
        waiting = WaitingRequest(route, wish, self.shared.bodies, body, early)
        del body  # `waiting` gives it to the route
        answer: ASGIApp = waiting
        stream_id = Headers(scope=scope).get(STREAM_ID)
        if stream_id is not None and is_stream:
            try:
                answer = self.shared.streams.keep(stream_id, lambda: waiting)
            except RequestFailed:
                wish.end()
                raise
        await answer(_without_stream_id(scope), receive, send)

    async def _named(self, name: str) -> PoolModel:
        if not name:
            raise invalid("model name is missing from the request")
        model = await self._listing.find(name)
        if model is None:
            words = f"model '{name[:80]}' not found; {_HOW_TO_LIST}"
            raise invalid(words, event=Event.UNKNOWN_MODEL)
        return model

    def _check_opens(
        self,
        model: PoolModel,
        needs: RouteNeeds,
        query: Mapping[str, Sequence[str]],
        *,
        may_open: bool,
    ) -> None:
        """Raise RequestFailed (400) if the request needs a model that it may not open."""
        asked = query.get("autoload", [""])[0]
        autoload = asked in _ON if asked else self._autoload
        is_open = model.is_running or model.rests
        if needs.opened and not is_open and not (autoload and may_open):
            raise invalid("model is not loaded")


class _AllModels(Subject):
    """What the routes about the server tell of all models of a pool."""

    def __init__(self, pool: ModelPool, *, autoload: bool) -> None:
        self._pool, self._autoload = pool, autoload

    def health(self) -> Response:
        """200, with the progress of models that are being loaded."""
        models = self._pool.models.values()
        loading = {m.name: _progress(m) for m in models if m.status == "loading"}
        return JSONResponse({"status": "ok"} | ({"loading": loading} if loading else {}))

    def props(self) -> Json:
        return {
            "role": "router",
            "max_instances": self._pool.most,
            "models_autoload": self._autoload,
            "model_alias": "specoffload",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "build_info": f"specoffload {__version__}",
        }

    async def metrics(self) -> list[Metric]:
        """The metrics of each model that was loaded once, and which models are open."""
        models = [*self._pool.models.values()]
        contexts = {m.name: m.served.context for m in models if m.served is not None}
        asked = (OneSubject(one, has_metrics=True).metrics() for one in contexts.values())
        scraped = await asyncio.gather(*asked)
        return joined(
            dict(zip(contexts, scraped, strict=True)), {m.name: m.is_ready for m in models}
        )


def _check_may_change(request: Request) -> None:
    """Raise RequestFailed if a GET without a key, or of another site's page, would change things.

    The list of models itself needs no key, and no Origin header.
    """
    if not has_key(request.scope):
        raise RequestFailed(NEEDS_KEY)
    if not may_change(request.scope):
        raise RequestFailed(ANOTHER_SITE)


def _card(model: PoolModel) -> ModelCard | None:
    """Return what an open model says of itself, None for one that is not open."""
    return model.served.engine.card if model.served is not None and model.is_ready else None


def _reads_images(model: PoolModel) -> bool:
    """True if an open model has a projector, or if a closed one's flags name one."""
    card = _card(model)
    return model.entry.reads_images if card is None else card.reads_images


def _progress(model: PoolModel) -> Json:
    loading = model.loading
    return {} if loading is None else {"step": loading.step, "value": round(loading.done, 4)}


def _context_of(model: PoolModel) -> ServerContext:
    """Return the context of a model that was opened before. Raises RequestFailed (503)."""
    if model.served is None:
        raise RequestFailed(unavailable(f"{model.name} was not loaded yet", event=Event.LOADING))
    return model.served.context


def _without_stream_id(scope: Scope) -> Scope:
    """Return the scope for a route, which must not keep its stream again."""
    headers = [(name, value) for name, value in scope["headers"] if name != STREAM_ID.encode()]
    return {**scope, "headers": headers}
