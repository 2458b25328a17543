"""Serves OpenAI's Responses API: turns requests into chat requests, and answers into events.

https://platform.openai.com/docs/api-reference/responses and responses-streaming. Nothing is stored:
each request has the whole conversation, as clients send it with `store: false`.
"""

from __future__ import annotations

import copy
import secrets
import time
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from offload.errors import BadRequest
from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning
from specoffload.chat.parser import StreamParser
from specoffload.server.api.answers import Json
from specoffload.server.api.body import checked, ignore
from specoffload.server.api.context import BodyRoute, ServerContext
from specoffload.server.api.omitted import omitted_kind
from specoffload.server.api.requests import ChatRequest, RequestModel, Whole, function_tool
from specoffload.server.api.streaming import EventWording
from specoffload.server.engine.messages import Problem
from specoffload.session.generation import Piece

# ---- requests


class ItemPart(RequestModel):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(RequestModel):
    """A message, a function call, its result, or the reasoning before it."""

    type: str | None = None
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None


class ResponsesTool(RequestModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesToolChoice(RequestModel):
    type: str
    name: str | None = None
    mode: str | None = None  # of allowed_tools
    tools: list[dict[str, Any]] | None = None


class TextOptions(RequestModel):
    format: dict[str, Any] | None = None


class ReasoningRequest(RequestModel):
    effort: str | None = None


class ResponsesRequest(RequestModel):
    """/v1/responses. Other fields are copied unchanged into the chat request."""

    model: str | None = None
    input: str | list[InputItem]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ResponsesToolChoice | None = None
    text: TextOptions | None = None
    reasoning: ReasoningRequest | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None


_STORED = ("previous_response_id", "conversation", "prompt", "background")
_TRANSLATED = {
    *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "stream_options"),
    *("max_output_tokens", "include", "truncation", "store", "max_tool_calls", *_STORED),
}
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def as_chat(request: ResponsesRequest) -> tuple[Json, list[str]]:
    """Return the body of an equivalent chat request, and the names of fields without effect.

    Raises BadRequest for content that a text model cannot read, and for stored answers.
    """
    for name in _STORED:
        if getattr(request, name):
            raise BadRequest(f"{name}: this server stores nothing; send the whole input")
    extra = request.model_extra or {}
    ignored = [name for name in ("include", "max_tool_calls") if extra.get(name)]
    if extra.get("truncation") not in (None, "disabled"):
        ignored.append("truncation")
    given = request.model_dump(exclude_unset=True)
    body = {name: value for name, value in given.items() if name not in _TRANSLATED}
    body["messages"] = _messages(request)
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    tools = []
    for at, tool in enumerate(request.tools or ()):
        if tool.type != "function":
            ignored.append(f"tools[{at}]")  # a tool that runs at OpenAI
            continue
        if not tool.name:
            raise BadRequest(f"tools[{at}]: a function needs a name")
        tools.append(function_tool(tool.name, tool.description, tool.parameters, tool.strict))
    if tools:
        body["tools"] = tools
        if request.tool_choice is not None:
            body["tool_choice"] = _choice(request.tool_choice)
    return body, ignored


def _choice(choice: str | ResponsesToolChoice) -> str | Json:
    if isinstance(choice, str):
        return choice
    if choice.type == "allowed_tools":
        allowed = {"mode": choice.mode or "auto", "tools": choice.tools or []}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    if choice.type != "function" or not choice.name:
        raise BadRequest(
            f"tool_choice: type {choice.type[:80]!r} is not supported; it is auto, none, required, "
            "allowed_tools, or a function's name"
        )
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(form: Json) -> Json:
    """Return a response format in the form of chat requests, with the schema in its own object."""
    if form.get("type") != "json_schema":
        return form
    inner = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": inner}


def _messages(request: ResponsesRequest) -> list[Json]:
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    turn: Json | None = None  # the assistant's turn, which may consist of several items
    thoughts = ""  # reasoning that belongs to the next item of the assistant
    for at, item in enumerate(request.input):
        where = f"input[{at}]"
        if item.type == "reasoning":
            turn, thoughts = None, thoughts + _thoughts(where, item)
            continue
        if item.type != "function_call" and item.role != "assistant":
            _reasoned_only(messages, thoughts)
            turn, thoughts = None, ""
            messages.append(_message(where, item))
            continue
        if turn is None or (item.type in (None, "message") and _has_parts(turn)):
            turn = {"role": "assistant", "content": ""}
            if thoughts:
                turn["reasoning_content"], thoughts = thoughts, ""
            messages.append(turn)
        _add_to_turn(where, item, turn)
    _reasoned_only(messages, thoughts)
    return messages


def _thoughts(where: str, item: InputItem) -> str:
    """Return the text of a reasoning item; empty if it is encrypted, as OpenAI's is."""
    parts = item.content if isinstance(item.content, list) else []
    return _text(where, parts or item.summary or [])


def _reasoned_only(messages: list[Json], thoughts: str) -> None:
    """Append an answer that was cut while it reasoned. Reasoning without text adds no turn."""
    if thoughts:
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})


def _has_parts(turn: Json) -> bool:
    return bool(turn["content"] or turn.get("tool_calls"))


def _add_to_turn(where: str, item: InputItem, turn: Json) -> None:
    if item.type == "function_call":
        if not item.call_id or not item.name:
            raise BadRequest(f"{where}: function_call needs a call_id and a name")
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] = _text(where, item.content or "")


def _message(where: str, item: InputItem) -> Json:
    if item.type == "function_call_output":
        if not item.call_id:
            raise BadRequest(f"{where}: function_call_output needs a call_id")
        content = _result(where, item.output or "")
        return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    if item.type is not None and item.type != "message":
        raise BadRequest(f"{where}: items of type {item.type[:80]!r} are not supported")
    if item.role not in _ROLES:
        role = repr(item.role)[:80]
        raise BadRequest(f"{where}: role {role} is not one of {', '.join(_ROLES)}")
    if item.content is None:
        raise BadRequest(f"{where}: content is missing")
    return {"role": item.role, "content": _text(where, item.content)}


def _result(where: str, output: str | list[ItemPart]) -> str | list[Json]:
    """Return the result of a tool as text, or as parts if one of them is left out."""
    if isinstance(output, str) or not any(omitted_kind(part.type) for part in output):
        return _text(where, output)
    return [
        {"type": part.type}
        if omitted_kind(part.type)
        else {"type": "text", "text": _part_text(where, at, part)}
        for at, part in enumerate(output)
    ]


def _text(where: str, content: str | list[ItemPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(where, at, part) for at, part in enumerate(content))


def _part_text(where: str, at: int, part: ItemPart) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXTS, "refusal") or text is None:
        raise BadRequest(f"{where}.content[{at}]: a part of type {part.type[:80]!r} is not text")
    return text


# ---- answers


class ResponsesWording(EventWording):
    """Writes a response of items. Each item is added, extended by deltas, and done before the next.

    The event `response.created` opens the stream, before the first event of any other kind.
    """

    def __init__(self, parser: StreamParser, request: ResponsesRequest, model: str) -> None:
        given = request.model_dump(exclude_unset=True)
        self._items: list[Json] = []
        result = {
            "id": "resp_" + secrets.token_hex(16),
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": given.get("metadata") or {},
            "model": model,
            "output": self._items,
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": given.get("reasoning") or {},
            "store": False,
            "temperature": given.get("temperature"),
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools") or [],
            "top_p": given.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }
        super().__init__(parser, result)
        self._n_events = 0
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

    def finish(self, last: Piece, n_reasoning: int) -> list[Json]:
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
        return [*events, self._with_response(f"response.{status}")]

    def break_off(self, problem: Problem) -> list[Json]:
        events = [*self.opening_events(), *self._close("incomplete")]
        self.result["status"] = "failed"
        self.result["error"] = {"code": "server_error", "message": problem.message}
        return [*events, self._with_response("response.failed")]

    def opening_events(self) -> list[Json]:
        """Return the events that open the stream; empty if the stream is open already."""
        if self._n_events:
            return []
        return [
            self._with_response("response.created"),
            self._with_response("response.in_progress"),
        ]

    def _event(self, kind: str, /, **fields: Any) -> Json:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _with_response(self, kind: str) -> Json:
        return self._event(kind, response=copy.deepcopy(self.result))

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
            call = {
                "id": "fc_" + secrets.token_hex(12),
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            events = self._open(call)
        if piece.arguments:
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
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            events = [self._in_item(name, name=item["name"], arguments=item["arguments"])]
        else:
            part = item["content"][0]
            more: Json = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._in_part(f"response.{part['type']}.done", text=part["text"], **more),
                self._in_part("response.content_part.done", part=dict(part)),
            ]
        return [*events, self._with_item("response.output_item.done")]


# ---- route


def responses_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["responses"], route_class=BodyRoute)

    @router.post("/v1/responses")
    @router.post("/responses")
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """The model's next turn, as items."""
        chat, ignored = as_chat(body)
        ignore(request, ignored)
        job, prompt = await context.question(request, checked(chat, ChatRequest))

        wording = ResponsesWording(prompt.parser(), body, context.card.name)
        return context.generate(request, [job], wording, stream=body.stream)

    return router
