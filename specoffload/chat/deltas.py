"""The parts of an assistant's answer as they become known, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """More of the tool call number `index`, counted from 0.

    The first piece of a call has its `id` and `name`, and they are None in all others. Its
    `arguments` join to JSON text as the model wrote it, unless the generation ends within.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Delta = Content | Reasoning | CallPiece


@dataclass
class Call:
    """One whole tool call; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """An assistant's answer, all deltas joined."""

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
    """The message that `deltas` make."""
    message = Message()
    for delta in deltas:
        message.add(delta)
    return message
