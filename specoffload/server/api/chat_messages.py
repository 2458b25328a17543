"""Turns messages of chat requests into the form of `Conversation`, and names what is left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from offload.errors import BadRequest
from specoffload.server.api.billing_line import billing_chars
from specoffload.server.api.foreign_parts import (
    is_left_out,
    place_and_type,
    readable_text,
    thoughts_of,
)
from specoffload.server.api.images import ConversationImages
from specoffload.server.api.omitted import omitted_kind, placeholder
from specoffload.server.api.requests import (
    ChatMessage,
    ConversationRequest,
    ImageUrl,
    TextPart,
    ToolCall,
)
from specoffload.server.api.response_tools import as_arguments

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")


def template_message(
    at: int,
    message: ChatMessage,
    images: ConversationImages,
    *,
    is_last: bool = False,
    is_old: bool = False,
) -> tuple[dict[str, Any] | None, list[int | None]]:
    """Return a message as templates take it, and its cache points as `CachePoint.n_chars`.

    The message is None if nothing of it is for the model. `is_last`: it is the question. `is_old`:
    a later message asks, and a client sends this one with each request. Raises BadRequest.
    """
    where = f"messages[{at}]"
    if message.content is None and message.role not in ("assistant", "tool") and not is_last:
        return None, []
    calls = [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(_calls(message))]
    if calls and message.role != "assistant":
        raise BadRequest(f"{where}: only the assistant has tool_calls")
    others = {
        "tool_calls": [{"id": f"call_{at}_{i}"} | call for i, call in enumerate(calls)],
        "name": message.name,
        "reasoning_content": _thoughts(message),
        "tool_call_id": message.tool_call_id,
    }
    content, ends = _content(where, message, images, is_old=is_old)
    n_billing = billing_chars(message.role, content)
    if n_billing:
        content = content[n_billing:]
        ends = [end - n_billing for end in ends if end > n_billing]
        if not content:
            return None, []
    unread = _unread_types(message)
    if unread and not content and message.role not in ("assistant", "tool"):
        if is_last:
            raise BadRequest(
                f"{where}: nothing of it can be read; its parts are of type {', '.join(unread)}, "
                "and this server reads text and images"
            )
        return None, []
    points: list[int | None] = [*ends]
    if message.cache_control is not None:
        points.append(None if calls else len(content))
    result: dict[str, Any] = {"role": message.role, "content": content}
    return result | {name: value for name, value in others.items() if value}, points


def left_out_places(request: ConversationRequest) -> list[str]:
    """Return the place and type of each part of messages that the model does not get."""
    return [
        place_and_type(f"messages[{at}].content[{i}]", part.type)
        for at, message in enumerate(request.messages)
        for i, part in _parts(message)
        if _is_left_out(message.role, part)
    ]


def _parts(message: ChatMessage) -> Iterator[tuple[int, TextPart]]:
    return enumerate(message.content) if isinstance(message.content, list) else iter(())


def _unread_types(message: ChatMessage) -> list[str]:
    return [part.type[:80] for _, part in _parts(message) if _is_left_out(message.role, part)]


def _is_left_out(role: str, part: TextPart) -> bool:
    if part.foreign is None or not is_left_out(part.foreign):
        return False
    return role != "assistant" or thoughts_of(part.foreign) is None


# ---- calls


def _calls(message: ChatMessage) -> Sequence[ToolCall]:
    return message.tool_calls or ()


def _call(where: str, call: ToolCall) -> dict[str, Any]:
    """Return a call as templates take it; without an id if the client sent none."""
    if call.function is not None:
        given = call.function.arguments
        function = {"name": call.function.name, "arguments": {} if given is None else given}
    elif call.custom is not None:
        arguments = as_arguments(call.custom.input or "")
        function = {"name": call.custom.name, "arguments": arguments}
    else:
        raise BadRequest(f"{where}: a call needs an object 'function' or 'custom' with its name")
    fields: dict[str, Any] = {"type": "function", "function": function}
    return fields | ({"id": call.id} if call.id else {})


# ---- text


def _thoughts(message: ChatMessage) -> str | None:
    """Return the reasoning of a message: of its fields, or else of parts of its content."""
    if known := message.reasoning_content or message.reasoning:
        return known
    parts = [part.foreign for _, part in _parts(message) if part.foreign is not None]
    for given in (parts, message.thinking_blocks, message.reasoning_details):
        if thoughts := "".join(filter(None, map(thoughts_of, given or ()))):
            return thoughts
    return None


def _content(
    where: str, message: ChatMessage, images: ConversationImages, *, is_old: bool
) -> tuple[str, list[int]]:
    """Return a message's text, and the numbers of its characters before the cache points in it."""
    if message.content is None:
        # An answer may have calls or reasoning alone, and a tool may return nothing.
        if message.role in ("assistant", "tool"):
            return "", []
        raise BadRequest(f"{where}: content is missing")
    if isinstance(message.content, str):
        return message.content, []
    content, ends = "", []
    place = _resent_place(where, message, is_old=is_old)
    for part in message.content:
        content += _text(where, message.role, part, images, place)
        if part.cache_control is not None:
            ends.append(len(content))
    return content, ends


def _resent_place(where: str, message: ChatMessage, *, is_old: bool) -> str:
    """Return the place of files that may be left out; "" if they have to be read.

    A client sends these files with each later request, so a refusal would end the conversation.
    """
    if message.role == "tool":
        return f"the result of {message.tool_call_id or 'a call'}"
    return where if is_old and message.role in ("user", "assistant") else ""


def _text(where: str, role: str, part: TextPart, images: ConversationImages, place: str) -> str:
    """Return the text of a part, or the marker of an image; empty if the part is left out.

    Raises BadRequest for images, sounds, videos and files that cannot be read and have no `place`.
    """
    if part.type in _TEXT_TYPES:
        return part.text or part.refusal or ""
    if part.type == "image_url" and (images.are_read or role != "tool"):
        given = part.image_url
        url = given.url if isinstance(given, ImageUrl) else given
        return images.take(where, url, place and f"image in {place}")
    if part.foreign is not None:
        if role == "assistant" and thoughts_of(part.foreign) is not None:
            return ""
        text = readable_text(part.foreign)
        if text is not None or is_left_out(part.foreign):
            return text or ""
    kind = omitted_kind(part.type)
    if place:
        images.omitted.append((str(kind), place))
        return placeholder(part.type)
    if kind in ("audio", "video"):
        # The first words are llama-server's. Its hint at a projector would not help here.
        raise BadRequest(
            f"{kind} input is not supported by this server ({where}): it reads text and images, "
            "and llama-server reads more with a projector for it"
        )
    if kind == "image":
        raise BadRequest(
            f"{where}: a part of type {part.type[:80]!r} needs the image itself or its address, "
            "because this server keeps no files"
        )
    raise BadRequest(
        f"{where}: a part has type {part.type[:80]!r}, and this server reads text and images only"
    )
