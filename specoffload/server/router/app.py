"""The HTTP application of several models: chooses a request's model, and lets it wait for it.

Routes, states and errors are those of llama-server's router (tools/server/server-models.cpp in
llama.cpp). A POST names its model in the body, a GET in the query. Then the model's own application
answers, in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send

from offload.errors import NotSupported
from specoffload import __version__
from specoffload.generation.generation import OnProgress
from specoffload.server.access import ANOTHER_SITE, NEEDS_KEY, AccessRules, has_key, may_change
from specoffload.server.api.answers import Json, server_sent
from specoffload.server.api.app import bare_app, create_app, describe, guard
from specoffload.server.api.body import HeldBodies, invalid, read_json
from specoffload.server.api.kept import STREAM_ID, streams_router
from specoffload.server.api.life_signs import SIGN_S
from specoffload.server.api.refusals import problem_response
from specoffload.server.api.shared import SharedParts
from specoffload.server.api.status import older_form
from specoffload.server.api.stored import stored_router
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.messages import Event, Problem, RequestFailed, unavailable
from specoffload.server.log import add_words
from specoffload.server.metrics import MEDIA_TYPE
from specoffload.server.page import add_page
from specoffload.server.router.early import EarlyStream
from specoffload.server.router.listing import Listing
from specoffload.server.router.model import Entry, Model, Wish
from specoffload.server.router.pool import ModelPool
from specoffload.server.router.scrape import joined, page_of

if TYPE_CHECKING:  # the API process has no engine
    from specoffload.session.session import Session

_HEADER_PATIENCE_S = SIGN_S  # a stream's header is sent after this time, so that proxies wait
_NEWS_S = 1.0  # seconds between comments about loading
_EVENT_PATIENCE_S = 10.0
_HOW_TO_LIST = "GET /v1/models lists the models, and with ?reload=1 it reads the list again first"
_ON = ("true", "1")  # values of a query that switch something on
_MOST_EVENTS = 1000  # events that a reader of /models/sse may be behind
_SSE = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def create_router(
    pool: ModelPool,
    *,
    entries: Callable[[], Sequence[Entry]],
    on_list: Callable[[Sequence[Entry]], None] = lambda entries: None,
    access: AccessRules | None = None,
    shared: SharedParts | None = None,
    has_page: bool = True,
    has_metrics: bool = False,
    autoload: bool = True,
) -> FastAPI:
    """Return the application. `entries` reads the list of models again, for `on_list` too.

    `shared` has the parts of the models' applications. Without `autoload`, requests for models that
    are not loaded are refused.
    """
    app = bare_app()
    guard(app, access or AccessRules())
    events = _Events(pool)
    parts = shared or SharedParts()
    models = _Models(pool, Listing(pool, entries, on_list), parts, autoload)
    app.include_router(_status_router(models, events, has_metrics=has_metrics))
    app.include_router(streams_router(parts.streams))
    app.include_router(stored_router(parts.stored))
    if has_page:
        add_page(app)
    # The routes of every model's application. No request reaches this one.
    of_models = create_app(EngineClient(_never), has_page=False, shared=parts).routes
    own_routes = [*app.routes]
    app.openapi = functools.cache(  # type: ignore[method-assign]
        lambda: _with(describe(of_models), describe(own_routes))
    )
    app.mount("/", _Routed(models, of_models))
    return app


@dataclass(frozen=True)
class _Models:
    """The models of the server, and what requests for them share.

    Without `autoload`, requests for models that are not running are refused.
    """

    pool: ModelPool
    listing: Listing
    parts: SharedParts
    autoload: bool


def _with(document: Json, more: Json) -> Json:
    """Return an OpenAPI document with the paths of another one, which takes precedence."""
    schemas = document["components"].get("schemas", {}) | more["components"].get("schemas", {})
    return document | {
        "paths": document["paths"] | more["paths"],
        "components": document["components"] | more["components"] | {"schemas": schemas},
    }


def _never(on_progress: OnProgress) -> Session:
    raise AssertionError("this engine is never started")


# ---- routes about the models


class _Events:
    """Tells the readers of /models/sse of changes."""

    def __init__(self, pool: ModelPool) -> None:
        self._readers: set[asyncio.Queue[Json | None]] = set()
        self._has_ended = False
        pool.on_status = self._on_status
        pool.on_stop = self._end

    def _end(self) -> None:
        """End all streams, because a server that stops waits for them."""
        self._has_ended = True
        self.tell(None)

    def tell(self, event: Json | None) -> None:
        for reader in self._readers:
            with contextlib.suppress(asyncio.QueueFull):
                reader.put_nowait(event)

    def _on_status(self, model: Model) -> None:
        data: Json = {"status": model.status}
        if model.status == "unloaded":
            data["exit_code"] = model.exit_code
        self.tell({"model": model.name, "event": "status_change", "data": data})

    async def follow(self) -> AsyncIterator[bytes]:
        reader: asyncio.Queue[Json | None] = asyncio.Queue(_MOST_EVENTS)
        self._readers.add(reader)
        try:
            while not self._has_ended:
                try:
                    async with asyncio.timeout(_EVENT_PATIENCE_S):
                        event = await reader.get()
                    if event is not None:
                        yield server_sent(event)
                except TimeoutError:
                    yield b": no change\n\n"
        finally:
            self._readers.discard(reader)


def _status_router(served: _Models, events: _Events, *, has_metrics: bool) -> APIRouter:
    pool, listing, bodies = served.pool, served.listing, served.parts.bodies
    router = APIRouter(tags=["models"])
    created = int(time.time())

    async def health(request: Request) -> Response:
        """200 while the server runs, with the progress of models that are being loaded."""
        if "model" in request.query_params:
            return _Forward(served, waits=False)
        loading = {m.name: _progress(m) for m in pool.models.values() if m.status == "loading"}
        return JSONResponse({"status": "ok"} | ({"loading": loading} if loading else {}))

    for path in ("/health", "/v1/health"):
        router.add_api_route(path, health, methods=["GET"])
        router.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)

    @router.get("/v1/models")
    @router.get("/models")
    @router.get("/api/tags")
    async def models(request: Request) -> dict[str, Any]:
        """All models with their states. With `?reload=1` the list is read again first.

        Without the server's key only names and states are told, and the list is not read again.
        """
        is_known = has_key(request.scope)
        if request.query_params.get("reload") in _ON:
            _check_may_change(request)
            await listing.read_again()
            events.tell({"model": "*", "event": "models_reload"})
        found = [_described(model, created, is_known=is_known) for model in pool.models.values()]
        return {"object": "list", "data": found, "models": [older_form(m["id"]) for m in found]}

    @router.get("/models/sse")
    async def changes() -> Response:
        """Changes of the models' states, as server-sent events."""
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(events.follow(), media_type="text/event-stream", headers=headers)

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One model with its state."""
        found = await listing.find(name)
        if found is None:
            raise _not_found()
        return _described(found, created, is_known=True)

    @router.post("/models/load")
    async def load(request: Request) -> dict[str, bool]:
        """Loads a model, as soon as there is room for it. Does not wait for that."""
        found = await listing.find(_name_in(await _body_of(request, bodies)))
        if found is None:
            raise _not_found()
        if found.is_running:
            raise invalid("model is already running")
        pool.load(found)
        return {"success": True}

    @router.post("/models/unload")
    async def unload(request: Request) -> dict[str, bool]:
        """Ends a model's engine, after its requests or its `stop-timeout`. Does not wait."""
        found = pool.find(_name_in(await _body_of(request, bodies)))
        if found is None:
            raise invalid("model is not found")
        if not found.is_running:
            raise invalid("model is not running")
        pool.unload(found)
        return {"success": True}

    async def not_served(request: Request) -> Response:
        """A 501, because this server neither fetches nor deletes models."""
        raise NotSupported(
            f"{request.method} /models: models are not fetched or deleted over HTTP; name one in "
            "--models-preset (hf-repo = user/repo:quant), which fetches it when it is first used"
        )

    router.add_api_route("/models", not_served, methods=["POST", "DELETE"], include_in_schema=False)

    @router.get("/props")
    async def props(request: Request) -> Response:
        """The router's own settings, or with `?model=` those of a model."""
        if "model" in request.query_params:
            return _Forward(served)
        own: Json = {
            "role": "router",
            "max_instances": pool.most,
            "models_autoload": served.autoload,
            "model_alias": "specoffload",
            "model_path": "none",
            "default_generation_settings": {"params": {}, "n_ctx": 0},
            "build_info": f"specoffload {__version__}",
        }
        return JSONResponse(own)

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Prometheus' text of the model that `?model=` names, or of all. Loads none."""
        if "model" not in request.query_params:
            if not has_metrics:
                raise NotSupported("/metrics is off: start the server with --metrics")
            scope = _inner(request.scope)
            models = [*pool.models.values()]
            apps = {m.name: m.served.app for m in models if m.served is not None}
            pages = await asyncio.gather(*(page_of(app, scope) for app in apps.values()))
            states = {m.name: m.is_ready for m in models}
            page = joined(dict(zip(apps, pages, strict=True)), states)
            return Response(page, media_type=MEDIA_TYPE)
        return _Forward(served, waits=False)

    return router


def _check_may_change(request: Request) -> None:
    """Raise RequestFailed if a GET without a key, or of another site's page, would change things.

    The list of models itself needs no key, and no Origin header.
    """
    if not has_key(request.scope):
        raise RequestFailed(NEEDS_KEY)
    if not may_change(request.scope):
        raise RequestFailed(ANOTHER_SITE)


def _described(model: Model, created: int, *, is_known: bool) -> Json:
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
        "created": created,
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
            "input_modalities": ["text", *["image"] * entry.reads_images],
            "output_modalities": ["text"],
        },
        "source": entry.source,
        "can_remove": False,
    }
    card = model.served.engine.card if model.served is not None and model.is_ready else None
    if card is not None:
        told["meta"] = {
            "n_vocab": card.n_vocab,
            "n_ctx": card.n_ctx,
            "n_params": card.n_params,
            "size": card.size_bytes,
            "architecture": card.architecture,
        }
    return told


def _progress(model: Model) -> Json:
    loading = model.loading
    return {} if loading is None else {"step": loading.step, "value": round(loading.done, 4)}


def _not_found() -> RequestFailed:
    kind, event = "not_found_error", Event.UNKNOWN_MODEL
    return RequestFailed(Problem("NotFound", "model is not found", 404, kind, event=event))


def _name_in(body: Json) -> str:
    """Return the model's name in a body, or "" if it has none."""
    name = body.get("model")
    return name if isinstance(name, str) else ""


# ---- requests for a model


async def _body_of(request: Request, bodies: HeldBodies) -> Json:
    """Return the request's body as a JSON object. Raises RequestFailed."""
    async with bodies.read(_chunks(request.receive)) as data:
        return read_json(data)


async def _chunks(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body. Raises RequestFailed if the client leaves before."""
    is_whole = False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise invalid("the client left while it sent the body")
        yield message.get("body", b"")
        is_whole = not message.get("more_body", False)


class _Routed:
    """Answers every request that has no route of its own through its model's application.

    `routes` are those of the models' applications. Other paths get 404, whatever model they name.
    """

    def __init__(self, models: _Models, routes: Sequence[BaseRoute]) -> None:
        self._models, self._routes = models, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        inner = _inner(scope)
        if all(route.matches(inner)[0] is Match.NONE for route in self._routes):
            raise HTTPException(404)
        await _Forward(self._models)(scope, receive, send)


class _Forward(Response):
    """The answer of the model that a request names, for which it waits."""

    def __init__(self, models: _Models, *, waits: bool = True) -> None:
        """Without `waits`, the model's application answers at once, whatever the state of its
        engine. A stream whose client may come back is kept, also while it waits."""
        super().__init__()
        self._models, self._waits = models, waits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        has_body = scope["method"] not in ("GET", "HEAD", "DELETE", "OPTIONS")
        body, found = b"", {}
        try:
            if has_body:
                async with self._models.parts.bodies.read(_chunks(receive)) as data:
                    body, found = bytes(data), read_json(data) if data else {}
            model = await self._model(_name_in(found) or query.get("model", [""])[0])
            autoload = self._models.autoload
            if asked := query.get("autoload"):
                autoload = asked[0] in _ON
            if not has_body and not may_change(scope):
                autoload = False
            if self._waits and not autoload and not (model.is_running or model.rests):
                raise invalid("model is not loaded")
            add_words(scope, model.name)
            # A question about an open model is no use of it: whoever watches it lets it sleep.
            if not self._waits or (not has_body and model.is_ready):
                await self._at_once(model, scope, receive, send)
                return
            wish = self._models.pool.ask(model)
        except RequestFailed as e:
            await problem_response(e.problem)(scope, receive, send)
            return
        is_stream = found.get("stream") is True
        early = EarlyStream(scope, found, model.name) if is_stream else None
        waiting = _Waiting(wish, self._models.parts.bodies, body, early)
        del body  # `waiting` gives it to the model
        stream_id = Headers(scope=scope).get(STREAM_ID)
        if stream_id is None or not is_stream:
            await waiting(scope, receive, send)
            return
        try:
            kept = self._models.parts.streams.keep(stream_id, lambda: waiting)
        except RequestFailed as e:
            wish.end()
            await problem_response(e.problem)(scope, receive, send)
            return
        await kept(scope, receive, send)

    async def _model(self, name: str) -> Model:
        if not name:
            raise invalid("model name is missing from the request")
        model = await self._models.listing.find(name)
        if model is None:
            words = f"model '{name[:80]}' not found; {_HOW_TO_LIST}"
            raise invalid(words, event=Event.UNKNOWN_MODEL)
        return model

    async def _at_once(self, model: Model, scope: Scope, receive: Receive, send: Send) -> None:
        if model.served is None:
            raise RequestFailed(
                unavailable(f"{model.name} was not loaded yet", event=Event.LOADING)
            )
        await model.served.app(_inner(scope), receive, send)


class _Waiting:
    """A request that waits for its model, and is then answered by the model's application.

    A stream gets its header, signs of life, and comments with the progress while it waits long. It
    then has status 200, so a later refusal is an event.
    """

    def __init__(
        self, wish: Wish, bodies: HeldBodies, body: bytes, early: EarlyStream | None
    ) -> None:
        """`early` has the first events of a stream, None for other answers."""
        self._wish, self._bodies, self._body, self._early = wish, bodies, body, early
        self._has_header = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        finally:
            self._wish.end()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        left = asyncio.ensure_future(_until_left(receive))
        try:
            with self._bodies.hold(len(self._body)):  # the model's application counts it then
                if not await self._wait(left, send):
                    return
        finally:
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        try:
            self._wish.granted.result()
        except RequestFailed as e:
            await problem_response(e.problem)(scope, receive, self._sender(send))
            return
        served = self._wish.model.served
        assert served is not None  # a wish is granted by a model with an engine
        body, self._body = self._body, b""
        replayed = _replayed(body, receive)
        del body
        await served.app(_inner(scope), replayed, self._sender(send))

    async def _wait(self, left: asyncio.Future[None], send: Send) -> bool:
        """Wait until the model takes the request, or refuses it. False if the client left."""
        granted, began_s = self._wish.granted, time.monotonic()
        told_at_s = -math.inf  # time of the last event
        while not granted.done():
            waited_s = time.monotonic() - began_s
            patience_s: float | None = (
                _NEWS_S if self._has_header else _HEADER_PATIENCE_S - waited_s
            )
            await asyncio.wait(
                {granted, left},
                timeout=None if self._early is None else patience_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if granted.done():
                break
            if left.done():
                return False
            assert self._early is not None  # else only the two events above end the wait
            if not self._has_header:
                self._has_header = True
                await send({"type": "http.response.start", "status": 200, "headers": _SSE})
            told = f": {_waiting_words(self._wish.model)}\n\n".encode()
            if time.monotonic() - told_at_s >= SIGN_S:
                told_at_s = time.monotonic()
                told += self._early.sign()
            await send({"type": "http.response.body", "body": told, "more_body": True})
        return True

    def _sender(self, send: Send) -> Send:
        """Return `send`, or one for a stream whose header was sent while it waited."""
        early = self._early
        if not self._has_header or early is None:
            return send
        is_error = False
        body = b""

        async def send_rest(message: Message) -> None:
            nonlocal is_error, body
            if message["type"] == "http.response.start":
                is_error = message["status"] != 200
                return
            if not is_error:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                await send({**message, "body": early.failed(body)})

        return send_rest


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that gives the body, which was read before, and then what follows."""
    left = [body]  # given away once, so that it is in memory once

    async def receive_again() -> Message:
        if not left:
            return await receive()
        return {"type": "http.request", "body": left.pop(), "more_body": False}

    return receive_again


def _inner(scope: Scope) -> Scope:
    """Return the scope for a model's application: without what routing has added to it.

    The stream is kept here, and not by the model's application again.
    """
    added = ("app", "router", "endpoint", "path_params", "route", "root_path", "app_root_path")
    own = {key: value for key, value in scope.items() if key not in added}
    headers = [(name, value) for name, value in scope["headers"] if name != STREAM_ID.encode()]
    return own | {"headers": headers}


def _waiting_words(model: Model) -> str:
    loading = model.loading
    if loading is None:
        return f"{model.name} is {model.status}"
    return f"loading {model.name}: {loading.step} {loading.done:.0%}"
