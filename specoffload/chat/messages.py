"""Converts a conversation's messages to the form that a template takes. Pure."""

from __future__ import annotations

import contextlib
import hashlib
import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from specoffload.chat.conversation import Conversation, Tool, of_whole_characters
from specoffload.chat.families import CallLayout, without_harmony, written
from specoffload.chat.needs import TemplateNeeds
from specoffload.chat.turns import MessageFields, arranged, as_users, joined, paired

_ALPHABET = string.digits + string.ascii_letters


def template_messages(
    conversation: Conversation, needs: TemplateNeeds, layout: CallLayout
) -> list[MessageFields]:
    """Return the conversation's messages in the form that the template takes.

    Parts that the template does not take become text: system messages of the user, tools in a
    system message, and calls in the family's `layout`. Messages are merged, moved or put between
    others where the template limits their order.
    """
    messages = paired([_plain_message(message, layout) for message in conversation.messages])
    tools = conversation.tools if conversation.tool_choice != "none" else ()
    if tools and not needs.takes_tools:
        has_system = messages[0]["role"] == "system"
        messages.insert(
            int(has_system), {"role": "system", "content": _instructions(tools, layout)}
        )
    worded = [_worded(message, needs, layout) for message in messages]
    return in_form(arranged(worded, needs.limits), needs)


def in_form(messages: Sequence[Mapping[str, Any]], needs: TemplateNeeds) -> list[MessageFields]:
    """Return the messages with fields, ids and arguments as the template takes them."""
    return [_formed(message, needs) for message in messages]


# ---- the parts that become text


def _plain_message(given: Mapping[str, Any], layout: CallLayout) -> MessageFields:
    message = {key: value for key, value in given.items() if value is not None}
    message["content"] = message.get("content", "")
    if message["role"] == "developer":
        message["role"] = "system"  # OpenAI's older name, which templates know
    if message["role"] == "assistant" and layout.is_harmony:
        reasoning, content = without_harmony(message["content"])
        message["content"] = content
        if reasoning:
            message["reasoning_content"] = joined(message.get("reasoning_content"), reasoning)
    return message


def _worded(message: MessageFields, needs: TemplateNeeds, layout: CallLayout) -> MessageFields:
    """Return the message with calls and results as text, if the template does not take them."""
    calls = message.get("tool_calls")
    if calls and not needs.takes_calls:
        named = [(call["function"]["name"], arguments_of(call)) for call in calls]
        worded = {key: value for key, value in message.items() if key != "tool_calls"}
        texts = filter(None, (message["content"], written(layout, named)))
        return {**worded, "content": "\n".join(texts)}
    if message["role"] == "tool" and not needs.takes_results:
        return as_users(message)
    return message


def _instructions(tools: Sequence[Tool], layout: CallLayout) -> str:
    described = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
    return (
        "You can call these tools:\n"
        f"{described}\n"
        "To call a tool, answer in exactly this form and write nothing else:\n"
        f"{written(layout, [('NAME', {'PARAMETER': 'VALUE'})])}\n"
        "Otherwise answer in words."
    )


# ---- the form of a message


def _formed(given: Mapping[str, Any], needs: TemplateNeeds) -> MessageFields:
    message = dict(given)
    content, reasoning = message["content"], message.get("reasoning_content")
    if message.get("tool_calls"):
        message["tool_calls"] = [_call(call, needs) for call in message["tool_calls"]]
    if message.get("tool_call_id"):
        message["tool_call_id"] = _id(message["tool_call_id"], needs.id_length)
    if reasoning:
        message["thinking"] = reasoning  # the name in gpt-oss's template
    if needs.content_as_parts:
        message["content"] = [{"type": "text", "text": content}]
    if reasoning and needs.reasoning_as_part:
        text = [{"type": "text", "text": content}] if content else []
        message["content"] = [{"type": "thinking", "thinking": reasoning}, *text]
    if message.get("tool_calls") and needs.calls_without_content and not content:
        message["content"] = None
    return message


def _call(call: Mapping[str, Any], needs: TemplateNeeds) -> MessageFields:
    function = call["function"]
    arguments: Any = function.get("arguments", {})
    if needs.arguments_as_object:
        arguments = arguments_of(call)
    elif not isinstance(arguments, str) or not _is_object(arguments):
        arguments = json.dumps(arguments_of(call), ensure_ascii=False)
    completed = {**call, "type": "function", "function": {**function, "arguments": arguments}}
    if call.get("id"):
        completed["id"] = _id(call["id"], needs.id_length)
    return completed


def _id(given: str, length: int | None) -> str:
    """Return the call's id, or letters computed from it if it has not the required length."""
    is_plain = len(given) == length and given.isascii() and given.isalnum()
    if length is None or is_plain:
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big")
    letters = ""
    for _ in range(length):
        number, digit = divmod(number, len(_ALPHABET))
        letters += _ALPHABET[digit]
    return letters


def arguments_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call's arguments as an object.

    The token limit may have cut their JSON text. Open strings, lists and objects are then closed
    (llama.cpp #25510). Other text, and JSON that is no object, become an argument of their own.
    """
    given = call["function"].get("arguments", {})
    if isinstance(given, str):
        given = _read(given)
    return given if isinstance(given, Mapping) else {"arguments": given}


def _read(text: str) -> Any:
    if not text.strip():
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        return of_whole_characters(json.loads(text))
    with contextlib.suppress(ValueError):
        return of_whole_characters(from_json(text, allow_partial="trailing-strings"))
    return text


def _is_object(text: str) -> bool:
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(text), dict)
    return False
