"""Tools of the Responses API as functions of a chat request, and calls of these as its items.

A custom tool takes a text instead of JSON arguments, and a namespace holds tools
(https://platform.openai.com/docs/api-reference/responses/create). Both become plain functions. A
custom tool is a function with one argument, `input`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

from pydantic import BeforeValidator, model_validator

from offload.errors import BadRequest
from specoffload.server.api.loose_forms import flat_tool, object_of
from specoffload.server.api.refusals import Json
from specoffload.server.api.request_model import RequestModel
from specoffload.server.api.requests import function_tool

_INPUT = "input"
_TEXT_ARGUMENT = {
    "type": "object",
    "properties": {_INPUT: {"type": "string"}},
    "required": [_INPUT],
    "additionalProperties": False,
}


class CustomFormat(RequestModel):
    type: str
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(RequestModel):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(object_of)] = None
    strict: bool | None = None
    format: CustomFormat | None = None  # of a custom tool's text
    tools: list[ResponsesTool] | None = None  # of a namespace

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, sent: Any) -> Any:
        return flat_tool(sent)


class ResponsesToolChoice(RequestModel):
    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None  # of allowed_tools
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class _ListedTool:
    """A function or custom tool, and where the request has it."""

    where: str
    tool: ResponsesTool
    name: str
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        return self.tool.type == "custom"


class ResponsesTools:
    """The tools of one request."""

    def __init__(self, tools: Sequence[ResponsesTool]) -> None:
        """Raises BadRequest for a tool without a name."""
        self.ignored: list[str] = []  # names of tools and fields without effect
        self._entries = list(self._read("tools", tools, None))

    def functions(self) -> list[Json]:
        """Return the tools of a chat request."""
        return [
            function_tool(
                self.function_name(entry.name, entry.namespace),
                _description(entry.tool),
                _TEXT_ARGUMENT if entry.is_custom else entry.tool.parameters,
                entry.tool.strict,
            )
            for entry in self._entries
        ]

    def function_name(self, name: str, namespace: str | None) -> str:
        """Return the name of the function for a tool: its own, unless other tools have it too."""
        if namespace and self._counts[name] > 1:
            return f"{namespace}__{name}"
        return name

    def is_custom(self, function: str) -> bool:
        entry = self._by_function.get(function)
        return entry is not None and entry.is_custom

    def item_name(self, function: str) -> Json:
        """Return the fields `name` and, in a namespace, `namespace` of a call to this function."""
        entry = self._by_function.get(function)
        if entry is None or entry.namespace is None:
            return {"name": function if entry is None else entry.name}
        return {"name": entry.name, "namespace": entry.namespace}

    def choice(self, choice: str | ResponsesToolChoice) -> str | Json:
        """Return `tool_choice` in the form of chat requests. Raises BadRequest."""
        if isinstance(choice, str):
            return choice
        if choice.type == "allowed_tools":
            tools = [
                {**tool, "type": "function"} if tool.get("type") == "custom" else tool
                for tool in choice.tools or ()
            ]
            allowed = {"mode": choice.mode or "auto", "tools": tools}
            return {"type": "allowed_tools", "allowed_tools": allowed}
        if choice.type not in ("function", "custom") or not choice.name:
            raise BadRequest(
                f"tool_choice: type {choice.type[:80]!r} is not supported; it is auto, none, "
                "required, allowed_tools, or the name of a function or custom tool"
            )
        name = self.function_name(choice.name, choice.namespace)
        return {"type": "function", "function": {"name": name}}

    @cached_property
    def _counts(self) -> Counter[str]:
        return Counter(entry.name for entry in self._entries)

    @cached_property
    def _by_function(self) -> dict[str, _ListedTool]:
        return {self.function_name(e.name, e.namespace): e for e in self._entries}

    def _read(
        self, where: str, tools: Sequence[ResponsesTool], namespace: str | None
    ) -> Iterator[_ListedTool]:
        for at, tool in enumerate(tools):
            here = f"{where}[{at}]"
            if tool.type == "namespace" and namespace is None:
                if tool.description:
                    self.ignored.append(f"{here}.description")
                yield from self._read(f"{here}.tools", tool.tools or (), _named(here, tool))
            elif tool.type in ("function", "custom"):
                if tool.format is not None and tool.format.type != "text":
                    self.ignored.append(f"{here}.format")  # it is told, but not enforced
                yield _ListedTool(here, tool, _named(here, tool), namespace)
            else:
                self.ignored.append(here)  # a tool that runs at OpenAI


def _named(where: str, tool: ResponsesTool) -> str:
    if not tool.name:
        raise BadRequest(f"{where}: a {tool.type} needs a name")
    return tool.name


def _description(tool: ResponsesTool) -> str | None:
    """Return the description, with the grammar of a custom tool's text."""
    if tool.format is None or not tool.format.definition:
        return tool.description
    told = f"The input follows this {tool.format.syntax} grammar:\n{tool.format.definition}"
    return f"{tool.description}\n\n{told}" if tool.description else told


def as_arguments(text: str) -> str:
    """Return the arguments of a call to a custom tool with this text."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


def as_text(arguments: str) -> str:
    """Return the text in the arguments of a call to a custom tool.

    Arguments of another form, such as those of a call that was cut, are returned as they are.
    """
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    text = value.get(_INPUT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
