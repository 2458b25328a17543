"""Describes a conversation with a model: the request, and the parts of the answer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offload.errors import BadRequest
from specoffload.chat.thinking import TEMPLATE_SWITCHES, ThinkingWish, thinking_wish

ReasoningFormat = Literal["auto", "none", "deepseek", "deepseek-legacy", "hidden"]
"""llama-server's: `none` leaves reasoning in the content, `deepseek-legacy` gives it twice.

`hidden` is Groq's: the model reasons, and the answer has no reasoning."""

ContinuedPart = Literal["auto", "reasoning_content", "content"]
"""The part of the last message that is continued. `auto`: the content, or else the reasoning."""

_TOOL_NAME = re.compile(r"[\w.:/-]{1,128}")

# ---- requests


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    def __post_init__(self) -> None:
        if not _TOOL_NAME.fullmatch(self.name):
            raise BadRequest(
                f"tool name {self.name[:80]!r}: use 1 to 128 letters, digits and _ . : / -"
            )

    def as_openai(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates expect.

        Templates read fields that clients may leave out, so they are filled in.
        """
        parameters = {key: value for key, value in self.parameters.items() if value is not None}
        function: dict[str, Any] = {
            "name": self.name,
            "description": self.description or "",
            "parameters": {"type": "object", "properties": {}} | parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Named:
    """A `tool_choice`: the answer has to call this tool."""

    name: str


@dataclass(frozen=True)
class Allowed:
    """A `tool_choice`: the answer may call only these tools. With `must_call` it has to."""

    names: tuple[str, ...]
    must_call: bool = False


ToolChoice = Literal["auto", "none", "required"] | Named | Allowed


@dataclass(frozen=True)
class ReasoningOptions:
    """Settings of an answer's reasoning.

    The template gets `enabled` as `enable_thinking` and `effort` as `reasoning_effort`. None keeps
    the template's default.
    """

    format: ReasoningFormat = "auto"
    enabled: bool | None = None
    effort: str | None = None


@dataclass(frozen=True)
class CachePoint:
    """The end of a part of a conversation, up to which the client will send the same text again.

    Anthropic's and OpenRouter's `cache_control` marks such parts. `index` is the index of a message
    or of a tool. `n_chars` are the characters of the message's content before the point. None: all
    of the message, or of the tool.
    """

    of: Literal["message", "tool"]
    index: int
    n_chars: int | None = None


@dataclass(frozen=True)
class Conversation:
    """The request for one answer.

    A message is a mapping of OpenAI's shape: `role` (system, developer, user, assistant, tool),
    `content` (text), and optionally `reasoning_content`, `tool_calls` (`arguments` is JSON text or
    an object), `tool_call_id` and `name`.
    """

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continues: ContinuedPart | None = None  # the last message's part that the answer continues
    schema: str | None = None  # JSON schema of an answer that is no call, as JSON text
    cache_points: tuple[CachePoint, ...] = ()

    def __post_init__(self) -> None:
        if not self.messages:
            raise BadRequest("messages is empty: at least one message is needed")
        names = [tool.name for tool in self.tools]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadRequest(f"tools: two of them are called {twice!r}")
        for name in self._chosen or ():
            if name not in names:
                raise BadRequest(f"tool_choice: no tool is called {name!r}")
        if self.must_call and not self.callable_tools:
            raise BadRequest("tool_choice is required, and there are no tools")

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.tool_choice == "none":
            return ()
        chosen = self._chosen
        return tuple(tool for tool in self.tools if chosen is None or tool.name in chosen)

    @property
    def must_call(self) -> bool:
        """True if the answer has to be a tool call."""
        if isinstance(self.tool_choice, Allowed):
            return self.tool_choice.must_call
        return self.tool_choice == "required" or isinstance(self.tool_choice, Named)

    @property
    def _chosen(self) -> tuple[str, ...] | None:
        """The names that `tool_choice` gives; None if it gives none."""
        if isinstance(self.tool_choice, Named):
            return (self.tool_choice.name,)
        return self.tool_choice.names if isinstance(self.tool_choice, Allowed) else None


@dataclass(frozen=True)
class ChatSettings:
    """Default settings for conversations that do not set their own."""

    template: str | None = None  # replaces the model file's template
    template_name: str = "of the model file"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning: ReasoningOptions = ReasoningOptions()
    continues: bool = True  # True: continue an answer at the end of a conversation

    def __post_init__(self) -> None:
        """Raises BadRequest for template variables that contradict each other."""
        self.own_wish  # noqa: B018

    @property
    def own_wish(self) -> ThinkingWish:
        """What the settings' template variables say about thinking."""
        return thinking_wish(kwargs_forms("--chat-template-kwargs", self.template_kwargs))

    def reasoning_for(
        self, wish: ThinkingWish, form: ReasoningFormat | None = None
    ) -> ReasoningOptions:
        """Return the reasoning options of a conversation that says `wish`.

        The settings fill in what it does not say. Their effort "none" turns reasoning off.
        """
        own = self.own_wish
        effort = wish.effort or own.effort or self.reasoning.effort
        enabled = self.reasoning.enabled
        if effort == "none":
            enabled, effort = False, None
        for asked in (own.enabled, wish.enabled):
            enabled = enabled if asked is None else asked
        shown = "hidden" if wish.is_hidden else form or self.reasoning.format
        return ReasoningOptions(shown, enabled, effort)

    def kwargs_with(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template variables of a conversation, without those that switch thinking."""
        merged = {**self.template_kwargs, **given}
        return {name: value for name, value in merged.items() if name not in TEMPLATE_SWITCHES}


def kwargs_forms(place: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template variables that say something about thinking, by their places."""
    return {f"{place}.{name}": kwargs[name] for name in TEMPLATE_SWITCHES if name in kwargs}


# ---- answers


@dataclass(frozen=True)
class Content:
    """The next part of the answer's text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """The next part of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """The next part of tool call number `index`, counted from 0.

    Only the first piece of a call has its `id` and `name`. The `arguments` of all pieces join to
    JSON text as the model wrote it. The text is incomplete if the generation ends inside the call.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = Content | Reasoning | CallPiece


@dataclass
class Call:
    """One tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """An assistant's answer: all deltas joined."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        if isinstance(delta, Content):
            self.content += delta.text
        elif isinstance(delta, Reasoning):
            self.reasoning += delta.text
        elif delta.name is not None:
            assert delta.id is not None
            self.calls.append(Call(delta.id, delta.name, delta.arguments))
        else:
            self.calls[delta.index].arguments += delta.arguments


def joined(deltas: Iterable[Delta]) -> Message:
    """Return the message that `deltas` add up to."""
    message = Message()
    for delta in deltas:
        message.add(delta)
    return message


# ---- text from JSON

_HALVES = re.compile("[\ud800-\udfff]")


def of_whole_characters(value: Any) -> Any:
    """Return a JSON value in which half a surrogate pair is the replacement character, U+FFFD.

    JSON can escape such a half, but no UTF-8 can hold it (RFC 8259, section 8.2).
    """
    if isinstance(value, str):
        return _HALVES.sub("\ufffd", value)
    if isinstance(value, list):
        return [of_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {of_whole_characters(key): of_whole_characters(v) for key, v in value.items()}
    return value
