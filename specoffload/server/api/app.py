"""The HTTP API: OpenAI's completions and chat, llama-server's status, over an EngineClient."""

from __future__ import annotations

import logging
import time
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from specoffload.errors import KNOWN
from specoffload.server.access.gate import Access, Gate
from specoffload.server.api.answer import (
    SingleAnswer,
    StreamedAnswer,
    WholeAnswer,
    problem_response,
)
from specoffload.server.api.parameters import (
    chat_messages,
    completion_prompt,
    generate_options,
)
from specoffload.server.api.shapes import ChatShape, Shape, TextShape
from specoffload.server.api.slots import slot_body, slot_job, slots_body
from specoffload.server.api.wire import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    SlotRequest,
    TemplateRequest,
    TokenizeRequest,
)
from specoffload.server.body.reading import BodyReader, body_limit_bytes, ignore
from specoffload.server.engine.client import EngineClient, RequestFailed, unavailable
from specoffload.server.engine.messages import (
    ChatJob,
    CompletionJob,
    Event,
    Job,
    Problem,
    Prompt,
    SlotsJob,
    TemplateJob,
    TokenizeJob,
    Tokens,
    problem_of,
)
from specoffload.server.page.files import page_router
from specoffload.session.generation import GenerateOptions, ModelCard

_Body = TypeVar("_Body", bound=BaseModel)

log = logging.getLogger("specoffload.server")

_TYPES = {404: "not_found_error", 500: "server_error"}


def create_app(
    engine: EngineClient,
    *,
    access: Access | None = None,
    defaults: GenerateOptions | None = None,
    has_page: bool = True,
    strict_params: bool = False,
) -> FastAPI:
    """The application; starting and closing `engine` is the caller's business.

    `defaults` is what a request that names no sampling parameter gets; `has_page` puts the chat
    page at `/`. With `strict_params`, a parameter without effect is a 400.
    """
    access = access or Access()
    # No /docs: its page loads scripts from a foreign server. No redirects: they would go to
    # whatever name the client has put into its Host header.
    app = FastAPI(
        title="specoffload",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
    )
    app.add_middleware(Gate, access=access)
    if access.origins:  # the last added is the first passed
        app.add_middleware(
            CORSMiddleware,
            allow_origins=access.origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    api = _Api(engine, defaults or GenerateOptions(), BodyReader(strict=strict_params))
    router = APIRouter()
    for path in ("/health", "/v1/health"):
        router.add_api_route(path, api.health, methods=["GET", "HEAD"])
    for path in ("/v1/models", "/models"):
        router.add_api_route(path, api.models, methods=["GET"])
    router.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    router.add_api_route("/props", api.props, methods=["GET"])
    for path in ("/v1/chat/completions", "/chat/completions"):
        router.add_api_route(path, api.chat, methods=["POST"], response_model=None)
    router.add_api_route("/v1/completions", api.completion, methods=["POST"], response_model=None)
    router.add_api_route("/tokenize", api.tokenize, methods=["POST"], response_model=None)
    router.add_api_route("/apply-template", api.template, methods=["POST"], response_model=None)
    router.add_api_route("/slots", api.slots, methods=["GET"], response_model=None)
    router.add_api_route(
        "/slots/{number:int}", api.change_slot, methods=["POST"], response_model=None
    )
    app.include_router(router)
    if has_page:
        app.include_router(page_router())
    _install_error_handlers(app)
    return app


class _Api:
    def __init__(self, engine: EngineClient, defaults: GenerateOptions, bodies: BodyReader) -> None:
        self._engine = engine
        self._bodies = bodies
        self._defaults = defaults
        self._created = int(time.time())

    # ---- status

    async def health(self) -> Response:
        problem = self._engine.unavailable()
        return problem_response(problem) if problem else JSONResponse({"status": "ok"})

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._describe(self._card())]}

    async def model(self, name: str) -> dict[str, Any]:
        card = self._card()
        if name != card.name:
            raise HTTPException(404, f"no model {name!r} here: this server has {card.name!r}")
        return self._describe(card)

    async def props(self) -> dict[str, Any]:
        card = self._card()
        defaults = self._defaults
        return {
            "default_generation_settings": {
                "n_ctx": card.n_ctx,
                "params": {
                    "n_predict": -1 if defaults.n_predict is None else defaults.n_predict,
                    "temperature": defaults.temperature,
                    "top_k": defaults.top_k,
                    "top_p": defaults.top_p,
                    "min_p": defaults.min_p,
                    "repeat_penalty": defaults.repeat_penalty,
                    "repeat_last_n": defaults.repeat_last_n,
                    "frequency_penalty": defaults.frequency_penalty,
                    "presence_penalty": defaults.presence_penalty,
                    "seed": -1 if defaults.seed is None else defaults.seed,
                },
            },
            "total_slots": self._engine.n_parallel,
            "model_alias": card.name,
            "chat_template": card.chat_template,
            "notes": list(card.notes),
            "requests_processing": self._engine.n_running,
            "requests_deferred": self._engine.n_waiting,
            "engine_restarts": self._engine.n_restarts,
        }

    # ---- generation

    async def chat(self, request: Request) -> Response:
        body = await self._read(request, ChatRequest)
        options, idle = generate_options(body, self._defaults)
        ignore(request, idle)
        job = ChatJob(chat_messages(body.messages), options)
        card = self._card()
        return self._generate(job, body, ChatShape(card.name, int(time.time())))

    async def completion(self, request: Request) -> Response:
        body = await self._read(request, CompletionRequest)
        options, idle = generate_options(body, self._defaults)
        ignore(request, idle)
        prompt = completion_prompt(body)
        echo = prompt if body.echo and isinstance(prompt, str) else ""
        card = self._card()
        job = CompletionJob(prompt, options)
        return self._generate(job, body, TextShape(card.name, int(time.time()), echo))

    def _generate(self, job: Job, body: GenerationRequest, shape: Shape) -> Response:
        ticket = self._engine.submit(job)
        if body.stream:
            options = body.stream_options
            include_usage = bool(options and options.include_usage)
            return StreamedAnswer(ticket, shape, include_usage=include_usage)
        return WholeAnswer(ticket, shape)

    # ---- text only

    async def tokenize(self, request: Request) -> Response:
        body = await self._read(request, TokenizeRequest)
        job = TokenizeJob(body.content, body.add_special, body.parse_special)
        return SingleAnswer(self._engine.submit(job), _tokens_body)

    async def template(self, request: Request) -> Response:
        body = await self._read(request, TemplateRequest)
        job = TemplateJob(chat_messages(body.messages))
        return SingleAnswer(self._engine.submit(job), _prompt_body)

    # ---- slots

    async def slots(self, request: Request) -> Response:
        n_ctx = self._card().n_ctx
        return SingleAnswer(self._engine.submit(SlotsJob()), lambda event: slots_body(event, n_ctx))

    async def change_slot(self, request: Request, number: int) -> Response:
        has_body = request.headers.get("content-length", "0") != "0"
        body = await self._read(request, SlotRequest) if has_body else SlotRequest()
        job = slot_job(number, request.query_params.get("action"), body)
        return SingleAnswer(self._engine.submit(job), slot_body)

    async def _read(self, request: Request, kind: type[_Body]) -> _Body:
        return await self._bodies.read(request, kind, body_limit_bytes(self._card()))

    def _card(self) -> ModelCard:
        """Raises RequestFailed (503) before the first load."""
        if self._engine.card is None:
            raise RequestFailed(self._engine.unavailable() or unavailable("Loading model"))
        return self._engine.card

    def _describe(self, card: ModelCard) -> dict[str, Any]:
        return {
            "id": card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "specoffload",
            "meta": {
                "n_vocab": card.n_vocab,
                "n_ctx": card.n_ctx,
                "n_params": card.n_params,
                "size": card.size_bytes,
                "architecture": card.architecture,
            },
        }


def _tokens_body(event: Event) -> dict[str, Any]:
    assert isinstance(event, Tokens)
    return {"tokens": list(event.ids)}


def _prompt_body(event: Event) -> dict[str, Any]:
    assert isinstance(event, Prompt)
    return {"prompt": event.text}


def _install_error_handlers(app: FastAPI) -> None:
    async def failed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestFailed)
        return problem_response(error.problem)

    async def known(request: Request, error: Exception) -> Response:
        return problem_response(problem_of(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        status = error.status_code
        message = f"{request.method} {request.url.path}: {error.detail}"
        kind = _TYPES.get(status, "invalid_request_error")
        response = problem_response(Problem("HTTPException", message, status, kind))
        response.headers.update(error.headers or {})
        return response

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=400)  # nobody reads it: the client hung up in its body

    async def unforeseen(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem_response(problem_of(error))

    app.add_exception_handler(RequestFailed, failed)
    for kind in KNOWN:
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientDisconnect, gone)
    app.add_exception_handler(Exception, unforeseen)
