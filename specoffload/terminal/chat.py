"""The loop of a chat, which reads messages and orders, and shows answers."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from pathlib import Path

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
    "system": "TEXT: set the instructions for the model; without TEXT, show them",
    "clear": "forget the conversation, keep the instructions",
    "retry": "answer the last question again",
    "save": "FILE: write the conversation as JSON",
    "load": "FILE: continue a saved conversation",
    "stats": "speed of the last answer, accepted drafts, and copies to the GPU",
    "exit": "leave; so does Ctrl-D",
}
_ALIASES = {"quit": "exit", "bye": "exit", "?": "help", "regen": "retry", "reset": "clear"}


def read_order(text: str) -> tuple[str, str] | None:
    """The name and the argument of the order in `text`; None if `text` is a message.

    `//` begins a message that starts with `/`. Raises UsageError for an order that does not exist
    or lacks its file.
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
    return name, argument.strip()


def converse(talk: Talk, ask: Callable[[], str], console: Console) -> None:
    """Converse until Ctrl-D or /exit. Ctrl-C ends an answer, never the conversation.

    `ask` returns the next line. It raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C.
    """
    while True:
        try:
            text = ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            report.note("Ctrl-D or /exit leaves")
            continue
        try:
            order = read_order(text)
            if order is not None and order[0] == "exit":
                return
            if order is not None:
                _obey(*order, talk, console)
            elif text:
                _show(talk.ask(text.removeprefix("/") if text.startswith("//") else text), console)
        except KeyboardInterrupt:
            report.note("stopped")
        except (OffloadError, UsageError) as e:
            report.error(str(e))


def _show(parts: Iterator[Delta | Piece], console: Console) -> None:
    show_answer(parts, console)
    console.print()


def _obey(name: str, argument: str, talk: Talk, console: Console) -> None:
    match name:
        case "help":
            for order, words in ORDERS.items():
                report.line(f"/{order:7} {words}")
            report.paragraph(
                "Alt-Enter, or a backslash before Enter, begins another line; Ctrl-C stops an "
                "answer"
            )
        case "system":
            if argument:
                talk.set_system(argument)
            report.note(f"system: {talk.system or 'none'}")
        case "clear":
            talk.clear()
            report.note("forgotten")
        case "retry":
            _show(talk.retry(), console)
        case "save":
            talk.save(Path(argument))
            report.note(f"{len(talk.messages)} messages in {argument}")
        case "load":
            talk.load(Path(argument))
            report.note(f"{len(talk.messages)} messages from {argument}")
        case "stats":
            stats = talk.stats
            if stats is None:
                report.note("nothing was answered yet")
                return
            for words in (*report.summary(stats), *report.spec_lines(stats)):
                report.paragraph(words)
