"""OpenAI's /v1/chat/completions, whole and in chunks."""

from __future__ import annotations

import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning
from specoffload.chat.format import ChatPrompt
from specoffload.server.api.answers import (
    DONE,
    MARK,
    Json,
    ParsedAnswer,
    TextLine,
    server_sent,
    timings_of,
    to_json,
    usage_of,
)
from specoffload.server.api.context import ServerContext
from specoffload.server.api.probabilities import chat_logprobs
from specoffload.server.api.requests import ChatRequest, ConversationRequest
from specoffload.server.api.streaming import Wording
from specoffload.session.generation import Piece


def chat_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["chat"])

    @context.post(router, "/v1/chat/completions", "/chat/completions", body=ChatRequest)
    async def chat(request: Request, body: ChatRequest) -> Response:
        """The model's next message, `n` times."""
        question = await context.question(request, body)

        def wording() -> Wording:
            return ChatWording(question.prompt, context.card.name, body)

        return context.generate(request, [question.job], wording, stream=body.stream)

    @context.post(router, "/apply-template", body=ConversationRequest)
    async def apply_template(request: Request, body: ConversationRequest) -> Response:
        """The prompt that a conversation becomes."""
        return JSONResponse({"prompt": await context.rendered(body)})

    return router


class ChatWording(Wording):
    """chat.completion, and chat.completion.chunk."""

    def __init__(self, prompt: ChatPrompt, model: str, body: ChatRequest) -> None:
        n = body.n or 1
        self._head: Json = {
            "id": "chatcmpl-" + secrets.token_hex(16),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model,
        }
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._n_top = (body.top_logprobs or 0) if body.logprobs else None  # None: no logprobs
        self._answers = [ParsedAnswer(prompt.parser()) for _ in range(n)]
        self._logprobs: list[list[Any]] = [[] for _ in range(n)]
        self._n_logprobs_told = [0] * n
        self._has_begun = False  # the chunks with the role are sent
        self._lines: dict[tuple[int, str], TextLine] = {}

    def piece(self, job: int, piece: Piece) -> bytes:
        at = piece.index
        deltas = self._answers[at].add(piece)
        self._logprobs[at] += piece.logprobs
        told = []
        if not self._has_begun and (deltas or piece.stats is not None):
            self._has_begun = True
            first = {"role": "assistant", "content": ""}
            told = [server_sent(self._chunk(i, first)) for i in range(len(self._answers))]
        if deltas and (piece.so_far is not None or self._n_top is not None):
            told += [self._told(at, delta) for delta in deltas[:-1]]
            told.append(self._told_in_full(piece, deltas[-1]))
        else:
            told += [self._told(at, delta) for delta in deltas]
        if piece.stats is not None:
            ending = self._chunk(at, {}, self._reason(at))
            told.append(server_sent(ending | {"timings": timings_of(piece.stats)}))
        return b"".join(told)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return server_sent(self._head | {"choices": [], "usage": self._usage()}) + DONE

    def whole(self) -> bytes:
        last = self._answers[-1].last
        assert last is not None  # the engine process checks the last pieces
        assert last.stats is not None
        body = self._head | {
            "object": "chat.completion",
            "choices": [self._choice(at) for at in range(len(self._answers))],
            "usage": self._usage(),
            "timings": timings_of(last.stats),
        }
        return to_json(body).encode()

    def _choice(self, at: int) -> Json:
        given = self._answers[at].message
        message: Json = {"role": "assistant", "content": given.content}
        if given.reasoning:
            message["reasoning_content"] = given.reasoning
        if given.calls:
            message["content"] = given.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in given.calls
            ]
        return {
            "index": at,
            "message": message,
            "logprobs": self._logprobs_from(at, 0),
            "finish_reason": self._reason(at),
        }

    def _reason(self, at: int) -> str | None:
        answer = self._answers[at]
        reason = None if answer.last is None else answer.last.finish_reason
        return "tool_calls" if reason == "stop" and answer.message.calls else reason

    def _usage(self) -> Json:
        pieces = [answer.last for answer in self._answers]
        usage = usage_of([p.stats for p in pieces if p is not None and p.stats is not None],
                         len(self._answers))  # fmt: skip
        n_reasoning = sum(answer.n_reasoning for answer in self._answers)
        usage["completion_tokens_details"] = {"reasoning_tokens": n_reasoning}
        return usage

    def _told(self, at: int, delta: Delta) -> bytes:
        """Most chunks differ only in a text, so they are filled into a prepared line."""
        if isinstance(delta, CallPiece):
            return server_sent(self._chunk(at, _worded(delta)))
        key = at, _name(delta)
        if key not in self._lines:
            self._lines[key] = TextLine(self._chunk(at, {key[1]: MARK}))
        return self._lines[key].sent(delta.text)

    def _told_in_full(self, piece: Piece, delta: Delta) -> bytes:
        """With the timings so far, and the logprobs of all tokens since the last chunk with any."""
        at = piece.index
        chunk = self._chunk(at, _worded(delta))
        if piece.so_far is not None:
            chunk["timings"] = timings_of(piece.so_far)
        chunk["choices"][0]["logprobs"] = self._logprobs_from(at, self._n_logprobs_told[at])
        self._n_logprobs_told[at] = len(self._logprobs[at])
        return server_sent(chunk)

    def _logprobs_from(self, at: int, start: int) -> Json | None:
        if self._n_top is None:
            return None
        return chat_logprobs(self._logprobs[at][start:], self._n_top)

    def _chunk(self, at: int, delta: Json, reason: str | None = None) -> Json:
        choice = {"index": at, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._head | {"choices": [choice]}


def _name(delta: Content | Reasoning) -> str:
    return "content" if isinstance(delta, Content) else "reasoning_content"


def _worded(delta: Delta) -> Json:
    if not isinstance(delta, CallPiece):
        return {_name(delta): delta.text}
    call: Json = {"index": delta.index}
    function: Json = {"arguments": delta.arguments}
    if delta.name is not None:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [call | {"function": function}]}
