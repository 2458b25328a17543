"""The models of a server, usually one, as the routes see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from fastapi import APIRouter
from prometheus_client.metrics_core import Metric
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from specoffload.generation.generation import ModelCard
from specoffload.server.api.context import ServerContext
from specoffload.server.api.refusals import Json
from specoffload.server.api.shared import SharedParts


class RouteNeeds(NamedTuple):
    """What a route needs of a request's model.

    `named`: with several models, a request that names none is refused. `opened`: the request waits
    until the model is open.
    """

    named: bool = True
    opened: bool = True


class ListedModel(NamedTuple):
    """A model as /v1/models describes it, and whether it reads images."""

    described: Json
    reads_images: bool


class Subject(ABC):
    """What the routes about the server tell of: one model, or several together."""

    @abstractmethod
    def health(self) -> Response:
        """Return the answer to /health."""

    @abstractmethod
    def props(self) -> Json:
        """Return the answer to /props. Raises RequestFailed while the model is loaded."""

    @abstractmethod
    async def metrics(self) -> list[Metric]:
        """Return the metrics of /metrics."""


class Models(ABC):
    """The models of a server: one that is always open, or several that requests choose from."""

    shared: SharedParts
    has_metrics: bool  # whether /metrics is open

    @abstractmethod
    async def answer(
        self, route: ASGIApp, needs: RouteNeeds, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Answer a request by `route`, with the context of the request's model in the scope.

        The route is called without a context if the request names no model and needs none.
        """

    @abstractmethod
    def subject(self, context: ServerContext | None) -> Subject:
        """Return what a request asks about. None: it names no model."""

    @abstractmethod
    async def listed(self, request: Request) -> Sequence[ListedModel]:
        """Return the models for a client that asks for all of them."""

    @abstractmethod
    async def described(self, name: str) -> Json:
        """Return a model as /v1/models describes it. Raises RequestFailed (404)."""

    def own_routers(self) -> Sequence[APIRouter]:
        """Return the routes that only this kind of server has."""
        return ()


def meta_of(card: ModelCard | None) -> Json | None:
    """Return the facts of a model for /v1/models, as llama-server does. None: it is not loaded."""
    if card is None:
        return None
    return {
        "n_vocab": card.n_vocab,
        "n_ctx": card.n_ctx,
        "n_params": card.n_params,
        "size": card.size_bytes,
        "architecture": card.architecture,
    }
