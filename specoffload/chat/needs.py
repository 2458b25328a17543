"""Describes which parts of a conversation a chat template takes, and in what form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specoffload.chat.turns import TurnLimits


@dataclass(frozen=True)
class TemplateNeeds:
    """The parts of a conversation that a template takes, their form and their order."""

    takes_tools: bool = False
    takes_calls: bool = False  # an assistant's tool_calls
    takes_results: bool = False  # messages of the role tool
    takes_system: bool = False
    arguments_as_object: bool = False  # True: arguments of tool_calls are objects; False: JSON text
    content_as_parts: bool = False  # True: [{"type": "text", "text": ...}]; False: text
    reasoning_as_part: bool = False  # True: the first part of the content; False: a field
    calls_without_content: bool = False  # True: None beside calls; False: empty text
    id_length: int | None = None  # required number of letters in a call's id
    limits: TurnLimits = TurnLimits()
    thinks_with: Mapping[str, Any] = field(default_factory=dict)  # variables that turn thinking on
    thinks_not_with: Mapping[str, Any] = field(default_factory=dict)  # and off; empty: none does
    takes_effort: bool = False
