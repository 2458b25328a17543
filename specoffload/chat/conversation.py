"""A chat request without its transport: messages, tools, and how the model is to reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offload.errors import BadRequest

ReasoningFormat = Literal["auto", "none", "deepseek", "deepseek-legacy"]
"""llama-server's: none leaves the reasoning in the content, deepseek-legacy gives it twice."""

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        if not _TOOL_NAME.fullmatch(self.name):
            raise BadRequest(
                f"tool name {self.name[:80]!r}: 1 to 128 letters, digits and _ . : / - make a name"
            )

    def as_openai(self) -> dict[str, Any]:
        """The form in which chat templates expect a tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Named:
    """`tool_choice` of one tool by its name: the answer is a call of it."""

    name: str


ToolChoice = Literal["auto", "none", "required"] | Named


@dataclass(frozen=True)
class ReasoningOptions:
    """`enabled` and `effort` reach the template as `enable_thinking` and `reasoning_effort`.

    None leaves the template its own default.
    """

    format: ReasoningFormat = "auto"
    enabled: bool | None = None
    effort: str | None = None


@dataclass(frozen=True)
class Conversation:
    """One answer's request.

    A message is a mapping of OpenAI's shape: `role` (system, developer, user, assistant, tool),
    `content` (text), and where they apply `reasoning_content`, `tool_calls` (with `arguments` as
    JSON text or an object), `tool_call_id` and `name`.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: bool = False  # the last message is the beginning of the answer
    schema: str | None = None  # JSON schema of an answer in words, as JSON text

    def __post_init__(self) -> None:
        if not self.messages:
            raise BadRequest("messages is empty: at least one message is needed")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"tools: two of them are called {twice!r}")
        if isinstance(self.tool_choice, Named) and self.tool_choice.name not in names:
            raise BadRequest(f"tool_choice: no tool is called {self.tool_choice.name!r}")
        if self.tool_choice == "required" and not self.tools:
            raise BadRequest("tool_choice is required, and there are no tools")

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return ()
        if isinstance(self.tool_choice, Named):
            return tuple(tool for tool in self.tools if tool.name == self.tool_choice.name)
        return self.tools

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a tool call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, Named)
