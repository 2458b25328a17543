"""A request of Anthropic's Messages API as one of /v1/chat/completions. Pure.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from pydantic import Field

from offload.errors import BadRequest
from specoffload.server.api.wire import RequestModel, Whole


class Block(RequestModel):
    """A part of a message: text, tool_use, tool_result or thinking; other types are refused."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    is_error: bool | None = None


class AnthropicMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(RequestModel):
    """A tool of the client's; those with another type run at Anthropic."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceRequest(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Whole | None = Field(None, ge=0)


class CountRequest(RequestModel):
    """Of /v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoiceRequest | None = None
    thinking: Thinking | None = None


class MessagesRequest(CountRequest):
    """Of /v1/messages. Fields that only this server has go with it as they are."""

    max_tokens: Whole = Field(ge=1)
    stop_sequences: list[str] | None = None
    stream: bool | None = None


_RENAMED = {"stop_sequences": "stop"}
_OWN = {"messages", "system", "tools", "tool_choice", "thinking", *_RENAMED}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def as_chat(request: CountRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The body of /v1/chat/completions that means the same, and the names of what has no effect.

    Raises BadRequest for what a text model cannot read.
    """
    body = {
        name: value
        for name, value in request.model_dump(exclude_unset=True).items()
        if name not in _OWN
    }
    for name, theirs in _RENAMED.items():
        if (value := getattr(request, name, None)) is not None:
            body[theirs] = value
    ignored: list[str] = []
    body["messages"] = _messages(request)
    tools = []
    for at, tool in enumerate(request.tools or ()):
        if tool.type in (None, "custom"):
            tools.append(_tool(tool))
        else:
            ignored.append(f"tools[{at}]")  # one that runs at Anthropic
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
    return body, tuple(ignored)


def _choice(choice: ToolChoiceRequest) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise BadRequest("tool_choice: type tool needs a name")
    return {"type": "function", "function": {"name": choice.name}}


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema or {}}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _messages(request: CountRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        system = request.system
        text = system if isinstance(system, str) else _text("system", system)
        messages.append({"role": "system", "content": text})
    for at, message in enumerate(request.messages):
        where = f"messages[{at}]"
        if isinstance(message.content, str):
            messages.append({"role": message.role, "content": message.content})
        elif message.role == "assistant":
            messages.append(_assistant(where, message.content))
        else:
            messages += _user(where, message.role, message.content)
    return messages


def _assistant(where: str, blocks: Sequence[Block]) -> dict[str, Any]:
    calls = [_call(f"{where}.content[{at}]", block) for at, block in enumerate(blocks)
             if block.type == "tool_use"]  # fmt: skip
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    rest = [b for b in blocks if b.type not in ("tool_use", "thinking", "redacted_thinking")]
    message["content"] = _text(where, rest)
    reasoning = "".join(b.thinking or "" for b in blocks if b.type == "thinking")
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _call(where: str, block: Block) -> dict[str, Any]:
    if not block.id or not block.name:
        raise BadRequest(f"{where}: tool_use needs an id and a name")
    arguments = json.dumps(block.input or {}, ensure_ascii=False)
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _user(where: str, role: str, blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    """Results of tools become messages of their own, before the text of the same message."""
    rest = []
    for at, block in enumerate(blocks):
        if block.type != "tool_result":
            rest.append(block)
            continue
        if not block.tool_use_id:
            raise BadRequest(f"{where}.content[{at}]: tool_result needs a tool_use_id")
        content = block.content or ""
        text = content if isinstance(content, str) else _text(f"{where}.content[{at}]", content)
        if block.is_error:
            text = f"error: {text}"
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}
    if rest:
        yield {"role": role, "content": _text(where, rest)}


def _text(where: str, blocks: Sequence[Block]) -> str:
    for at, block in enumerate(blocks):
        if block.type != "text" or block.text is None:
            raise BadRequest(f"{where}[{at}]: a block of type {block.type[:80]!r} is not text")
    return "\n".join(block.text or "" for block in blocks)
