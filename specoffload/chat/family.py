"""A model family's way of writing tool calls: how they are read, and how they are written."""

from __future__ import annotations

from dataclasses import dataclass

from specoffload.chat.layout import Layout
from specoffload.chat.parsing.json_calls import JsonCalls, NamedCalls
from specoffload.chat.parsing.tagged_calls import TaggedCalls


@dataclass(frozen=True)
class HarmonyCalls:
    """Channels of messages, of which some are to a tool."""


@dataclass(frozen=True)
class MistralCalls:
    """After one marker a list of JSON objects, or a name and its arguments."""

    listed: JsonCalls
    named: NamedCalls


Calls = JsonCalls | NamedCalls | TaggedCalls | HarmonyCalls | MistralCalls


def openers(calls: Calls) -> tuple[str, ...]:
    """The markers that begin a call anywhere in a text; none where calls have none."""
    if isinstance(calls, MistralCalls):
        return (calls.named.opens,)
    if isinstance(calls, HarmonyCalls):
        return ()
    if isinstance(calls, JsonCalls):
        return calls.opens
    return tuple(marker for marker in (calls.section, calls.opens) if marker)


@dataclass(frozen=True)
class Family:
    """Its templates have all of `marks`. `markers` are texts that may be special tokens of its
    vocabulary, which the engine has to show for the parser to see."""

    name: str
    marks: tuple[str, ...]
    calls: Calls
    layout: Layout
    markers: tuple[str, ...] = ()
    ends_reasoning: bool = False  # a call's marker ends the reasoning, closed or not
    id_length: int | None = None  # of a call's id, where the template insists on one
