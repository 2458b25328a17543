"""The routes that only a server of several models has: it opens and closes them, and tells it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from offload.errors import NotSupported
from specoffload.server.api.answers import STREAM_HEADERS, server_sent
from specoffload.server.api.body import HeldBodies, invalid, read_json
from specoffload.server.api.refusals import Json
from specoffload.server.engine.messages import Event, Problem, RequestFailed
from specoffload.server.router.listing import Listing
from specoffload.server.router.model import PoolModel
from specoffload.server.router.pool import ModelPool

_EVENT_PATIENCE_S = 10.0
_MOST_EVENTS = 1000  # events that a reader of /models/sse may be behind


class ModelEvents:
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

    def _on_status(self, model: PoolModel) -> None:
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


def changes_router(
    pool: ModelPool, listing: Listing, events: ModelEvents, bodies: HeldBodies
) -> APIRouter:
    """Return the routes. Reading their bodies counts in `bodies`."""
    router = APIRouter(tags=["models"])

    @router.get("/models/sse")
    async def changes() -> Response:
        """Changes of the models' states, as server-sent events."""
        return StreamingResponse(events.follow(), headers=STREAM_HEADERS)

    @router.post("/models/load")
    async def load(request: Request) -> dict[str, bool]:
        """Loads a model, as soon as there is room for it. Does not wait for that."""
        model = await listing.find(name_in(await _body_of(request, bodies)))
        if model is None:
            raise not_found()
        if model.is_running:
            raise invalid("model is already running")
        pool.load(model)
        return {"success": True}

    @router.post("/models/unload")
    async def unload(request: Request) -> dict[str, bool]:
        """Ends a model's engine, after its requests or its `stop-timeout`. Does not wait."""
        model = pool.find(name_in(await _body_of(request, bodies)))
        if model is None:
            raise invalid("model is not found")
        if not model.is_running:
            raise invalid("model is not running")
        pool.unload(model)
        return {"success": True}

    async def not_served(request: Request) -> Response:
        """A 501, because this server neither fetches nor deletes models."""
        raise NotSupported(
            f"{request.method} /models: models are not fetched or deleted over HTTP; name one in "
            "--models-preset (hf-repo = user/repo:quant), which fetches it when it is first used"
        )

    router.add_api_route("/models", not_served, methods=["POST", "DELETE"], include_in_schema=False)

    return router


def not_found() -> RequestFailed:
    """Return llama-server's 404 for an unknown model."""
    kind, event = "not_found_error", Event.UNKNOWN_MODEL
    return RequestFailed(Problem("NotFound", "model is not found", 404, kind, event=event))


def name_in(body: Json) -> str:
    """Return the model's name in a body, or "" if it has none."""
    name = body.get("model")
    return name if isinstance(name, str) else ""


async def _body_of(request: Request, bodies: HeldBodies) -> Json:
    """Return the request's body as a JSON object. Raises RequestFailed."""
    async with bodies.read(chunks_of(request.receive)) as data:
        return read_json(data)


async def chunks_of(receive: Receive) -> AsyncIterator[bytes]:
    """Yield the parts of a request's body. Raises RequestFailed if the client leaves before."""
    is_whole = False
    while not is_whole:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise invalid("the client left while it sent the body")
        yield message.get("body", b"")
        is_whole = not message.get("more_body", False)
