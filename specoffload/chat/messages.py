"""Converts messages to the form that a template takes, found by rendering small messages."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from offload.errors import BadRequest
from specoffload.chat.conversation import Conversation, Tool
from specoffload.chat.families import CallLayout, written

_NEEDLE = "needle-in-the-chat"
_KEY = "needle_key"
_TOOL = Tool("needle_tool", "A probe.", {"type": "object", "properties": {}})


@dataclass(frozen=True)
class TemplateNeeds:
    """The parts of a conversation that a template takes, and their form."""

    takes_tools: bool
    takes_calls: bool  # an assistant's tool_calls
    takes_results: bool  # messages of the role tool
    takes_system: bool
    arguments_as_object: bool  # True: arguments of tool_calls are objects; False: JSON text
    content_as_parts: bool  # True: [{"type": "text", "text": ...}]; False: text


def needs_of(name: str, source: str, *, bos: str, eos: str) -> TemplateNeeds:
    """Return what a template takes, found by rendering small conversations.

    If the template refuses a conversation, it counts as one that renders no text.
    """

    def rendered(*messages: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        variables = {
            "messages": list(messages),
            "tools": list(tools) or None,
            "add_generation_prompt": False,
            "bos_token": bos,
            "eos_token": eos,
        }
        try:
            return render(name, source, variables)
        except BadRequest:
            return ""

    parts = [{"type": "text", "text": _NEEDLE}]
    as_text = rendered({"role": "user", "content": _NEEDLE})
    as_parts = "" if _NEEDLE in as_text else rendered({"role": "user", "content": parts})
    in_parts = _NEEDLE in as_parts and "'text'" not in as_parts

    def message(role: str, text: str, **more: Any) -> dict[str, Any]:
        content = [{"type": "text", "text": text}] if in_parts else text
        return {"role": role, "content": content, **more}

    system, ask = message("system", _NEEDLE), message("user", "?")
    tools = [_TOOL.as_openai()]

    def with_call(arguments: object) -> str:
        call = {"name": _TOOL.name, "arguments": arguments}
        calls = [{"id": "call00000", "type": "function", "function": call}]
        result = message("tool", _NEEDLE, tool_call_id="call00000", name=_TOOL.name)
        called = message("assistant", "", tool_calls=calls)
        return rendered(ask, called, result, tools=tools) or rendered(ask, called, tools=tools)

    as_object, as_json = with_call({_KEY: 1}), with_call(f'{{"{_KEY}": 1}}')
    with_object = _KEY in as_object and f"'{_KEY}'" not in as_object
    with_call_written = as_object if with_object else as_json
    return TemplateNeeds(
        takes_tools=_TOOL.name in rendered(ask, tools=tools),
        takes_calls=_KEY in with_call_written,
        takes_results=_NEEDLE in with_call_written,
        takes_system=_NEEDLE in (rendered(system, ask) or rendered(system, ask, tools=tools)),
        arguments_as_object=with_object,
        content_as_parts=in_parts,
    )


def template_messages(
    conversation: Conversation, needs: TemplateNeeds, layout: CallLayout
) -> list[dict[str, Any]]:
    """Return the conversation's messages in the form that the template takes.

    Parts that the template does not take become text: system messages in the next user message,
    tools in a system message, and calls in the family's `layout`. Raises BadRequest for arguments
    that are not JSON if the template needs an object.
    """
    messages = [_message(at, m, needs, layout) for at, m in enumerate(conversation.messages)]
    tools = conversation.tools if conversation.tool_choice != "none" else ()
    if tools and not needs.takes_tools:
        _put_first(messages, _instructions(tools, layout))
    if not needs.takes_system:
        messages = _without_system(messages)
    if needs.content_as_parts:
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return messages


def _message(
    at: int, given: Mapping[str, Any], needs: TemplateNeeds, layout: CallLayout
) -> dict[str, Any]:
    message = {key: value for key, value in given.items() if value is not None}
    message["content"] = message.get("content", "")
    if message["role"] == "developer":
        message["role"] = "system"  # OpenAI's older name, which templates know
    if message.get("reasoning_content"):
        message["thinking"] = message["reasoning_content"]  # the name in gpt-oss's template
    calls = message.pop("tool_calls", None)
    if calls and needs.takes_calls:
        message["tool_calls"] = [
            _call(f"messages[{at}].tool_calls[{i}]", call, needs) for i, call in enumerate(calls)
        ]
    elif calls:
        text = written(layout, [_plain(call) for call in calls])
        message["content"] = "\n".join(filter(None, (message["content"], text)))
    if message["role"] == "tool" and not needs.takes_results:
        result = {"tool_call_id": message.get("tool_call_id"), "content": message["content"]}
        found = {key: value for key, value in result.items() if value is not None}
        return {"role": "user", "content": json.dumps({"tool_result": found}, ensure_ascii=False)}
    return message


def _call(where: str, call: Mapping[str, Any], needs: TemplateNeeds) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments", {})
    if needs.arguments_as_object and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as e:
            raise BadRequest(f"{where}: the arguments are not JSON: {e}") from e
    elif not needs.arguments_as_object and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _plain(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    arguments = call["function"].get("arguments", {})
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, Mapping):
        arguments = {"arguments": arguments}  # text that is not a JSON object, kept as written
    return call["function"]["name"], arguments


def _instructions(tools: Sequence[Tool], layout: CallLayout) -> str:
    described = "\n".join(json.dumps(tool.as_openai(), ensure_ascii=False) for tool in tools)
    return (
        "You can call these tools:\n"
        f"{described}\n"
        "To call a tool, answer in exactly this form and write nothing else:\n"
        f"{written(layout, [('NAME', {'PARAMETER': 'VALUE'})])}\n"
        "Otherwise answer in words."
    )


def _put_first(messages: list[dict[str, Any]], text: str) -> None:
    """Add `text` to the first system message, or insert it as a system message."""
    if messages[0]["role"] == "system":
        messages[0]["content"] = "\n\n".join(filter(None, (messages[0]["content"], text)))
    else:
        messages.insert(0, {"role": "system", "content": text})


def _without_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each system message's text put into the next user message."""
    found: list[dict[str, Any]] = []
    waiting = ""
    for message in messages:
        if message["role"] == "system":
            waiting = "\n\n".join(filter(None, (waiting, message["content"])))
        elif message["role"] == "user" and waiting:
            text = "\n\n".join(filter(None, (waiting, message["content"])))
            found.append({**message, "content": text})
            waiting = ""
        else:
            found.append(message)
    if waiting:
        found.append({"role": "user", "content": waiting})
    return found


# -- templates

# They are rendered with Jinja, configured as in transformers: loop controls, `{% generation %}`,
# `tojson` without HTML escaping, `raise_exception` and `strftime_now`
# (https://huggingface.co/docs/transformers/chat_templating_writing).

MOST_TEMPLATE_CHARS = 1 << 20  # the longest published template is under 20,000


class _Refusal(Exception):
    """A template called `raise_exception`."""


class _GenerationTag(Extension):
    """`{% generation %}` marks text for training; its body is rendered without change."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_listed,
    )


def _listed(value: object) -> list[Any]:
    """Return the results of a filter such as `map` as a list.

    llama.cpp can write such results as JSON; transformers cannot.
    """
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def _refuse(message: object = "") -> NoReturn:
    raise _Refusal(str(message))


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    # transformers uses an immutable sandbox, but published templates append to their lists.
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


def check(name: str, source: str) -> None:
    """Raise BadRequest if `source` is not a Jinja template."""
    if len(source) > MOST_TEMPLATE_CHARS:
        raise BadRequest(
            f"chat template {name} has {len(source)} characters; at most {MOST_TEMPLATE_CHARS} "
            "are read"
        )
    try:
        _compiled(source)
    except jinja2.TemplateError as e:
        raise BadRequest(f"chat template {name} is not a Jinja template: {e}") from e
    except RecursionError as e:
        raise BadRequest(f"chat template {name} is nested too deeply") from e


def render(
    name: str,
    source: str,
    variables: Mapping[str, Any],
    now: Callable[[], datetime] = datetime.now,
) -> str:
    """Return the text that the template `source` makes from `variables`; `name` is for errors.

    Raises BadRequest for any fault of a template. Time and memory are not limited.
    """
    check(name, source)
    try:
        return _compiled(source).render(
            **{**variables, "strftime_now": lambda form: now().strftime(form)}
        )
    except _Refusal as e:
        raise BadRequest(f"chat template {name} refuses the messages: {e}") from e
    except RecursionError as e:
        raise BadRequest(f"chat template {name} calls itself without an end") from e
    except Exception as e:  # for example 1/0, a missing attribute, a forbidden method
        kind = "" if isinstance(e, jinja2.TemplateError) else f"{type(e).__name__}: "
        raise BadRequest(f"chat template {name} failed on these messages: {kind}{e}") from e
