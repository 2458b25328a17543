"""The HTTP API: OpenAI's completions and chat, llama-server's status, over an EngineClient."""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from specoffload.chat.settings import ChatSettings
from specoffload.errors import KNOWN
from specoffload.server.access.clients import client_of
from specoffload.server.access.gate import Access, Gate
from specoffload.server.anthropic.routes import AnthropicRoutes
from specoffload.server.api.answer import SingleAnswer, problem_response
from specoffload.server.api.context import Context
from specoffload.server.api.embeddings import EmbeddingRoutes
from specoffload.server.api.openapi import openapi_router
from specoffload.server.api.slots import slot_body, slot_job, slots_body
from specoffload.server.api.status import Status
from specoffload.server.api.text import TextRoutes
from specoffload.server.api.wire import ChatRequest, SlotRequest
from specoffload.server.body.reading import BodyReader, has_body, ignore
from specoffload.server.chat.answer import ChatTeller
from specoffload.server.chat.asking import Asking
from specoffload.server.chat.renderer import Renderer
from specoffload.server.completions.native import NativeRoutes
from specoffload.server.completions.routes import completions_router
from specoffload.server.engine.client import EngineClient, RequestFailed, unavailable
from specoffload.server.engine.messages import Problem, SlotsJob, problem_of
from specoffload.server.page.files import page_router
from specoffload.server.responses.routes import responses_router
from specoffload.server.telling.group import TicketGroup
from specoffload.server.telling.told import Told
from specoffload.session.generation import AskedOptions, GenerateOptions

log = logging.getLogger("specoffload.server")

_TYPES = {404: "not_found_error", 500: "server_error"}


def create_app(
    engine: EngineClient,
    *,
    access: Access | None = None,
    defaults: GenerateOptions | None = None,
    has_page: bool = True,
    strict_params: bool = False,
    has_metrics: bool = False,
    chat: ChatSettings | None = None,
    renderer: Renderer | None = None,
) -> FastAPI:
    """The application; starting and closing `engine` and `renderer` is the caller's business.

    `defaults` is what a request that names no sampling parameter gets; `has_page` puts the chat
    page at `/`. With `strict_params`, a parameter without effect is a 400. `has_metrics` opens
    /metrics.
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
    defaults = defaults or AskedOptions()
    asking = Asking(renderer or Renderer(), chat or ChatSettings(), defaults)
    context = Context(engine, BodyReader(strict=strict_params), defaults, asking)
    app.include_router(Status(context, has_metrics=has_metrics).router())
    app.include_router(TextRoutes(context).router())
    app.include_router(completions_router(context))
    app.include_router(NativeRoutes(context).router())
    app.include_router(AnthropicRoutes(context).router())
    app.include_router(responses_router(context))
    app.include_router(EmbeddingRoutes(context).router())
    app.include_router(openapi_router(app))
    api = _Api(context)
    router = APIRouter()
    for path in ("/v1/chat/completions", "/chat/completions"):
        router.add_api_route(path, api.chat, methods=["POST"], response_model=None)
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
    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine = context.engine

    # ---- generation

    async def chat(self, request: Request) -> Response:
        body = await self._context.read(request, ChatRequest)
        card = self._context.card()
        question = await self._context.asking.question(body, card)
        ignore(request, question.idle)
        # Before the teller is made, so that the engine begins meanwhile.
        group = TicketGroup(self._engine, [question.job], client_of(request))
        teller = ChatTeller(
            question.prompt,
            card.name,
            int(time.time()),
            n=question.job.options.n,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        return Told(group, teller, stream=bool(body.stream))

    # ---- slots

    async def slots(self, request: Request) -> Response:
        engine, n_ctx = self._engine, self._context.card().n_ctx
        if request.query_params.get("fail_on_no_slot") and engine.n_running >= engine.n_parallel:
            raise RequestFailed(unavailable("no slot available"))
        return SingleAnswer(engine.submit(SlotsJob()), lambda event: slots_body(event, n_ctx))

    async def change_slot(self, request: Request, number: int) -> Response:
        body = SlotRequest()
        if has_body(request.headers):
            body = await self._context.read(request, SlotRequest)
        job = slot_job(number, request.query_params.get("action"), body)
        return SingleAnswer(self._engine.submit(job), slot_body)


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
