"""The lines of a chat that begin with a slash. Pure."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from specoffload.errors import UsageError

ORDERS = {
    "help": "this list",
    "system": "TEXT: instructions that stand before the conversation; without, show them",
    "clear": "forget the conversation, keep the instructions",
    "retry": "answer the last question once more",
    "save": "FILE: write the conversation as JSON",
    "load": "FILE: go on with one that was saved",
    "stats": "speed, acceptance and what was streamed, of the last answer",
    "exit": "leave; so does Ctrl-D",
}
_ALIASES = {"quit": "exit", "bye": "exit", "?": "help", "regen": "retry", "reset": "clear"}


@dataclass(frozen=True)
class Order:
    """`argument` is what follows the name."""

    name: str
    argument: str = ""


def read_order(text: str) -> Order | None:
    """None for a message; `//` begins one that starts with a slash. Raises UsageError for an
    order that does not exist, or lacks its file."""
    if not text.startswith("/") or text.startswith("//"):
        return None
    word, _, argument = text[1:].strip().partition(" ")
    name = _ALIASES.get(word, word)
    if name not in ORDERS:
        near = difflib.get_close_matches(word, [*ORDERS, *_ALIASES], 1)
        hint = f"; did you mean /{near[0]}?" if near else "; /help lists them"
        raise UsageError(f"there is no /{word}{hint}")
    if name in ("save", "load") and not argument.strip():
        raise UsageError(f"/{name} needs a file: /{name} talk.json")
    return Order(name, argument.strip())


def message_of(text: str) -> str:
    """The text of a message as it is meant: one leading slash of two is taken off."""
    return text[1:] if text.startswith("//") else text
