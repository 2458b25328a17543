"""What each API says when a request is refused or breaks off: status, type, code and words.

Programs that use models recognise some events by a phrase, a type or a code of the API that they
speak, and then shorten a conversation or try again. `_TABLE` has these events. Everything else has
llama-server's form, or Anthropic's on its paths. docs/server.md has the table with the rules of the
clients that it satisfies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from specoffload.server.engine.messages import Event, Problem
from specoffload.server.log import add_words

Json = dict[str, Any]


class Api(Enum):
    """The form of requests, answers and errors."""

    OPENAI = "OpenAI's chats and completions"
    RESPONSES = "OpenAI's Responses API"
    MESSAGES = "Anthropic's Messages API"
    NATIVE = "llama-server's own"


_PATHS = (
    ("/v1/messages", Api.MESSAGES),
    ("/v1/responses", Api.RESPONSES),
    ("/responses", Api.RESPONSES),
    ("/v1/chat/completions", Api.OPENAI),
    ("/chat/completions", Api.OPENAI),
    ("/v1/completions", Api.OPENAI),
    ("/v1/embeddings", Api.OPENAI),
    ("/v1/models", Api.OPENAI),
)


def api_of(path: str) -> Api:
    """Return the API that a request's path belongs to."""
    for start, api in _PATHS:
        if path == start or path.startswith(f"{start}/"):
            return api
    return Api.NATIVE


@dataclass(frozen=True)
class _Said:
    """What an API says at an event. None stands for the problem's own status or type.

    A code of None stands for the status. `words` may have the problem's {message}, {n_prompt},
    {most} (tokens of the longest prompt, rounded up to the context's size) and {n_ctx}.
    """

    status: int | None = None
    type: str | None = None
    code: str | None = None
    words: str = "{message}"


_REMEDY = "shorten the prompt or raise --ctx-size"
_TOO_LARGE = "request entity too large: {message}"
_TABLE: Mapping[Event, Mapping[Api, _Said]] = {
    Event.PROMPT_TOO_LONG: {
        Api.OPENAI: _Said(
            code="context_length_exceeded",
            words="request ({n_prompt} tokens) exceeds the available context size ({n_ctx} "
            "tokens): this model's maximum context length is {n_ctx} tokens, and the answer needs "
            f"at least one; {_REMEDY}",
        ),
        Api.RESPONSES: _Said(
            code="context_length_exceeded",
            words="Your input exceeds the context window of this model: request ({n_prompt} "
            "tokens) exceeds the available context size ({n_ctx} tokens), and the answer needs at "
            f"least one; {_REMEDY}",
        ),
        Api.MESSAGES: _Said(
            type="invalid_request_error",
            words=f"prompt is too long: {{n_prompt}} tokens > {{most}} maximum; {_REMEDY}",
        ),
        Api.NATIVE: _Said(
            words="request ({n_prompt} tokens) exceeds the available context size ({n_ctx} "
            f"tokens), and the answer needs at least one; {_REMEDY}",
        ),
    },
    Event.TEXT_TOO_LONG: {
        Api.OPENAI: _Said(
            code="context_length_exceeded",
            words="request ({n_prompt} tokens) exceeds the available context size ({n_ctx} "
            "tokens): this model's maximum context length is {n_ctx} tokens in embeddings. "
            "{message}",
        ),
        Api.NATIVE: _Said(
            words="request ({n_prompt} tokens) exceeds the available context size ({n_ctx} "
            "tokens). {message}",
        ),
    },
    Event.BODY_OVER_CONTEXT: {
        Api.OPENAI: _Said(
            code="context_length_exceeded",
            words="request entity too large, which exceeds the context window: {message}",
        ),
        Api.RESPONSES: _Said(
            code="context_length_exceeded",
            words="request entity too large, which exceeds the context window: {message}",
        ),
        Api.MESSAGES: _Said(
            type="request_too_large",
            words="prompt is too long for the context window: {message}",
        ),
        Api.NATIVE: _Said(words=_TOO_LARGE),
    },
    Event.BODY_TOO_LARGE: {
        Api.OPENAI: _Said(code="request_too_large", words=_TOO_LARGE),
        Api.RESPONSES: _Said(code="request_too_large", words=_TOO_LARGE),
        Api.MESSAGES: _Said(type="request_too_large", words=_TOO_LARGE),
        Api.NATIVE: _Said(words=_TOO_LARGE),
    },
    # No `server_is_overloaded`: Codex ends the turn there, and retries other codes of a 503.
    Event.QUEUE_FULL: {
        Api.MESSAGES: _Said(status=529, type="overloaded_error", words="Overloaded: {message}"),
    },
    Event.LOADING: {Api.MESSAGES: _Said(type="overloaded_error")},
    Event.UNKNOWN_MODEL: {
        Api.OPENAI: _Said(code="model_not_found"),
        Api.RESPONSES: _Said(code="model_not_found"),
        Api.MESSAGES: _Said(status=404, type="not_found_error", words="model: {message}"),
    },
    Event.UNKNOWN_RESPONSE: {Api.RESPONSES: _Said(code="previous_response_not_found")},
    Event.BAD_KEY: {
        Api.OPENAI: _Said(code="invalid_api_key"),
        Api.RESPONSES: _Said(code="invalid_api_key"),
        # Claude Code compares the whole body of the error.
        Api.MESSAGES: _Said(type="authentication_error", words="invalid x-api-key"),
    },
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


@dataclass(frozen=True)
class Refusal:
    """A problem in the terms of an API. `code` is the status if the API has no code for it."""

    status: int
    type: str
    code: str | int
    message: str


def refusal_of(problem: Problem, api: Api) -> Refusal:
    said = _TABLE.get(problem.event, {}).get(api, _Said()) if problem.event else _Said()
    status = problem.http_status if said.status is None else said.status
    kind = problem.type
    if api is Api.MESSAGES:
        other = "api_error" if status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(status, other)
    message = problem.message
    if said.words != "{message}":
        n_prompt, n_ctx = problem.n_prompt_tokens or 0, problem.n_ctx or 0
        # A prompt of n_ctx tokens leaves no room for an answer, and is over the maximum too.
        most = min(n_ctx, n_prompt - 1)
        message = said.words.format(message=message, n_prompt=n_prompt, n_ctx=n_ctx, most=most)
        if problem.is_lower_bound:
            message += f" (the text has at least {n_prompt} tokens, and was not counted)"
    code = status if said.code is None else said.code
    return Refusal(status, said.type or kind, code, message)


def error_body(problem: Problem, api: Api) -> Json:
    """Return the body of an error, or the data of an error event, in the form of an API.

    `{"error": {"code", "message", "type"}}`, with token counts if known; Anthropic's form is
    https://docs.anthropic.com/en/api/errors.
    """
    told = refusal_of(problem, api)
    if api is Api.MESSAGES:
        error: Json = {"type": told.type, "message": told.message}
        if problem.details is not None:
            error["details"] = problem.details
        return {"type": "error", "error": error}
    error = {"code": told.code, "message": told.message, "type": told.type}
    if problem.n_prompt_tokens is not None:
        error["n_prompt_tokens"] = problem.n_prompt_tokens
    if problem.n_ctx is not None:
        error["n_ctx"] = problem.n_ctx
    return {"error": error}


class _ProblemResponse(JSONResponse):
    """An error in the form of the API that the request's path belongs to."""

    def __init__(self, problem: Problem, headers: Mapping[str, str]) -> None:
        super().__init__(error_body(problem, Api.NATIVE), problem.http_status, headers)
        self._problem = problem

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        add_words(scope, self._problem.message)
        api = api_of(scope["path"])
        self.status_code = refusal_of(self._problem, api).status
        self.body = self.render(error_body(self._problem, api))
        self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def problem_response(problem: Problem) -> Response:
    """Return the error as JSON, with headers that tell clients whether and when to retry."""
    headers = {}
    if problem.retry_after_s is not None:
        headers["Retry-After"] = str(problem.retry_after_s)
    if problem.retry_after_ms is not None:
        headers["Retry-After-Ms"] = str(problem.retry_after_ms)  # OpenAI's clients read it
    if not problem.can_retry:
        headers["X-Should-Retry"] = "false"  # OpenAI's clients read it
    if problem.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _ProblemResponse(problem, headers)
