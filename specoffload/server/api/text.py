"""Routes about text and tokens alone: llama-server's /tokenize, /detokenize, /apply-template."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specoffload.server.api.answer import SingleAnswer
from specoffload.server.api.context import Context
from specoffload.server.api.wire import DetokenizeRequest, TemplateRequest, TokenizeRequest
from specoffload.server.engine.messages import (
    DetokenizeJob,
    Event,
    Text,
    TokenizeJob,
    Tokens,
)


class TextRoutes:
    """See the module."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["text"])
        for path, route in (
            ("/tokenize", self.tokenize),
            ("/detokenize", self.detokenize),
            ("/apply-template", self.template),
        ):
            router.add_api_route(path, route, methods=["POST"], response_model=None)
        return router

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, with their pieces where those are asked for."""
        body = await self._context.read(request, TokenizeRequest)
        job = TokenizeJob(body.content, body.add_special, body.parse_special, body.with_pieces)
        return SingleAnswer(self._context.engine.submit(job), _tokens_body)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones written out."""
        body = await self._context.read(request, DetokenizeRequest)
        job = DetokenizeJob(tuple(body.tokens))
        return SingleAnswer(self._context.engine.submit(job), _text_body)

    async def template(self, request: Request) -> Response:
        """The prompt that a conversation becomes."""
        body = await self._context.read(request, TemplateRequest)
        text = await self._context.asking.text(body, self._context.card())
        return JSONResponse({"prompt": text})


def _tokens_body(event: Event) -> dict[str, Any]:
    assert isinstance(event, Tokens)
    if event.pieces is None:
        return {"tokens": list(event.ids)}
    pieces = zip(event.ids, event.pieces, strict=True)
    return {"tokens": [{"id": id_, "piece": _piece(piece)} for id_, piece in pieces]}


def _piece(piece: bytes) -> str | list[int]:
    """Text, or where a character is cut, its bytes."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


def _text_body(event: Event) -> dict[str, Any]:
    assert isinstance(event, Text)
    return {"content": event.text}
