"""The parts of a server that its routes share."""

from __future__ import annotations

import time
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel

from specoffload.server.body.reading import BodyReader, body_limit_bytes
from specoffload.server.chat.asking import Asking
from specoffload.server.engine.client import EngineClient, RequestFailed, unavailable
from specoffload.session.generation import GenerateOptions, ModelCard

_Body = TypeVar("_Body", bound=BaseModel)


class Context:
    """`defaults` is what a request gets that does not say; `created` the server's start, Unix
    seconds."""

    def __init__(
        self, engine: EngineClient, bodies: BodyReader, defaults: GenerateOptions, asking: Asking
    ) -> None:
        self.engine = engine
        self.asking = asking
        self.defaults = defaults
        self.created = int(time.time())
        self._bodies = bodies

    async def read(self, request: Request, kind: type[_Body]) -> _Body:
        """The request's body. Raises RequestFailed and BadRequest for what cannot be."""
        return await self._bodies.read(request, kind, body_limit_bytes(self.card()))

    def card(self) -> ModelCard:
        """Raises RequestFailed (503) before the first load."""
        if self.engine.card is None:
            raise RequestFailed(self.engine.unavailable() or unavailable("Loading model"))
        return self.engine.card
