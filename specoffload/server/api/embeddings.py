"""/v1/embeddings as OpenAI has it, /embedding as llama-server: vectors of texts.

llama.cpp tools/server/README.md, "POST /embedding" and "POST /v1/embeddings".
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from pydantic import Field
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from offload.errors import BadRequest
from specoffload.server.api.answer import TicketResponse, problem_response
from specoffload.server.api.context import Context
from specoffload.server.api.wire import Prompts, RequestModel, Whole
from specoffload.server.completions.prompts import prompts_of
from specoffload.server.engine.client import EngineClient, RequestFailed, Ticket
from specoffload.server.engine.messages import Embedded, EmbedJob

Rows = NDArray[np.float32]


class EmbeddingsRequest(RequestModel):
    """Of /v1/embeddings. `dimensions` cuts each vector, and gives it length 1 again."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1)


class NativeEmbeddingRequest(RequestModel):
    """Of /embedding; `input` is its other name for `content`."""

    content: Prompts = None
    input: Prompts = None


class EmbeddingRoutes:
    """See the module."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["embeddings"])
        router.add_api_route("/v1/embeddings", self.openai, methods=["POST"], response_model=None)
        for path in ("/embeddings", "/embedding"):
            router.add_api_route(path, self.native, methods=["POST"], response_model=None)
        return router

    async def openai(self, request: Request) -> Response:
        """One vector of length 1 for each input; 501 where the model makes none."""
        body = await self._context.read(request, EmbeddingsRequest)
        jobs = [EmbedJob(prompt) for prompt in prompts_of(body.input, "input")]
        model = self._context.card().name
        return _Answer(self._context.engine, jobs, lambda found: _openai_body(model, body, found))

    async def native(self, request: Request) -> Response:
        """The vector of each text, or without pooling one of each token; 501 where there are
        none."""
        body = await self._context.read(request, NativeEmbeddingRequest)
        given = body.content if body.content is not None else body.input
        jobs = [EmbedJob(prompt) for prompt in prompts_of(given, "content")]
        return _Answer(self._context.engine, jobs, _native_body)


class _Answer(TicketResponse):
    """Embeds one text after the other, so that what generates goes on between them."""

    def __init__(
        self,
        engine: EngineClient,
        jobs: Sequence[EmbedJob],
        body: Callable[[list[Embedded]], Any],
    ) -> None:
        super().__init__(self._cancel)
        self._engine, self._jobs, self._body = engine, jobs, body
        self._ticket: Ticket | None = None

    def _cancel(self) -> None:
        if self._ticket is not None:
            self._ticket.cancel()

    async def _produce(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = []
        try:
            for job in self._jobs:
                self._ticket = self._engine.submit(job)
                event = await self._ticket.next()
                assert isinstance(event, Embedded)
                found.append(event)
            response: Response = JSONResponse(self._body(found))
        except RequestFailed as e:
            response = problem_response(e.problem)
        await response(scope, receive, send)


def _openai_body(model: str, body: EmbeddingsRequest, found: Sequence[Embedded]) -> dict[str, Any]:
    n_tokens = sum(one.n_tokens for one in found)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": at, "embedding": _told(_vector(one, body), body)}
            for at, one in enumerate(found)
        ],
        "model": model,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


def _vector(found: Embedded, body: EmbeddingsRequest) -> Rows:
    if not found.is_pooled:
        raise BadRequest(
            "without pooling there is a vector for each token, which this API has no place for: "
            "start the server with --pooling mean or last, or use /embedding"
        )
    row = found.rows[0]
    if body.dimensions is not None and body.dimensions > len(row):
        raise BadRequest(f"dimensions {body.dimensions}: this model's vectors have {len(row)}")
    return unit_length(row[: body.dimensions])


def _told(row: Rows, body: EmbeddingsRequest) -> str | list[float]:
    if body.encoding_format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    return [float(x) for x in row]


def _native_body(found: Sequence[Embedded]) -> list[dict[str, Any]]:
    """As llama-server, vectors of texts have length 1, and those of tokens are as they are."""
    return [
        {
            "index": at,
            "embedding": [
                [float(x) for x in (unit_length(row) if one.is_pooled else row)] for row in one.rows
            ],
        }
        for at, one in enumerate(found)
    ]


def unit_length(row: Rows) -> Rows:
    """The vector's direction; a null vector has none, and stays."""
    length = float(np.linalg.norm(row.astype(np.float64)))
    return row / np.float32(length) if length else row
