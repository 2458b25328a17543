"""The parts of a server that its routes share: reading bodies, rendering chats, generating."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from specoffload.chat.conversation import ChatSettings
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.access import client_of
from specoffload.server.api.body import (
    checked,
    has_body,
    ignore,
    ignored_names,
    invalid,
    read_json,
)
from specoffload.server.api.parameters import conversation_of, generate_options
from specoffload.server.api.requests import (
    ChatRequest,
    ConversationRequest,
    GenerationRequest,
    RequestModel,
)
from specoffload.server.api.streaming import GenerationResponse, TicketGroup, Wording
from specoffload.server.engine.client import EngineClient, RequestFailed, unavailable
from specoffload.server.engine.messages import ChatJob, GeneratingJob
from specoffload.server.renderer import Renderer
from specoffload.session.card import ModelCard
from specoffload.session.chat import answer_options, check_options, format_of
from specoffload.session.generation import GenerateOptions

_OVERHEAD_BYTES = 2**20  # tools, schemas, and the JSON around a prompt
_MOST_BYTES = 64 * 2**20
_MOST_BYTES_AT_ONCE = 2 * _MOST_BYTES  # limit of all bodies that are being read
_RETRY_AFTER_S = 2

_Body = TypeVar("_Body", bound=RequestModel)
Endpoint = Callable[[Request, _Body], Awaitable[Response]]


@dataclass(frozen=True)
class Question:
    """A chat request for the engine. `prompt` reads the answers."""

    job: ChatJob
    prompt: ChatPrompt


class ServerContext:
    """`defaults` and `chat` apply where a request says nothing."""

    def __init__(
        self,
        engine: EngineClient,
        renderer: Renderer,
        defaults: GenerateOptions,
        chat: ChatSettings,
    ) -> None:
        self.engine = engine
        self.defaults = defaults
        self.created = int(time.time())  # Unix seconds
        self.bodies: set[type[RequestModel]] = set()  # bodies of all routes, for /openapi.json
        self._renderer = renderer
        self._chat = chat
        self._n_bytes = 0  # size of all bodies that are being read
        self._format: tuple[ModelCard, ChatFormat] | None = None

    @property
    def card(self) -> ModelCard:
        """Raises RequestFailed (503) until the model is loaded for the first time."""
        if self.engine.card is None:
            raise RequestFailed(self.engine.unavailable() or unavailable("Loading model"))
        return self.engine.card

    # ---- requests

    def post(
        self, router: APIRouter, *paths: str, body: type[_Body]
    ) -> Callable[[Endpoint[_Body]], Endpoint[_Body]]:
        """Decorates an endpoint of POST requests with a body."""

        def register(endpoint: Endpoint[_Body]) -> Endpoint[_Body]:
            async def route(request: Request) -> Response:
                return await endpoint(request, await self.read(request, body))

            route.__name__, route.__doc__ = endpoint.__name__, endpoint.__doc__  # type: ignore[attr-defined]
            extra = self.described(body)
            for path in paths:
                router.add_api_route(
                    path, route, methods=["POST"], response_model=None, openapi_extra=extra
                )
            return endpoint

        return register

    def described(self, body: type[RequestModel]) -> dict[str, Any]:
        """A route's `openapi_extra` for its body."""
        self.bodies.add(body)
        schema = {"$ref": f"#/components/schemas/{body.__name__}"}
        content = {"application/json": {"schema": schema}}
        return {"requestBody": {"required": _needs_body(body), "content": content}}

    async def read(self, request: Request, kind: type[_Body]) -> _Body:
        """The request's body. Raises BadRequest, and RequestFailed: 413 over the limit, 503 if too
        much is being read, 400 for anything that is no JSON object or does not fit `kind`."""
        if not has_body(request.headers) and not _needs_body(kind):
            return kind()
        body = checked(read_json(await self._bytes(request)), kind)
        if not kind.is_translated:
            ignore(request, ignored_names(body))
        return body

    async def _bytes(self, request: Request) -> bytearray:
        # Text may double when JSON escapes it.
        longest_bytes = _OVERHEAD_BYTES + 2 * self.card.n_ctx * self.card.longest_token_bytes
        limit_bytes = min(longest_bytes, _MOST_BYTES)
        data = bytearray()
        try:
            async for chunk in request.stream():
                data += chunk
                self._n_bytes += len(chunk)
                if len(data) > limit_bytes:
                    raise invalid(
                        f"the body is over {limit_bytes} bytes, which is more than a prompt that "
                        "fits the context can take: shorten it or raise --ctx-size",
                        413,
                    )
                if self._n_bytes > _MOST_BYTES_AT_ONCE:
                    message = f"bodies of over {_MOST_BYTES_AT_ONCE} bytes are being read"
                    raise RequestFailed(unavailable(message, _RETRY_AFTER_S))
        finally:
            self._n_bytes -= len(data)
        return data

    def translated(
        self, request: Request, chat: dict[str, Any], ignored: Sequence[str], kind: type[_Body]
    ) -> _Body:
        """Another API's request, translated to the body of a chat; `ignored` are its parameters
        without effect. Raises RequestFailed and BadRequest."""
        ignore(request, ignored)
        body = checked(chat, kind)
        ignore(request, ignored_names(body))
        return body

    def options(self, request: Request, body: GenerationRequest) -> GenerateOptions:
        """Raises BadRequest."""
        options, idle = generate_options(body, self.defaults)
        ignore(request, idle)
        return options

    # ---- chats

    async def question(self, request: Request, body: ChatRequest) -> Question:
        """Raises BadRequest."""
        options = self.options(request, body)
        conversation = conversation_of(body, self._chat, options.json_schema)
        check_options(conversation, options)
        prompt = await self._renderer.prepare(self._chat_format(), conversation)
        return Question(ChatJob(prompt.text, answer_options(prompt, options)), prompt)

    async def rendered(self, body: ConversationRequest) -> str:
        """The prompt that a conversation becomes. Raises BadRequest."""
        conversation = conversation_of(body, self._chat)
        return (await self._renderer.prepare(self._chat_format(), conversation)).text

    def _chat_format(self) -> ChatFormat:
        card = self.card
        if self._format is None or self._format[0] is not card:
            self._format = card, format_of(card, self._chat)
        return self._format[1]

    # ---- answers

    def generate(
        self,
        request: Request,
        jobs: Sequence[GeneratingJob],
        wording: Wording,
        *,
        stream: bool | None,
    ) -> Response:
        """Submits `jobs`. Raises RequestFailed if not even the first is accepted."""
        group = TicketGroup(self.engine, jobs, client_of(request))
        return GenerationResponse(group, wording, stream=bool(stream))


def _needs_body(kind: type[RequestModel]) -> bool:
    return any(field.is_required() for field in kind.model_fields.values())
