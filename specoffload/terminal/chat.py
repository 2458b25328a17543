"""The loop of a chat: a message or an order, its answer, and the next."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console

from offload.errors import OffloadError
from specoffload import report
from specoffload.chat.conversation import Delta
from specoffload.errors import UsageError
from specoffload.session.generation import Piece
from specoffload.terminal.screen import show_answer
from specoffload.terminal.talk import Talk

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
    """The order in `text`, or None if it is a message. `//` begins a message that starts with `/`.

    Raises UsageError for an order that does not exist or lacks its file.
    """
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
    """The text of a message, with one of two leading slashes removed."""
    return text[1:] if text.startswith("//") else text


class Asks(Protocol):
    """A source of messages."""

    def ask(self) -> str: ...


def converse(talk: Talk, keyboard: Asks, console: Console) -> None:
    """Converse until Ctrl-D or /exit. Ctrl-C ends an answer, never the conversation."""
    while True:
        try:
            text = keyboard.ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            report.note("Ctrl-D or /exit leaves")
            continue
        try:
            order = read_order(text)
            if order is not None and order.name == "exit":
                return
            if order is not None:
                _obey(order, talk, console)
            elif text:
                _show(talk.ask(message_of(text)), console)
        except KeyboardInterrupt:
            report.note("stopped")
        except (OffloadError, UsageError) as e:
            report.error(str(e))


def _show(parts: Iterator[Delta | Piece], console: Console) -> None:
    show_answer(parts, console)
    console.print()


def _obey(order: Order, talk: Talk, console: Console) -> None:
    orders: dict[str, Callable[[], None]] = {
        "help": _help,
        "system": lambda: _system(talk, order.argument),
        "clear": lambda: _clear(talk),
        "retry": lambda: _show(talk.retry(), console),
        "save": lambda: _save(talk, Path(order.argument)),
        "load": lambda: _load(talk, Path(order.argument)),
        "stats": lambda: _stats(talk),
    }
    orders[order.name]()


def _help() -> None:
    for name, words in ORDERS.items():
        report.line(f"/{name:7} {words}")
    report.paragraph(
        "Alt-Enter, or a backslash before Enter, begins another line; Ctrl-C stops an answer"
    )


def _system(talk: Talk, text: str) -> None:
    if text:
        talk.set_system(text)
    report.note(f"system: {talk.system or 'none'}")


def _clear(talk: Talk) -> None:
    talk.clear()
    report.note("forgotten")


def _save(talk: Talk, path: Path) -> None:
    talk.save(path)
    report.note(f"{len(talk.messages)} messages in {path}")


def _load(talk: Talk, path: Path) -> None:
    talk.load(path)
    report.note(f"{len(talk.messages)} messages from {path}")


def _stats(talk: Talk) -> None:
    if talk.stats is None:
        report.note("nothing was answered yet")
        return
    for words in (*report.summary(talk.stats), *report.spec_lines(talk.stats)):
        report.paragraph(words)
