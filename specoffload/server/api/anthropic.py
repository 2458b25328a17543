"""Serves Anthropic's Messages API: turns requests into chat requests, and answers into events.

https://docs.anthropic.com/en/api/messages
https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response

from offload.errors import BadRequest
from specoffload.chat.conversation import CallPiece, Content, Delta, of_whole_characters
from specoffload.chat.parser import StreamParser
from specoffload.generation.generation import Piece
from specoffload.server.api.answers import Json, anthropic_error, problem_response
from specoffload.server.api.body import checked, ignore
from specoffload.server.api.context import BodyRoute, ServerContext
from specoffload.server.api.omitted import omitted_kind
from specoffload.server.api.requests import (
    CacheControl,
    ChatRequest,
    ConversationRequest,
    RequestModel,
    Whole,
    function_tool,
)
from specoffload.server.api.streaming import EventWording
from specoffload.server.engine import calls
from specoffload.server.engine.messages import Problem, Started

# ---- requests


class ContentBlock(RequestModel):
    """A part of a message: text, image, tool_use, tool_result or thinking. Other types are refused,
    except media in a tool_result."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: ImageSource | None = None
    cache_control: CacheControl | None = None

    @property
    def is_marked(self) -> bool:
        """True if the block or, for a tool_result, a block in it has cache_control."""
        inner = self.content if isinstance(self.content, list) else ()
        return self.cache_control is not None or any(block.is_marked for block in inner)


class ImageSource(RequestModel):
    """The bytes or the address of an image."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(RequestModel):
    """A tool of the client. Tools of other types run at Anthropic."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(None, ge=0)


class OutputConfig(RequestModel):
    """The form of the answer, and how much the model should think."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountRequest(RequestModel):
    """/v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    cache_control: CacheControl | None = None  # of the last block of the last message


class MessagesRequest(CountRequest):
    """/v1/messages. Other fields go into the chat request as they are."""

    max_tokens: Whole = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thread: dict[str, Any] | None = None  # a conversation that the server would keep


# Anthropic's clients then send the whole conversation, as before there were threads.
_NO_THREADS = Problem(
    "BadRequest",
    "thread: this server keeps no conversations; send all messages, and no thread (thread=False)",
    400,
    "invalid_request_error",
    details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
)
_TRANSLATED = {
    *("messages", "system", "tools", "tool_choice", "thinking", "stop_sequences"),
    *("output_config", "output_format", "cache_control"),
}
_MARK: Json = {"cache_control": {"type": "ephemeral"}}  # in chat requests
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(request: CountRequest) -> tuple[Json, list[str]]:
    """Return the body of an equivalent chat request, and the names of fields without effect.

    Raises BadRequest for content that a text model cannot read.
    """
    given = request.model_dump(exclude_unset=True)
    body = {name: value for name, value in given.items() if name not in _TRANSLATED}
    body["messages"] = _messages(request)
    if request.cache_control is not None:
        body["messages"][-1] |= _MARK
    if given.get("stop_sequences") is not None:
        body["stop"] = given["stop_sequences"]
    given_tools = list(enumerate(request.tools or ()))
    elsewhere = [f"tools[{at}]" for at, tool in given_tools if tool.type not in (None, "custom")]
    tools = [
        function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        | (_MARK if tool.cache_control is not None else {})
        for _, tool in given_tools
        if tool.type in (None, "custom")
    ]
    if tools:
        body["tools"] = tools
        choice = request.tool_choice
        if choice is not None:
            body["tool_choice"] = _choice(choice)
            if choice.disable_parallel_tool_use is not None:
                body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if request.thinking is not None:
        thinks = request.thinking.type != "disabled"
        known = body.get("chat_template_kwargs") or {}
        body["chat_template_kwargs"] = {"enable_thinking": thinks, **known}
        if thinks and request.thinking.budget_tokens is not None:
            body["thinking_budget_tokens"] = request.thinking.budget_tokens
    config = request.output_config or OutputConfig()
    if config.effort is not None:
        body["reasoning_effort"] = config.effort
    form = _response_format(config.format, request.output_format)
    if form is not None and isinstance(request, MessagesRequest):
        body["response_format"] = form
    return body, elsewhere


def _response_format(form: Json | None, older: Json | None) -> Json | None:
    """Return the form of the answer as in chat requests. Raises BadRequest for other forms."""
    if form is not None and older is not None and form != older:
        raise BadRequest("output_config.format and output_format differ: send one of them")
    name, found = ("output_format", older) if form is None else ("output_config.format", form)
    if found is None:
        return None
    kind, schema = found.get("type"), found.get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise BadRequest(f"{name}: type {kind!r} is not json_schema with a schema, a JSON object")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _choice(choice: AnthropicToolChoice) -> str | Json:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise BadRequest("tool_choice: type tool needs a name")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: CountRequest) -> list[Json]:
    messages: list[Json] = []
    if request.system:
        messages.append({"role": "system", "content": _marked_text("system", request.system)})
    for at, message in enumerate(request.messages):
        where = f"messages[{at}]"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(where, message.content))
        else:
            messages += _user(where, message.role, message.content)
    return messages


def _assistant(where: str, blocks: Sequence[ContentBlock]) -> Json:
    calls, thoughts, texts = [], "", []
    for at, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.id or not block.name:
                raise BadRequest(f"{where}.content[{at}]: tool_use needs an id and a name")
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts += block.thinking or ""
        elif block.type != "redacted_thinking":
            texts.append(block)
    message: Json = {"role": "assistant", "content": _marked_text(where, texts)}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    if any(block.type == "tool_use" and block.is_marked for block in blocks):
        message |= _MARK
    return message


def _user(where: str, role: str, blocks: Sequence[ContentBlock]) -> Iterator[Json]:
    """Yield the chat messages of a user's blocks: first each tool result, then the text."""
    texts = []
    for at, block in enumerate(blocks):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if not block.tool_use_id:
            raise BadRequest(f"{where}.content[{at}]: tool_result needs a tool_use_id")
        content = _result(f"{where}.content[{at}]", block.content or "", bool(block.is_error))
        told = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
        yield told | (_MARK if block.is_marked else {})
    if texts:
        yield {"role": role, "content": _content(where, texts)}


def _result(where: str, content: str | Sequence[ContentBlock], is_error: bool) -> str | list[Json]:
    """Return the result of a tool as text, or as parts if one of them is left out."""
    before = "error: " if is_error else ""
    if isinstance(content, str) or not any(omitted_kind(block.type) for block in content):
        return before + _text(where, content)
    parts: list[Json] = [{"type": "text", "text": before}]
    for at, block in enumerate(content):
        is_out = omitted_kind(block.type) is not None
        text = "" if is_out else _block_text(where, at, block)
        parts.append({"type": "text", "text": "\n" * bool(at) + text})
        if is_out:
            parts.append(_image(block) or {"type": block.type})
    return parts


def _content(where: str, blocks: Sequence[ContentBlock]) -> str | list[Json]:
    """Return the text of blocks, or parts if one of them is an image or has cache_control.

    Texts are joined by newlines, and nothing comes between a text and an image.
    """
    if not any(block.type == "image" for block in blocks):
        return _marked_text(where, blocks)
    parts: list[Json] = []
    for at, block in enumerate(blocks):
        if block.type == "image":
            image = _image(block)
            if image is None:
                raise BadRequest(f"{where}[{at}]: an image needs a source of type base64 or url")
            parts.append(image | (_MARK if block.is_marked else {}))
        else:
            follows_text = at > 0 and blocks[at - 1].type != "image"
            parts.append(_text_part(where, at, block, "\n" * follows_text))
    return parts


def _marked_text(where: str, content: str | Sequence[ContentBlock]) -> str | list[Json]:
    """Return the text of blocks of text, or parts if one of them has cache_control."""
    if isinstance(content, str) or not any(block.is_marked for block in content):
        return _text(where, content)
    return [_text_part(where, at, block, "\n" * bool(at)) for at, block in enumerate(content)]


def _text_part(where: str, at: int, block: ContentBlock, before: str) -> Json:
    part: Json = {"type": "text", "text": before + _block_text(where, at, block)}
    return part | (_MARK if block.is_marked else {})


def _image(block: ContentBlock) -> Json | None:
    """Return an image as a part of a chat message; None if the block is none, or has no source."""
    source = block.source
    if block.type != "image" or source is None:
        return None
    if source.type == "base64" and source.data is not None:
        url = f"data:{source.media_type or 'image/png'};base64,{source.data}"
    elif source.type == "url" and source.url is not None:
        url = source.url
    else:
        return None
    return {"type": "image_url", "image_url": {"url": url}}


def _text(where: str, content: str | Sequence[ContentBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_block_text(where, at, block) for at, block in enumerate(content))


def _block_text(where: str, at: int, block: ContentBlock) -> str:
    if block.type != "text" or block.text is None:
        raise BadRequest(f"{where}[{at}]: a block of type {block.type[:80]!r} is not text")
    return block.text


# ---- answers


class AnthropicWording(EventWording):
    """Writes a message of content blocks, each started, extended by deltas and stopped."""

    def __init__(self, parser: StreamParser, model: str, stops: Sequence[str] = ()) -> None:
        """`stops`: the client's own stop sequences. A chat format may have others."""
        self._blocks: list[Json] = []
        self._stops = frozenset(stops)
        result = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        super().__init__(parser, result)
        self._arguments = ""  # arguments of the open call, as JSON text
        self._is_open = False  # True while the last block is not stopped
        self._has_started = False

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

    def finish(self, last: Piece, n_reasoning: int) -> list[Json]:
        events = [*self.opening_events(), *self._close()]
        assert last.stats is not None
        word = last.stopping_word if last.stopping_word in self._stops else None
        reason = "end_turn" if word is None else "stop_sequence"
        if last.finish_reason == "length":
            reason = "max_tokens"
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
        return [anthropic_error(problem)]

    def opening_events(self) -> list[Json]:
        """Return the event that opens the stream; empty if the stream is open already."""
        if self._has_started:
            return []
        self._has_started = True
        return [{"type": "message_start", "message": {**self.result, "content": []}}]

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
        found = of_whole_characters(json.loads(arguments))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


# ---- routes


def anthropic_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)

    @router.post("/v1/messages")
    async def messages(request: Request, body: MessagesRequest) -> Response:
        """The model's next turn."""
        if body.thread is not None:
            return problem_response(_NO_THREADS)
        chat, ignored = as_chat(body)
        ignore(request, ignored)
        job, prompt = await context.question(request, checked(chat, ChatRequest))

        wording = AnthropicWording(prompt.parser(), context.card.name, body.stop_sequences or ())
        return context.generate(request, [job], wording, stream=body.stream)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request, body: CountRequest) -> Response:
        """The number of tokens that a conversation takes as a prompt."""
        chat, ignored = as_chat(body)
        ignore(request, ignored)
        text, images = await context.rendered(request, checked(chat, ConversationRequest))
        n_tokens = await context.engine.call(calls.count_tokens, text, images)
        return JSONResponse({"input_tokens": n_tokens})

    return router
