"""/v1/embeddings: refused in one sentence, since a model that generates makes none."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from offload.errors import NotSupported


async def embeddings() -> Response:
    """501: there are none."""
    raise NotSupported(
        "this server generates text and makes no embeddings: use a server with an embedding "
        "model beside it"
    )


def embeddings_router() -> APIRouter:
    """The routes of OpenAI's and llama-server's names for it."""
    router = APIRouter(tags=["embeddings"])
    for path in ("/v1/embeddings", "/embeddings", "/embedding"):
        router.add_api_route(path, embeddings, methods=["POST"], response_model=None)
    return router
