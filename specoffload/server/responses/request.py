"""A request of OpenAI's Responses API as one of /v1/chat/completions. Pure.

https://platform.openai.com/docs/api-reference/responses. Nothing is stored: a conversation is sent
whole each time, as its clients do with `store: false`.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from offload.errors import BadRequest
from specoffload.server.api.wire import RequestModel, Whole


class Part(RequestModel):
    type: str
    text: str | None = None
    refusal: str | None = None


class Item(RequestModel):
    """A message, or a call of a function, its result or the reasoning before it."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None


class ResponsesTool(RequestModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceObject(RequestModel):
    type: str
    name: str | None = None


class TextOptions(RequestModel):
    format: dict[str, Any] | None = None


class ReasoningRequest(RequestModel):
    effort: str | None = None


class ResponsesRequest(RequestModel):
    """Of /v1/responses. Fields that only this server has go with it as they are."""

    model: str | None = None
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    text: TextOptions | None = None
    reasoning: ReasoningRequest | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None


_OWN = {
    *("input", "instructions", "tools", "tool_choice", "text", "reasoning", "stream_options"),
    *("previous_response_id", "conversation", "prompt", "background", "max_output_tokens"),
    *("include", "truncation", "store", "max_tool_calls"),
}
_STORED = ("previous_response_id", "conversation", "prompt", "background")
_ROLES = ("system", "developer", "user", "assistant")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def as_chat(request: ResponsesRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The body of /v1/chat/completions that means the same, and the names of what has no effect.

    Raises BadRequest for what a text model cannot read, and for what needs stored answers.
    """
    for name in _STORED:
        if getattr(request, name):
            raise BadRequest(f"{name}: this server stores nothing; send the whole input")
    extra = request.model_extra or {}
    ignored = [name for name in ("include", "max_tool_calls") if extra.get(name)]
    if extra.get("truncation") not in (None, "disabled"):
        ignored.append("truncation")
    given = request.model_dump(exclude_unset=True)
    body = {name: value for name, value in given.items() if name not in _OWN}
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    body["messages"] = _messages(request)
    if request.reasoning is not None and request.reasoning.effort is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    tools, others = _tools(request.tools or [])
    if tools:
        body["tools"] = tools
        if request.tool_choice is not None:
            body["tool_choice"] = _choice(request.tool_choice)
    return body, (*ignored, *others)


def _tools(given: list[ResponsesTool]) -> tuple[list[dict[str, Any]], list[str]]:
    tools, others = [], []
    for at, tool in enumerate(given):
        if tool.type != "function":
            others.append(f"tools[{at}]")  # one that runs at OpenAI
            continue
        if not tool.name:
            raise BadRequest(f"tools[{at}]: a function needs a name")
        function = {"name": tool.name, "description": tool.description, "strict": tool.strict}
        known: dict[str, Any] = {
            name: value for name, value in function.items() if value is not None
        }
        known["parameters"] = tool.parameters or {}
        tools.append({"type": "function", "function": known})
    return tools, others


def _choice(choice: str | ToolChoiceObject) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice
    if choice.type != "function" or not choice.name:
        raise BadRequest("tool_choice: it is auto, none, required, or a function's name")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """In this API the schema stands beside its name, in the other within."""
    if form.get("type") != "json_schema":
        return form
    inner = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": inner}


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    turn: dict[str, Any] | None = None  # the assistant's, which takes several items
    for at, item in enumerate(request.input):
        where = f"input[{at}]"
        if not _belongs_to_turn(item):
            turn = None
            messages.append(_message(where, item))
            continue
        if turn is None or (item.type in (None, "message") and turn["content"]):
            turn = {"role": "assistant", "content": ""}
            messages.append(turn)
        _into_turn(where, item, turn)
    return messages


def _belongs_to_turn(item: Item) -> bool:
    return item.type in ("function_call", "reasoning") or item.role == "assistant"


def _into_turn(where: str, item: Item, turn: dict[str, Any]) -> None:
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else []
        text = _text(where, parts or item.summary or [])
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    elif item.type == "function_call":
        if not item.call_id or not item.name:
            raise BadRequest(f"{where}: function_call needs a call_id and a name")
        function = {"name": item.name, "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] = _text(where, item.content or "")


def _message(where: str, item: Item) -> dict[str, Any]:
    if item.type == "function_call_output":
        if not item.call_id:
            raise BadRequest(f"{where}: function_call_output needs a call_id")
        text = _text(where, item.output or "")
        return {"role": "tool", "tool_call_id": item.call_id, "content": text}
    if item.type is not None and item.type != "message":
        raise BadRequest(f"{where}: items of type {item.type[:80]!r} are not supported")
    if item.role not in _ROLES:
        role = repr(item.role)[:80]
        raise BadRequest(f"{where}: role {role} is not one of {', '.join(_ROLES)}")
    if item.content is None:
        raise BadRequest(f"{where}: content is missing")
    return {"role": item.role, "content": _text(where, item.content)}


def _text(where: str, content: str | list[Part]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for at, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            raise BadRequest(
                f"{where}.content[{at}]: a part of type {part.type[:80]!r} is not text"
            )
        texts.append(text)
    return "".join(texts)
