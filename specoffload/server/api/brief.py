"""Routes that generate nothing: tokens of texts, embeddings, and llama-server's slots.

llama.cpp tools/server/README.md, "POST /tokenize", "/detokenize", "/embedding", "/slots".
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import JSONResponse, Response

from offload.errors import BadRequest
from specoffload.generation.generation import SlotAction, SlotResult
from specoffload.server.api.body import ignore, ignored_names
from specoffload.server.api.context import ServerContext
from specoffload.server.api.parameters import prompts_of
from specoffload.server.api.refusals import Json
from specoffload.server.api.requests import (
    DetokenizeRequest,
    EmbeddingsRequest,
    NativeEmbeddingRequest,
    SlotRequest,
    TokenizeRequest,
)
from specoffload.server.api.routes import BodyRoute, context_of
from specoffload.server.engine import calls
from specoffload.server.engine.messages import Prompt, RequestFailed, unavailable

Row = NDArray[np.float32]

_COUNTS = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}


def text_router() -> APIRouter:
    router = APIRouter(tags=["text"], route_class=BodyRoute)

    @router.post("/tokenize")
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """Token ids of a text, with their pieces if asked for."""
        context = context_of(request)
        ignore(request, ignored_names(body))
        function = calls.tokenize_in_pieces if body.with_pieces else calls.tokenize
        arguments = body.content, body.add_special, body.parse_special
        tokens = await context.engine.call(function, *arguments)
        if body.with_pieces:
            tokens = [{"id": id_, "piece": _piece(piece)} for id_, piece in tokens]
        return JSONResponse({"tokens": tokens})

    @router.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
        """The text of token ids; special tokens are written out."""
        context = context_of(request)
        ignore(request, ignored_names(body))
        content = await context.engine.call(calls.detokenize, body.tokens)
        return JSONResponse({"content": content})

    return router


def _piece(piece: bytes) -> str | list[int]:
    """Return the piece as text, or as a list of bytes if it is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


# ---- embeddings


def embeddings_router() -> APIRouter:
    router = APIRouter(tags=["embeddings"], route_class=BodyRoute)

    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """One vector of length 1 for each input; 501 if the model makes none."""
        context = context_of(request)
        context.check_model(body.model)
        ignore(request, ignored_names(body))
        embeddings = await _embedded(context, request, prompts_of(body.input, "input"))
        n_tokens = sum(one.n_tokens for one in embeddings)
        data = [
            {"object": "embedding", "index": at, "embedding": _openai_vector(one, body)}
            for at, one in enumerate(embeddings)
        ]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        answer = {"object": "list", "data": data, "model": context.card.name, "usage": usage}
        return JSONResponse(answer)

    @router.post("/embeddings")
    @router.post("/embedding")
    async def embedding(request: Request, body: NativeEmbeddingRequest) -> Response:
        """The vector of each text, or without pooling one of each token; 501 if the model makes
        none."""
        context = context_of(request)
        ignore(request, ignored_names(body))
        given = body.content if body.content is not None else body.input
        embeddings = await _embedded(context, request, prompts_of(given, "content"))
        # As in llama-server, vectors of texts have length 1, and those of tokens any length.
        vectors = [[unit_length(r) if one.is_pooled else r for r in one.rows] for one in embeddings]
        return JSONResponse(
            [
                {"index": at, "embedding": [row.tolist() for row in rows]}
                for at, rows in enumerate(vectors)
            ]
        )

    return router


async def _embedded(
    context: ServerContext, request: Request, prompts: Sequence[Prompt]
) -> list[calls.Embedded]:
    """Return the embeddings of `prompts`, one by one, so that running requests go on in between.

    Stops when the client leaves.
    """
    embeddings: list[calls.Embedded] = []
    for prompt in prompts:
        embeddings.append(await context.engine.call(calls.embed, prompt))
        if await request.is_disconnected():
            break
    return embeddings


def _openai_vector(embedding: calls.Embedded, body: EmbeddingsRequest) -> str | list[float]:
    if not embedding.is_pooled:
        raise BadRequest(
            "without pooling there is a vector for each token, which this API has no place for: "
            "start the server with --pooling mean or last, or use /embedding"
        )
    row = embedding.rows[0]
    if body.dimensions is not None and body.dimensions > len(row):
        raise BadRequest(f"dimensions {body.dimensions}: this model's vectors have {len(row)}")
    row = unit_length(row[: body.dimensions])
    if body.encoding_format == "base64":
        return base64.b64encode(row.astype("<f4").tobytes()).decode()
    numbers: list[float] = row.tolist()
    return numbers


def unit_length(row: Row) -> Row:
    """Return the vector scaled to length 1. A null vector stays unchanged."""
    length = float(np.linalg.norm(row.astype(np.float64)))
    return row / np.float32(length) if length else row


# ---- slots


def slots_router() -> APIRouter:
    router = APIRouter(tags=["slots"], route_class=BodyRoute)

    @router.get("/slots")
    async def slots(request: Request) -> Response:
        """The contents of each slot, and the progress of its request."""
        context = context_of(request)
        engine, n_ctx = context.engine, context.card.n_ctx
        if request.query_params.get("fail_on_no_slot") and engine.n_running >= engine.n_parallel:
            raise RequestFailed(unavailable("no slot available"))
        return JSONResponse(
            [
                {
                    "id": slot.id,
                    "n_ctx": n_ctx,
                    "is_processing": slot.is_processing,
                    "n_tokens": slot.n_tokens,
                    "n_prompt_tokens": slot.n_prompt_tokens,
                    "next_token": [
                        {
                            "has_next_token": slot.is_processing,
                            "n_remain": slot.n_remain,
                            "n_decoded": slot.n_decoded,
                        }
                    ],
                }
                for slot in await engine.call(calls.slots)
            ]
        )

    @router.post("/slots/{number:int}")
    async def change_slot(
        request: Request, number: int, action: SlotAction, body: SlotRequest | None = None
    ) -> Response:
        """Saves, restores or erases what an idle slot holds."""
        context = context_of(request)
        ignore(request, ignored_names(body or SlotRequest()))
        filename = "" if body is None else body.filename or ""
        if action != "erase" and not filename:
            raise BadRequest(f"{action} needs a filename in the body")
        arguments = number, action, filename
        result = await context.engine.call(calls.change_slot, *arguments)
        return JSONResponse(_changed(*arguments, result))

    return router


def _changed(number: int, action: SlotAction, filename: str, result: SlotResult) -> Json:
    if action == "erase":
        return {"id_slot": number, "n_erased": result.n_tokens}
    tokens, size = _COUNTS[action]
    timings: dict[str, Any] = {f"{action}_ms": 1e3 * result.took_s}
    return {
        "id_slot": number,
        "filename": filename,
        tokens: result.n_tokens,
        size: result.n_bytes,
        "timings": timings,
    }
