"""Serves Anthropic's Messages API: writes answers as events of content blocks.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specoffload.chat.conversation import CallPiece, Content, Delta, of_whole_characters
from specoffload.chat.parser import StreamParser
from specoffload.generation.generation import TextPiece
from specoffload.server.api.body import checked, ignore
from specoffload.server.api.life_signs import (
    Pings,
    StreamStart,
    message_head,
    new_start,
    opening_of_message,
    start_of,
)
from specoffload.server.api.message_input import CountRequest, MessagesRequest, as_chat
from specoffload.server.api.refusals import Api, Json, error_body, problem_response
from specoffload.server.api.requests import ChatRequest, ConversationRequest
from specoffload.server.api.routes import BodyRoute, context_of
from specoffload.server.api.streaming import EventWording
from specoffload.server.engine.messages import Problem, Started

# Anthropic's clients then send the whole conversation, as before there were threads.
_NO_THREADS = Problem(
    "BadRequest",
    "thread: this server keeps no conversations; send all messages, and no thread (thread=False)",
    400,
    "invalid_request_error",
    details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
)


class AnthropicWording(EventWording):
    """Writes a message of content blocks, each started, extended by deltas and stopped."""

    def __init__(
        self,
        parser: StreamParser,
        model: str,
        stops: Sequence[str] = (),
        start: StreamStart | None = None,
        user_agent: str = "",
    ) -> None:
        """`stops`: the client's own stop sequences. A chat format may have others.

        `start` is what the stream said before, None for a new stream. `user_agent` names the
        client.
        """
        self._blocks: list[Json] = []
        self._stops = frozenset(stops)
        self._start = start or new_start("msg_")
        super().__init__(parser, message_head(self._start, model) | {"content": self._blocks})
        self._pings = Pings(user_agent)
        self._arguments = ""  # arguments of the open call, as JSON text
        self._is_open = False  # True while the last block is not stopped

    def started(self, job: int, started: Started) -> None:
        self.result["usage"]["input_tokens"] = started.n_prompt_tokens

    def add(self, delta: Delta) -> list[Json]:
        events = self.opening_events()
        if isinstance(delta, CallPiece):
            if delta.name is not None:
                call: Json = {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}}
                events += self._open(call)
            self._arguments += delta.arguments
            if delta.arguments:
                events.append(self._delta("input_json_delta", "partial_json", delta.arguments))
            return events
        if isinstance(delta, Content):
            kind, name, empty = "text", "text", {"type": "text", "text": ""}
        else:
            kind, name = "thinking", "thinking"
            empty = {"type": "thinking", "thinking": "", "signature": ""}
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events += self._open(empty)
        self._blocks[-1][name] += delta.text
        return [*events, self._delta(f"{kind}_delta", name, delta.text)]

    def finish(self, last: TextPiece, n_reasoning: int) -> list[Json]:
        events = [*self.opening_events(), *self._close()]
        assert last.stats is not None
        word = last.stopping_word if last.stopping_word in self._stops else None
        reason = "end_turn" if word is None else "stop_sequence"
        if last.finish_reason == "length":
            reason = "model_context_window_exceeded" if last.fills_context else "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        ending = {"stop_reason": reason, "stop_sequence": word}
        n_read = last.stats.n_cached_tokens
        n_created = max(0, last.stats.n_kept_tokens - n_read)
        usage = {
            "input_tokens": last.stats.n_prompt_tokens - n_read - n_created,
            "cache_read_input_tokens": n_read,
            "cache_creation_input_tokens": n_created,
            "output_tokens": last.stats.n_tokens,
        }
        self.result |= {**ending, "usage": usage}
        return [
            *events,
            {"type": "message_delta", "delta": ending, "usage": usage},
            {"type": "message_stop"},
        ]

    def break_off(self, problem: Problem) -> list[Json]:
        return [error_body(problem, Api.MESSAGES)]

    def opening_events(self) -> list[Json]:
        """Return the event that opens the stream; empty if the stream is open already."""
        return opening_of_message(self._start, self.result)

    def signs(self) -> list[Json]:
        return self._pings.next(self.opening_events)

    def _open(self, block: Json) -> list[Json]:
        events = self._close()
        self._is_open = True
        self._blocks.append(block)
        index = len(self._blocks) - 1
        return [
            *events,
            {"type": "content_block_start", "index": index, "content_block": dict(block)},
        ]

    def _close(self) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        block, events = self._blocks[-1], []
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
            self._arguments = ""
        elif block["type"] == "thinking":
            block["signature"] = signature_of(block["thinking"])
            events = [self._delta("signature_delta", "signature", block["signature"])]
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, kind: str, name: str, text: str) -> Json:
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def signature_of(thinking: str) -> str:
    """Return what stands as the signature of a thinking block. It is never checked.

    Clients send only signed thinking back with their next request, so it must not be empty. A
    digest differs between texts, as Anthropic's signatures do.
    """
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()


def _object(arguments: str) -> Json:
    """Return a call's arguments; an empty object if they are not a JSON object.

    Arguments are incomplete if the token limit has cut the call short.
    """
    try:
        value = of_whole_characters(json.loads(arguments))
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


# ---- routes


def anthropic_router() -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)

    @router.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """The model's next turn."""
        context = context_of(request)
        if body.thread is not None:
            return problem_response(_NO_THREADS)
        chat, ignored = as_chat(body)
        ignore(request, ignored)
        job, prompt = await context.question(request, checked(chat, ChatRequest))

        wording = AnthropicWording(
            prompt.parser(),
            context.card.name,
            body.stop_sequences or (),
            start_of(request.scope),
            request.headers.get("user-agent", ""),
        )
        return context.generate(request, [job], wording, stream=body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest) -> Response:
        """The number of tokens that a conversation takes as a prompt."""
        context = context_of(request)
        chat, ignored = as_chat(body)
        ignore(request, ignored)
        n_tokens = await context.n_tokens(request, checked(chat, ConversationRequest))
        return JSONResponse({"input_tokens": n_tokens})

    return router
