"""Reads JSON that programs write in several shapes as the one shape that the APIs have.

Each function is for a validator that runs before the type is checked. What it does not know it
returns as it is, so that the check refuses it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from specoffload.chat.conversation import of_whole_characters
from specoffload.server.api.foreign_parts import flat_text

_WORDS = ("auto", "none", "any", "required")  # of tool_choice
_TEXT_TYPES = ("text", "input_text", "output_text")
_FORMATS = {"parsed": "deepseek", "raw": "none"}  # Groq's names of llama-server's formats
_FLAT_CALL = ("name", "arguments")


def parts_of(value: Any) -> Any:
    """Return a message's content as text or as a list of parts.

    One part stands for a list of one, a text in the list for a part of text, and null for no part.
    """
    parts = [value] if isinstance(value, dict) else value
    return [_part(one) for one in parts if one is not None] if isinstance(parts, list) else parts


def _part(value: Any) -> Any:
    if isinstance(value, str):
        return {"type": "text", "text": value}
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return {"type": "text", **value}
    return value


def text_of(value: Any) -> Any:
    """Return the text of parts or of messages. A text and null stay as they are."""
    parts = [value] if isinstance(value, dict) else value
    if not isinstance(parts, list):
        return value
    inner = [
        one.get("content") or one.get("text") if isinstance(one, dict) else one for one in parts
    ]
    return "\n".join(filter(None, map(flat_text, inner)))


def text_or_parts(value: Any) -> Any:
    """Return a tool's result as it is if it is text, parts or null. Return other JSON as text."""
    parts = [value] if isinstance(value, dict) and _is_text(value) else value
    is_parts = isinstance(parts, list) and all(
        isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts
    )
    return parts if parts is None or isinstance(parts, str) or is_parts else _json(parts)


def _is_text(part: Mapping[str, Any]) -> bool:
    return part.get("type") in _TEXT_TYPES and isinstance(part.get("text"), str)


def arguments_text(value: Any) -> Any:
    """Return a call's arguments as JSON text. Text and null stay as they are.

    An empty list is an empty object, because PHP writes both as [] (prism-php #659).
    """
    return value if value is None or isinstance(value, str) else _json(value or {})


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def objects_of(value: Any) -> Any:
    """Return a list of objects. One object stands for a list of one."""
    return [value] if isinstance(value, dict) else value


def texts_of(value: Any) -> Any:
    """Return a list of texts. One text stands for a list of one."""
    return [value] if isinstance(value, str) else value


def object_of(value: Any) -> Any:
    """Return an object that was sent as its JSON text, or as [] where PHP means an empty one."""
    if value == []:
        return {}
    if isinstance(value, str):
        try:
            read = of_whole_characters(json.loads(value))
        except (ValueError, RecursionError):
            return value
        return read if isinstance(read, dict) else value
    return value


def id_text(value: Any) -> Any:
    """Return an id as text. Some programs number calls."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def llama_format(value: Any) -> Any:
    """Return a `reasoning_format` by llama-server's name. Groq has others for the same."""
    return _FORMATS.get(value, value) if isinstance(value, str) else value


def mark_of(value: Any) -> Any:
    """Return `cache_control` as an object, or None. It is a hint, and no form of it is refused."""
    if isinstance(value, dict):
        return {"type": "ephemeral"}
    return {"type": "ephemeral"} if value else None


def flat_tool(value: Any) -> Any:
    """Return a tool in the Responses API's form: a function's name beside its type.

    Chats have the function in an object of its own, and Anthropic's API calls the schema
    `input_schema`. A tool without a type is a function.
    """
    if not isinstance(value, dict):
        return value
    tool = dict(value)
    if isinstance(tool.get("function"), dict) and "name" not in tool:
        inner = tool.pop("function")
        tool = {**inner, **tool}
    if tool.get("type") is None and "name" in tool:
        tool["type"] = "function"
    if tool.get("parameters") is None and "input_schema" in tool:
        tool["parameters"] = tool.pop("input_schema")
    return tool


def nested_tool(value: Any, fields: Collection[str]) -> Any:
    """Return a tool in the form of chats. `fields` are those of a function."""
    tool = flat_tool(value)
    if not isinstance(tool, dict) or tool.get("type") != "function" or "name" not in tool:
        return value
    own = {name: tool[name] for name in tool if name in fields}
    return {name: tool[name] for name in tool if name not in own} | {"function": own}


def anthropic_tool(value: Any) -> Any:
    """Return a tool in Anthropic's form. A function of OpenAI's APIs is a tool of the client."""
    tool = flat_tool(value)
    if not isinstance(tool, dict):
        return value
    if tool.get("type") == "function":
        del tool["type"]
    if "parameters" in tool:
        tool["input_schema"] = tool.pop("parameters")
    return tool


def nested_call(value: Any) -> Any:
    """Return a call in the form of chats, whose function is an object of its own."""
    if not isinstance(value, dict) or "name" not in value or value.get("function") is not None:
        return value
    own = {name: value[name] for name in _FLAT_CALL if name in value}
    return {name: value[name] for name in value if name not in own} | {"function": own}


def flat_choice(value: Any) -> Any:
    """Return `tool_choice` in the Responses API's form: a word, or a type and a name."""
    if not isinstance(value, dict):
        return "required" if value == "any" else value
    kind, inner = value.get("type"), value.get("function")
    if kind in _WORDS:
        return "required" if kind == "any" else kind
    if kind not in ("function", "tool"):
        return value
    others = {name: value[name] for name in value if name != "function"}
    return others | {"type": "function"} | (inner if isinstance(inner, dict) else {})


def anthropic_choice(value: Any) -> Any:
    """Return `tool_choice` in Anthropic's form: an object with a type, and a name for a tool."""
    choice = flat_choice(value)
    own = {} if not isinstance(value, dict) else value
    if isinstance(choice, str):
        return own | {"type": "any" if choice == "required" else choice}
    return choice | {"type": "tool"} if choice is not value and isinstance(choice, dict) else value


def items_of(value: Any) -> Any:
    """Return the items of the Responses API, from texts and from messages of chats, too."""
    items = [value] if isinstance(value, dict) else value
    return [item for one in items for item in _items(one)] if isinstance(items, list) else items


def _items(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, dict) or value.get("type") not in (None, "message"):
        return [value]
    if value.get("role") == "tool":
        call_id = value.get("tool_call_id")
        result = {"type": "function_call_output", "call_id": call_id}
        return [{**result, "output": value.get("content")}]
    calls = value.get("tool_calls")
    if value.get("role") != "assistant" or not isinstance(calls, list):
        return [value]
    message = {name: value[name] for name in value if name != "tool_calls"}
    return [*([message] if message.get("content") else []), *map(_call_item, calls)]


def _call_item(value: Any) -> Any:
    call = nested_call(value)
    inner = call.get("function") if isinstance(call, dict) else None
    if not isinstance(inner, dict):
        return value
    own = {name: inner.get(name) for name in _FLAT_CALL}
    return {"type": "function_call", "call_id": call.get("id"), **own}
