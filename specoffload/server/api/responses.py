"""Serves OpenAI's Responses API: writes answers as items and events.

https://platform.openai.com/docs/api-reference/responses and responses-streaming.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning
from specoffload.chat.parser import StreamParser
from specoffload.generation.generation import TextPiece
from specoffload.server.access import owner_of
from specoffload.server.api.body import checked, ignore
from specoffload.server.api.life_signs import StreamStart, new_start, start_of
from specoffload.server.api.refusals import Api, Json, refusal_of
from specoffload.server.api.requests import ChatRequest, ConversationRequest
from specoffload.server.api.response_input import (
    SEALED_REASONING,
    ResponsesRequest,
    as_chat,
    sealed,
)
from specoffload.server.api.response_tools import as_text
from specoffload.server.api.routes import BodyRoute, context_of
from specoffload.server.api.streaming import EventWording
from specoffload.server.api.whole_input import whole_request
from specoffload.server.engine.messages import Event, Problem


class ResponsesWording(EventWording):
    """Writes a response of items. Each item is added, extended by deltas, and done before the next.

    The event `response.created` opens the stream, before the first event of any other kind.
    """

    def __init__(
        self,
        parser: StreamParser,
        request: ResponsesRequest,
        model: str,
        start: StreamStart | None = None,
        keep: Callable[[Json], None] | None = None,
    ) -> None:
        """`start` is what the stream said before, None for a new stream.

        `keep` is called with the whole response when it has ended. None if it is not to be kept.
        """
        self._items: list[Json] = []
        self._start = start or new_start("resp_")
        head = response_head(self._start, request.model_dump(exclude_unset=True), model)
        super().__init__(parser, head | {"output": self._items, "store": keep is not None})
        self._keep = keep
        self._tools = request.own_tools
        self._seals_reasoning = SEALED_REASONING in (request.include or ())
        self._arguments = ""  # of the last item, if it calls a custom tool
        self._is_open = False  # True while the last item is not done

    def add(self, delta: Delta) -> list[Json]:
        events = self.opening_events()
        if isinstance(delta, CallPiece):
            return events + self._add_call(delta)
        kind = "message" if isinstance(delta, Content) else "reasoning"
        if not self._is_open or self._items[-1]["type"] != kind:
            events += self._open_text(delta)
        part = self._items[-1]["content"][0]
        part["text"] += delta.text
        more: Json = {"logprobs": []} if kind == "message" else {}
        name = f"response.{part['type']}.delta"
        return [*events, self._in_part(name, delta=delta.text, **more)]

    def finish(self, last: TextPiece, n_reasoning: int) -> list[Json]:
        assert last.stats is not None
        status = "incomplete" if last.finish_reason == "length" else "completed"
        events = [*self.opening_events(), *self._close(status)]
        self.result["status"] = status
        if status == "incomplete":
            self.result["incomplete_details"] = {"reason": "max_output_tokens"}
        stats = last.stats
        self.result["usage"] = {
            "input_tokens": stats.n_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": stats.n_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": stats.n_tokens,
            "output_tokens_details": {"reasoning_tokens": n_reasoning},
            "total_tokens": stats.n_prompt_tokens + stats.n_tokens,
        }
        if self._keep is not None:
            self._keep(self.result)
        return [*events, self._with_response(f"response.{status}")]

    def break_off(self, problem: Problem) -> list[Json]:
        events = [*self.opening_events(), *self._close("incomplete")]
        self.result["status"] = "failed"
        self.result["error"] = failure_of(problem)
        return [*events, self._with_response("response.failed")]

    def tells_refusal(self, problem: Problem) -> bool:
        return problem.event is Event.PROMPT_TOO_LONG  # Codex shortens its input by this event only

    def opening_events(self) -> list[Json]:
        """Return the events that open the stream; empty if the stream is open already."""
        return [] if self._start.n_events else signs_of_response(self._start, self.result)

    def signs(self) -> list[Json]:
        return signs_of_response(self._start, self.result)

    def _event(self, kind: str, /, **fields: Any) -> Json:
        return numbered(self._start, kind, **fields)

    def _with_response(self, kind: str) -> Json:
        return with_response(self._start, kind, self.result)

    def _with_item(self, kind: str) -> Json:
        item = copy.deepcopy(self._items[-1])
        return self._event(kind, output_index=len(self._items) - 1, item=item)

    def _in_item(self, kind: str, /, **fields: Any) -> Json:
        at = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return self._event(kind, **at, **fields)

    def _in_part(self, kind: str, /, **fields: Any) -> Json:
        return self._in_item(kind, content_index=0, **fields)

    def _open(self, item: Json) -> list[Json]:
        events = self._close("completed")
        self._is_open = True
        self._items.append(item)
        return [*events, self._with_item("response.output_item.added")]

    def _open_text(self, delta: Content | Reasoning) -> list[Json]:
        item: Json = {"status": "in_progress", "content": []}
        if isinstance(delta, Content):
            item |= {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant"}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item |= {"id": "rs_" + secrets.token_hex(12), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        events = self._open(item)
        item["content"].append(part)
        return [*events, self._in_part("response.content_part.added", part=dict(part))]

    def _add_call(self, piece: CallPiece) -> list[Json]:
        events = []
        if piece.name is not None:
            is_custom = self._tools.is_custom(piece.name)
            kind = "custom_tool_call" if is_custom else "function_call"
            call = {
                "id": ("ctc_" if is_custom else "fc_") + secrets.token_hex(12),
                "type": kind,
                "status": "in_progress",
                "call_id": piece.id,
                **self._tools.item_name(piece.name),
                ("input" if is_custom else "arguments"): "",
            }
            events = self._open(call)
            self._arguments = ""
        if self._items[-1]["type"] == "custom_tool_call":
            self._arguments += piece.arguments  # the text is known when the JSON around it ends
        elif piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            name = "response.function_call_arguments.delta"
            events.append(self._in_item(name, delta=piece.arguments))
        return events

    def _close(self, status: str) -> list[Json]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "reasoning" and self._seals_reasoning:
            item["encrypted_content"] = sealed(item["content"][0]["text"])
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            events = [self._in_item(name, name=item["name"], arguments=item["arguments"])]
        elif item["type"] == "custom_tool_call":
            item["input"] = as_text(self._arguments)
            events = [
                self._in_item("response.custom_tool_call_input.delta", delta=item["input"]),
                self._in_item("response.custom_tool_call_input.done", input=item["input"]),
            ]
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._in_part(f"response.{part['type']}.done", text=part["text"], **more),
                self._in_part("response.content_part.done", part=dict(part)),
            ]
        return [*events, self._with_item("response.output_item.done")]


def response_head(start: StreamStart, asked: Json, model: str) -> Json:
    """Return a response without output. `asked` are the fields of its request that were sent."""
    return {
        "id": start.id,
        "object": "response",
        "created_at": start.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.get("instructions"),
        "max_output_tokens": asked.get("max_output_tokens"),
        "metadata": asked.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.get("parallel_tool_calls", True),
        "previous_response_id": asked.get("previous_response_id"),
        "reasoning": asked.get("reasoning") or {},
        "store": asked.get("store") is not False,
        "temperature": asked.get("temperature"),
        "text": asked.get("text") or {"format": {"type": "text"}},
        "tool_choice": asked.get("tool_choice", "auto"),
        "tools": asked.get("tools") or [],
        "top_p": asked.get("top_p"),
        "truncation": "disabled",
        "usage": None,
    }


def numbered(start: StreamStart, kind: str, /, **fields: Any) -> Json:
    """Return the stream's next event."""
    start.n_events += 1
    return {"type": kind, "sequence_number": start.n_events - 1, **fields}


def with_response(start: StreamStart, kind: str, response: Json) -> Json:
    return numbered(start, kind, response=copy.deepcopy(response))


def signs_of_response(start: StreamStart, response: Json) -> list[Json]:
    """Return the events that open a stream, or if it is open, one that adds nothing."""
    kinds = [*["response.created"] * (not start.n_events), "response.in_progress"]
    return [with_response(start, kind, response) for kind in kinds]


def failure_of(problem: Problem) -> Json:
    """Return the error of a response that failed. Its codes are strings in all cases.

    Codex waits before it tries again if the code and the words are those of a rate limit.
    """
    told = refusal_of(problem, Api.RESPONSES)
    if problem.retry_after_s is not None:
        words = f"{told.message}; try again in {problem.retry_after_s} s"
        return {"code": "rate_limit_exceeded", "message": words}
    code = told.code if isinstance(told.code, str) else "server_error"
    return {"code": code, "message": told.message}


def responses_router() -> APIRouter:
    router = APIRouter(tags=["responses"], route_class=BodyRoute)

    @router.post("/v1/responses")
    @router.post("/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """The model's next turn, as items."""
        context = context_of(request)
        owner = owner_of(request.scope)
        whole, own_input = whole_request(
            context.shared.stored, owner, body, context.most_body_bytes
        )
        chat, ignored = as_chat(whole)
        ignore(request, ignored)
        job, prompt = await context.question(request, checked(chat, ChatRequest))

        def keep(response: Json) -> None:
            assert own_input is not None
            context.shared.stored.keep(owner, response, own_input, body.previous_response_id)

        wording = ResponsesWording(
            *(prompt.parser(), body, context.card.name, start_of(request.scope)),
            keep=None if own_input is None else keep,
        )
        return context.generate(request, [job], wording, stream=body.stream)

    @router.post("/v1/responses/input_tokens")
    @router.post("/responses/input_tokens")
    async def input_tokens(request: Request, body: ResponsesRequest) -> Response:
        """The number of tokens that a conversation takes as a prompt."""
        context = context_of(request)
        owner, most_bytes = owner_of(request.scope), context.most_body_bytes
        chat, ignored = as_chat(
            whole_request(context.shared.stored, owner, body, most_bytes).request
        )
        ignore(request, ignored)
        return JSONResponse(await context.counted(request, checked(chat, ConversationRequest)))

    return router
