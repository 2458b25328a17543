"""Turns requests of OpenAI's Responses API into chat requests.

https://platform.openai.com/docs/api-reference/responses/create. `whole_input.py` has put items that
a request names by id into its input before.
"""

from __future__ import annotations

import base64
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from offload.errors import BadRequest
from specoffload.server.api.foreign_parts import (
    SetAside,
    is_left_out,
    place_and_type,
    readable_text,
)
from specoffload.server.api.loose_forms import (
    arguments_text,
    flat_choice,
    items_of,
    parts_of,
    text_of,
    text_or_parts,
)
from specoffload.server.api.omitted import omitted_kind
from specoffload.server.api.refusals import Json
from specoffload.server.api.request_model import RequestModel
from specoffload.server.api.requests import Id, ImageUrl, Whole
from specoffload.server.api.response_tools import (
    ResponsesTool,
    ResponsesToolChoice,
    ResponsesTools,
    as_arguments,
)

_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class ItemPart(SetAside):
    """A part of an item: text, or an image. Other types are read as in chats."""

    known_types: ClassVar = frozenset({*_TEXTS, "refusal", "input_image"})

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | ImageUrl | None = None  # an object in chats, and some programs write it here


class InputItem(SetAside):
    """A message, a call of a function or custom tool, its result, or the reasoning before it.

    Items of other types are left out.
    """

    known_types: ClassVar = frozenset(
        {"message", "reasoning", *_CALLS, *_RESULTS, "item_reference"}
    )

    type: str | None = None
    id: Id = None  # of an item that the server made, or of one that it shall take here
    role: str | None = None
    content: str | list[ItemPart] | None = None
    call_id: Id = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a call to a custom tool
    output: str | list[ItemPart] | None = None
    summary: list[ItemPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _with_json_as_text(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        item = dict(sent)
        if item.get("type") in _CALLS:
            item["arguments"] = arguments_text(item.get("arguments"))
            item["call_id"] = item.get("call_id") or item.get("id")
        elif item.get("type") in _RESULTS:
            item["output"] = text_or_parts(item.get("output"))
        if isinstance(item.get("summary"), str):
            item["summary"] = [item["summary"]]
        for name in ("content", "summary"):
            if name in item:
                item[name] = parts_of(item[name])
        return item

    encrypted_content: str | None = None  # of reasoning, as `sealed` writes it


class TextOptions(RequestModel):
    format: dict[str, Any] | None = None


class ResponsesRequest(RequestModel):
    """/v1/responses. Other fields are copied unchanged into the chat request."""

    model: str | None = None
    input: Annotated[str | list[InputItem], BeforeValidator(items_of)]
    instructions: Annotated[str | None, BeforeValidator(text_of)] = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    tools: list[ResponsesTool] | None = None
    tool_choice: Annotated[str | ResponsesToolChoice | None, BeforeValidator(flat_choice)] = None
    text: TextOptions | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    include: list[str] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    prompt: dict[str, Any] | None = None
    background: bool | None = None

    @cached_property
    def own_tools(self) -> ResponsesTools:
        """The request's tools. Raises BadRequest for a tool without a name."""
        return ResponsesTools(self.tools or ())


SEALED_REASONING = "reasoning.encrypted_content"  # value of `include`
_SEAL = "specoffload:"
_STORED = ("previous_response_id", "conversation", "prompt", "background")
_TRANSLATED = {
    *("input", "instructions", "tools", "tool_choice", "text", "stream_options"),
    *("max_output_tokens", "include", "truncation", "store", "max_tool_calls", *_STORED),
}
_ROLES = ("system", "developer", "user", "assistant")


def as_chat(request: ResponsesRequest) -> tuple[Json, list[str]]:
    """Return the body of an equivalent chat request, and the names of fields without effect.

    Raises BadRequest for content that a text model cannot read, and for stored answers.
    """
    for name in _STORED:
        if getattr(request, name):
            raise BadRequest(f"{name} is not supported: send the whole input")
    extra = request.model_extra or {}
    ignored = ["include"] if set(request.include or ()) - {SEALED_REASONING} else []
    if extra.get("max_tool_calls"):
        ignored.append("max_tool_calls")
    if extra.get("truncation") not in (None, "disabled"):
        ignored.append("truncation")
    given = request.model_dump(exclude_unset=True)
    body = {name: value for name, value in given.items() if name not in _TRANSLATED}
    own = request.own_tools
    body["messages"] = _messages(request, own, ignored)
    if request.max_output_tokens is not None:
        body["max_tokens"] = request.max_output_tokens
    if request.text is not None and request.text.format is not None:
        body["response_format"] = _response_format(request.text.format)
    ignored += own.ignored
    if tools := own.functions():
        body["tools"] = tools
        if request.tool_choice is not None:
            body["tool_choice"] = own.choice(request.tool_choice)
    return body, ignored


def _response_format(form: Json) -> Json:
    """Return a response format in the form of chat requests, with the schema in its own object."""
    if form.get("type") != "json_schema" or "json_schema" in form:
        return form
    inner = {name: form[name] for name in ("name", "schema", "strict") if name in form}
    return {"type": "json_schema", "json_schema": inner}


def _messages(request: ResponsesRequest, tools: ResponsesTools, ignored: list[str]) -> list[Json]:
    """Return the messages of a chat request. Adds the places of items left out to `ignored`."""
    messages: list[Json] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    turn: Json | None = None  # the assistant's turn, which may consist of several items
    thoughts = ""  # reasoning that belongs to the next item of the assistant
    for at, given in enumerate(request.input):
        where = f"input[{at}]"
        if given.foreign is not None:  # a record of a tool that ran elsewhere
            ignored.append(where)
            continue
        item = _readable(where, given, ignored)
        is_last = at == len(request.input) - 1
        is_asking = item.role in ("user", "system", "developer")
        if is_asking and given.content is None and not is_last:
            continue
        if given.content and not item.content and is_asking:
            if is_last:
                raise BadRequest(
                    f"{where}: nothing of it can be read, and this server reads text and images"
                )
            continue
        if item.type == "reasoning":
            turn, thoughts = None, thoughts + _thoughts(where, item)
            continue
        if item.type not in _CALLS and item.role != "assistant":
            _reasoned_only(messages, thoughts)
            turn, thoughts = None, ""
            messages.append(_message(where, item))
            continue
        if turn is None or (item.type in (None, "message") and _has_parts(turn)):
            turn = {"role": "assistant", "content": ""}
            if thoughts:
                turn["reasoning_content"], thoughts = thoughts, ""
            messages.append(turn)
        _add_to_turn(where, item, turn, tools)
    _reasoned_only(messages, thoughts)
    return messages


def _readable(where: str, item: InputItem, ignored: list[str]) -> InputItem:
    """Return the item with foreign parts as text. Adds the places of others to `ignored`."""
    read = {}
    for name in ("content", "output", "summary"):
        parts = getattr(item, name)
        if isinstance(parts, list) and any(part.foreign is not None for part in parts):
            read[name] = _read(f"{where}.{name}", parts, ignored)
    return item.model_copy(update=read) if read else item


def _read(where: str, parts: list[ItemPart], ignored: list[str]) -> list[ItemPart]:
    parts_read = []
    for at, part in enumerate(parts):
        if part.foreign is None:
            parts_read.append(part)
        elif (text := readable_text(part.foreign)) is not None:
            parts_read.append(ItemPart(type="text", text=text))
        elif is_left_out(part.foreign):
            ignored.append(place_and_type(f"{where}[{at}]", part.type))
        else:
            parts_read.append(part)
    return parts_read


def _thoughts(where: str, item: InputItem) -> str:
    """Return the text of a reasoning item; empty if only its server can read it, as OpenAI's."""
    parts = item.content if isinstance(item.content, list) else []
    if not parts and (text := unsealed(item.encrypted_content or "")):
        return text
    return _text(where, parts or item.summary or [])


def sealed(reasoning: str) -> str:
    """Return reasoning as `encrypted_content`, which clients send back and do not read.

    It hides nothing: the client gets the same text beside it. Clients that keep nothing on a server
    (`store: false`) drop reasoning without it.
    """
    return _SEAL + base64.b64encode(reasoning.encode()).decode()


def unsealed(content: str) -> str:
    """Return the reasoning that `sealed` wrote; empty for content of other servers."""
    if not content.startswith(_SEAL):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_SEAL), validate=True).decode()
    except ValueError:
        return ""


def _reasoned_only(messages: list[Json], thoughts: str) -> None:
    """Append an answer that was cut while it reasoned. Reasoning without text adds no turn."""
    if thoughts:
        messages.append({"role": "assistant", "content": "", "reasoning_content": thoughts})


def _has_parts(turn: Json) -> bool:
    return bool(turn["content"] or turn.get("tool_calls"))


def _add_to_turn(where: str, item: InputItem, turn: Json, tools: ResponsesTools) -> None:
    if item.type in _CALLS:
        if not item.call_id or not item.name:
            raise BadRequest(f"{where}: {item.type} needs a call_id and a name")
        is_custom = item.type == "custom_tool_call"
        arguments = as_arguments(item.input or "") if is_custom else item.arguments or "{}"
        name = tools.function_name(item.name, item.namespace)
        function = {"name": name, "arguments": arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    else:
        turn["content"] = _text(where, item.content or "")


def _message(where: str, item: InputItem) -> Json:
    if item.type in _RESULTS:
        if not item.call_id:
            raise BadRequest(f"{where}: {item.type} needs a call_id")
        content = _result(where, item.output or "")
        return {"role": "tool", "tool_call_id": item.call_id, "content": content}
    if item.type is not None and item.type != "message":
        raise BadRequest(f"{where}: items of type {item.type[:80]!r} are not supported")
    if item.role not in _ROLES:
        role = repr(item.role)[:80]
        raise BadRequest(f"{where}: role {role} is not one of {', '.join(_ROLES)}")
    if item.content is None:
        raise BadRequest(f"{where}: content is missing")
    return {"role": item.role, "content": _content(where, item.content)}


def _content(where: str, content: str | list[ItemPart]) -> str | list[Json]:
    """Return the text of a message, or parts if one of them is an image or another file.

    Files that are no images stay as parts of their type, about which `chat_messages.py` decides.
    """
    if isinstance(content, str) or not any(omitted_kind(part.type) for part in content):
        return _text(where, content)
    return _parts(where, content)


def _parts(where: str, content: list[ItemPart]) -> list[Json]:
    return [
        _image(part) or {"type": part.type}
        if omitted_kind(part.type)
        else {"type": "text", "text": _part_text(where, at, part)}
        for at, part in enumerate(content)
    ]


def _image(part: ItemPart) -> Json | None:
    """Return an image as a part of a chat message; None if the part is none."""
    if part.type != "input_image" or part.image_url is None:
        return None
    given = part.image_url
    return {
        "type": "image_url",
        "image_url": {"url": given.url if isinstance(given, ImageUrl) else given},
    }


def _result(where: str, output: str | list[ItemPart]) -> str | list[Json]:
    """Return the result of a tool as text, or as parts if one of them is left out."""
    if isinstance(output, str) or not any(omitted_kind(part.type) for part in output):
        return _text(where, output)
    return _parts(where, output)


def _text(where: str, content: str | list[ItemPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(where, at, part) for at, part in enumerate(content))


def _part_text(where: str, at: int, part: ItemPart) -> str:
    if part.type not in (*_TEXTS, "refusal"):
        raise BadRequest(f"{where}.content[{at}]: a part of type {part.type[:80]!r} is not text")
    return (part.refusal if part.type == "refusal" else part.text) or ""
