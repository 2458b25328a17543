"""Turns requests of Anthropic's Messages API into chat requests.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from offload.errors import BadRequest
from specoffload.server.api.foreign_parts import (
    SetAside,
    flat_text,
    is_left_out,
    place_and_type,
    readable_text,
)
from specoffload.server.api.loose_forms import (
    anthropic_choice,
    anthropic_tool,
    arguments_text,
    object_of,
    parts_of,
    text_or_parts,
    texts_of,
)
from specoffload.server.api.omitted import omitted_kind
from specoffload.server.api.refusals import Json
from specoffload.server.api.request_model import RequestModel
from specoffload.server.api.requests import Id, Mark, Whole, function_tool


class ContentBlock(SetAside):
    """A part of a message: text, image, tool_use, tool_result or thinking.

    Other types are read as text, left out or refused (`foreign_parts.py`).
    """

    known_types: ClassVar = frozenset({"text", "image", "tool_use", "tool_result", "thinking"})

    type: str
    text: str | None = None
    thinking: Annotated[str | None, BeforeValidator(flat_text)] = None
    id: Id = None
    name: str | None = None
    input: Annotated[str | None, BeforeValidator(arguments_text)] = None  # JSON text
    tool_use_id: Id = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None
    source: ImageSource | None = None
    cache_control: Mark = None

    @model_validator(mode="before")
    @classmethod
    def _with_result_as_text(cls, sent: Any) -> Any:
        if not isinstance(sent, dict) or sent.get("type") != "tool_result":
            return sent
        return {**sent, "content": text_or_parts(sent.get("content"))}

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
    content: Annotated[str | list[ContentBlock] | None, BeforeValidator(parts_of)] = None


class AnthropicTool(RequestModel):
    """A tool of the client. Tools of other types run at Anthropic, and some have no name."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Annotated[dict[str, Any] | None, BeforeValidator(object_of)] = None
    strict: bool | None = None
    cache_control: Mark = None


class AnthropicToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(RequestModel):
    """The form of the answer, and how much the model should think."""

    format: dict[str, Any] | None = None
    effort: str | None = None


class CountRequest(RequestModel):
    """/v1/messages/count_tokens."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1)
    system: Annotated[str | list[ContentBlock] | None, BeforeValidator(parts_of)] = None
    tools: list[Annotated[AnthropicTool, BeforeValidator(anthropic_tool)]] | None = None
    tool_choice: Annotated[AnthropicToolChoice | None, BeforeValidator(anthropic_choice)] = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # the older name of output_config.format
    cache_control: Mark = None  # of the last block of the last message


class MessagesRequest(CountRequest):
    """/v1/messages. Other fields go into the chat request as they are."""

    max_tokens: Whole = Field(ge=1)
    stop_sequences: Annotated[list[str] | None, BeforeValidator(texts_of)] = None
    stream: bool | None = None
    thread: dict[str, Any] | None = None  # a conversation that the server would keep


_TRANSLATED = {
    *("messages", "system", "tools", "tool_choice", "stop_sequences"),
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
    ignored: list[str] = []
    body["messages"] = _messages(request, ignored)
    if request.cache_control is not None:
        body["messages"][-1] |= _MARK
    if given.get("stop_sequences") is not None:
        body["stop"] = given["stop_sequences"]
    tools = _tools(request, ignored)
    choice = request.tool_choice
    if tools:
        body["tools"] = tools
        if choice is not None:
            body["tool_choice"] = _choice(choice)
            if choice.disable_parallel_tool_use is not None:
                body["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    elif choice is not None and choice.type in ("any", "tool"):
        ignored.append("tool_choice")
    config = request.output_config or OutputConfig()
    if config.effort is not None:
        body["output_config"] = {"effort": config.effort}
    form = _response_format(config.format, request.output_format)
    if form is not None and isinstance(request, MessagesRequest):
        body["response_format"] = form
    return body, ignored


def _tools(request: CountRequest, ignored: list[str]) -> list[Json]:
    """Return the client's own tools. Adds the places of those that run at Anthropic to `ignored`.

    Raises BadRequest for a tool without a name.
    """
    tools: list[Json] = []
    for at, tool in enumerate(request.tools or ()):
        if tool.type not in (None, "custom"):
            ignored.append(f"tools[{at}]")
            continue
        if not tool.name:
            raise BadRequest(f"tools[{at}]: a tool needs a name")
        function = function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
        tools.append(function | (_MARK if tool.cache_control is not None else {}))
    return tools


def _response_format(form: Json | None, older: Json | None) -> Json | None:
    """Return the form of the answer as in chat requests. Raises BadRequest for other forms."""
    if form is not None and older is not None and form != older:
        raise BadRequest("output_config.format and output_format differ: send one of them")
    name, form_sent = ("output_format", older) if form is None else ("output_config.format", form)
    if form_sent is None:
        return None
    kind, schema = form_sent.get("type"), form_sent.get("schema")
    if kind != "json_schema" or not isinstance(schema, dict):
        raise BadRequest(f"{name}: type {kind!r} is not json_schema with a schema, a JSON object")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _choice(choice: AnthropicToolChoice) -> str | Json:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if not choice.name:
        raise BadRequest("tool_choice: type tool needs a name")
    return {"type": "function", "function": {"name": choice.name}}


def _messages(request: CountRequest, ignored: list[str]) -> list[Json]:
    """Return the messages of a chat request. Adds the places of blocks left out to `ignored`."""
    messages: list[Json] = []
    if isinstance(request.system, str):
        messages += [{"role": "system", "content": request.system}] if request.system else []
    elif blocks := _read("system", "system", request.system or (), ignored):
        messages.append({"role": "system", "content": _marked_text("system", blocks)})
    for at, message in enumerate(request.messages):
        where = f"messages[{at}]"
        content = message.content
        if content is None:
            is_last = at == len(request.messages) - 1
            if message.role != "assistant" and is_last:
                raise BadRequest(f"{where}: content is missing")
            if message.role != "assistant":
                continue
            content = ""
        if isinstance(content, str):
            messages.append({"role": message.role, "content": content})
            continue
        blocks = _read(f"{where}.content", message.role, content, ignored)
        if message.role == "assistant":
            messages.append(_assistant(where, blocks))
        elif blocks or not content:
            messages += _user(where, message.role, blocks)
        elif at == len(request.messages) - 1:
            kinds = ", ".join(sorted({block.type[:80] for block in content}))
            raise BadRequest(
                f"{where}: nothing of it can be read; its blocks are of type {kinds}, and this "
                "server reads text and images"
            )
    return messages


# Blocks that stand in messages of one role.
_ROLES = {"thinking": "assistant", "tool_use": "assistant", "tool_result": "user"}


def _read(
    where: str, role: str, blocks: Sequence[ContentBlock], ignored: list[str]
) -> list[ContentBlock]:
    """Return the blocks, with foreign ones as text. Adds the places of others to `ignored`.

    Blocks of another role's messages are left out, too. Images and files of results stay, because
    the model is told that they are omitted.
    """
    blocks_read: list[ContentBlock] = []
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        if _ROLES.get(block.type, role) != role:
            ignored.append(place_and_type(place, block.type))
        elif isinstance(block.content, list):
            inner = _read(f"{place}.content", "result", block.content, ignored)
            blocks_read.append(block.model_copy(update={"content": inner}))
        elif block.foreign is None:
            blocks_read.append(block)
        elif (text := readable_text(block.foreign)) is not None:
            blocks_read.append(
                ContentBlock(type="text", text=text, cache_control=block.cache_control)
            )
        elif is_left_out(block.foreign):
            ignored.append(place_and_type(place, block.type))
            if blocks_read and block.cache_control is not None:
                blocks_read[-1] = blocks_read[-1].model_copy(
                    update={"cache_control": block.cache_control}
                )
        else:
            blocks_read.append(block)
    return blocks_read


def _assistant(where: str, blocks: Sequence[ContentBlock]) -> Json:
    calls, thoughts, texts = [], "", []
    for at, block in enumerate(blocks):
        if block.type == "tool_use":
            if not block.id or not block.name:
                raise BadRequest(f"{where}.content[{at}]: tool_use needs an id and a name")
            arguments = block.input or "{}"
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts += block.thinking or ""
        else:
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
    """Return the text of blocks, or parts if one of them is a file or has cache_control.

    Texts are joined by newlines, and nothing comes between a text and an image. Files that are no
    images stay as parts of their type, about which `chat_messages.py` decides.
    """
    if not any(omitted_kind(block.type) for block in blocks):
        return _marked_text(where, blocks)
    parts: list[Json] = []
    for at, block in enumerate(blocks):
        if block.type == "image":
            image = _image(block)
            if image is None:
                raise BadRequest(f"{where}[{at}]: an image needs a source of type base64 or url")
            parts.append(image | (_MARK if block.is_marked else {}))
        elif omitted_kind(block.type) is not None:
            parts.append({"type": block.type})
        else:
            follows_text = at > 0 and omitted_kind(blocks[at - 1].type) is None
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
    if block.type != "text":
        raise BadRequest(f"{where}[{at}]: a block of type {block.type[:80]!r} is not text")
    return block.text or ""
